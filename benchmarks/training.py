"""Overhead of the training loop: one step of it beside a bare forward + backward + AdamW of the same model.

Both contenders live in one process, take turns step by step, and swap who goes first from round to round; what counts is the
median of the ratios of CPU time within a round. The loop's step includes all that the bare one leaves out: drawing the windows,
the norm of the gradient, clipping, reading loss and norm, and the line of the log.

    python benchmarks/training.py --rounds 40 -o benchmarks/results/training.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from probes.config import ModelConfig
from probes.corpus import Corpus, build_corpus
from probes.provenance import provenance
from probes.run_folder import RunFolder
from probes.training import Trainer, TrainingConfig

SIZES = {
    "4 blocks, width 64": ModelConfig(scheme="keel", n_blocks=4),
    "32 blocks, width 64": ModelConfig(scheme="keel", n_blocks=32),
}
_WARM_UP = 3


def bare_step(config: TrainingConfig, corpus: Corpus) -> Callable[[], None]:
    """Forward, backward, AdamW (the fastest that torch has), nothing else; always on the same windows."""
    model = Trainer(config, corpus).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    windows = corpus.batch(seed=0, step=1, n_windows=config.batch_size, seq_len=config.seq_len)

    def step() -> None:
        model.loss(windows[:, :-1], windows[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def loop_step(config: TrainingConfig, corpus: Corpus, folder: RunFolder) -> Callable[[], None]:
    """One step as the training command does it."""
    trainer = Trainer(config, corpus)
    return lambda: folder.append(trainer.advance())


def seconds(step: Callable[[], None]) -> float:
    """CPU time of one call, all threads of the process, which other processes disturb less than wall time."""
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(model: ModelConfig, corpus: Corpus, rounds: int) -> dict[str, float]:
    """Medians of both contenders and of their ratio.

    Returns:
        CPU seconds per step, and the ratio with its quartiles.
    """
    config = TrainingConfig(model=model, steps=rounds + 50, peak_lr=1e-5)
    with tempfile.TemporaryDirectory() as place, RunFolder(place).opened(config, {}) as folder:
        contenders = {"loop": loop_step(config, corpus, folder), "bare": bare_step(config, corpus)}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(_WARM_UP + rounds):
            for name in sorted(contenders, reverse=bool(i % 2)):
                times[name].append(seconds(contenders[name]))
    ratios = [a / b for a, b in zip(times["loop"][_WARM_UP:], times["bare"][_WARM_UP:], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "loop_cpu_seconds": statistics.median(times["loop"][_WARM_UP:]),
        "bare_cpu_seconds": statistics.median(times["bare"][_WARM_UP:]),
        "ratio": statistics.median(ratios),
        "ratio_lower_quartile": low,
        "ratio_upper_quartile": high,
    }


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    corpus = build_corpus()
    results = {name: measure(model, corpus, options.rounds) for name, model in SIZES.items()}
    for name, found in results.items():
        quartiles = f"{found['ratio_lower_quartile']:.3f} to {found['ratio_upper_quartile']:.3f}"
        both = f"loop {found['loop_cpu_seconds']:.4f} CPU s, bare {found['bare_cpu_seconds']:.4f} CPU s"
        print(f"{name}: {both}, ratio {found['ratio']:.3f} (quartiles {quartiles})")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"tokens_per_step": 512, "rounds": options.rounds, "results": results, "provenance": dict(provenance())}
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
