"""``keel max-lr --scheme``: from options to stress tests, and their results as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from probes.corpus import Corpus
    from probes.divergence import JudgeThresholds, Landmarks
    from probes.max_learning_rate import StressTest
    from probes.training import TrainingConfig

__all__ = ["Plan", "page"]

_PRESETS = ("cpu", "gpu")
_GPU_DEPTHS = (64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command, as it documents them; None leaves a value to the preset."""

    scheme: str
    preset: str
    blocks: int | None
    width: int | None
    n_seeds: int
    first_seed: int
    peak: float
    steps: int
    batch_size: int | None
    accumulation: int
    seq_len: int | None
    texts: list[str] | None
    tokenizer: str
    settings: list[str]
    dtype: str | None
    device: str | None
    threads: int | None
    to_end: bool
    output: Path | None
    reference: Path | None = None

    def run(self, known: Landmarks, thresholds: JudgeThresholds | None = None) -> list[StressTest]:
        """Train every ramp of the plan, with a progress bar on stderr.

        Args:
            known: landmarks that the command line gives; the text's own entropy stands where it gives none.
            thresholds: of the judge.

        Returns:
            One test per depth of the preset.
        """
        from keel_theory.schemes import get_scheme
        from probes.cli import _training

        get_scheme(self.scheme)
        _training.threads(self.threads)
        _, corpus = _training.corpus_of(self.texts, self.tokenizer, "text", self.output)
        return [self._run(config, corpus, known, thresholds) for config in self._configs(corpus)]

    def _configs(self, corpus: Corpus) -> Iterator[TrainingConfig]:
        from probes.cli._training import ModelOptions

        options = ModelOptions(
            scheme=self.scheme,
            settings=self.settings,
            blocks=self.blocks,
            width=self.width,
            dtype=self.dtype,
            seed=self.first_seed,
        )
        given: dict[str, Any] = {"batch_size": self.batch_size, "seq_len": self.seq_len, "device": self.device}
        changes = {name: value for name, value in given.items() if value is not None}
        for plain in self._presets():
            ramp = replace(
                plain,
                corpus=corpus.config,
                steps=self.steps,
                peak_lr=self.peak,
                accumulation=self.accumulation,
                **changes,
            )
            yield options.apply(ramp, vocab_size=corpus.vocab_size)

    def _presets(self) -> list[TrainingConfig]:
        from probes.max_learning_rate import cpu_preset, gpu_preset

        if self.preset not in _PRESETS:
            raise typer.BadParameter(f"unknown preset '{self.preset}'; known: {', '.join(_PRESETS)}", param_hint="--preset")
        if self.preset == "cpu":
            return [cpu_preset(self.scheme)]
        depths = _GPU_DEPTHS if self.blocks is None else (2 * max(1, self.blocks),)
        return [gpu_preset(self.scheme, depth) for depth in depths]

    def _run(self, config: TrainingConfig, corpus: Corpus, known: Landmarks, thresholds: JudgeThresholds | None) -> StressTest:
        from probes.cli import _training
        from probes.cli.max_lr import check_reference
        from probes.max_learning_rate import landmarks_for, stress_test

        own = landmarks_for(corpus)
        entropy = own.unigram_entropy if known.unigram_entropy is None else known.unigram_entropy
        known = replace(known, unigram_entropy=entropy, initial_loss=own.initial_loss)
        check_reference(self.reference, known, config.steps, thresholds)
        depth = config.model.n_sublayers
        with (
            _training.interruptible(self.output),
            _training.progress(f"{self.scheme}, {depth} sub-layers", config.steps) as show,
        ):
            return stress_test(
                config,
                n_seeds=self.n_seeds,
                corpus=corpus,
                folder=None if self.output is None else self.output / f"{self.scheme}_{depth}",
                landmarks=known,
                thresholds=thresholds,
                early_stop=not self.to_end,
                on_step=lambda seed, record: show(record),
            )


def page(test: StressTest, *, wide: bool) -> str:
    """Verdicts, reasons and the Max LR by every criterion of every seed, as text."""
    from probes.cli.max_lr import judgement_page
    from probes.config import describe

    config = test.config
    text = test.runs[0].training.corpus
    lines = [
        f"{config.model.scheme}: {describe(config.model)}",
        f"ramp 0 -> {config.peak_lr:g} over {config.steps} steps of {config.batch_size * config.seq_len} tokens; "
        f"entropy of the text {text['unigram_entropy']:.4f} unigram, {text['bigram_entropy']:.4f} bigram nats/token",
    ]
    for run in test.runs:
        trained = f"{len(run.training.records)} steps in {run.training.seconds:.0f} s"
        lines += ["", f"seed {run.seed} ({trained})", judgement_page(run.judgement, wide=wide)]
    if len(test.runs) > 1:
        lines += ["", f"Max LR {test.summary.words()}: median of {len(test.runs)} seeds, 95 % bootstrap interval"]
    return "\n".join(lines)
