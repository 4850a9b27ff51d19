# %%
"""The paper's Figure 1b: average scores by capability, Pre-LN and Keel, as published. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import ONE_COLUMN, caption
from figures._style import paper_style, scheme_style
from figures.paper_tables import PUBLISHED, load_tables
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INPUTS", "SETTINGS", "compute", "draw", "finding", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({preset: {} for preset in ("smoke", "cpu", "gpu")})
"""Nothing to choose: published numbers."""
_TABLE = "figure1b_capabilities"
INPUTS = (PUBLISHED / f"{_TABLE}.csv",)
_WORDS = {
    "multilingual": "multilingual",
    "general_knowledge": "general\nknowledge",
    "math_and_code": "mathematics\nand code",
    "overall": "overall",
}


def compute(*, folder: Path | None = None) -> pd.DataFrame:
    """The published scores.

    Args:
        folder: not needed: nothing is trained.

    Returns:
        Columns capability, scheme, score (percent), printed (the score's text), source.
    """
    frame = load_tables().frame(_TABLE).rename(columns={"architecture": "scheme", "value": "score"})
    return frame.assign(source="published")


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Keel's gain over Pre-LN by capability, as published; nothing is measured, so there is no verdict.

    Args:
        frame: of :func:`compute`.

    Returns:
        Gains in points, by capability, in the figure's order.
    """
    table = frame.pivot_table(index="capability", columns="scheme", values="score", sort=False)
    return {"gains": {str(name): float(gain) for name, gain in (table["keel"] - table["pre_ln"]).items()}}


def draw(frame: pd.DataFrame) -> Figure:
    """One row per capability, Keel's gain between the two scores.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    table = frame.pivot_table(index="capability", columns="scheme", values="score", sort=False)
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 2.5), layout="constrained")
        axes = figure.add_subplot()
        rows = range(len(table))
        axes.hlines(rows, table["pre_ln"], table["keel"], color="#bbbbbb", linewidth=1.2, zorder=1)
        for scheme in table.columns:
            _markers(axes, table[scheme], str(scheme))
        for row, (before, after) in enumerate(zip(table["pre_ln"], table["keel"], strict=True)):
            axes.annotate(
                f"{after - before:+.1f}",
                ((before + after) / 2, row),
                (0, -5),
                textcoords="offset points",
                size=7,
                ha="center",
                va="top",
            )
        axes.set_yticks(rows, [_WORDS.get(str(name), str(name)) for name in table.index])
        axes.set_ylim(len(table) - 0.5, -0.75)
        axes.margins(x=0.24)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("average score (%)")
        caption(
            figure, "Hollow markers: published averages (the paper's Figure 1b), printed without a spread; gains in points."
        )
        figure.draw_without_rendering()
    return figure


def _markers(axes: Axes, scores: pd.Series[float], scheme: str) -> None:
    """Hollow, with the value on the outer side; the first row names the scheme."""
    style = scheme_style(scheme)
    axes.plot(scores, range(len(scores)), linestyle="none", marker=style.marker, color=style.color, mfc="white", mew=1.2, ms=5)
    side = 1 if scheme == "keel" else -1
    for row, score in enumerate(scores):
        axes.annotate(
            f"{score:.1f}",
            (score, row),
            (6 * side, 0),
            textcoords="offset points",
            color=style.color,
            size=7,
            ha="left" if side > 0 else "right",
            va="center",
        )
    axes.annotate(
        get_scheme(scheme).label,
        (float(scores.iloc[0]), 0),
        (0, 6),
        textcoords="offset points",
        color=style.color,
        size=8,
        weight="bold",
        ha="left" if side > 0 else "right",
        va="bottom",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("fig1b_capabilities", arguments)


# %%
if __name__ == "__main__":
    main()
