r"""Judge a run whose learning rate rises: whether, when and how it diverges, and the largest rate that it tolerates.

Training is fed point by point, and so is a finished log; the same points give the same judgement either way. The judge looks
at a hundred fixed places of the ramp, and is done once it is certain; what comes later changes nothing. Told to listen to the
end it adds the criteria that are met later, beside the verdict and its onsets as they were.

Steps may be numbered from anywhere: the ramp begins at its first step. A loss that is not known is a fact as well, and what the
last rows say decides (:mod:`probes.run_end`).

Four criteria (Chen & Wei 2026, arXiv:2601.19895, section 5.1, and not-a-number): see ``probes/judgement.py`` for the answer and
:class:`~probes.divergence_criteria.JudgeThresholds` for every threshold. The earliest onset decides. Degradation needs a
reference run, stagnation the unigram entropy or a reference; without them the answer is that it cannot be judged.

Where the losses of models that do not learn are known for the same batches, what the batches make of the loss is taken off
before anything is judged (:mod:`probes.control_variates`). A reference comes with its own taken off
(:func:`probes.max_learning_rate.landmarks_for` does so).

A reference adds evidence and takes none away: beside it the entropy counts as without. It clears a run only where it has
points, and only if it does not diverge itself, for it is judged first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from probes.control_variates import clean
from probes.divergence_criteria import (
    JudgeThresholds,
    Lag,
    LagKind,
    Landmarks,
    Record,
    Rise,
    find_non_finite,
    find_plateau,
    find_rise,
    lag_at_entropy,
    lag_behind_reference,
    uncovered,
)
from probes.errors import KeelError
from probes.judgement import Criterion, CriterionResult, Judgement, Outcome, Status
from probes.onset import FloatArray, running_median
from probes.run_end import RunEnd, StandIns, find_run_end

__all__ = ["JudgeThresholds", "Landmarks", "RunRecordError", "StreamingJudge", "judge_run", "reference_fault"]

_LOOKS = 100
_SPIKE = "a spike open"


class RunRecordError(KeelError):
    """Points that cannot be a run: steps that do not increase or lie beyond the ramp, learning rates that are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Where a criterion is met: index into all points, first and last index that it may have begun at, and in words."""

    index: int
    reason: str
    earliest: int
    latest: int
    slow: bool = False
    leaves_open: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What the criteria say about the points so far."""

    met: dict[Criterion, _Trouble] = field(default_factory=dict)
    deciding: Criterion | None = None
    open_end: _Trouble | None = None
    undecidable: _Trouble | None = None
    certain: bool = False
    notes: tuple[str, ...] = ()


