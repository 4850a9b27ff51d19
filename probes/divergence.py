r"""Judge a run whose learning rate rises: whether, when and how it diverges, and the largest rate that it tolerates.

Training is fed point by point, and so is a finished log; the same points give the same judgement either way. The judge looks
at a hundred fixed places of the ramp, and is done once it is certain; what comes later changes nothing. Told to listen to the
end it adds the criteria that are met later, beside the verdict and its onsets as they were.

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

__all__ = ["JudgeThresholds", "Landmarks", "RunRecordError", "StreamingJudge", "judge_run", "reference_fault"]

_LOOKS = 100
_OPEN_POINTS = 3  # a spike at the very end of the data is told from noise by so many points


class RunRecordError(KeelError):
    """Points that cannot be a run: steps that do not increase or lie beyond the ramp, learning rates that are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Where a criterion is met: index into all points, and in words."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What the criteria say about the points so far."""

    met: dict[Criterion, _Trouble] = field(default_factory=dict)
    deciding: Criterion | None = None
    open_spike: _Trouble | None = None
    undecidable: _Trouble | None = None
    certain: bool = False
    notes: tuple[str, ...] = ()


class StreamingJudge:
    """Judges while a run goes on.

    Args:
        ramp_steps: steps of the whole ramp, >= 1.
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
        landmarks: Landmarks | None = None,
        thresholds: JudgeThresholds | None = None,
        to_end: bool = False,
    ) -> None:
        if ramp_steps < 1:
            raise ValueError(f"a ramp has at least 1 step, got {ramp_steps}")
        self.ramp_steps = ramp_steps
        self.landmarks = landmarks or Landmarks()
        self.thresholds = thresholds or JudgeThresholds()
        self._reference = _judge_reference(self.landmarks, ramp_steps, self.thresholds)
        broken = self._reference is not None and self._reference.diverged
        self._known = self.landmarks.without_reference() if broken else self.landmarks
        self._to_end = to_end
        self._steps: list[int] = []
        self._rates: list[float] = []
        self._losses: list[float] = []
        self._batches = array("d")  # rows of _n_batch_losses
        self._clean: tuple[FloatArray, str | None] | None = None
        self._n_batch_losses: int | None = None
        self._bad_gradients = 0
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
            loss: of this step, nats; may be not a number.
            grad_norm: before clipping; only counted where it is not finite.
            batch_losses: of models that do not learn, on the batch of this step, nats
                (:attr:`probes.run_folder.StepRecord.batch_losses`); what batches make of the loss is then taken off. None
                where that is not known; otherwise always as many.

        Returns:
            Whether the judge is certain; from then on points are ignored.

        Raises:
            RunRecordError: if the step does not increase or lies beyond the ramp, the learning rate is negative or not finite,
                or there are more or fewer batch losses than before.
        """
        if step > self.ramp_steps:
            raise RunRecordError(f"step {step} lies beyond the ramp of {self.ramp_steps} steps; a ramp ends with its last step")
        if self._certain:
            return True
        if self._steps and step <= self._steps[-1]:
            raise RunRecordError(f"step {step} comes after step {self._steps[-1]}; steps must increase")
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise RunRecordError(f"learning rate {learning_rate} at step {step}; it must be a finite number >= 0")
        loss = math.nan if loss is None else loss
        self._note_batch(step, batch_losses)
        self._steps.append(step)
        self._rates.append(learning_rate)
        self._losses.append(loss)
        self._bad_gradients += grad_norm is not None and not math.isfinite(grad_norm)
        self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
        if step >= self._next_look or self._bad_losses in (1, self.thresholds.non_finite_patience):
            self._look(step)
        return self._certain

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
    def _complete(self) -> bool:
        """Whether no further point can come: of steps counted from 0 the last is one less, and points may lie apart."""
        last = self.ramp_steps - (self._steps[0] == 0)
        distance = float(np.median(np.diff(self._steps))) if len(self._steps) > 1 else 1.0
        return self._steps[-1] + distance > last


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


