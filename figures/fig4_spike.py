# %%
r"""Pre-LN early in training at two learning rates and two depths: the paper's Figure 4.

The paper: at 3e-3 the early loss of Pre-LN is smooth, at 4.5e-3 it spikes, in both of two depths. Here the learning rates are
those two times the factor of ``figures/_training_runs.py``, each reached in the first tenth of the steps and then held, at
twice and four times the depth of the other figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import CUT_WORDS, ONE_COLUMN, caption, draw_seeds, limit_losses, mark_entropy, size_words
from figures._findings import decide, in_runs, spread_over_seeds
from figures._style import label_line_ends, paper_style, scheme_style
from figures._training_runs import constant, scaled_lr, train_curves

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig4_spike"
_LOWER = "#999999"

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "sweep": {
                "schemes": ["pre_ln"],
                "blocks": [2, 4],
                "widths": [32],
                "training": {"schedule": "cosine", "steps": 40, "warmup": 4, "batch_size": 2, "seq_len": 32},
                "corpus": {"max_bytes": 200_000},
                "grid": [constant(scaled_lr(3e-3)), constant(scaled_lr(4.5e-3))],
            },
        },
        "cpu": {
            "sweep": {
                "schemes": ["pre_ln"],
                "blocks": [64, 128],
                "widths": [64],
                "training": {"schedule": "cosine", "steps": 300, "warmup": 30, "batch_size": 4, "seq_len": 64},
                "grid": [constant(scaled_lr(3e-3)), constant(scaled_lr(4.5e-3))],
            },
        },
        "gpu": {
            "device": "cuda",
            "sweep": {
                "schemes": ["pre_ln"],
                "blocks": [128, 256],
                "widths": [512],
                "seeds": [0, 1, 2],
                "training": {
                    "schedule": "cosine",
                    "steps": 1000,
                    "warmup": 100,
                    "batch_size": 32,
                    "seq_len": 256,
                    "activation_checkpointing": True,
                },
                "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
                "grid": [constant(3e-3), constant(4.5e-3)],
            },
        },
    }
)
"""The GPU preset (256 and 512 sub-layers of width 512, one GPU of 80 GB or more) has never been run."""


compute = partial(train_curves, NAME)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether the higher learning rate spikes and the lower does not.

    Args:
        frame: of :func:`compute`; two learning rates.

    Returns:
        Per depth and learning rate the largest rise of the loss above its lowest level so far (nats per token) and the number
        of seeds with a spike, and the verdict: reproduced if at every depth every seed of the higher spikes and none of the
        lower does; in direction if at every depth the highest rise of the higher is above that of the lower.
    """
    runs = in_runs(frame)
    lower, higher = sorted(runs["peak_lr"].unique())
    rows, full, direction = [], True, True
    for _, of_depth in runs.groupby("n_sublayers"):
        calm, wild = (of_depth[of_depth["peak_lr"] == rate] for rate in (lower, higher))
        full &= bool(wild["is_spike"].all() and not calm["is_spike"].any())
        direction &= bool(wild["rise"].max() > calm["rise"].max())
        rows += [
            {
                "n_sublayers": int(some["n_sublayers"].iloc[0]),
                "peak_lr": float(some["peak_lr"].iloc[0]),
                "largest_rise": spread_over_seeds(some["rise"].tolist()),
                "final_loss": spread_over_seeds(some["final_loss"].tolist()),
                "seeds_with_a_spike": int(some["is_spike"].sum()),
            }
            for some in (calm, wild)
        ]
    return {"runs": rows, "verdict": decide(fully=full, in_direction=direction)}


def draw(frame: pd.DataFrame) -> Figure:
    """Loss against step, a panel per depth.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    depths = sorted(frame["n_sublayers"].unique())
    rates = sorted(frame["peak_lr"].unique())
    shades = dict(zip(rates, (_LOWER, scheme_style("pre_ln").color), strict=True))
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 3.9), layout="constrained")
        panels = figure.subplots(len(depths), 1, squeeze=False, sharex=True)[:, 0]
        names = []
        for axes, depth in zip(panels, depths, strict=True):
            rows = frame[frame["n_sublayers"] == depth]
            axes.set_title(f"Pre-LN, {depth} sub-layers")
            limit_losses(axes, rows)
            axes.margins(x=0.0)
            ends = {
                f"LR {rate:g}": draw_seeds(axes, rows[rows["peak_lr"] == rate], window=5, color=shades[rate]) for rate in rates
            }
            mark_entropy(axes, rows)
            axes.set_ylabel("loss (nats/token)")
            names.append((axes, ends, {f"LR {rate:g}": shades[rate] for rate in rates}))
        panels[-1].set_xlabel("optimizer step")
        first = frame.iloc[0]
        caption(
            figure,
            f"{size_words(frame)}. Learning rate held after {first['warmup']} steps of warm-up; mean of 5 steps; {CUT_WORDS}.",
        )
        for of_panel in names:
            label_line_ends(*of_panel)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