class StreamingJudge:
    """Judges while a run goes on.

    Args:
        ramp_steps: steps of the whole ramp, >= 1.
        first_step: number of the ramp's first step. None takes 0 where the first point has that number, and 1 elsewhere.
        landmarks: what is known about a healthy run; a reference that diverges itself is named and not used.
        thresholds: when something counts.
        to_end: listen to the end even when certain, for the Max LR by every criterion; the verdict is the same without.

    Raises:
        ValueError: if ramp_steps is below 1.

    Example:
        >>> judge = StreamingJudge(ramp_steps=5)
        >>> for step, loss in enumerate([5.0, 4.0, 3.0, math.nan, math.nan], start=1):
        ...     _ = judge.feed(step, 0.001 * step, loss)
        >>> answer = judge.judgement()
        >>> answer.outcome.value, answer.onset_step, answer.max_lr
        ('non_finite', 4, 0.003)
    """

    def __init__(
        self,
        *,
        ramp_steps: int,
        first_step: int | None = None,
        landmarks: Landmarks | None = None,
        thresholds: JudgeThresholds | None = None,
        to_end: bool = False,
    ) -> None:
        if ramp_steps < 1:
            raise ValueError(f"a ramp has at least 1 step, got {ramp_steps}")
        self.ramp_steps = ramp_steps
        self.first_step = first_step
        self.landmarks = landmarks or Landmarks()
        self.thresholds = thresholds or JudgeThresholds()
        self._reference = _judge_reference(self.landmarks, ramp_steps, self.thresholds)
        broken = self._reference is not None and self._reference.diverged
        self._known_of_health = self.landmarks.without_reference() if broken else self.landmarks
        self._to_end = to_end
        self._steps: list[int] = []
        self._rates: list[float] = []
        self._losses: list[float] = []  # not a number where unknown
        self._known: list[bool] = []
        self._norms: list[float] = []  # not a number where unknown, infinite where not finite
        self._bad_norms: list[bool] = []
        self._stand_ins = StandIns()
        self._batches = array("d")  # rows of _n_batch_losses
        self._clean: tuple[FloatArray, str | None] | None = None
        self._n_batch_losses: int | None = None
        self._bad_losses = 0  # in a row
        self._next_look = 0.0
        self._since: tuple[Outcome, int] | None = None
        self._certain = False
        self._verdict: _Findings | None = None

    @property
    def certain(self) -> bool:
        """Whether the run has diverged beyond doubt, so that it can be stopped."""
        return self._certain

    def feed(
        self,
        step: int,
        learning_rate: float,
        loss: float | None,
        grad_norm: float | None = None,
        batch_losses: Sequence[float] | None = None,
    ) -> bool:
        """Add one optimizer step.

        Args:
            step: its number, larger than the last one's.
            learning_rate: used in this step.
            loss: of this step, nats; may be not a number. None where it is not known.
            grad_norm: before clipping. One that is not finite tells of a loss that is hidden, and decides where such norms
                last to the end of the data; None where it is not known.
            batch_losses: of models that do not learn, on the batch of this step, nats
                (:attr:`probes.run_folder.StepRecord.batch_losses`); what batches make of the loss is then taken off. None
                where that is not known; otherwise always as many.

        Returns:
            Whether the judge is certain; from then on points are ignored.

        Raises:
            RunRecordError: if the step does not increase or lies outside the ramp, the learning rate is negative or not finite,
                or there are more or fewer batch losses than before.
        """
        if self.first_step is None:
            self.first_step = min(step, 1)
        if not self._steps:
            self._known_of_health = _aligned(self._known_of_health, self.first_step, self.last_step)
        if not self.first_step <= step <= self.last_step:
            side = "beyond" if step > self.last_step else "before"
            raise RunRecordError(
                f"step {step} lies {side} the ramp of {self.ramp_steps} steps, which are {self.first_step} to {self.last_step}"
            )
        if self._certain:
            return True
        if self._steps and step <= self._steps[-1]:
            raise RunRecordError(f"step {step} comes after step {self._steps[-1]}; steps must increase")
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise RunRecordError(f"learning rate {learning_rate} at step {step}; it must be a finite number >= 0")
        self._note_batch(step, batch_losses)
        self._steps.append(step)
        self._rates.append(learning_rate)
        self._note_loss(loss, grad_norm)
        if step >= self._next_look or self._bad_losses in (1, self.thresholds.non_finite_patience):
            self._look(step)
        return self._certain

    def _note_loss(self, loss: float | None, grad_norm: float | None) -> None:
        known = not self._stand_ins(loss, grad_norm) and loss is not None
        self._losses.append(loss if loss is not None and known else math.nan)
        self._known.append(known)
        self._norms.append(math.nan if grad_norm is None else grad_norm if math.isfinite(grad_norm) else math.inf)
        self._bad_norms.append(self._stand_ins.gradient_is_bad)
        if known:
            self._bad_losses = 0 if math.isfinite(self._losses[-1]) else self._bad_losses + 1

    def _note_batch(self, step: int, batch_losses: Sequence[float] | None) -> None:
        if batch_losses is not None and self._n_batch_losses is None:
            self._n_batch_losses = len(batch_losses)
            self._batches.extend([math.nan] * (len(batch_losses) * len(self._steps)))
        n_known = self._n_batch_losses or 0
        values = [math.nan] * n_known if batch_losses is None else list(batch_losses)
        if len(values) != n_known:
            raise RunRecordError(f"{len(values)} batch losses at step {step}, and {n_known} before")
        self._batches.extend(values)

    @property
    def _batch_losses(self) -> FloatArray | None:
        """Shape (n, k), not a number where unknown; None where they are known of no step."""
        if not self._n_batch_losses:
            return None
        return np.array(self._batches).reshape(-1, self._n_batch_losses)

    @property
    def _cleaned(self) -> FloatArray:
        """The losses without what their batches make of them, shape (n,)."""
        if self._clean is None or len(self._clean[0]) != len(self._losses):
            self._clean = clean(np.asarray(self._losses, float), self._batch_losses)
        return self._clean[0]

    def judgement(self) -> Judgement:
        """The judgement of the points so far; asking changes nothing.

        Raises:
            RunRecordError: if there are no points.
        """
        if not self._steps:
            raise RunRecordError("no points to judge; feed at least one optimizer step")
        return _judgement(self, _findings(self))

    def _look(self, step: int) -> None:
        self._next_look = step + self.ramp_steps / _LOOKS
        findings = _findings(self)
        outcome = _outcome(self, findings)
        if self._since is None or self._since[0] is not outcome:
            self._since = (outcome, step)
        if self._verdict is None and findings.certain:
            self._verdict = findings
        self._certain = findings.certain and not self._to_end

    @property
    def _enough(self) -> bool:
        """Whether there are enough finite losses to judge by."""
        return sum(map(math.isfinite, self._losses)) >= self.thresholds.min_points

    @property
    def last_step(self) -> int:
        """Number of the ramp's last step; counted from 1 before the first point."""
        return (1 if self.first_step is None else self.first_step) + self.ramp_steps - 1

    @property
    def _complete(self) -> bool:
        """Whether no further point can come: points may lie apart."""
        return self._steps[-1] + _spacing(self._steps) > self.last_step

    def _bad_losses_from(self, index: int) -> int:
        """Losses that are known not to be finite, from a point on."""
        pairs = zip(self._losses[index:], self._known[index:], strict=True)
        return sum(known and not math.isfinite(loss) for loss, known in pairs)

    def _end(self, losses: FloatArray) -> RunEnd | None:
        """What the last points say."""
        norms, bad_norms = np.array(self._norms), np.array(self._bad_norms)
        return find_run_end(losses, np.array(self._known), norms, bad_norms, self.thresholds.non_finite_patience)


