# %%
r"""Gain of the shortcut against depth, every scheme: the paper's Eqs. (15), (19) and their neighbours. No figure of the paper.

Lines are closed forms at infinite width; markers are products measured on stacks of random branches, by exact vector-Jacobian
products through the true normalisations at the true sums, with the branches held constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import TWO_COLUMNS, caption
from figures._style import paper_style, scheme_style, text_color
from keel_theory.propagation import monte_carlo_product, shortcut_log_product
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["SETTINGS", "compute", "draw", "main"]

_ALL = [
    "highway",
    "post_ln",
    "deepnorm",
    "admin",
    "pre_ln",
    "hybrid_norm",
    "mix_ln",
    "keel",
    "scaled_shortcut",
    "scaled_shortcut_input_gain",
    "scaled_shortcut_normed_input_gain",
    "peri_ln",
    "branch_norm",
    "layernorm_scaling",
]
"""The toolkit's own schemes; what a session registers besides is drawn by naming it to :func:`compute`."""
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"schemes": _ALL, "lines": [2, 8, 64, 1024], "measured": [2, 16, 64], "width": 32, "n_draws": 8, "seed": 0},
        "cpu": {
            "schemes": _ALL,
            "lines": [round(2 ** (1 + i / 4)) for i in range(41)],
            "measured": [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
            "width": 512,
            "n_draws": 32,
            "seed": 0,
        },
        "gpu": {  # NumPy's arithmetic: larger, on the CPU of the machine
            "schemes": _ALL,
            "lines": [round(2 ** (1 + i / 4)) for i in range(49)],
            "measured": [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096],
            "width": 1024,
            "n_draws": 128,
            "seed": 0,
        },
    }
)
_SCALED_MATRICES = 2
"""Value and output, or both of the FFN: what DeepNorm starts smaller."""
_FLOOR = 1e-3
"""Lowest gain of the enlarged panel."""
_SAME = 1e-6
_NAME_SIZE = 6.5
_SHARED = "#333333"
"""Of a name that several schemes share."""
_DECADE = float(np.log(10))