def _judge_reference(landmarks: Landmarks, ramp_steps: int, thresholds: JudgeThresholds) -> Judgement | None:
    steps, losses = landmarks.reference_steps, landmarks.reference_losses
    if steps is None or losses is None:
        return None
    length = max(ramp_steps, int(steps[-1]))
    judge = StreamingJudge(ramp_steps=length, landmarks=landmarks.without_reference(), thresholds=thresholds)
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
        steps: optimizer steps, shape (n,), increasing.
        learning_rates: shape (n,).
        losses: shape (n,), nats; may hold not-a-numbers.
        grad_norms: shape (n,), before clipping.
        batch_losses: of k models that do not learn, on the same batches, shape (n, k), nats; not a number where unknown.
        ramp_steps: length of the ramp, not below the last step; the last step where None.
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
    length = max(1, int(steps[-1])) if ramp_steps is None else ramp_steps
    shift = (first_step or 1) - 1
    if shift:
        shifted = judge_run(
            [s - shift for s in steps],
            learning_rates,
            losses,
            grad_norms,
            batch_losses=batch_losses,
            ramp_steps=length,
            landmarks=landmarks,
            thresholds=thresholds,
            to_end=to_end,
        )
        onset = None if shifted.onset_step is None else shifted.onset_step + shift
        return replace(shifted, onset_step=onset)
    if steps[-1] > length:
        raise RunRecordError(f"step {steps[-1]} lies beyond the ramp of {length} steps; a ramp ends with its last step")
    judge = StreamingJudge(ramp_steps=length, landmarks=landmarks, thresholds=thresholds, to_end=to_end)
    norms: Sequence[float | None] = [None] * len(steps) if grad_norms is None else grad_norms
    batches = [None] * len(steps) if batch_losses is None else batch_losses.tolist()
    for step, rate, loss, norm, batch in zip(steps, learning_rates, losses, norms, batches, strict=True):
        if judge.feed(int(step), float(rate), loss, norm, batch):
            break
    return judge.judgement()


def _findings(judge: StreamingJudge) -> _Findings:
    """Everything found; what was found when the judge became certain stands, also where it listens on."""
    verdict = judge._verdict
    if judge._certain and verdict is not None:
        return verdict
    found = _search(judge)
    if verdict is None:
        return found
    return replace(
        found, met=found.met | verdict.met, deciding=verdict.deciding, open_spike=None, undecidable=None, certain=True
    )


def _search(judge: StreamingJudge) -> _Findings:
    losses = judge._cleaned
    steps = np.asarray(judge._steps, float)
    thresholds = judge.thresholds
    bad = find_non_finite(losses, thresholds)
    finite = np.flatnonzero(np.isfinite(losses[:bad]))
    met: dict[Criterion, _Trouble] = {}
    open_spike = undecidable = None
    certain = bad is not None and len(losses) - bad >= thresholds.non_finite_patience
    if bad is not None:
        met[Criterion.NON_FINITE] = _Trouble(index=bad, reason=f"the loss is {losses[bad]} from step {steps[bad]:.0f} on")
    if len(finite) >= (thresholds.min_points if bad is None else 3):
        record = Record(steps[finite], losses[finite], judge.ramp_steps, judge._known)
        rise = find_rise(record, thresholds)
        if rise is not None and bad is not None and _ends_in(rise, record, steps[bad], thresholds):
            met[Criterion.NON_FINITE] = _blow_up(rise, finite, steps, losses, bad)
        elif rise is not None and rise.settled:
            met[Criterion.IRRECOVERABLE_SPIKE] = _Trouble(index=int(finite[rise.index]), reason=_rise_words(rise, record))
            certain |= rise.certain
        elif rise is not None and bad is None and len(record.losses) - rise.recognised >= _OPEN_POINTS:
            open_spike = _Trouble(index=int(finite[rise.index]), reason=_open_words(rise, record))
        certain |= _add_lags(met, record, finite, rise, thresholds)
        undecidable = _blind_plateau(judge, record, finite, rise) if not met else None
    deciding = min(met, key=lambda criterion: met[criterion].index) if met else None
    notes = _notes(judge, losses[:bad])
    return _Findings(
        met=met, deciding=deciding, open_spike=open_spike, undecidable=undecidable, certain=bool(certain), notes=notes
    )


def _ends_in(rise: Rise, record: Record, bad_step: float, thresholds: JudgeThresholds) -> bool:
    """Whether a rise is the beginning of the end: not finite any more before it would have been certain by itself."""
    return bool(bad_step - record.steps[rise.recognised] < thresholds.rise_patience * record.ramp_steps)