def reference_fault(landmarks: Landmarks, *, ramp_steps: int, thresholds: JudgeThresholds | None = None) -> str | None:
    """Why a reference run is none: what the judge finds wrong with it, over its own length.

    Args:
        landmarks: with the reference, or without.
        ramp_steps: of the run to be judged beside it.
        thresholds: when something counts.

    Returns:
        The kind of its divergence and where, in words; None where there is no fault or no reference.
    """
    reference = _judge_reference(landmarks, ramp_steps, thresholds or JudgeThresholds())
    return None if reference is None or not reference.diverged else _fault_words(reference)


def _aligned(known: Landmarks, first_step: int, last_step: int) -> Landmarks:
    """A reference that counts its steps from elsewhere, brought to the run's: from 0 or 1, or where they share no step."""
    steps = known.reference_steps
    if steps is None:
        return known
    begins = _beginning(steps.astype(int).tolist())
    apart = steps[-1] < first_step or steps[0] > last_step
    if begins == first_step or not (apart or {begins, first_step} == {0, 1}):
        return known
    return replace(known, reference_steps=steps + (first_step - begins))


def _judge_reference(landmarks: Landmarks, ramp_steps: int, thresholds: JudgeThresholds) -> Judgement | None:
    steps, losses = landmarks.reference_steps, landmarks.reference_losses
    if steps is None or losses is None:
        return None
    first = min(int(steps[0]), 1) if steps[-1] <= ramp_steps else int(steps[0])
    length = max(ramp_steps, int(steps[-1]) - first + 1)
    judge = StreamingJudge(ramp_steps=length, first_step=first, landmarks=landmarks.without_reference(), thresholds=thresholds)
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        judge.feed(int(step), 0.0, loss)
    return judge.judgement()


def _fault_words(reference: Judgement) -> str:
    return f"{reference.outcome.words} from step {reference.onset_step} of {reference.ramp_steps}"


