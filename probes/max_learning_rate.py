r"""The paper's stress test: a learning rate that rises linearly until the run diverges, or the ramp ends.

Max LR is the learning rate of the last optimizer step before the trouble began. Its resolution is the learning rate per step: a
ramp to 5e-2 over 5,000 steps tells it to 1e-5.

Source: Chen & Wei 2026, arXiv:2601.19895, section 5.1.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from probes.config import ModelConfig
from probes.control_variates import without_batches
from probes.corpus import Corpus, build_corpus
from probes.divergence import JudgeThresholds, Landmarks, StreamingJudge
from probes.errors import CheckpointError, KeelError
from probes.judgement import Judgement
from probes.run_folder import StepRecord, batch_losses
from probes.seed_summary import SeedSummary, combine_seeds
from probes.training import Outcome, TrainingResult, train
from probes.training_config import TrainingConfig, TrainingConfigError
from probes.training_state import Scheduler, borrowed

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ModelStressTest",
    "StressRun",
    "StressTest",
    "beside_reference",
    "cpu_preset",
    "gpu_preset",
    "landmarks_for",
    "stress_test",
    "stress_test_model",
]

_Batch = TypeVar("_Batch")


def cpu_preset(scheme: str) -> TrainingConfig:
    """64 sub-layers of width 64 over bytes, to 5e-2 in 600 steps of 512 tokens: a minute or two on two CPU cores."""
    return TrainingConfig(model=ModelConfig(scheme=scheme, n_blocks=32), steps=600, validation_tokens=0)


def gpu_preset(scheme: str, n_sublayers: int) -> TrainingConfig:
    """Width 512 in bfloat16 over bytes, to 5e-2 in 600 steps of 8,192 tokens, meant for one GPU of 80 GB or more.

    Args:
        scheme: name.
        n_sublayers: attention and FFN counted separately, even; 64 and 512 together are meant to take ten minutes at most.
    """
    model = ModelConfig(
        scheme=scheme,
        n_blocks=n_sublayers // 2,
        width=512,
        ffn_width=1536,
        n_heads=8,
        n_kv_heads=4,
        context_length=256,
        compute_dtype="bfloat16",
    )
    return TrainingConfig(
        model=model,
        steps=600,
        batch_size=32,
        seq_len=256,
        device="cuda",
        activation_checkpointing=n_sublayers > 128,
        validation_tokens=0,
    )


@dataclass(frozen=True, kw_only=True)
class StressRun:
    """One seed of a stress test.

    Attributes:
        judgement: what became of it.
        training: its steps.
    """

    judgement: Judgement
    training: TrainingResult

    @property
    def seed(self) -> int:
        """Of weights and data."""
        return self.training.config.seed


@dataclass(frozen=True, kw_only=True)
class StressTest:
    """Several seeds of one configuration.

    Attributes:
        config: of the first seed.
        runs: one per seed.
    """

    config: TrainingConfig
    runs: tuple[StressRun, ...]

    @cached_property
    def summary(self) -> SeedSummary:
        """Median Max LR over the seeds with a bootstrap interval; seeds that held to the peak count as lower bounds."""
        return combine_seeds([run.judgement for run in self.runs])

    def verdict(self) -> str:
        """One sentence."""
        if len(self.runs) == 1:
            return self.runs[0].judgement.verdict()
        kinds = "; ".join(f"seed {run.seed}: {run.judgement.verdict()}" for run in self.runs)
        return f"Max LR {self.summary.words()}, median of {len(self.runs)} seeds with its 95 % bootstrap interval; {kinds}"

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: per seed, the Max LR overall and by each criterion, with outcome, onset, bound and best loss."""
        import pandas as pd

        model = self.config.model
        parts = [
            run.judgement.to_frame().assign(
                scheme=model.scheme, n_sublayers=model.n_sublayers, width=model.width, seed=run.seed
            )
            for run in self.runs
        ]
        return pd.concat(parts, ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single steps, ready for JSON."""
        return {
            "scheme": self.config.model.scheme,
            "n_blocks": self.config.model.n_blocks,
            "n_sublayers": self.config.model.n_sublayers,
            "verdict": self.verdict(),
            "summary": asdict(self.summary),
            "runs": [
                {"seed": run.seed, "judgement": run.judgement.to_dict(), "training": run.training.to_dict()}
                for run in self.runs
            ],
        }


def stress_test(
    config: TrainingConfig,
    *,
    n_seeds: int = 1,
    corpus: Corpus | None = None,
    folder: str | Path | None = None,
    landmarks: Landmarks | None = None,
    thresholds: JudgeThresholds | None = None,
    early_stop: bool = True,
    on_step: Callable[[int, StepRecord], object] | None = None,
    save_seconds: float = 60.0,
) -> StressTest:
    """Train up the ramp and judge the run while it goes on.

    Args:
        config: a ramp; its seed is the first one's, the others follow it.
        n_seeds: how many.
        corpus: the text; built once from ``config.corpus`` when None.
        folder: each seed's run goes to ``seed_N`` inside it, and resumes there.
        landmarks: what is known about a healthy run; those of :func:`landmarks_for` when None, with which degradation cannot
            be judged, since that takes a reference run.
        thresholds: of the judge.
        early_stop: end a run once its divergence is certain. The verdict is the same without.
        on_step: called with (seed, record) of every step.
        save_seconds: save the state of a run in a folder this often.

    Returns:
        Every seed's judgement.

    Raises:
        TrainingConfigError: if the schedule is no ramp or there is no seed.
        CheckpointError: if a run in the folder was stopped early, and this test would go on beyond.
    """
    if config.schedule != "ramp":
        raise TrainingConfigError(f"schedule must be 'ramp' for a stress test, got {config.schedule!r}")
    if n_seeds < 1:
        raise TrainingConfigError(f"a stress test needs at least 1 seed, got {n_seeds}")
    corpus = build_corpus(config.corpus) if corpus is None else corpus
    landmarks = landmarks_for(corpus) if landmarks is None else landmarks
    runs = []
    for seed in range(config.seed, config.seed + n_seeds):
        judge = StreamingJudge(ramp_steps=config.steps, landmarks=landmarks, thresholds=thresholds)
        note = _note(judge, early_stop, None if on_step is None else _seeded(on_step, seed))
        place = None if folder is None else Path(folder) / f"seed_{seed}"
        training = train(config.with_seed(seed), corpus=corpus, folder=place, on_step=note, save_seconds=save_seconds)
        _check_whole(training, stopped=early_stop and judge.certain)
        runs.append(StressRun(judgement=judge.judgement(), training=training))
    return StressTest(config=config, runs=tuple(runs))


def landmarks_for(corpus: Corpus, reference: Sequence[StepRecord] | None = None) -> Landmarks:
    """What is known about a healthy run on a text.

    Args:
        corpus: gives the unigram entropy, and ln V as the loss of an untrained model.
        reference: a healthy run over the same text and ramp; what its own batches make of its loss is taken off.

    Returns:
        The judge's landmarks.
    """
    known = Landmarks.of_text(
        unigram_entropy=corpus.unigram_entropy, bigram_entropy=corpus.bigram_entropy, vocab_size=corpus.vocab_size
    )
    return known if reference is None else beside_reference(known, reference)


def beside_reference(known: Landmarks, reference: Sequence[StepRecord]) -> Landmarks:
    """The same landmarks with a healthy run, what its own batches make of its loss taken off.

    Args:
        known: about a healthy run.
        reference: one over the same text and ramp.
    """
    losses = np.array([record.loss for record in reference], float)
    return replace(
        known,
        reference_steps=np.array([record.step for record in reference], float),
        reference_losses=without_batches(losses, batch_losses(reference)),
    )


def _check_whole(training: TrainingResult, *, stopped: bool) -> None:
    """Refuse what an earlier test cut short, where this one would not have: by its options, thresholds or landmarks.

    Raises:
        CheckpointError: if the run is shorter than this test asks for.
    """
    done = len(training.records)
    if training.outcome is Outcome.STOPPED and not stopped and done < training.config.steps:
        raise CheckpointError(
            f"the run in {training.folder} was stopped early there, at step {done} of {training.config.steps}, and this test "
            "would go on; name another folder"
        )


def _seeded(on_step: Callable[[int, StepRecord], object], seed: int) -> Callable[[StepRecord], object]:
    return lambda record: on_step(seed, record)


def _note(
    judge: StreamingJudge, early_stop: bool, on_step: Callable[[StepRecord], object] | None
) -> Callable[[StepRecord], bool]:
    """Feed the judge; a true answer means that the run can end."""

    def note(record: StepRecord) -> bool:
        certain = judge.feed(record.step, record.lr, record.loss, record.grad_norm, batch_losses=record.batch_losses)
        if on_step is not None:
            on_step(record)
        return early_stop and certain

    return note


@dataclass(frozen=True, kw_only=True)
class ModelStressTest:
    """A stress test of someone's own model.

    Attributes:
        judgement: what became of it.
        records: one per optimizer step.
        n_left_over: micro-batches at the end that did not fill an optimizer step and were not used.
    """

    judgement: Judgement
    records: tuple[StepRecord, ...]
    n_left_over: int


def stress_test_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[_Batch],
    loss: Callable[[nn.Module, _Batch], Tensor],
    *,
    steps: int,
    peak_lr: float = 5e-2,
    accumulation: int = 1,
    clip: float = 1.0,
    scheduler: Scheduler | None = None,
    landmarks: Landmarks | None = None,
    thresholds: JudgeThresholds | None = None,
    early_stop: bool = True,
    on_step: Callable[[StepRecord], object] | None = None,
) -> ModelStressTest:
    """Put someone's own model under the ramp, and give it back untouched.

    Afterwards parameters, gradients, buffers, modes, optimizer state, learning rates, scheduler and random state are bit-equal
    to before, also after an exception or Ctrl-C. The learning rate rises once per optimizer step; parameter groups keep the
    ratios of their rates, and the largest follows the ramp. The scheduler is not stepped.

    Args:
        model: trained in training mode.
        optimizer: with or without history.
            One whose ``step`` needs a closure is refused.
        batches: micro-batches; the run ends with them where they are too few, which is incomplete and no divergence.
        loss: mean loss of a micro-batch, a scalar with its graph.
        steps: optimizer steps of the ramp.
        peak_lr: learning rate of the last one.
        accumulation: micro-batches per optimizer step.
        clip: largest gradient norm; 0 never clips.
        scheduler: of the optimizer, to be restored.
        landmarks: what is known about a healthy run; stagnation cannot be judged without.
        thresholds: of the judge.
        early_stop: end once a divergence is certain.
        on_step: called with every record; a true answer ends the run.

    Returns:
        The judgement and every step.

    Raises:
        TrainingConfigError: if steps, peak_lr, accumulation or clip is outside its domain, the optimizer's step needs a
            closure, or the loss is no scalar with a graph.
        KeelError: if the batches do not fill one optimizer step.
    """
    _check_ramp(steps=steps, accumulation=accumulation, peak_lr=peak_lr, clip=clip)
    _check_optimizer(optimizer)
    judge = StreamingJudge(ramp_steps=steps, landmarks=landmarks, thresholds=thresholds)
    note = _note(judge, early_stop, None)
    records: list[StepRecord] = []
    window: list[_Batch] = []
    with borrowed(model, optimizer, scheduler):
        ramp = _Ramp(model, optimizer, clip)
        for batch in batches:
            window.append(batch)
            if len(window) < accumulation:
                continue
            record = ramp.step(len(records) + 1, peak_lr * (len(records) + 1) / steps, window, loss)
            window = []
            records.append(record)
            stop = note(record) | bool(on_step is not None and on_step(record))
            if stop or not math.isfinite(record.loss) or len(records) == steps:
                break
    if not records:
        raise KeelError(f"{len(window)} micro-batch(es) do not fill one optimizer step of {accumulation}")
    return ModelStressTest(judgement=judge.judgement(), records=tuple(records), n_left_over=len(window))


def _check_ramp(*, steps: object, accumulation: object, peak_lr: object, clip: object) -> None:
    for name, value in (("steps", steps), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise TrainingConfigError(f"{name} must be an integer above 0, got {value!r}")
    for name, value in (("peak_lr", peak_lr), ("clip", clip)):
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise TrainingConfigError(f"{name} must be a finite number, got {value!r}")
    if not peak_lr > 0:  # type: ignore[operator]  # a number, as just checked
        raise TrainingConfigError(f"peak_lr must be above 0, got {peak_lr}")
    if clip < 0:  # type: ignore[operator]  # a number, as just checked
        raise TrainingConfigError(f"clip must be at least 0 (0 never clips), got {clip}")


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingConfigError(
            f"{type(optimizer).__name__} needs a closure for each step, which evaluates the loss several times; an optimizer "
            "that steps by step() alone, such as AdamW, can be put under a ramp"
        )


def _checked(value: object) -> Tensor:
    """A loss that can be differentiated."""
    if not isinstance(value, Tensor):
        raise TrainingConfigError(f"loss must return a scalar tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise TrainingConfigError(
            f"loss must return a scalar, the mean over the micro-batch, got shape {tuple(value.shape)} of {value.dtype}"
        )
    if not value.requires_grad:
        raise TrainingConfigError("loss must return a scalar with its graph, got one that needs no gradient")
    return value.reshape(())


class _Ramp:
    """Optimizer steps of a borrowed model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
        self.model, self.optimizer, self.clip = model.train(), optimizer, clip
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        highest = max(rates)
        self.shares = [rate / highest if highest > 0 else 1.0 for rate in rates]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.started = time.perf_counter()
        for parameter in {*model.parameters(), *self.parameters}:
            parameter.grad = None  # what is there belongs to the owner, who gets it back

    def step(self, number: int, lr: float, window: Sequence[_Batch], loss: Callable[[nn.Module, _Batch], Tensor]) -> StepRecord:
        """One optimizer step at a learning rate; where the loss is not finite the weights are left as they are."""
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * share)
            else:
                group["lr"] = lr * share
        losses = []
        for batch in window:
            value = _checked(loss(self.model, batch))
            (value / len(window)).backward()  # type: ignore[no-untyped-call]
            losses.append(value.detach())
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        mean = float(torch.stack(losses).mean())
        if math.isfinite(mean):
            self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed = time.perf_counter() - self.started
        return StepRecord(step=number, lr=lr, loss=mean, grad_norm=float(norm), time=elapsed)
