"""Loss curves as the figures draw them: seeds thin, their median thick, names at the ends, landmarks, and a caption line."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._style import scheme_style
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = [
    "CUT_WORDS",
    "ONE_COLUMN",
    "TWO_COLUMNS",
    "caption",
    "draw_schemes",
    "draw_seeds",
    "limit_losses",
    "mark_entropy",
    "size_words",
    "smoothed",
]

ONE_COLUMN, TWO_COLUMNS = 3.35, 7.0
"""Inches."""
_CAPTION_SIZE = 6.0
_CHARACTERS_PER_INCH = 22.0
_GREY = "#666666"
_CUT_SHARE = 0.03
CUT_WORDS = f"the fall in the first {100 * _CUT_SHARE:g} % of the steps is cut"
"""For captions of figures that use :func:`limit_losses`."""


def smoothed(values: NDArray[np.floating[Any]], window: int) -> NDArray[np.float64]:
    """Centred running mean; near the ends over what there is of the window.

    Args:
        values: shape (n,).
        window: points, made odd.

    Returns:
        Shape (n,).

    Example:
        >>> smoothed(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
        [1.5, 3.0, 3.0, 3.0]
    """
    n = len(values)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    index = np.arange(n)
    first, last = np.maximum(index - window // 2, 0), np.minimum(index + window // 2, n - 1)
    mean: NDArray[np.float64] = (total[last + 1] - total[first]) / (last + 1 - first)
    return mean


def draw_seeds(
    axes: Axes, rows: pd.DataFrame, *, window: int, color: str, dash: Any = "-", x: str = "step", y: str = "loss"
) -> tuple[float, float]:
    """The curves of one setting: every seed thin, their median thick.

    Args:
        axes: to draw on.
        rows: curves of runs that differ in their seed only, on the same steps.
        window: steps of the running mean.
        color: of all.
        dash: of the median.
        x: column.
        y: column.

    Returns:
        The end of the median, for its name.
    """
    table = rows.pivot_table(index=x, columns="seed", values=y, dropna=False)
    curves = np.stack([smoothed(table[seed].to_numpy(float), window) for seed in table.columns])
    if len(curves) > 1:
        axes.plot(table.index, curves.T, color=color, linewidth=0.5, alpha=0.45)
    median = np.median(curves, axis=0)
    axes.plot(table.index, median, color=color, linestyle=dash, linewidth=1.4)
    finite = np.flatnonzero(np.isfinite(median))
    end = int(finite[-1]) if len(finite) else 0
    return float(table.index[end]), float(median[end])


def draw_schemes(axes: Axes, rows: pd.DataFrame, window: int) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """The curves of every scheme in its colour, by :func:`draw_seeds`.

    Args:
        axes: to draw on.
        rows: curves, one setting per scheme.
        window: steps of the running mean.

    Returns:
        Ends and colours by label, for :func:`figures._style.label_line_ends`.
    """
    ends, colors = {}, {}
    for scheme, of_scheme in rows.groupby("scheme", sort=False):
        label = get_scheme(str(scheme)).label
        colors[label] = scheme_style(str(scheme)).color
        ends[label] = draw_seeds(axes, of_scheme, window=window, color=colors[label])
    return ends, colors


def limit_losses(axes: Axes, frame: pd.DataFrame, window: int = 5) -> None:
    """Set the y axis to what the smoothed curves take after the first fall (:data:`CUT_WORDS`), so that the rest is not flat.

    Args:
        axes: whose y axis is set.
        frame: all curves on it.
        window: steps of the running mean that is drawn.
    """
    extremes = []
    for _, run in frame.groupby("trial"):
        curve = smoothed(run["loss"].to_numpy(float), window)
        after = curve[round(_CUT_SHARE * len(curve)) :]
        if np.isfinite(after).any():
            extremes += [np.nanmin(after), np.nanmax(after)]
    low, high = min(extremes), max(*extremes, float(frame["unigram_entropy"].iloc[0]))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))


def mark_entropy(axes: Axes, frame: pd.DataFrame, *, outside: bool = False, named: bool = True) -> None:
    """A dotted line at the unigram entropy of the text, named at its right end.

    Args:
        axes: to draw on.
        frame: of runs over one text.
        outside: write the name beside the axes, where the curves lie on the line.
        named: write the name; not where curves lie on the line and names of their own beside it: then the caption does.
    """
    level = float(frame["unigram_entropy"].iloc[0])
    axes.axhline(level, color=_GREY, linestyle=(0, (1, 2)), linewidth=0.8, zorder=1)
    if not named:
        return
    words: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "size": 6, "color": _GREY}
    if outside:
        axes.annotate("unigram\nentropy", (1.0, level), (3, 0), ha="left", va="center", **words)
        return
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4}
    axes.annotate("unigram entropy", (1.0, level), (-1, 1.5), ha="right", va="bottom", bbox=box, zorder=5, **words)


_SETTING = ("scheme", "n_sublayers", "width", "peak_lr", "steps")
"""What runs that are repeated over seeds have in common."""


def size_words(frame: pd.DataFrame) -> str:
    """Size, batch, seeds and device of all runs, for the caption; depths and widths that differ are listed."""
    counts = frame.groupby([name for name in _SETTING if name in frame.columns])["seed"].nunique()
    fewest, most = int(counts.min()), int(counts.max())
    seeds = f"{most}" if fewest == most else f"{fewest} to {most}"
    return (
        f"{_list(frame['n_sublayers'])} sub-layers, width {_list(frame['width'])}; {_list(frame['tokens_per_step'])} tokens "
        f"(bytes) per step; n = {seeds} seed{'s' if most > 1 else ''} each; {_list(frame['device'])}"
    )


def _list(values: pd.Series[Any]) -> str:
    distinct = sorted(values.unique().tolist())
    return " and ".join(str(value) for value in distinct)


def caption(figure: Figure, text: str) -> None:
    """Write a caption below everything, wrapped to the figure's width, and make room for it; before names at curves' ends.

    Args:
        figure: laid out by the constrained engine.
        text: of the caption.
    """
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(text, int(_CHARACTERS_PER_INCH * width), break_on_hyphens=False)
    share = (len(lines) * 1.25 * _CAPTION_SIZE / 72 + 0.03) / height
    figure.text(0.01, 0.005, "\n".join(lines), size=_CAPTION_SIZE, color="#444444", ha="left", va="bottom", linespacing=1.2)
    room: Mapping[str, Any] = {"rect": (0, share, 1, 1 - share)}
    figure.get_layout_engine().set(**room)  # type: ignore[union-attr]  # every figure here has one
    figure.draw_without_rendering()  # inside the style, so that it is the style's fonts that the layout sees