def judge_run(
    steps: Sequence[int],
    learning_rates: Sequence[float],
    losses: Sequence[float | None],
    grad_norms: Sequence[float | None] | None = None,
    *,
    batch_losses: FloatArray | None = None,
    ramp_steps: int | None = None,
    first_step: int | None = None,
    landmarks: Landmarks | None = None,
    thresholds: JudgeThresholds | None = None,
    to_end: bool = False,
) -> Judgement:
    """Judge a finished run: the same answer as while it went on.

    Args:
        steps: optimizer steps, shape (n,), increasing, numbered from anywhere.
        learning_rates: shape (n,).
        losses: shape (n,), nats; may hold not-a-numbers, and None where one is not known.
        grad_norms: shape (n,), before clipping.
        batch_losses: of k models that do not learn, on the same batches, shape (n, k), nats; not a number where unknown.
        ramp_steps: length of the ramp; from the first to the last step where None, each point as long as its distance to the
            next.
        first_step: number of the ramp's first step. None takes 1 (or 0) where all steps lie on a ramp that begins there, and
            the first point's otherwise.
        landmarks: what is known about a healthy run.
        thresholds: when something counts.
        to_end: add the criteria that are met after the verdict is certain; the verdict is the same without.

    Returns:
        The judgement.

    Raises:
        RunRecordError: if the points are not a run, or go on beyond the ramp.
    """
    if not len(steps) == len(learning_rates) == len(losses) or not len(steps):
        raise RunRecordError(f"{len(steps)} steps, {len(learning_rates)} learning rates and {len(losses)} losses to judge")
    if batch_losses is not None and (batch_losses.ndim != 2 or len(batch_losses) != len(steps)):
        raise RunRecordError(f"{len(steps)} steps and batch losses of shape {batch_losses.shape}; it must be (n, k)")
    first, length = _extent(steps, ramp_steps, first_step)
    if steps[-1] >= first + length:
        raise RunRecordError(f"step {steps[-1]} lies beyond the ramp of {length} steps; a ramp ends with its last step")
    judge = StreamingJudge(ramp_steps=length, first_step=first, landmarks=landmarks, thresholds=thresholds, to_end=to_end)
    norms: Sequence[float | None] = [None] * len(steps) if grad_norms is None else grad_norms
    batches = [None] * len(steps) if batch_losses is None else batch_losses.tolist()
    for step, rate, loss, norm, batch in zip(steps, learning_rates, losses, norms, batches, strict=True):
        if judge.feed(int(step), float(rate), None if loss is None else float(loss), norm, batch):
            break
    return judge.judgement()


def _spacing(steps: Sequence[int]) -> float:
    """Usual distance of two points, steps."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def _extent(steps: Sequence[int], ramp_steps: int | None, first_step: int | None) -> tuple[int, int]:
    """First step and length of the ramp, as far as they are not given: from its first to its last step."""
    first, last = int(steps[0]), int(steps[-1])
    begins = _beginning(steps) if first_step is None else first_step
    if ramp_steps is not None and first_step is None and last <= ramp_steps - (first == 0):
        begins = min(first, 1)
    return begins, max(1, last - begins + 1) if ramp_steps is None else ramp_steps


def _beginning(steps: Sequence[int]) -> int:
    """Number of a ramp's first step: 1 where the first point is the first of points that lie apart."""
    first = int(steps[0])
    return 1 if 1 <= first <= _spacing(steps) else first


def _findings(judge: StreamingJudge) -> _Findings:
    """Everything found; what was found when the judge became certain stands, also where it listens on."""
    verdict = judge._verdict
    if judge._certain and verdict is not None:
        return verdict
    found = _search(judge)
    if verdict is None:
        return found
    return replace(found, met=found.met | verdict.met, deciding=verdict.deciding, open_end=None, undecidable=None, certain=True)


