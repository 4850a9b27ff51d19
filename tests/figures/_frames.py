"""Frames as the figures' ``compute`` makes them, constructed: curves and costs of which the answer is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from figures._style import paper_style

UNIGRAM = 3.2


def learning(steps: int, end: float, *, start: float = 5.5, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """A loss that falls from start to end, with noise."""
    rng = np.random.default_rng(seed)
    share = np.linspace(0, 1, steps)
    return end + (start - end) * np.exp(-6 * share) + noise * rng.standard_normal(steps)


def with_spike(losses: np.ndarray, at: int, height: float, length: int = 40) -> np.ndarray:
    """The same loss with a rise that lasts."""
    spiked = losses.copy()
    spiked[at : at + length] += height
    return spiked


def run(losses: np.ndarray, **columns: Any) -> pd.DataFrame:
    """The curve of one run; columns override the defaults."""
    known = {
        "scheme": "keel",
        "n_sublayers": 64,
        "width": 64,
        "n_parameters": 433_000,
        "seed": 0,
        "peak_lr": 0.03,
        "steps": len(losses),
        "warmup": len(losses) // 10,
        "tokens_per_step": 256,
        "seq_len": 64,
        "device": "cpu",
        "unigram_entropy": UNIGRAM,
        "initial_loss": float(np.log(256)),
        "outcome": "finished",
        "validation_loss": float(losses[-1]),
    } | columns
    known["trial"] = "-".join(str(known[name]) for name in ("scheme", "n_sublayers", "peak_lr", "steps", "seed"))
    steps = np.arange(1, len(losses) + 1)
    return pd.DataFrame({"step": steps, "lr": 0.01, "loss": losses, "grad_norm": 1.0}).assign(**known)


def runs(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(list(parts), ignore_index=True)


def costs(values: Iterable[float], perplexity: float = 10.0, **columns: Any) -> pd.DataFrame:
    """A removal frame: the full model's perplexity and loss, and the cost of each block."""
    rows = [{"kind": "model", "metric": "perplexity", "value": perplexity, "low": perplexity, "high": perplexity, "start": 0}]
    for start, value in enumerate(values):
        rows.append(
            {
                "kind": "unit",
                "metric": "delta_perplexity",
                "value": value,
                "low": value - 0.1 * abs(value),
                "high": value + 0.1 * abs(value) + 1e-3,
                "start": start,
            }
        )
    n_blocks = len(rows) - 1
    constant = {
        "n_blocks": n_blocks,
        "n_sublayers": 2 * n_blocks,
        "width": 64,
        "n_parameters": 433_000,
        "n_predictions": 4096,
        "samples": "64 sequences",
        "device": "cpu",
        "dtype": "float32",
        "steps": 1600,
        "tokens_per_step": 256,
        "seed": 0,
    }
    return pd.DataFrame(rows).assign(**(constant | columns))


def words(figure: Figure) -> str:
    """Everything that is written on a figure, line ends as spaces."""
    texts = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        texts += [text.get_text() for text in axes.texts]
        texts += [axes.get_title(loc="left"), axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        legend = axes.get_legend()
        texts += [text.get_text() for text in legend.get_texts()] if legend is not None else []
        texts += [label.get_text() for label in axes.get_yticklabels()]
    return " | ".join(texts).replace("\n", " ")


def assert_printable(
    draw: Callable[[pd.DataFrame], Figure], frame: pd.DataFrame, *, width: float, says: Iterable[str]
) -> Figure:
    """Of the asked width, everything said, nothing written outside to the left or below."""
    figure = draw(frame)
    written = words(figure)
    for word in says:
        assert word in written, f"{word!r} is not in {written!r}"
    assert figure.get_size_inches()[0] == width
    with paper_style():
        figure.draw_without_rendering()
        box, height = figure.get_tightbbox(), figure.get_size_inches()[1]
    assert -0.01 < box.x0 < box.x1 < width + 0.01
    assert -0.01 < box.y0 < box.y1 < height + 0.01
    below = min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert all(text.get_window_extent().y1 <= below for text in figure.texts), "the caption runs into the axes"
    return figure
