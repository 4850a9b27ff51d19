"""Small training runs shared by the tests."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from probes.config import ModelConfig
from probes.corpus import Corpus, CorpusConfig, build_corpus
from probes.run_folder import StepRecord
from probes.training_config import TrainingConfig

MODEL = ModelConfig(n_blocks=2, width=16, ffn_width=32, n_heads=2, n_kv_heads=1, context_length=16)
CORPUS = CorpusConfig(max_bytes=60_000)


@lru_cache
def small_corpus() -> Corpus:
    return build_corpus(CORPUS)


def small_run(**changes: Any) -> TrainingConfig:
    """50 steps of a model of width 16 in about a second; scheme, n_blocks, compute_dtype and init_std are the model's."""
    model = {name: changes.pop(name) for name in ("scheme", "n_blocks", "compute_dtype", "init_std") if name in changes}
    plain = {"steps": 50, "batch_size": 4, "seq_len": 16, "peak_lr": 0.02, "validation_tokens": 64} | changes
    return TrainingConfig(model=replace(MODEL, **model), corpus=CORPUS, **plain)


def numbers(records: tuple[StepRecord, ...] | list[StepRecord]) -> list[tuple[float | None, ...]]:
    """What must be the same in every repetition of a run: everything but the time."""
    return [(r.step, r.lr, r.loss, r.grad_norm, r.unigram_loss, r.bigram_loss) for r in records]