def _search(judge: StreamingJudge) -> _Findings:
    losses = judge._cleaned
    thresholds = judge.thresholds
    met: dict[Criterion, _Trouble] = {}
    stretch = find_non_finite(losses, thresholds, np.array(judge._known, bool))
    certain = stretch is not None and judge._bad_losses_from(stretch) >= thresholds.non_finite_patience
    end = judge._end(losses)
    broken = _broken(judge, losses, stretch, end)
    bad = None if broken is None else broken.index
    if broken is not None:
        met[Criterion.NON_FINITE] = broken
    finite = np.flatnonzero(np.isfinite(losses[:bad]))
    open_end = undecidable = None
    if len(finite) >= (thresholds.min_points if bad is None else 3):
        record = Record(np.asarray(judge._steps, float)[finite], losses[finite], judge.ramp_steps, judge._known_of_health)
        rise = find_rise(record, thresholds)
        if rise is not None and broken is not None and _ends_in(rise, record, judge._steps[broken.index], thresholds):
            met[Criterion.NON_FINITE] = _blow_up(rise, finite, judge._steps, losses, broken.index)
        elif rise is not None and rise.settled:
            met[Criterion.IRRECOVERABLE_SPIKE] = _of_rise(rise, finite, _rise_words(rise, record))
            certain |= rise.certain
        elif rise is not None and bad is None:
            open_end = replace(_of_rise(rise, finite, _open_words(rise, record)), leaves_open=_SPIKE)
        certain |= _add_lags(met, record, finite, rise, thresholds)
        undecidable = _blind_plateau(judge, record, finite, rise) if not met else None
    if end is not None and not end.diverged:
        unknown = _of_end(judge, end)
        open_end = unknown if open_end is None or unknown.index < open_end.index else open_end
    deciding = min(met, key=lambda criterion: met[criterion].index) if met else None
    notes = _notes(judge, losses[:bad])
    return _Findings(met=met, deciding=deciding, open_end=open_end, undecidable=undecidable, certain=bool(certain), notes=notes)


def _broken(judge: StreamingJudge, losses: FloatArray, stretch: int | None, end: RunEnd | None) -> _Trouble | None:
    """Where losses are not finite for good: a stretch of them, or whatever the last points say, the first of the two."""
    broken = _of_end(judge, end) if end is not None and end.diverged else None
    if stretch is None or (broken is not None and broken.index < stretch):
        return broken
    reason = f"the loss is {losses[stretch]} from step {judge._steps[stretch]} on"
    earliest = stretch if broken is None or broken.index > stretch else broken.earliest
    return _Trouble(index=stretch, reason=reason, earliest=earliest, latest=stretch)


def _of_end(judge: StreamingJudge, end: RunEnd) -> _Trouble:
    reason = f"from step {judge._steps[end.index]} on {end.reason}"
    return _Trouble(index=end.index, reason=reason, earliest=end.earliest, latest=end.index, leaves_open=end.what)


def _of_rise(rise: Rise, finite: np.typing.NDArray[np.intp], reason: str) -> _Trouble:
    earliest, latest = int(finite[min(rise.earliest, rise.index)]), int(finite[max(rise.recognised, rise.index)])
    return _Trouble(index=int(finite[rise.index]), reason=reason, earliest=earliest, latest=latest, slow=rise.slow)


def _ends_in(rise: Rise, record: Record, bad_step: float, thresholds: JudgeThresholds) -> bool:
    """Whether a rise is the beginning of the end: not finite any more before it would have been certain by itself."""
    return bool(bad_step - record.steps[rise.recognised] < thresholds.rise_patience * record.ramp_steps)


def _blow_up(rise: Rise, finite: np.typing.NDArray[np.intp], steps: Sequence[int], losses: FloatArray, bad: int) -> _Trouble:
    found = _of_rise(rise, finite, "")
    end = f"is {losses[bad]}" if not math.isfinite(losses[bad]) else "is no number that can be trusted"
    reason = f"the loss leaves its level of {rise.before:.4g} at step {steps[found.index]} and {end} from step {steps[bad]} on"
    return replace(found, reason=reason, slow=False)


def _add_lags(
    met: dict[Criterion, _Trouble],
    record: Record,
    finite: np.typing.NDArray[np.intp],
    rise: Rise | None,
    thresholds: JudgeThresholds,
) -> bool:
    """Add stagnation or degradation, each by whatever tells of it first; whether one is certain.

    Where the entropy tells of standing still and the reference of falling, more points will tell which: neither is certain.
    """
    certain = falls = False
    for find in (lag_behind_reference, lag_at_entropy):
        lag, sure = _lag(find, record, rise, thresholds)
        certain |= sure
        if lag is None:
            continue
        falls |= lag.kind is LagKind.FALLING
        criterion = Criterion.STAGNATION if lag.kind is LagKind.FLAT else Criterion.DEGRADATION
        trouble = _of_lag(lag, finite, _lag_words(lag, record))
        if criterion not in met or trouble.index < met[criterion].index:
            met[criterion] = trouble
    return certain and not falls


