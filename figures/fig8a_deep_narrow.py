# %%
r"""Shallow and wide against deep and narrow, with equally many weights in the blocks: the paper's Figure 8a.

The paper draws the training loss of Pre-LN, 128 sub-layers of width 2048 against 512 of width 1024, and prints no loss. Its
Table 5 has the scores: deep and narrow is hardly better with Pre-LN (52.3 against 52.2), while Keel, deep and narrow, is better
than both (55.5). So Keel is trained in both shapes too. Four times the depth at half the width keeps the weights of the blocks;
the learning rate of all is the paper's 6e-3 times the factor of ``figures/_training_runs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import CUT_WORDS, ONE_COLUMN, caption, draw_seeds, limit_losses, mark_entropy, size_words
from figures._findings import conclude, failed_runs, in_runs, learned_nothing, same_sign, spread_over_seeds
from figures._style import label_line_ends, paper_style, scheme_style
from figures._training_runs import scaled_lr, train_curves
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig8a_deep_narrow"
_WIDE_COLOR = "#b06000"
_WIDE_DASH = (0, (3.0, 1.5))

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "seeds": [0],
                "peaks": [scaled_lr(6e-3)],
                "training": {
                    "schedule": "cosine",
                    "steps": 40,
                    "warmup": 4,
                    "batch_size": 2,
                    "seq_len": 32,
                    "validation_tokens": 1024,
                },
                "corpus": {"max_bytes": 200_000},
                "grid": [{"blocks": [1], "widths": [32]}, {"blocks": [4], "widths": [16]}],
            },
        },
        "cpu": {
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "seeds": [0, 1],
                "peaks": [scaled_lr(6e-3)],
                "training": {
                    "schedule": "cosine",
                    "steps": 600,
                    "warmup": 60,
                    "batch_size": 4,
                    "seq_len": 64,
                    "validation_tokens": 32_768,
                },
                "grid": [{"blocks": [8], "widths": [128]}, {"blocks": [32], "widths": [64]}],
            },
        },
        "gpu": {
            "device": "cuda",
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "seeds": [0, 1, 2],
                "peaks": [6e-3],
                "training": {
                    "schedule": "cosine",
                    "steps": 2000,
                    "warmup": 200,
                    "batch_size": 32,
                    "seq_len": 256,
                    "validation_tokens": 262_144,
                    "activation_checkpointing": True,
                },
                "grid": [
                    {
                        "blocks": [64],
                        "widths": [1024],
                        "model": {"n_heads": 16, "n_kv_heads": 8, "compute_dtype": "bfloat16"},
                    },
                    {
                        "blocks": [256],
                        "widths": [512],
                        "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
                    },
                ],
            },
        },
    }
)
"""The GPU preset (128 sub-layers of width 1024 against 512 of 512, one GPU of 80 GB or more) has never been run."""


compute = partial(train_curves, NAME)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether depth pays, and with which scheme.

    Args:
        frame: of :func:`compute`; two depths.

    Returns:
        Per scheme and shape the validation and the final training loss (nats per token, over seeds) and the number of
        parameters; what depth gains, loss of the wide minus loss of the deep one, seed by seed; the runs that end at the
        unigram entropy, of which nothing can be compared; the parts of the statement; and the verdict: reproduced if in every
        seed Keel, deep and narrow, has a lower validation loss than both shapes of Pre-LN, and depth gains more with Keel
        than with Pre-LN; not decided where seeds differ, or a run learned nothing.
    """
    runs = in_runs(frame)
    shallow, deep = sorted(runs["n_sublayers"].unique())
    table = runs.pivot_table(index="seed", columns=["scheme", "n_sublayers"], values="validation_loss")
    gains = {scheme: (table[scheme, shallow] - table[scheme, deep]).to_numpy(float) for scheme in ("pre_ln", "keel")}
    best_pre_ln = np.minimum(table["pre_ln", shallow], table["pre_ln", deep])
    lead = (best_pre_ln - table["keel", deep]).to_numpy(float)
    more = gains["keel"] - gains["pre_ln"]
    failed = runs[learned_nothing(runs)]
    parts = {
        "Keel, deep and narrow, ends lower than both shapes of Pre-LN": same_sign(lead) if failed.empty else None,
        "depth gains more with Keel than with Pre-LN": same_sign(more) if failed.empty else None,
    }
    return {
        "peak_lr": float(runs["peak_lr"].iloc[0]),
        "shapes": [
            {
                "scheme": str(scheme),
                "n_sublayers": int(rows["n_sublayers"].iloc[0]),
                "width": int(rows["width"].iloc[0]),
                "n_parameters": int(rows["n_parameters"].iloc[0]),
                "validation_loss": spread_over_seeds(rows["validation_loss"].tolist()),
                "final_loss": spread_over_seeds(rows["final_loss"].tolist()),
            }
            for (scheme, _), rows in runs.groupby(["scheme", "n_sublayers"])
        ],
        "gain_of_depth": {scheme: spread_over_seeds(gain.tolist()) for scheme, gain in gains.items()},
        "lead_of_deep_keel_over_pre_ln": spread_over_seeds(lead.tolist()),
        "unigram_entropy": float(runs["unigram_entropy"].iloc[0]),
        "learned_nothing": failed_runs(failed),
        "parts": parts,
        "verdict": conclude(parts, main=list(parts)),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Loss against step, a panel per scheme, deep as full lines, wide as brown dashes.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    deepest = frame["n_sublayers"].max()
    window = max(3, int(frame["steps"].iloc[0]) // 30)
    with paper_style():
        schemes = list(frame.groupby("scheme", sort=False))
        figure = NewFigure(figsize=(ONE_COLUMN, 1.0 + 1.7 * len(schemes)), layout="constrained")
        panels = figure.subplots(len(schemes), 1, squeeze=False, sharex=True)[:, 0]
        names = []
        for axes, (scheme, of_scheme) in zip(panels, schemes, strict=True):
            limit_losses(axes, frame, window)  # the same limits in each
            axes.margins(x=0.0)
            ends, colors = {}, {}
            for (depth, width), rows in of_scheme.groupby(["n_sublayers", "width"], sort=False):
                label = f"{get_scheme(str(scheme)).label} {depth} × {width}"
                deep = depth == deepest
                color, dash = (scheme_style(str(scheme)).color, "-") if deep else (_WIDE_COLOR, _WIDE_DASH)
                ends[label] = draw_seeds(axes, rows, window=window, color=color, dash=dash)
                colors[label] = color
            mark_entropy(axes, frame, named=False)
            axes.set_ylabel("training loss\n(nats/token)")
            names.append((axes, ends, colors))
        panels[-1].set_xlabel("optimizer step")
        first = frame.iloc[0]
        counts = ", ".join(
            f"{depth} × {rows['width'].iloc[0]}: {rows['n_parameters'].median() / 1e6:.2f} M".replace(" ", "\N{NO-BREAK SPACE}")
            for depth, rows in frame.groupby("n_sublayers")
        )
        caption(
            figure,
            f"{size_words(frame)}. Sub-layers × width, parameters: {counts}. Peak learning rate {first['peak_lr']:g}, "
            f"{first['warmup']} steps of warm-up, cosine decay; thin: each seed (mean of {window} steps), thick: their median; "
            f"dashed: shallow and wide; dotted: unigram entropy; {CUT_WORDS}.",
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
