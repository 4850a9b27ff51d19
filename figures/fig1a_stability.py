# %%
r"""Training stability at an aggressive learning rate: the paper's Figure 1a.

The paper: training loss of Keel and Pre-LN at 4.5e-3, the first 1,000 steps; Pre-LN spikes, Keel is smooth. Here both train
at that learning rate times the factor of ``figures/_training_runs.py``, reached in the first tenth of the steps and then held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import CUT_WORDS, ONE_COLUMN, caption, draw_schemes, limit_losses, mark_entropy, size_words
from figures._findings import decide, in_runs, spread_over_seeds
from figures._style import label_line_ends, paper_style
from figures._training_runs import constant, scaled_lr, train_curves

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig1a_stability"

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [2],
                "widths": [32],
                "seeds": [0, 1],
                "training": {"schedule": "cosine", "steps": 40, "warmup": 4, "batch_size": 2, "seq_len": 32},
                "corpus": {"max_bytes": 200_000},
                "grid": [constant(scaled_lr(4.5e-3))],
            },
        },
        "cpu": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [32],
                "widths": [64],
                "seeds": [0, 1, 2],
                "training": {"schedule": "cosine", "steps": 1000, "warmup": 100, "batch_size": 4, "seq_len": 64},
                "grid": [constant(scaled_lr(4.5e-3))],
            },
        },
        "gpu": {
            "device": "cuda",
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [32, 256],
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
                "grid": [constant(4.5e-3)],
            },
        },
    }
)
"""The GPU preset (64 and 512 sub-layers of width 512, one GPU of 80 GB or more) has never been run."""


compute = partial(train_curves, NAME)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether Pre-LN spikes and Keel does not, at the deepest model of the frame.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per scheme the largest rise of the loss above its lowest level so far and the final loss (nats per token, over seeds),
        the number of seeds with a spike, and the verdict: reproduced if every seed of Pre-LN spikes and none of Keel does; in
        direction if Pre-LN's median largest rise is above the highest of Keel's.
    """
    runs = in_runs(frame[frame["n_sublayers"] == frame["n_sublayers"].max()])
    pre_ln, keel = (runs[runs["scheme"] == scheme] for scheme in ("pre_ln", "keel"))
    return {
        "n_sublayers": int(runs["n_sublayers"].iloc[0]),
        "peak_lr": float(runs["peak_lr"].iloc[0]),
        **{
            name: {
                "largest_rise": spread_over_seeds(rows["rise"].tolist()),
                "final_loss": spread_over_seeds(rows["final_loss"].tolist()),
                "seeds_with_a_spike": int(rows["is_spike"].sum()),
            }
            for name, rows in (("pre_ln", pre_ln), ("keel", keel))
        },
        "verdict": decide(
            fully=bool(pre_ln["is_spike"].all() and not keel["is_spike"].any()),
            in_direction=bool(np.median(pre_ln["rise"]) > keel["rise"].max()),
        ),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Loss against step, a panel per depth.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    depths: Sequence[int] = sorted(frame["n_sublayers"].unique())
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 0.6 + 2.1 * len(depths)), layout="constrained")
        panels = figure.subplots(len(depths), 1, squeeze=False, sharex=True)[:, 0]
        names = []
        for axes, depth in zip(panels, depths, strict=True):
            rows = frame[frame["n_sublayers"] == depth]
            axes.set_title(f"{depth} sub-layers, learning rate {rows['peak_lr'].iloc[0]:g}")
            limit_losses(axes, rows, 9)
            axes.margins(x=0.0)
            names.append((axes, *draw_schemes(axes, rows, 9)))
            mark_entropy(axes, rows, named=False)
            axes.set_ylabel("training loss (nats/token)")
        panels[-1].set_xlabel("optimizer step")
        first = frame.iloc[0]
        caption(
            figure,
            f"{size_words(frame)}. Learning rate held after {first['warmup']} steps of warm-up; thin: each seed (mean of 9 "
            f"steps), thick: their median; dotted: unigram entropy; {CUT_WORDS}.",
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