def _of_lag(lag: Lag, finite: np.typing.NDArray[np.intp], reason: str) -> _Trouble:
    earliest, latest = int(finite[lag.earliest]), int(finite[lag.latest])
    return _Trouble(index=int(finite[lag.index]), reason=reason, earliest=earliest, latest=latest)


def _lag(
    find: Callable[[Record, JudgeThresholds], Lag | None], record: Record, rise: Rise | None, thresholds: JudgeThresholds
) -> tuple[Lag | None, bool]:
    """A lag, and whether it is certain. A rise ends the record for it, unless the rise ends in a plateau."""
    calm = record if rise is None else record.until(rise.index)
    lag = find(calm, thresholds) if len(calm.losses) >= thresholds.min_points else None
    if lag is not None or rise is None:
        return lag, lag is not None and lag.certain
    late = find(record, thresholds)
    return (late if late is not None and late.kind is LagKind.FLAT and late.index > rise.index else None), False


def _blind_plateau(
    judge: StreamingJudge, record: Record, finite: np.typing.NDArray[np.intp], rise: Rise | None
) -> _Trouble | None:
    """An early plateau of which nothing says whether it is too high."""
    thresholds = judge.thresholds
    if rise is not None or judge._known_of_health.unigram_entropy is not None or _reference_gap(judge) is None:
        return None
    limit = thresholds.blind_level * record.initial if record.level.min() > 0 else math.inf
    plateau = find_plateau(record, thresholds, limit, math.nan)
    if plateau is None:
        return None
    reason = (
        f"the loss stands still at {plateau.level:.4g} from step {record.steps[plateau.index]:.0f} on; cannot judge whether "
        "that is stagnation without the unigram entropy or a reference run"
    )
    return _of_lag(plateau, finite, reason)


def _rise_words(rise: Rise, record: Record) -> str:
    return (
        f"the loss leaves its level of {rise.before:.4g} at step {record.steps[rise.index]:.0f} and never returns: lowest "
        f"since step {record.steps[rise.recognised]:.0f} is {rise.after:.4g}"
    )


def _open_words(rise: Rise, record: Record) -> str:
    return (
        f"a spike from step {record.steps[rise.index]:.0f} (level before {rise.before:.4g}) is still open at the end of the "
        "data, too late to say whether it recovers"
    )


def _lag_words(lag: Lag, record: Record) -> str:
    return (
        f"the loss {lag.kind.value} from step {record.steps[lag.index]:.0f} on and ends at {lag.level:.4g}, where {lag.beside} "
        f"{lag.expected:.4g}"
    )


def _notes(judge: StreamingJudge, losses: FloatArray) -> tuple[str, ...]:
    notes = []
    known = np.array(judge._known[: len(losses)], bool)
    transient, unknown = int((known & ~np.isfinite(losses)).sum()), int((~known).sum())
    if transient:
        notes.append(f"{transient} losses that were not finite were followed by finite ones: transient")
    if unknown:
        notes.append(f"{unknown} losses are not known")
    bad_gradients = int(np.isinf(judge._norms).sum())
    if bad_gradients:
        notes.append(f"{bad_gradients} gradient norms were not finite")
    if judge._clean is not None and judge._clean[1] is not None:
        notes.append(judge._clean[1])
    reference = judge._reference
    if reference is not None and reference.outcome is Outcome.CANNOT_JUDGE and reference.onset_step is not None:
        notes.append(
            f"the reference stands still itself from step {reference.onset_step}; it is taken to be healthy, which the unigram "
            "entropy would tell"
        )
    return tuple(notes)


def _doubts(judge: StreamingJudge, findings: _Findings) -> list[str]:
    """The criteria that cannot be judged, and why; the plateau that decides has said so itself."""
    told = {Criterion.STAGNATION} if findings.undecidable is not None else set()
    criteria = [c for c in (Criterion.DEGRADATION, Criterion.STAGNATION) if c not in findings.met and c not in told]
    return [f"{c.value}: {reason}" for c in criteria if (reason := _cannot_judge(judge, c)) is not None]


