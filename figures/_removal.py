"""What figures 6 and 7 share: the cost of each block as a frame, and its drawing on the paper's log axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import spearmanr

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from probes.removal_result import LayerRemoval

__all__ = [
    "PAPER_FIRST_LAYERS",
    "TREND_LEVEL",
    "draw_costs",
    "place_of_first_layers",
    "removal_frame",
    "trend_p_past_first",
    "trend_past_first",
    "trend_rises",
]

PAPER_FIRST_LAYERS = 1e4
"""Perplexity that the paper says removing a first layer exceeds (appendix A)."""
TREND_LEVEL = 0.01
"""Probability, two-sided, of a rank correlation by chance below which a trend over depth counts as one."""
_FIRST_SHARE = 0.1


def removal_frame(result: LayerRemoval, **columns: Any) -> pd.DataFrame:
    """The exact costs of every unit and the full model's own values.

    Args:
        result: of the probe.
        columns: further ones, the same in every row.

    Returns:
        Rows of ``LayerRemoval.to_frame()`` of the model and its units, with n_predictions, samples, device, dtype.
    """
    frame = result.to_frame()
    wanted = frame[frame["metric"].isin(["perplexity", "loss", "delta_perplexity", "delta_loss"]) & (frame["kind"] != "joint")]
    return wanted.assign(
        n_predictions=result.n_predictions, samples=result.samples, device=result.device, dtype=result.dtype, **columns
    ).reset_index(drop=True)


def place_of_first_layers(n_units: int) -> int:
    """How many units count as the first ones: a tenth, at least one.

    Example:
        >>> place_of_first_layers(32)
        3
    """
    return max(1, round(_FIRST_SHARE * n_units))


def trend_past_first(costs: Sequence[float]) -> float:
    """Spearman's rank correlation of cost and depth past the first tenth; NaN where costs are not finite.

    Args:
        costs: of every unit, first to last.

    Example:
        >>> trend_past_first([9.0, 1.0, 2.0, 3.0])
        1.0
    """
    rest = np.asarray(costs, float)[place_of_first_layers(len(costs)) :]
    return round(float(spearmanr(np.arange(len(rest)), rest).statistic), 12)


def trend_p_past_first(costs: Sequence[float]) -> float:
    """Probability, two-sided, of such a rank correlation of cost and depth past the first tenth if there were none.

    Args:
        costs: of every unit, first to last.

    Example:
        >>> trend_p_past_first([9.0, *range(20)]) < TREND_LEVEL
        True
    """
    rest = np.asarray(costs, float)[place_of_first_layers(len(costs)) :]
    return float(spearmanr(np.arange(len(rest)), rest).pvalue)


def trend_rises(costs: Sequence[float]) -> bool | None:
    """Whether the cost past the first tenth rises with depth, by :data:`TREND_LEVEL`; None where it is not told from no trend.

    Args:
        costs: of every unit, first to last.

    Example:
        >>> trend_rises([9.0, *range(20)]), trend_rises([9.0, *range(20, 0, -1)]), trend_rises([9.0, 1.0, 3.0, 2.0, 3.0])
        (True, False, None)
    """
    return trend_past_first(costs) > 0 if trend_p_past_first(costs) < TREND_LEVEL else None


def draw_costs(axes: Axes, rows: pd.DataFrame, *, color: str, marker: str, bars: bool = True, label: str = "") -> None:
    """Costs over depth on a log axis; what is not above zero has no place there and stands hollow on the lower edge.

    Args:
        axes: with a log axis.
        rows: delta_perplexity of one model's units.
        color: of line and markers.
        marker: of each unit.
        bars: whether to draw the bootstrap intervals.
        label: for a legend.
    """
    x, value = rows["start"].to_numpy(float), rows["value"].to_numpy(float)
    shown = np.where(np.isfinite(value) & (value > 0), value, np.nan)
    width = 1.1 if bars else 0.5
    axes.plot(x, shown, color=color, linewidth=width, marker=marker, ms=2.6 if bars else 0, mew=0, label=label or None)
    if not bars:
        return
    low, high = rows["low"].to_numpy(float), rows["high"].to_numpy(float)
    axes.vlines(x, np.maximum(low, 1e-12), high, color=color, linewidth=0.8, alpha=0.6)
    gone = np.isfinite(value) & (value <= 0)
    if not gone.any():
        return
    axes.plot(
        x[gone],
        np.full(gone.sum(), 0.015),
        marker,
        mfc="white",
        mec=color,
        ms=3.2,
        mew=0.7,
        transform=axes.get_xaxis_transform(),
        clip_on=False,
        zorder=5,
    )
