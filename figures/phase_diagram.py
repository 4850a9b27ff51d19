# %%
r"""Phase diagram of the shortcut over depth and shortcut scale. No figure of the paper: it draws its Eqs. (15), (18), (19).

Colour is what the shortcut keeps of a gradient over the whole stack, :math:`(\alpha / \sqrt{\alpha^2 + q})^L`, which is also
the cosine between the stack's input and its output. Below the line :math:`\alpha = \sqrt{L}` the gradient dies on the
shortcut; far above it, the branches of a freshly initialised stack are hardly in its output. Post-LN lies on the lower edge.

All sub-layers are alike here. Keel's first block has no scale: from an embedding of variance :math:`v_0` on it adds a factor
:math:`1/\sqrt{v_0 + 2q}` to what is drawn along its line. The figure says so for :math:`v_0 = 1`; where
:math:`v_0` and q are small, as the paper initialises them, it is a gain of about 3.5 (``keel verify 19-first-block-initial``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from figures._style import paper_style, scheme_style
from keel_theory.design import phase_diagram
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["SETTINGS", "compute", "draw", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {preset: MappingProxyType({"branch_variance": 1.0}) for preset in ("smoke", "cpu", "gpu")}
)
"""A closed form: the same at every size."""

_Color: TypeAlias = "str | tuple[float, float, float]"

_LEVELS = (1e-100, 1e-10, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
"""Products on the borders between the bands."""
_CRITICAL = "#222222"
_LARGE = 1e300
_DARK = (1e-10, 0.999)
"""Products below and above which the bands are dark."""


def compute(*, folder: Path | None = None, branch_variance: float = 1.0) -> pd.DataFrame:
    """The diagram as rows.

    Args:
        folder: not needed: nothing is trained.
        branch_variance: q, dimensionless, >= 0; the same for all sub-layers.

    Returns:
        Columns n_sublayers, alpha, branch_variance, log_product, product, branch_share, aligned_cosine.
    """
    return phase_diagram(branch_variance=branch_variance).to_frame()


def draw(frame: pd.DataFrame) -> Figure:
    """The diagram of :func:`compute`'s frame.

    Args:
        frame: one branch variance, a full grid of depths and scales.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    with paper_style():
        figure = NewFigure(figsize=(3.4, 3.3), layout="constrained")
        axes = figure.add_subplot()
        _bands(axes, frame)
        _curves(axes, frame)
        _corner(axes, frame)
        axes.set(xlabel="depth $L$ (sub-layers)", ylabel=r"shortcut scale $\alpha$ (dimensionless)")
        figure.text(0.99, 0.005, _remark(frame), size=6, ha="right", va="bottom", color="#444444")
        figure.get_layout_engine().set(rect=(0, 0.075, 1, 0.925))  # type: ignore[union-attr, call-arg]
        figure.canvas.draw()  # inside the style, so that it is the style's fonts that the layout sees
    return figure


_ALMOST_ONE = 0.99


def _corner(axes: Axes, frame: pd.DataFrame) -> None:
    """Say that the output is the input, in the corner where it is, if it is there."""
    corner = frame[(frame["n_sublayers"] <= 12) & (frame["alpha"] >= frame["alpha"].max() / 3)]
    if float(corner["product"].min()) >= _ALMOST_ONE:
        ink = _ink(frame, float(frame["n_sublayers"].min()), float(frame["alpha"].max()), _CRITICAL)
        axes.text(0.03, 0.96, "output hardly\ndiffers from input", transform=axes.transAxes, size=7, va="top", color=ink)


def _ink(frame: pd.DataFrame, n_sublayers: float, alpha: float, color: _Color) -> _Color:
    """A colour for words at one place: their own, or white on the dark bands at both ends."""
    distance = np.abs(np.log(frame["n_sublayers"] / n_sublayers)) + np.abs(np.log(frame["alpha"] / alpha))
    product = float(frame["product"].to_numpy()[int(np.argmin(distance))])
    return color if _DARK[0] <= product < _DARK[1] else "white"


def _remark(frame: pd.DataFrame) -> str:
    """Branch variance, and what Keel's first block costs at it from an embedding of variance one."""
    q = float(frame["branch_variance"].iloc[0])
    first = 1 / np.sqrt(1 + 2 * q) if q < _LARGE else 1 / np.sqrt(2) / np.sqrt(q)
    keel = get_scheme("keel").label
    return (
        f"branch variance $q$ = {q:g}; every sub-layer alike; embedding of variance 1:\n"
        rf"{keel}'s first block, which has no $\alpha$, keeps a further $1/\sqrt{{1 + 2q}}$ = {first:.2g}"
    )