def _cannot_judge(judge: StreamingJudge, criterion: Criterion) -> str | None:
    """Why a criterion that is not met cannot be said not to be; None where it can."""
    if criterion not in (Criterion.DEGRADATION, Criterion.STAGNATION):
        return None
    by_entropy = criterion is Criterion.STAGNATION
    if by_entropy and judge._known_of_health.unigram_entropy is not None:
        return None
    if judge._reference is None:
        return f"cannot judge without {'the unigram entropy or ' if by_entropy else ''}a reference run"
    return _reference_gap(judge)


def _reference_gap(judge: StreamingJudge) -> str | None:
    """Why the reference cannot clear the run; None where it can."""
    reference = judge._reference
    if reference is None:
        return "cannot judge without a reference run"
    if reference.diverged:
        return f"cannot judge, for the reference diverges itself ({_fault_words(reference)})"
    steps = np.array([step for step, loss in zip(judge._steps, judge._losses, strict=True) if math.isfinite(loss)], float)
    if not len(steps):
        return None
    missing = uncovered(Record(steps, steps, judge.ramp_steps, judge._known_of_health), judge.thresholds)
    if missing is not None:
        return (
            f"cannot judge where the reference has no points: steps {missing[0]:.0f} to {missing[1]:.0f} of a run from step "
            f"{steps[0]:.0f} to {steps[-1]:.0f}"
        )
    return None


def _outcome(judge: StreamingJudge, findings: _Findings) -> Outcome:
    if findings.deciding is not None:
        return findings.deciding.outcome
    if findings.open_end is not None:
        return Outcome.INCOMPLETE
    if findings.undecidable is not None:
        return Outcome.CANNOT_JUDGE
    if not judge._complete:
        return Outcome.INCOMPLETE
    return Outcome.HEALTHY if judge._enough else Outcome.CANNOT_JUDGE


def _judgement(judge: StreamingJudge, findings: _Findings) -> Judgement:
    outcome = _outcome(judge, findings)
    trouble = findings.met[findings.deciding] if findings.deciding else findings.open_end or findings.undecidable
    first = trouble.reason if trouble else _healthy_words(judge, outcome)
    others = [t.reason for c, t in findings.met.items() if c is not findings.deciding]
    best_loss, best_step = _best(judge)
    onset = _onset(judge, trouble)
    return Judgement(
        outcome=outcome,
        onset_step=onset.step,
        onset_interval=onset.interval,
        detected_step=None if trouble is None else _detected(judge, outcome),
        max_lr=onset.max_lr,
        max_lr_interval=onset.max_lr_interval,
        lower_bound=not outcome.diverged,
        upper_bound=outcome.diverged and onset.upper_bound,
        resolution=_resolution(judge, trouble),
        log_spaced=_log_spaced(judge._rates),
        slow=trouble is not None and trouble.slow and judge._reference is None,
        best_loss=best_loss,
        best_step=best_step,
        first_step=1 if judge.first_step is None else judge.first_step,
        open_end=None if trouble is None or outcome is not Outcome.INCOMPLETE else trouble.leaves_open,
        last_step=judge._steps[-1],
        ramp_steps=judge.ramp_steps,
        criteria=tuple(_criterion(judge, findings, criterion) for criterion in Criterion),
        reasons=(first, *others, *findings.notes, *_doubts(judge, findings)),
        early=judge._certain and not judge._complete,
    )


def _detected(judge: StreamingJudge, outcome: Outcome) -> int:
    if outcome is not Outcome.INCOMPLETE and judge._since is not None and judge._since[0] is outcome:
        return judge._since[1]
    return judge._steps[-1]


