# %%
r"""Pre-LN against Keel at a small learning rate: the paper's Figure 8b.

The paper trains both at 1.5e-3, the lowest learning rate of its Table 2, where their average scores are closest (Keel 50.5,
Pre-LN 49.5). It prints no loss; what is compared here is whether the losses order the two as those scores do. The learning rate
is 1.5e-3 times the factor of ``figures/_training_runs.py``, with the paper's schedule: linear warm-up, cosine decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import CUT_WORDS, ONE_COLUMN, caption, draw_schemes, limit_losses, mark_entropy, size_words
from figures._findings import conclude, failed_runs, in_runs, learned_nothing, paired_gap, same_sign, spread_over_seeds
from figures._style import label_line_ends, paper_style
from figures._training_runs import scaled_lr, train_curves
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig8b_small_lr"

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [2],
                "widths": [32],
                "seeds": [0, 1],
                "peaks": [scaled_lr(1.5e-3)],
                "training": {
                    "schedule": "cosine",
                    "steps": 40,
                    "warmup": 4,
                    "batch_size": 2,
                    "seq_len": 32,
                    "validation_tokens": 1024,
                },
                "corpus": {"max_bytes": 200_000},
            },
        },
        "cpu": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [32],
                "widths": [64],
                "seeds": [0, 1, 2],
                "peaks": [scaled_lr(1.5e-3)],
                "training": {
                    "schedule": "cosine",
                    "steps": 600,
                    "warmup": 60,
                    "batch_size": 4,
                    "seq_len": 64,
                    "validation_tokens": 32_768,
                },
            },
        },
        "gpu": {
            "device": "cuda",
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [256],
                "widths": [512],
                "seeds": [0, 1, 2],
                "peaks": [1.5e-3],
                "training": {
                    "schedule": "cosine",
                    "steps": 2000,
                    "warmup": 200,
                    "batch_size": 32,
                    "seq_len": 256,
                    "validation_tokens": 262_144,
                    "activation_checkpointing": True,
                },
                "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
            },
        },
    }
)
"""The GPU preset (512 sub-layers of width 512, one GPU of 80 GB or more) has never been run."""


compute = partial(train_curves, NAME)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether Keel's loss is the lower one, as its score is.

    Args:
        frame: of :func:`compute`.

    Returns:
        Final training and validation losses of both (nats per token, over seeds), the gap Pre-LN minus Keel seed by seed, and
        the verdict: reproduced if Keel's validation loss is the lower in every seed; not decided where seeds differ, or a run
        ends at the unigram entropy.
    """
    runs = in_runs(frame)
    gap = paired_gap(runs, "validation_loss")
    failed = runs[learned_nothing(runs)]
    parts = {"Keel ends lower than Pre-LN": same_sign(gap) if failed.empty else None}
    return {
        "peak_lr": float(runs["peak_lr"].iloc[0]),
        **{
            str(scheme): {
                "final_loss": spread_over_seeds(rows["final_loss"].tolist()),
                "validation_loss": spread_over_seeds(rows["validation_loss"].tolist()),
            }
            for scheme, rows in runs.groupby("scheme", sort=False)
        },
        "validation_gap_pre_ln_minus_keel": spread_over_seeds(gap),
        "training_gap_pre_ln_minus_keel": spread_over_seeds(paired_gap(runs, "final_loss")),
        "learned_nothing": failed_runs(failed),
        "parts": parts,
        "verdict": conclude(parts, main=list(parts)),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Loss against step.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 2.7), layout="constrained")
        axes = figure.add_subplot()
        window = max(3, int(frame["steps"].iloc[0]) // 40)
        limit_losses(axes, frame, window)
        axes.margins(x=0.0)
        ends, colors = draw_schemes(axes, frame, window)
        mark_entropy(axes, frame)
        axes.set(xlabel="optimizer step", ylabel="training loss (nats/token)")
        first = frame.iloc[0]
        validation = "; ".join(
            f"{get_scheme(str(scheme)).label} {rows.groupby('seed')['validation_loss'].first().median():.3f}"
            for scheme, rows in frame.groupby("scheme", sort=False)
        )
        caption(
            figure,
            f"{size_words(frame)}. Peak learning rate {first['peak_lr']:g}, {first['warmup']} steps of warm-up, cosine decay; "
            f"thin: each seed (mean of {window} steps), thick: their median; {CUT_WORDS}. Validation loss "
            f"(nats/token): {validation}.",
        )
        label_line_ends(axes, ends, colors)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