def _grid(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = frame.pivot_table(index="alpha", columns="n_sublayers", values="log_product")
    return table.columns.to_numpy(float), table.index.to_numpy(float), table.to_numpy()


def _bands(axes: Axes, frame: pd.DataFrame) -> None:
    """Bands between round products. What is contoured is the logarithm of -ln(product), smooth over the whole plane."""
    depth, alpha, log_product = _grid(frame)
    field = np.log10(np.maximum(-log_product, 1e-12))
    levels = sorted(np.log10([-np.log(g) for g in _LEVELS]))
    bands = axes.contourf(depth, alpha, field, levels=levels, extend="both", cmap=_muted("PuOr_r"))
    axes.contour(depth, alpha, field, levels=levels, colors="white", linewidths=0.5, linestyles="solid")
    axes.set(xscale="log", yscale="log", xlim=(depth[0], depth[-1]), ylim=(alpha[0], alpha[-1]))
    axes.grid(visible=False)
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes belong to a figure
    bar = figure.colorbar(bands, ax=axes, location="top", ticks=levels, aspect=30, pad=0.02, extendfrac=0.06)
    bar.ax.set_xticklabels([_power(g) for g in sorted(_LEVELS, reverse=True)])
    bar.ax.tick_params(length=0, pad=1)
    bar.set_label("gradient kept by the shortcut (= cosine of output with input)", size=7)


def _curves(axes: Axes, frame: pd.DataFrame) -> None:
    """The schemes' scales over depth, and the critical line, each with its name along it."""
    depth = np.unique(frame["n_sublayers"].to_numpy(float))
    highest = float(frame["alpha"].max())
    curves = {
        "keel": (depth, rf"{get_scheme('keel').label}, $\alpha = L$"),
        "deepnorm": (depth**0.25, rf"{get_scheme('deepnorm').label}, $\alpha = L^{{1/4}}$"),
    }
    for name, (scale, text) in curves.items():
        style = scheme_style(name)
        axes.plot(depth, scale, color=style.color, linestyle=style.dash, linewidth=1.6)
        _along(axes, depth, scale, text, partial(_ink, frame, color=_dark(style.color)))
    q = float(frame["branch_variance"].iloc[0])
    critical = np.sqrt(q) * np.sqrt(depth)  # q times the depth may leave float64
    shown = (critical >= 1) & (critical <= highest)
    if shown.any():
        axes.plot(depth[shown], critical[shown], color=_CRITICAL, linestyle=(0, (4, 2)), linewidth=1.1)
        _along(
            axes,
            depth[shown],
            critical[shown],
            rf"$\alpha = \sqrt{{{'' if q == 1 else 'q'}L}}$, kept 0.61",
            lambda *_: _CRITICAL,
        )
    red = scheme_style("post_ln").color
    axes.plot(depth, np.ones_like(depth), color=red, linewidth=3.0, clip_on=False, zorder=5)
    axes.annotate(
        rf"{get_scheme('post_ln').label}, $\alpha = 1$",
        (depth[-1], 1.0),
        (-4, 5),
        textcoords="offset points",
        color=_ink(frame, float(depth[-1]), 1.0, _dark(red)),
        size=7,
        ha="right",
    )


def _along(axes: Axes, x: np.ndarray, y: np.ndarray, text: str, ink: Callable[[float, float], _Color]) -> None:
    """Write along a straight line of the log-log plane, above its middle."""
    i = int(0.52 * (len(x) - 1))
    slope = float(np.log(y[-1] / y[0]) / np.log(x[-1] / x[0]))
    axes.annotate(
        text,
        (float(x[i]), float(y[i])),
        (-2, 3),
        textcoords="offset points",
        rotation=float(np.degrees(np.arctan(slope))),
        rotation_mode="anchor",
        transform_rotates_text=True,
        color=ink(float(x[i]), float(y[i])),
        size=7,
        ha="center",
        va="bottom",
    )


def _dark(color: str) -> tuple[float, float, float]:
    """A colour for words: half way to black, legible on every band."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return 0.55 * red, 0.55 * green, 0.55 * blue


def _muted(name: str) -> Colormap:
    """A colour map pulled towards white, so that lines and words on it stay legible."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colors = colormaps[name](np.linspace(0.05, 0.95, 256))
    colors[:, :3] = 1 - 0.72 * (1 - colors[:, :3])
    return ListedColormap(colors)


def _power(product: float) -> str:
    if product >= 0.01:
        return f"{product:g}".removeprefix("0")
    return rf"$10^{{{round(np.log10(product))}}}$"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the diagram; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("phase_diagram", arguments)


# %%
if __name__ == "__main__":
    main()
