# %%
"""The paper's Figure 1c: average score against depth, Pre-LN and Keel, as published; and the gain, which is its point.

Nothing here is measured. Hollow markers are the figure's numbers; crosses are the averages of Table 3's columns, recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import ONE_COLUMN, caption
from figures._style import label_line_ends, paper_style, scheme_style
from figures.paper_tables import PUBLISHED, load_tables
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INPUTS", "SETTINGS", "compute", "draw", "finding", "gains", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({preset: {} for preset in ("smoke", "cpu", "gpu")})
"""Nothing to choose: published numbers."""
_TABLE, _COLUMNS = "figure1c_depth_scaling", "table3_depth_scaling"
INPUTS = (PUBLISHED / f"{_TABLE}.csv", PUBLISHED / f"{_COLUMNS}.csv")
_AVERAGE = "Average"


def compute(*, folder: Path | None = None) -> pd.DataFrame:
    """The published averages, and those that follow from the published columns.

    Args:
        folder: not needed: nothing is trained.

    Returns:
        Columns scheme, n_sublayers, score (percent), source (published, recomputed).
    """
    import pandas as pd

    tables = load_tables()
    printed = tables.frame(_TABLE)[["architecture", "n_sublayers", "value"]].assign(source="published")
    columns = tables.frame(_COLUMNS)
    columns = columns[~columns["benchmark"].str.startswith(_AVERAGE)]
    recomputed = columns.groupby(["architecture", "n_sublayers"], sort=False)["value"].mean().reset_index()
    frame = pd.concat([printed, recomputed.assign(source="recomputed")], ignore_index=True)
    return frame.rename(columns={"architecture": "scheme", "value": "score"})


def gains(frame: pd.DataFrame) -> pd.Series[float]:
    """Keel's published score minus Pre-LN's, points, by depth.

    Args:
        frame: of :func:`compute`.
    """
    published = frame[frame["source"] == "published"].pivot_table(index="n_sublayers", columns="scheme", values="score")
    return published["keel"] - published["pre_ln"]


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Keel's published gain over Pre-LN by depth, and how far the published scores are from Table 3; nothing is measured.

    Args:
        frame: of :func:`compute`.

    Returns:
        Gains in points, by depth in sub-layers, and the largest difference in points of a score from the mean of its columns.
    """
    return {
        "gains": {f"{depth:,} sub-layers": float(gain) for depth, gain in gains(frame).items()},
        "largest_difference": _largest_difference(frame),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Scores above, Keel's gain below.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    depths = sorted(set(frame["n_sublayers"]))
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 3.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        _scores(above, frame)
        _gains(below, gains(frame))
        below.set_xscale("log", base=2)
        below.set_xticks(depths, [str(depth) for depth in depths])
        below.minorticks_off()
        below.set_xlim(depths[0] / 1.6, depths[-1] * 1.3)
        below.set_xlabel("depth $L$ (sub-layers)")
        caption(figure, _words(frame))
        figure.draw_without_rendering()
        published = frame[frame["source"] == "published"]
        ends = {str(name): rows.iloc[-1] for name, rows in published.groupby("scheme", sort=False)}
        label_line_ends(
            above,
            {get_scheme(name).label: (1.1 * float(end["n_sublayers"]), float(end["score"])) for name, end in ends.items()},
            {get_scheme(name).label: scheme_style(name).color for name in ends},
            size=8,
        )
        figure.draw_without_rendering()
    return figure


def _words(frame: pd.DataFrame) -> str:
    return (
        "Hollow markers: published averages (the paper's Figure 1c), printed without a spread. Crosses: mean of the columns "
        f"of the paper's Table 3, at most {_largest_difference(frame):.2f} points away."
    )


def _largest_difference(frame: pd.DataFrame) -> float:
    """Of a published average from the mean of its columns, points."""
    table = frame.pivot_table(index=["scheme", "n_sublayers"], columns="source", values="score")
    return float((table["published"] - table["recomputed"]).abs().max())


def _scores(axes: Axes, frame: pd.DataFrame) -> None:
    for (scheme, source), rows in frame.groupby(["scheme", "source"], sort=False):
        style = scheme_style(str(scheme))
        if source == "published":
            axes.plot(rows["n_sublayers"], rows["score"], mfc="white", mew=1.2, ms=5, **style.line())
            _values(axes, rows, str(scheme))
        else:
            axes.plot(rows["n_sublayers"], rows["score"], "x", color="#111111", ms=2.5, mew=0.7, zorder=5)
    axes.set_ylabel("average score (%)")
    axes.margins(y=0.14)


def _values(axes: Axes, rows: pd.DataFrame, scheme: str) -> None:
    up = scheme == "keel"
    for depth, score in zip(rows["n_sublayers"], rows["score"], strict=True):
        axes.annotate(
            f"{score:.1f}",
            (depth, score),
            (-4 if up else 4, 4 if up else -4),
            textcoords="offset points",
            color=scheme_style(scheme).color,
            size=7,
            ha="right" if up else "left",
            va="bottom" if up else "top",
        )


def _gains(axes: Axes, gain: pd.Series[float]) -> None:
    color = scheme_style("keel").color
    axes.vlines(gain.index, 0, gain, color=color, linewidth=1.0)
    axes.plot(gain.index, gain, "o", color=color, mfc="white", mew=1.2, ms=5)
    for depth, points in gain.items():
        axes.annotate(f"{points:+.1f}", (depth, points), (0, 5), textcoords="offset points", color=color, size=7, ha="center")
    axes.set_ylim(0, 1.35 * float(gain.max()))
    axes.set_ylabel("Keel − Pre-LN\n(points)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("fig1c_depth_scaling", arguments)


# %%
if __name__ == "__main__":
    main()