def compute(
    *,
    folder: Path | None = None,
    schemes: Sequence[str] = tuple(_ALL),
    lines: Sequence[int] = (2, 8, 64, 1024),
    measured: Sequence[int] = (2, 16, 64),
    width: int = 512,
    n_draws: int = 32,
    seed: int = 0,
) -> pd.DataFrame:
    """Closed forms and Monte Carlo of every scheme with its published parameters, at a branch variance of 1.

    Args:
        folder: not needed: nothing is trained.
        schemes: names.
        lines: depths of the closed forms, sub-layers.
        measured: depths of the Monte Carlo, sub-layers.
        width: of the random stacks.
        n_draws: stacks per scheme and depth.
        seed: of the draws.

    Returns:
        One row per scheme, depth and kind (closed_form, monte_carlo): log10 of the product of all shortcut gains, its standard
        deviation over the draws and the standard error of the mean, all in decades (0 for closed forms).
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for name in schemes:
        scheme = get_scheme(name)
        constant = {"scheme": name, "branch_variance": 1.0, "width": width, "n_draws": n_draws, "seed": seed}
        for depth in lines:
            exact = shortcut_log_product(scheme, depth, scaled_matrices=_SCALED_MATRICES)
            rows.append({**constant, **_row(depth, "closed_form", exact, 0.0, 0.0)})
        for depth in measured:
            drawn = monte_carlo_product(
                scheme, depth, width=width, n_draws=n_draws, seed=seed, scaled_matrices=_SCALED_MATRICES
            )
            rows.append({**constant, **_row(depth, "monte_carlo", drawn.mean, drawn.standard_deviation, drawn.standard_error)})
    return pd.DataFrame(rows)


def _row(n_sublayers: int, kind: str, log_product: float, deviation: float, error: float) -> dict[str, Any]:
    return {
        "n_sublayers": n_sublayers,
        "kind": kind,
        "log10_gain": log_product / _DECADE,
        "standard_deviation": deviation / _DECADE,
        "standard_error": error / _DECADE,
    }


def draw(frame: pd.DataFrame) -> Figure:
    """What stays above a thousandth, enlarged; below it all decades.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of page width.
    """
    from matplotlib.figure import Figure as NewFigure

    depths = sorted(set(frame["n_sublayers"]))
    ticks = [2**i for i in range(1, 21) if depths[0] <= 2**i <= depths[-1]]
    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 5.4), layout="constrained")
        enlarged, whole = figure.subplots(2, 1, sharex=True)
        for axes in (enlarged, whole):
            _curves(axes, frame)
            axes.set_ylabel("gain of the shortcut path\n(dimensionless)")
        enlarged.set_xscale("log", base=2)
        enlarged.set_xlim(depths[0] / 1.1, depths[-1] * 1.1)
        enlarged.set_xticks(ticks, [str(tick) for tick in ticks])
        enlarged.minorticks_off()
        enlarged.set_ylim(np.log10(_FLOOR) - 0.1, 0.1)
        enlarged.set_yticks([-3, -2, -1, 0], ["0.001", "0.01", "0.1", "1"])
        _set_powers(whole, frame)
        whole.set_xlabel("depth $L$ (sub-layers)")
        caption(figure, _words(frame))
        figure.draw_without_rendering()
        _label(enlarged, frame, dead=False)
        _label(whole, frame, dead=True)
        figure.draw_without_rendering()
    return figure


def _words(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    return (
        f"Gradient norm before the first sub-layer over that after the last, along shortcuts only; branch variance "
        f"{first['branch_variance']:g}, embedding of unit variance. Lines: closed form at infinite width. Markers: mean of n = "
        f"{first['n_draws']} random stacks of width {first['width']}, bars ± one standard deviation (seed {first['seed']}, "
        f"NumPy on the CPU). DeepNorm with its smaller initial weights, Highway with its gate's starting bias."
    )


def _curves(axes: Axes, frame: pd.DataFrame) -> None:
    for scheme, rows in frame.groupby("scheme", sort=False):
        style = scheme_style(str(scheme))
        exact = rows[rows["kind"] == "closed_form"].sort_values("n_sublayers")
        axes.plot(exact["n_sublayers"], exact["log10_gain"], color=style.color, linestyle=style.dash, label=f"closed {scheme}")
        drawn = rows[rows["kind"] == "monte_carlo"].sort_values("n_sublayers")
        axes.errorbar(
            drawn["n_sublayers"],
            drawn["log10_gain"],
            yerr=drawn["standard_deviation"],
            color=style.color,
            marker=style.marker,
            linestyle="none",
            elinewidth=0.8,
            capsize=1.5,
            label=f"drawn {scheme}",
        )


def _set_powers(axes: Axes, frame: pd.DataFrame) -> None:
    """The axis is linear in decades, since the products leave float64."""
    lowest = float(frame["log10_gain"].min())
    step = max(1, int(10 ** np.floor(np.log10(max(-lowest, 1) / 2))))
    while -lowest / step > 6:
        step *= 2
    ticks = np.arange(0, lowest - step, -step)
    axes.set_yticks(ticks, [rf"$10^{{{int(tick)}}}$" if tick else "1" for tick in ticks])
    axes.set_ylim(1.04 * lowest, -0.04 * lowest)


def _label(axes: Axes, frame: pd.DataFrame, *, dead: bool) -> None:
    """Names at the right ends: those below the enlarged panel's floor in one panel, the others in the other."""
    exact = frame[frame["kind"] == "closed_form"].sort_values("n_sublayers", kind="stable")
    ends = {str(name): rows for name, rows in exact.groupby("scheme", sort=False)}
    places, colors = {}, {}
    for group in _equal_curves({name: rows["log10_gain"].to_numpy(float) for name, rows in ends.items()}):
        last = ends[group[0]].iloc[-1]
        if bool(last["log10_gain"] < np.log10(_FLOOR)) is dead:
            text = "\n".join(get_scheme(name).label for name in group)
            places[text] = (float(last["n_sublayers"]), float(last["log10_gain"]))
            colors[text] = scheme_style(group[0]).color if len(group) == 1 else _SHARED
    _list_names(axes, places, colors)


def _list_names(axes: Axes, places: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Names one under another beside the axes, a thin line from each to the end of its curve: most of them end at 1."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes belong to a figure
    line = 1.3 * _NAME_SIZE * figure.dpi / 72 / axes.get_window_extent().height
    order = sorted(places, key=lambda text: -places[text][1])
    ends = axes.transAxes.inverted().transform(axes.transData.transform([places[text] for text in order]))[:, 1]
    rows = np.array([text.count("\n") + 1.4 for text in order])
    bottom = np.inf
    for text, end, height in zip(order, ends, rows * line, strict=True):
        centre = min(max(float(end), height / 2), 1.02 - height / 2, bottom - height / 2)
        bottom = centre - height / 2
        axes.annotate(
            text,
            xy=places[text],
            xytext=(1.06, centre),
            textcoords="axes fraction",
            color=text_color(colors[text]),
            size=_NAME_SIZE,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colors[text],
                "linewidth": 0.5,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def _equal_curves(curves: Mapping[str, NDArray[np.float64]]) -> list[list[str]]:
    """Names whose curves are the same everywhere, together, in the order given."""
    groups: list[list[str]] = []
    for name, values in curves.items():
        fellows = (group for group in groups if np.allclose(curves[group[0]], values, rtol=0, atol=_SAME))
        group = next(fellows, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("gain_against_depth", arguments)


# %%
if __name__ == "__main__":
    main()
