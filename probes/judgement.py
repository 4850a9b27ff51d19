r"""The answer of the judge: whether, when and how a run of rising learning rate diverged.

Max LR is the learning rate at the last point before the onset. A run that does not diverge gives a lower bound.

Source: Chen & Wei 2026, arXiv:2601.19895, section 5.1 (three kinds; not-a-number is added as a fourth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DEFINITION", "Criterion", "CriterionResult", "Judgement", "Outcome", "Status"]

DEFINITION = (
    "The level of a run is the running median of its loss. "
    "What it has learned is its first loss minus its lowest level so far. "
    "It has broken where its level rises above the lowest one by a tenth of what was learned and never comes back "
    "(irrecoverable spike), or where its losses or gradients are not finite any more (non-finite). "
    "It stands still where its end is flat, at the unigram entropy of the text or above (stagnation). "
    "Max LR is the learning rate before the earliest onset."
)
"""What the judge says, in five sentences; all else is noise, dating and doubt."""


class Outcome(str, Enum):
    """What became of the run."""

    HEALTHY = "healthy"
    """No divergence up to the peak: Max LR is a lower bound."""
    NON_FINITE = "non_finite"
    STAGNATION = "stagnation"
    IRRECOVERABLE_SPIKE = "irrecoverable_spike"
    """A rise, sharp or slow, after which the loss never returns to its level before."""
    DEGRADATION = "degradation"
    INCOMPLETE = "incomplete"
    """The data end before the ramp does, or during a spike: Max LR is a lower bound."""
    CANNOT_JUDGE = "cannot_judge"
    """The loss stands still early, and nothing says where a healthy run would be: Max LR is a lower bound."""

    @property
    def diverged(self) -> bool:
        """Whether this is a kind of divergence."""
        return self in _DIVERGED

    @property
    def words(self) -> str:
        """As it stands in a sentence."""
        return self.value.replace("_", " ").replace("non finite", "non-finite")


_DIVERGED = frozenset({Outcome.NON_FINITE, Outcome.STAGNATION, Outcome.IRRECOVERABLE_SPIKE, Outcome.DEGRADATION})


class Criterion(str, Enum):
    """The ways to diverge, each judged for itself."""

    NON_FINITE = "non_finite"
    IRRECOVERABLE_SPIKE = "irrecoverable_spike"
    STAGNATION = "stagnation"
    DEGRADATION = "degradation"

    @property
    def outcome(self) -> Outcome:
        """The outcome of a run that this criterion decides."""
        return Outcome(self.value)


class Status(str, Enum):
    """What a criterion says."""

    MET = "met"
    NOT_MET = "not_met"
    CANNOT_JUDGE = "cannot_judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionResult:
    """One criterion by itself.

    Attributes:
        criterion: which.
        status: met, not met, or not decidable with what is known.
        onset_step: optimizer step at which the trouble begins; None where it is not met.
        max_lr: learning rate at the last point before the onset, 0 where there is none; of the last point where it is not met.
        lower_bound: whether the true value may be larger.
        reason: in words, with numbers.
        onset_interval: first and last step at which it may have begun; None where it is not met.
        max_lr_interval: learning rates at the last points before these two.
        upper_bound: whether the true value is smaller: the rate did not rise about the onset.
    """

    criterion: Criterion
    status: Status
    onset_step: int | None
    max_lr: float
    lower_bound: bool
    reason: str
    onset_interval: tuple[int, int] | None = None
    max_lr_interval: tuple[float, float] | None = None
    upper_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What became of a run, and the largest learning rate that it tolerated.

    Attributes:
        outcome: the kind.
        onset_step: optimizer step at which the trouble begins, dated back, as the run numbers its steps; None if none.
        detected_step: step at which it was recognised; None where there is none.
        max_lr: learning rate at the last point before the onset (0 where the first point is bad already); of the last point
            of a run without divergence.
        lower_bound: whether ``max_lr`` is only known to be tolerated, and the true value may be larger.
        resolution: distance from ``max_lr`` to the next higher learning rate at the onset; of a lower
            bound, from the rate before.
        best_loss: lowest level reached (running median of five points, what the batches make of them taken off where that is
            known), nats; NaN without a finite loss.
        best_step: where.
        last_step: last step judged.
        ramp_steps: length of the ramp.
        criteria: every criterion by itself.
        reasons: in words, with numbers; the first says what decided.
        early: whether the judge was certain before the end of the ramp and looked no further.
        onset_interval: first and last step at which the trouble may have begun: the earliest drift that counts, and the step
            from which on the loss stays too high (a jump), or is not told from its plateau. None without trouble.
        max_lr_interval: learning rates at the last points before these two; None without trouble, or
            where the rate stands still.
        upper_bound: whether the true value is smaller than ``max_lr``: the rate did not rise about the onset, and the run
            broke at it.
        slow: a rise that took its time, without a jump and without a reference: it may be a degradation as well as a spike.
        log_spaced: whether the rate was multiplied from point to point, so that the resolution is a factor.
        first_step: number of the ramp's first step.
        open_end: of an incomplete run, what its last points leave open, in words; None where they leave nothing open.
    """

    outcome: Outcome
    onset_step: int | None
    detected_step: int | None
    max_lr: float
    lower_bound: bool
    resolution: float
    best_loss: float
    best_step: int | None
    last_step: int
    ramp_steps: int
    criteria: tuple[CriterionResult, ...]
    reasons: tuple[str, ...]
    early: bool
    onset_interval: tuple[int, int] | None = None
    max_lr_interval: tuple[float, float] | None = None
    upper_bound: bool = False
    slow: bool = False
    log_spaced: bool = False
    first_step: int = 1
    open_end: str | None = None

    @property
    def diverged(self) -> bool:
        """Whether the run diverged."""
        return self.outcome.diverged

    def criterion(self, criterion: Criterion) -> CriterionResult:
        """The result of one criterion."""
        return next(result for result in self.criteria if result.criterion is criterion)

    def verdict(self) -> str:
        """One sentence: kind, onset with its interval, Max LR with its interval and resolution."""
        return f"{self._kind_words()}{self._where_words()}; Max LR {self._max_lr_words()}"

    def _kind_words(self) -> str:
        if self.outcome is Outcome.IRRECOVERABLE_SPIKE and self.slow:
            return "slow rise (degradation or spike cannot be told apart without a reference)"
        return self.outcome.words

    def _where_words(self) -> str:
        if self.outcome is Outcome.HEALTHY:
            return f": no divergence up to the end of the ramp (step {self.last_step})"
        if self.outcome is Outcome.INCOMPLETE:
            if self.open_end is not None:
                return (
                    f": {self.open_end} from step {self.onset_step} to {self.last_step}, the last{self.place(self.last_step)}"
                )
            return f": no divergence, but the data end at step {self.last_step}{self.place(self.last_step)}"
        if self.onset_step is None:
            return ""
        steps = f" from step {self.onset_step}"
        if self._wide and self.onset_interval is not None and self.onset_interval[0] < self.onset_interval[1]:
            steps += f" (between {self.onset_interval[0]} and {self.onset_interval[1]})"
        return steps + self.place(self.onset_step)

    def place(self, step: int) -> str:
        """The place of a step on the ramp, in words that follow its number."""
        number = "" if self.first_step == 1 else f", number {step - self.first_step + 1}"
        return f"{number} of {self.ramp_steps}"

    @property
    def _wide(self) -> bool:
        """Whether the two ends of the interval are further apart than the rates of neighbouring points."""
        if self.max_lr_interval is None or not self.diverged:
            return False
        return self.upper_bound or self.max_lr_interval[1] - self.max_lr_interval[0] > 1.5 * self.resolution

    def _max_lr_words(self) -> str:
        bound = "< " if self.upper_bound else ">= " if self.lower_bound else ""
        interval = ""
        if self._wide and self.max_lr_interval is not None:
            interval = f"{self.max_lr_interval[0]:.4g} to {self.max_lr_interval[1]:.4g}; "
        factor = f", a factor of {1 + self.resolution / self.max_lr:.3g}" if self.log_spaced and self.max_lr > 0 else ""
        return f"{bound}{self.max_lr:.4g} ({interval}resolution {self.resolution:.2g}{factor})"

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows, one per criterion and one for the whole (``criterion`` = ``overall``).

        Returns:
            Columns criterion, status, onset_step, onset_earliest, onset_latest, max_lr, max_lr_low, max_lr_high, lower_bound,
            upper_bound, resolution, best_loss, reason; no value where there is no onset.
        """
        import pandas as pd

        overall = {"criterion": "overall", "status": self.outcome.value, "reason": self.reasons[0], **_ends(self)}
        frame = pd.DataFrame([overall, *({**_row(result), **_ends(result)} for result in self.criteria)])
        frame = frame.assign(resolution=self.resolution, best_loss=self.best_loss)
        steps = ["onset_step", "onset_earliest", "onset_latest"]
        rates = ["max_lr", "max_lr_low", "max_lr_high"]
        return frame.astype(dict.fromkeys(steps, "Int64") | dict.fromkeys(rates, "float64"))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold; a best loss that is not finite is None."""
        return {
            "outcome": self.outcome.value,
            "diverged": self.diverged,
            "onset_step": self.onset_step,
            "detected_step": self.detected_step,
            "max_lr": self.max_lr,
            "lower_bound": self.lower_bound,
            "upper_bound": self.upper_bound,
            "onset_interval": None if self.onset_interval is None else list(self.onset_interval),
            "max_lr_interval": None if self.max_lr_interval is None else list(self.max_lr_interval),
            "slow": self.slow,
            "resolution": self.resolution,
            "log_spaced": self.log_spaced,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "best_step": self.best_step,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "ramp_steps": self.ramp_steps,
            "early": self.early,
            "reasons": list(self.reasons),
            "criteria": [_row(result) for result in self.criteria],
        }


def _ends(result: Judgement | CriterionResult) -> dict[str, Any]:
    """Onset and Max LR with the ends of their intervals."""
    steps, rates = result.onset_interval or (None, None), result.max_lr_interval or (None, None)
    return {
        "onset_step": result.onset_step,
        "onset_earliest": steps[0],
        "onset_latest": steps[1],
        "max_lr": result.max_lr,
        "max_lr_low": rates[0],
        "max_lr_high": rates[1],
        "lower_bound": result.lower_bound,
        "upper_bound": result.upper_bound,
    }


def _row(result: CriterionResult) -> dict[str, Any]:
    return {
        "criterion": result.criterion.value,
        "status": result.status.value,
        "onset_step": result.onset_step,
        "max_lr": result.max_lr,
        "lower_bound": result.lower_bound,
        "reason": result.reason,
    }
