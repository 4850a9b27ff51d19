# %%
r"""What each block of an open model is worth: the paper's Figure 7, for any checkpoint.

The paper measures Qwen2.5-72B-Instruct and LLaMA-3.3-70B-Instruct, 80 blocks each, on C4 validation: without one of the first
layers the perplexity is above 1e4; past them the cost grows with depth. The cpu preset measures SmolLM2-135M (30 blocks, Pre-LN
like those two) on English prose of the standard library; the gpu preset names the paper's models, streamed block by block where
they do not fit. ``compute(checkpoints=[...], text="c4.txt")`` takes any others, and any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import ONE_COLUMN, caption
from figures._findings import conclude, every
from figures._removal import (
    PAPER_FIRST_LAYERS,
    draw_costs,
    place_of_first_layers,
    removal_frame,
    trend_p_past_first,
    trend_past_first,
    trend_rises,
)
from figures._style import paper_style

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from probes.removal_result import LayerRemoval

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig7_open_models"
UNTRAINED = "untrained"
"""Stands for a small untrained model, so that everything can be tried without a checkpoint."""
SCHEMA_VERSION = 2
"""2: with ``text``."""
_COLORS = ("#333333", "#0077bb", "#ee7733", "#009988")
_MARKERS = ("^", "o", "s", "D")

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"checkpoints": [UNTRAINED], "n_tokens": 512, "seq_len": 32, "batch_size": 4},
        "cpu": {"checkpoints": ["smollm2"], "n_tokens": 4096, "seq_len": 256, "batch_size": 4},
        "gpu": {
            "checkpoints": ["Qwen/Qwen2.5-72B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"],
            "n_tokens": 32_768,
            "seq_len": 2048,
            "batch_size": 4,
            "dtype": "bfloat16",
            "device": "cuda",
        },
    }
)
"""The GPU preset (the paper's two models, streamed) has never been run."""


def compute(
    *,
    folder: Path | None = None,
    checkpoints: Sequence[str],
    n_tokens: int,
    seq_len: int,
    batch_size: int,
    text: str | None = None,
    unit: str = "block",
    dtype: str | None = None,
    device: str = "cpu",
) -> pd.DataFrame:
    """Measure every checkpoint by the exact probe.

    Args:
        folder: nothing is kept there; a streamed run that is interrupted goes on by ``keel layer-removal`` only.
        checkpoints: what ``keel layer-removal`` takes, or ``untrained``.
        n_tokens: tokens in all, of each checkpoint's own tokenizer.
        seq_len: tokens per sequence.
        batch_size: sequences per batch.
        text: a file; prose of the standard library by default.
        unit: what is removed.
        dtype: of the parameters; as stored by default.
        device: where to compute.

    Returns:
        As :func:`figures._removal.removal_frame`, with ``checkpoint`` and ``text``, where the text is from.
    """
    import pandas as pd
    import torch

    from probes.device import resolve_device
    from probes.text import read_text

    place = resolve_device(device)
    content, name = read_text(text)
    chosen = None if dtype is None else getattr(torch, dtype)
    parts = []
    for checkpoint in checkpoints:
        with _located(checkpoint) as source:
            result = _measure(source, (content, name), n_tokens, seq_len, batch_size, unit, chosen, place)
        parts.append(removal_frame(result, checkpoint=checkpoint, n_parameters=result.n_parameters))
    return pd.concat(parts, ignore_index=True).assign(text=name if text in (None, "-") else Path(name).name)


@contextmanager
def _located(checkpoint: str) -> Iterator[str]:
    """The checkpoint itself, or an untrained model for as long as it is needed."""
    if checkpoint != UNTRAINED:
        yield checkpoint
        return
    from probes.config import tiny
    from probes.model import Transformer
    from probes.saving import save_model

    with TemporaryDirectory() as folder:
        save_model(Transformer(tiny("pre_ln")), folder)
        yield folder


def _measure(
    source: str,
    text: tuple[str, str],
    n_tokens: int,
    seq_len: int,
    batch_size: int,
    unit: str,
    dtype: torch.dtype | None,
    device: torch.device,
) -> LayerRemoval:
    """In memory where the weights fit, block by block otherwise."""
    from probes.checkpoint import load_checkpoint
    from probes.layer_removal import measure_layer_removal
    from probes.streaming.choice import checkpoint_fit
    from probes.streaming.model import open_streamed
    from probes.streaming.removal import measure_streamed_layer_removal
    from probes.text import checkpoint_batches

    content, name = text
    words: dict[str, Any] = {"n_tokens": n_tokens, "seq_len": seq_len, "batch_size": batch_size, "source": name}
    if checkpoint_fit(source, dtype=dtype, device=device).fits:
        loaded = load_checkpoint(source, dtype=dtype, device=device)
        batches = checkpoint_batches(loaded, content, **words)
        return measure_layer_removal(
            loaded.model, batches, layout=loaded.layout, unit=unit, estimates=False, joint=False, device=device
        )
    with open_streamed(source, dtype=dtype, device=device) as streamed:
        batches = checkpoint_batches(streamed.checkpoint, content, **words)
        return measure_streamed_layer_removal(streamed, batches, unit=unit)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether a first block is worth a perplexity of 1e4, and the cost grows with depth past the first ones.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per checkpoint the perplexity, the largest perplexity without one of the first tenth of the blocks, the rank correlation
        of cost and depth past them with its probability by chance, and whether a first block is the dearest; the parts of the
        statement, each of every checkpoint; and the verdict: reproduced if a first block is the dearest and above 1e4, and the
        cost rises past them by :data:`figures._removal.TREND_LEVEL`; in direction without the 1e4; not decided where the trend
        is not told from none.
    """
    rows = [_shape(str(checkpoint), rows) for checkpoint, rows in frame.groupby("checkpoint", sort=False)]
    dearest, above, rises = (
        "a first block is the dearest",
        f"without a first block the perplexity is above {PAPER_FIRST_LAYERS:g}",
        "past the first the cost rises with depth",
    )
    parts = {
        dearest: all(row["first_is_dearest"] for row in rows),
        above: all(row["perplexity_without_a_first_block"] > PAPER_FIRST_LAYERS for row in rows),
        rises: every(row["rises"] for row in rows),
    }
    return {"checkpoints": rows, "parts": parts, "verdict": conclude(parts, main=[dearest, rises])}


def _shape(checkpoint: str, rows: pd.DataFrame) -> dict[str, Any]:
    perplexity = float(rows.loc[rows["metric"] == "perplexity", "value"].iloc[0])
    costs = rows.loc[rows["metric"] == "delta_perplexity", "value"].to_numpy(float)
    first = place_of_first_layers(len(costs))
    return {
        "checkpoint": checkpoint,
        "n_blocks": len(costs),
        "perplexity": perplexity,
        "perplexity_without_a_first_block": perplexity + float(costs[:first].max()),
        "median_delta_perplexity_past_first": float(np.median(costs[first:])),
        "rank_correlation_past_first": trend_past_first(costs.tolist()),
        "p_of_the_rank_correlation": trend_p_past_first(costs.tolist()),
        "rises": trend_rises(costs.tolist()),
        "first_is_dearest": bool(np.argmax(costs) < first),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Δ perplexity against the block removed, log axis.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.ticker import MaxNLocator

    units = frame[frame["metric"] == "delta_perplexity"]
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 2.8), layout="constrained")
        axes = figure.add_subplot()
        axes.set_yscale("log")
        positive = units["value"][units["value"] > 0]
        axes.set_ylim(float(positive.min()) / 2.5, max(3 * PAPER_FIRST_LAYERS, float(units["high"].max()) * 2))
        words = []
        for number, (checkpoint, rows) in enumerate(units.groupby("checkpoint", sort=False)):
            color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
            draw_costs(axes, rows, color=color, marker=marker, label=str(checkpoint))
            words.append(_words(str(checkpoint), frame[frame["checkpoint"] == checkpoint]))
        _mark_paper(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="block removed (0 = first)", ylabel="Δ perplexity", xlim=(-0.8, units["start"].max() + 0.8))
        if units["checkpoint"].nunique() > 1:
            axes.legend(loc="upper right")
        first = frame.iloc[0]
        hollow = "hollow, on the edge: not above 0; " if (units["value"] <= 0).any() else ""
        caption(
            figure,
            f"{'; '.join(words)}. n = {first['n_predictions']:,} predicted tokens of {first['text']}, bars: 95 % over "
            f"{first['samples']}; {hollow}{first['dtype']} on {first['device']}. Paper: Qwen2.5-72B and LLaMA-3.3-70B, "
            "80 blocks each; it gives the perplexity without a block, not its rise.",
        )
    return figure


def _words(checkpoint: str, rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    perplexity = float(rows.loc[rows["metric"] == "perplexity", "value"].iloc[0])
    size = f"{first['n_blocks']} blocks, {first['n_parameters'] / 1e6:,.1f} M parameters"
    return f"{checkpoint}: {size}, perplexity {perplexity:.4g} in full"


def _mark_paper(axes: Any) -> None:
    """The level that the paper's first layers exceed, as a hollow marker."""
    axes.plot([0], [PAPER_FIRST_LAYERS], "D", mfc="white", mec="#777777", ms=4.5, zorder=6)
    axes.annotate(
        "", (0, 2.6 * PAPER_FIRST_LAYERS), (0, PAPER_FIRST_LAYERS), arrowprops={"arrowstyle": "->", "color": "#777777"}
    )
    axes.annotate(
        "paper, 70B models: perplexity above 1e4",
        (0, PAPER_FIRST_LAYERS),
        (7, 0),
        textcoords="offset points",
        va="center",
        size=7,
        color="#777777",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
