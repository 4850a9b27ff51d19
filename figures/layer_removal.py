# %%
"""What each block is worth: the paper's Figures 6 and 7, measured on a checkpoint.

The perplexity and the loss without each unit minus those of the full model, over depth. The axis is logarithmic in both
directions with a linear stretch around zero, so that units whose removal helps are drawn below the line rather than lost.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from figures._style import GALLERY, paper_style, save_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["compute", "draw", "main"]

_COLORS = {"attention": "#0077bb", "ffn": "#ee7733", "block": "#009988"}
_MARKERS = {"attention": "o", "ffn": "^", "block": "s"}
_NAMES = {"attention": "attention", "ffn": "FFN", "block": "block"}
_WORDS = {"block": "block", "sublayer": "sub-layer", "attn": "attention sub-layer", "ffn": "FFN sub-layer"}
_LOST = "#ee3377"


def compute(checkpoint: str = "smollm2", n_tokens: int = 2048, seq_len: int = 256, unit: str = "block") -> pd.DataFrame:
    """Measure a checkpoint on the default text.

    Args:
        checkpoint: what ``keel layer-removal`` takes.
        n_tokens: tokens in all.
        seq_len: tokens per sequence.
        unit: what is removed.

    Returns:
        The tidy frame of ``LayerRemoval.to_frame()``.
    """
    from probes.checkpoint import load_checkpoint
    from probes.layer_removal import measure_layer_removal
    from probes.text import checkpoint_batches, default_text

    loaded = load_checkpoint(checkpoint)
    batches = checkpoint_batches(loaded, default_text(), n_tokens=n_tokens, seq_len=seq_len)
    return measure_layer_removal(loaded.model, batches, layout=loaded.layout, unit=unit, joint=False).to_frame()


def draw(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """Two panels over depth: perplexity and loss.

    Args:
        frame: rows of one model, as :func:`compute` returns them.
        title: what was measured; the model's family and depth by default.

    Returns:
        The figure.
    """
    import matplotlib.pyplot as plt

    units = frame[frame.kind == "unit"]
    first = units.iloc[0]
    with paper_style():
        figure, (above, below) = plt.subplots(2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained")
        for axes, metric, label in (
            (above, "delta_perplexity", "Δ perplexity"),
            (below, "delta_loss", "Δ loss (nats/token)"),
        ):
            rows = units[units.metric == metric]
            _set_scale(axes, rows)
            _draw_costs(axes, rows)
            _mark_lost(axes, rows)
            axes.set_ylabel(label)
        if len(above.get_legend_handles_labels()[1]) > 1:
            above.legend(loc="best", ncols=2)
        word = _WORDS[str(first.counted_in)]
        below.set_xlabel(f"{word} removed" if first.span == 1 else f"first of {first.span} consecutive {word}s removed")
        below.margins(x=0.02)
        figure.suptitle(title or f"{first.family}: {first.n_blocks} blocks / {first.n_sublayers} sub-layers", fontsize="medium")
    return figure


def _set_scale(axes: Axes, rows: pd.DataFrame) -> None:
    """Log in both directions, linear below the smallest tenth of the costs."""
    sizes = rows.value[rows.status == "ok"].abs()
    linear = 10.0 ** math.floor(math.log10(sizes.quantile(0.1))) if len(sizes) else 1.0
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    axes.axhline(0, color="#777777", linewidth=0.6, zorder=0)


def _draw_costs(axes: Axes, rows: pd.DataFrame) -> None:
    kinds = rows.place.str.extract(r"(attention|ffn)", expand=False).where(rows.counted_in != "block").fillna("block")
    size = max(1.5, min(5.0, 60.0 / max(len(rows), 1) ** 0.6))
    for kind, group in rows.groupby(kinds, sort=True):
        drawn = group[group.status.isin(["ok", "zero"])]
        errors = [(drawn.value - drawn.low).fillna(0).clip(lower=0), (drawn.high - drawn.value).fillna(0).clip(lower=0)]
        axes.errorbar(
            drawn.start,
            drawn.value,
            yerr=errors,
            color=_COLORS[str(kind)],
            marker=_MARKERS[str(kind)],
            markersize=size,
            mew=0,
            elinewidth=0.6,
            linewidth=0.5,
            label=_NAMES[str(kind)],
        )


def _mark_lost(axes: Axes, rows: pd.DataFrame) -> None:
    """Crosses at the upper edge for what is no number, and in words how many."""
    lost = rows[rows.status.isin(["nan", "inf"])]
    if lost.empty:
        return
    axes.plot(lost.start, [0.98] * len(lost), "x", color=_LOST, transform=axes.get_xaxis_transform(), clip_on=False, ms=4)
    axes.text(
        0.5,
        0.9,
        f"× not finite: {len(lost)} of {len(rows)}",
        color=_LOST,
        transform=axes.transAxes,
        ha="center",
        va="top",
        fontsize="small",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw, and save PNG and SVG into the gallery."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="smollm2")
    parser.add_argument("--unit", default="block")
    parser.add_argument("--folder", type=Path, default=GALLERY)
    options = parser.parse_args(arguments)
    figure = draw(compute(options.checkpoint, unit=options.unit))
    for suffix in ("png", "svg"):
        save_figure(figure, options.folder / f"layer_removal.{suffix}")


if __name__ == "__main__":
    main()
