"""Overhead of the training loop: a step of it, plain and profiled, beside a bare forward + backward + AdamW of the same model.

The contenders live in one process, take turns step by step, and reverse their order from round to round; what counts is the
median of the ratios of CPU time within a round. The loop's step includes all that the bare one leaves out: drawing the windows,
what count models lose on them, the norm of the gradient, clipping, reading loss and norm, and the line of the log. A profiled
step reads the gradient dynamics over all sub-layers besides. A run takes such a step now and then (``keel train --profiles``):
what a whole run pays is told for 20 profiles in 600 steps.

    python benchmarks/training.py --rounds 40 -o benchmarks/results/training.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from probes.config import ModelConfig
from probes.corpus import Corpus, build_corpus
from probes.dynamics import write_profile
from probes.provenance import provenance
from probes.run_folder import RunFolder
from probes.training import Trainer, TrainingConfig

SIZES = {
    "4 blocks, width 64": ModelConfig(scheme="keel", n_blocks=4),
    "32 blocks, width 64": ModelConfig(scheme="keel", n_blocks=32),
    "128 blocks, width 64": ModelConfig(scheme="keel", n_blocks=128),
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
    """One step as the training command does it, its profile written where the step has one."""
    trainer = Trainer(config, corpus)

    def step() -> None:
        record = trainer.advance()
        if trainer.profile is not None:
            write_profile(folder.path, trainer.profile)
        folder.append(record)

    return step


def seconds(step: Callable[[], None]) -> float:
    """CPU time of one call, all threads of the process, which other processes disturb less than wall time."""
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(model: ModelConfig, corpus: Corpus, rounds: int) -> dict[str, Any]:
    """Medians of every contender, and of their ratios to the bare step.

    Returns:
        By contender: CPU seconds per step, and beside the bare one the ratio with its quartiles; and the ratio of a whole run.
    """
    config = TrainingConfig(model=model, steps=rounds + 50, peak_lr=1e-5)
    profiled = replace(config, probe_steps=tuple(range(1, config.steps + 1)))
    with tempfile.TemporaryDirectory() as place, RunFolder(place).opened(config, {}) as folder:
        contenders = {
            "bare": bare_step(config, corpus),
            "plain": loop_step(config, corpus, folder),
            "profiled": loop_step(profiled, corpus, folder),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(_WARM_UP + rounds):
            for name in sorted(contenders, reverse=bool(i % 2)):
                times[name].append(seconds(contenders[name]))
    times = {name: found[_WARM_UP:] for name, found in times.items()}
    found: dict[str, Any] = {name: {"cpu_seconds": statistics.median(values)} for name, values in times.items()}
    for name in ("plain", "profiled"):
        ratios = [a / b for a, b in zip(times[name], times["bare"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        found[name] |= {"ratio": median, "ratio_lower_quartile": low, "ratio_upper_quartile": high}
    plain, dear = found["plain"]["cpu_seconds"], found["profiled"]["cpu_seconds"]
    return found | {"run_with_20_profiles_in_600_steps": (580 * plain + 20 * dear) / (600 * plain)}


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
    for size, found in results.items():
        for name in ("plain", "profiled"):
            step = found[name]
            quartiles = f"{step['ratio_lower_quartile']:.3f} to {step['ratio_upper_quartile']:.3f}"
            print(f"{size}: {name} step {step['cpu_seconds']:.4f} CPU s, {step['ratio']:.3f} of the bare one ({quartiles})")
        print(f"{size}: run of 600 steps with 20 profiles {found['run_with_20_profiles_in_600_steps']:.3f} of one without")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"tokens_per_step": 512, "rounds": options.rounds, "results": results, "provenance": dict(provenance())}
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