def _healthy_words(judge: StreamingJudge, outcome: Outcome) -> str:
    rate = max(judge._rates)
    if outcome is Outcome.HEALTHY:
        return f"no divergence up to the end of the ramp, learning rate {rate:.4g}: Max LR is a lower bound"
    if outcome is Outcome.CANNOT_JUDGE:
        return f"{len(judge._losses)} points are too few to judge by; at least {judge.thresholds.min_points} are needed"
    return (
        f"no divergence in the data, which end at step {judge._steps[-1]} of {judge.ramp_steps}, learning rate {rate:.4g}: "
        "Max LR is a lower bound"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Onset:
    """A date, and the learning rates that go with it."""

    step: int | None
    interval: tuple[int, int] | None
    max_lr: float
    max_lr_interval: tuple[float, float] | None
    upper_bound: bool


def _onset(judge: StreamingJudge, trouble: _Trouble | None) -> _Onset:
    rates, steps = judge._rates, judge._steps
    if trouble is None:
        return _Onset(step=None, interval=None, max_lr=max(rates), max_lr_interval=None, upper_bound=False)
    still = _stands_still(rates, trouble.index)
    ends = (trouble.earliest, trouble.latest)
    low, high = (_rate_before(judge, end) for end in ends)
    if still:
        high = max(rates[: trouble.index + 1])
        low = min(low, max((rate for rate in rates[: trouble.index] if rate < high), default=0.0))
    return _Onset(
        step=steps[trouble.index],
        interval=(steps[ends[0]], steps[ends[1]]),
        max_lr=high if still else _rate_before(judge, trouble.index),
        max_lr_interval=(low, high),
        upper_bound=still,
    )


def _rate_before(judge: StreamingJudge, index: int) -> float:
    """The highest rate before a point at which something is known of the run."""
    rows = zip(judge._rates[:index], judge._losses[:index], judge._norms[:index], strict=True)
    return max((rate for rate, loss, norm in rows if math.isfinite(loss) or math.isfinite(norm)), default=0.0)


def _stands_still(rates: Sequence[float], index: int) -> bool:
    """Whether the rate does not rise to a point: the run broke at that very rate, which is then no rate that it tolerates."""
    if index:
        return rates[index] <= max(rates[:index])
    return len(rates) > 1 and rates[1] == rates[0]


def _criterion(judge: StreamingJudge, findings: _Findings, criterion: Criterion) -> CriterionResult:
    trouble = findings.met.get(criterion)
    status = Status.MET if trouble else Status.NOT_MET
    reason = trouble.reason if trouble else f"not met up to learning rate {judge._rates[-1]:.4g}"
    if trouble is None and (doubt := _cannot_judge(judge, criterion)) is not None:
        status, reason = Status.CANNOT_JUDGE, doubt
    onset = _onset(judge, trouble)
    if trouble is None and findings.open_end is not None:
        seen = _rate_before(judge, findings.open_end.index)
        onset = replace(onset, max_lr=seen)
        reason = reason if status is Status.CANNOT_JUDGE else f"not met up to learning rate {seen:.4g}"
        if criterion is Criterion.NON_FINITE and findings.open_end.leaves_open != _SPIKE:
            status, reason = Status.CANNOT_JUDGE, findings.open_end.reason
    return CriterionResult(
        criterion=criterion,
        status=status,
        onset_step=onset.step,
        onset_interval=onset.interval,
        max_lr=onset.max_lr,
        max_lr_interval=onset.max_lr_interval,
        lower_bound=trouble is None,
        upper_bound=onset.upper_bound,
        reason=reason,
    )


def _resolution(judge: StreamingJudge, trouble: _Trouble | None) -> float:
    """Distance from Max LR to the next higher rate at the onset, or of the last two rates that differ where it is a bound."""
    rates = judge._rates
    if trouble is None:
        at, before = max(rates), rates
    else:
        at, before = _rate_before(judge, trouble.index), rates[: trouble.index]
        higher = next((rate for rate in rates[trouble.index :] if rate > at), None)
        if higher is not None:
            return higher - at
    return at - max((rate for rate in before if rate < at), default=at)


def _log_spaced(rates: Sequence[float]) -> bool:
    """Whether a rising rate is multiplied from point to point rather than added to: steps that grow with the rate."""
    rising = np.array(rates)[np.array(rates) > 0]
    if len(rising) < 3 or not np.all(np.diff(rising) >= 0) or rising[-1] == rising[0]:
        return False
    straight = np.linspace(rising[0], rising[-1], len(rising))
    bent = np.geomspace(rising[0], rising[-1], len(rising))
    return bool(np.abs(rising - bent).sum() < np.abs(rising - straight).sum())


def _best(judge: StreamingJudge) -> tuple[float, int | None]:
    losses = judge._cleaned
    end = judge._end(losses)
    finite = np.flatnonzero(np.isfinite(losses[: end.earliest if end is not None and end.diverged else None]))
    if not len(finite):
        return math.nan, None
    level = running_median(losses[finite])
    best = int(np.argmin(level))
    return float(level[best]), judge._steps[int(finite[best])]