def _blow_up(rise: Rise, finite: np.typing.NDArray[np.intp], steps: FloatArray, losses: FloatArray, bad: int) -> _Trouble:
    index = int(finite[rise.index])
    reason = (
        f"the loss leaves its level of {rise.before:.4g} at step {steps[index]:.0f} and is {losses[bad]} from step "
        f"{steps[bad]:.0f} on"
    )
    return _Trouble(index=index, reason=reason)


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
        trouble = _Trouble(index=int(finite[lag.index]), reason=_lag_words(lag, record))
        if criterion not in met or trouble.index < met[criterion].index:
            met[criterion] = trouble
    return certain and not falls


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
    if rise is not None or judge._known.unigram_entropy is not None or _reference_gap(judge) is None:
        return None
    limit = thresholds.blind_level * record.initial if record.level.min() > 0 else math.inf
    plateau = find_plateau(record, thresholds, limit, math.nan)
    if plateau is None or record.initial - plateau.level < 0.1 * abs(record.initial):
        return None
    reason = (
        f"the loss stands still at {plateau.level:.4g} from step {record.steps[plateau.index]:.0f} on; cannot judge whether "
        "that is stagnation without the unigram entropy or a reference run"
    )
    return _Trouble(index=int(finite[plateau.index]), reason=reason)


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
    transient = int((~np.isfinite(losses)).sum())
    if transient:
        notes.append(f"{transient} losses that were not finite were followed by finite ones: transient")
    if judge._bad_gradients:
        notes.append(f"{judge._bad_gradients} gradient norms were not finite")
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
    if by_entropy and judge._known.unigram_entropy is not None:
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
    missing = uncovered(Record(steps, steps, judge.ramp_steps, judge._known), judge.thresholds)
    if missing is not None:
        return (
            f"cannot judge where the reference has no points: steps {missing[0]:.0f} to {missing[1]:.0f} of a run from step "
            f"{steps[0]:.0f} to {steps[-1]:.0f}"
        )
    return None


def _outcome(judge: StreamingJudge, findings: _Findings) -> Outcome:
    if findings.deciding is not None:
        return findings.deciding.outcome
    if findings.open_spike is not None:
        return Outcome.INCOMPLETE
    if findings.undecidable is not None:
        return Outcome.CANNOT_JUDGE
    if not judge._complete:
        return Outcome.INCOMPLETE
    return Outcome.HEALTHY if judge._enough else Outcome.CANNOT_JUDGE


def _judgement(judge: StreamingJudge, findings: _Findings) -> Judgement:
    outcome = _outcome(judge, findings)
    trouble = findings.met[findings.deciding] if findings.deciding else findings.open_spike or findings.undecidable
    first = trouble.reason if trouble else _healthy_words(judge, outcome)
    others = [t.reason for c, t in findings.met.items() if c is not findings.deciding]
    best_loss, best_step = _best(judge)
    return Judgement(
        outcome=outcome,
        onset_step=None if trouble is None else judge._steps[trouble.index],
        detected_step=None if trouble is None else _detected(judge, outcome),
        max_lr=_rate_before(judge, trouble),
        lower_bound=not outcome.diverged,
        resolution=_resolution(judge),
        best_loss=best_loss,
        best_step=best_step,
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
    rate = judge._rates[-1]
    if outcome is Outcome.HEALTHY:
        return f"no divergence up to the end of the ramp, learning rate {rate:.4g}: Max LR is a lower bound"
    if outcome is Outcome.CANNOT_JUDGE:
        return f"{len(judge._losses)} points are too few to judge by; at least {judge.thresholds.min_points} are needed"
    return (
        f"no divergence in the data, which end at step {judge._steps[-1]} of {judge.ramp_steps}, learning rate {rate:.4g}: "
        "Max LR is a lower bound"
    )


def _rate_before(judge: StreamingJudge, trouble: _Trouble | None) -> float:
    if trouble is None:
        return judge._rates[-1]
    return judge._rates[trouble.index - 1] if trouble.index else 0.0


def _criterion(judge: StreamingJudge, findings: _Findings, criterion: Criterion) -> CriterionResult:
    trouble = findings.met.get(criterion)
    status = Status.MET if trouble else Status.NOT_MET
    reason = trouble.reason if trouble else f"not met up to learning rate {judge._rates[-1]:.4g}"
    if trouble is None and (doubt := _cannot_judge(judge, criterion)) is not None:
        status, reason = Status.CANNOT_JUDGE, doubt
    return CriterionResult(
        criterion=criterion,
        status=status,
        onset_step=judge._steps[trouble.index] if trouble else None,
        max_lr=_rate_before(judge, trouble),
        lower_bound=trouble is None,
        reason=reason,
    )


def _resolution(judge: StreamingJudge) -> float:
    rises = np.diff(judge._rates)
    rising = rises[rises > 0]
    return float(np.median(rising)) if len(rising) else 0.0


def _best(judge: StreamingJudge) -> tuple[float, int | None]:
    losses = judge._cleaned
    finite = np.flatnonzero(np.isfinite(losses))
    if not len(finite):
        return math.nan, None
    level = running_median(losses[finite])
    best = int(np.argmin(level))
    return float(level[best]), judge._steps[int(finite[best])]
