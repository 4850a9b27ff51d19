"""A run as it was logged, and the part of it that is a ramp."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from probes.logs.rates import first_ramp_step
from probes.logs.steps import WOBBLE
from probes.logs.table import LossLogError
from probes.onset import FloatArray

__all__ = ["RunLog"]

_LAST = 0.25  # of what follows a ramp: looked at once more by itself
_HALF = 0.5
_FEW = 2  # losses
_AT_END = 20  # losses whose median is the level at the end of a ramp
_RISE = 0.1  # of what the run has learned: a falling rate raises a loss by less
_BY_CHANCE = 9.0  # median absolute deviations, six standard deviations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLog:
    """A run as it was logged.

    Attributes:
        source: file it came from.
        steps: optimizer steps, shape (n,), increasing.
        losses: nats, shape (n,); NaN where unknown, and as logged where not finite.
        known: whether the loss of a step is known, shape (n,).
        learning_rates: shape (n,); None where the log has none.
        grad_norms: n values, None where one is missing; None where the log has none.
        batch_losses: on the same batches, of models that know the frequencies of tokens and of pairs, nats per token, shape
            (n, 2), a row of not-a-numbers where either is missing; None where the log does not have both.
        notes: what was averaged, skipped or replaced, in words.
        ramp_steps: length of the ramp, where that is given or the log is of a run of this toolkit; None where it is not known.
        unigram_entropy: of its text, nats, where the log is of a run of this toolkit.
        initial_loss: of an untrained model on its text (ln V), nats, likewise.
        of_own_folder: whether any of these three is from the folder of such a run.
        total_steps: number of the last step that the run was to have, where the log says so.
    """

    source: str
    steps: NDArray[np.int64]
    losses: FloatArray
    known: NDArray[np.bool_]
    learning_rates: FloatArray | None
    grad_norms: tuple[float | None, ...] | None
    notes: tuple[str, ...]
    ramp_steps: int | None = None
    unigram_entropy: float | None = None
    initial_loss: float | None = None
    of_own_folder: bool = False
    batch_losses: FloatArray | None = None
    total_steps: int | None = None

    @property
    def n_steps(self) -> int:
        """Optimizer steps from the first to the last, the distance between two of them included."""
        apart = float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0
        return round(float(self.steps[-1] - self.steps[0]) + apart)

    def ramp(self) -> RunLog:
        """The part up to the last point at the highest learning rate: what decays after it is no part of the ramp.

        Raises:
            LossLogError: if the log has no learning rates, or they are no ramp, or only the smaller part of the log is one,
                or what follows the ramp is mostly unknown or not finite, or lies far above it.
        """
        if self.learning_rates is None:
            raise LossLogError(f"'{self.source}' has no learning rates")
        rates = self.learning_rates
        stop = len(rates) - int(np.argmax(rates[::-1]))
        dropped = len(rates) - stop
        self._check_ramp(rates, stop)
        self._check_rest(stop)
        ramp_steps, notes = self.ramp_steps, self.notes
        if dropped:
            notes += (f"{dropped} points after the last one at the highest learning rate ({rates.max():.4g}) are not judged",)
        elif ramp_steps is None and self.total_steps is not None and self._ends_before(self.total_steps):
            ramp_steps = self.total_steps
            notes += (f"the log ends at step {self.steps[-1]} of {ramp_steps}, and its rate has not begun to fall",)
        return replace(
            self,
            steps=self.steps[:stop],
            losses=self.losses[:stop],
            known=self.known[:stop],
            learning_rates=rates[:stop],
            grad_norms=None if self.grad_norms is None else self.grad_norms[:stop],
            batch_losses=None if self.batch_losses is None else self.batch_losses[:stop],
            notes=notes,
            ramp_steps=ramp_steps,
        )

    def _ends_before(self, last_step: int) -> bool:
        """By more than the distance between two of its steps."""
        apart = float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0
        return float(self.steps[-1]) + apart < last_step

    def first_step_of(self, ramp_steps: int) -> int:
        """The log's number of the first step of such a ramp: :func:`~probes.logs.rates.first_ramp_step`.

        Raises:
            LossLogError: if the log goes on beyond such a ramp.
        """
        first, last = first_ramp_step(self.steps, ramp_steps), int(self.steps[-1])
        if last >= first + ramp_steps:
            counted = "" if first == 1 else f" that begins at step {first}"
            raise LossLogError(
                f"'{self.source}' goes on to step {last}, beyond a ramp of {ramp_steps} steps{counted} (--ramp-steps)"
            )
        return first

    def _check_rest(self, stop: int) -> None:
        """Refuse what does not go on behind its ramp as it was: the ramp alone would look healthy."""
        n_rest = len(self.steps) - stop
        if not n_rest:
            return
        known = np.flatnonzero(self.known)
        n_unknown, apart = len(self.known) - 1 - known[-1], np.median(np.diff(known)) if len(known) > 1 else 1
        broken = self._broken()
        parts = (slice(stop, None), slice(len(self.steps) - math.ceil(n_rest * _LAST), None))
        if broken[-1] or n_unknown > apart or any(self._is_lost(part, stop, broken) for part in parts):
            raise self._not_judged("goes on in losses or gradient norms that are unknown or not finite", stop)
        for part in parts:
            self._check_level(part, stop)

    def _broken(self) -> NDArray[np.bool_]:
        """Steps whose loss or gradient norm is not finite, shape (n,)."""
        norms = np.array([0.0 if norm is None else norm for norm in self.grad_norms or [None] * len(self.steps)])
        broken: NDArray[np.bool_] = (self.known & ~np.isfinite(self.losses)) | ~np.isfinite(norms)
        return broken

    def _is_lost(self, part: slice, stop: int, broken: NDArray[np.bool_]) -> bool:
        """Whether half of a part behind the ramp says nothing, or what is not finite; it may be as sparse as the ramp is."""
        expected = float(self.known[:stop].mean()) * len(self.known[part])
        useful = int(np.count_nonzero(self.known[part] & ~broken[part]))
        return bool(broken[part].mean() > _HALF) or (expected >= _FEW and useful < _HALF * expected)

    def _check_level(self, part: slice, stop: int) -> None:
        """Refuse losses far above those at the end of the ramp, and zeros where there were none."""
        usable = self.known & np.isfinite(self.losses)
        rise, rest = self.losses[:stop][usable[:stop]], self.losses[part][usable[part]]
        if not len(rise) or not len(rest):
            return
        n_last = min(len(rise), _AT_END)
        level, first = float(np.median(rise[-n_last:])), float(np.median(rise[:_FEW]))
        if level > 0 and np.mean(rest <= 0) > _HALF:
            raise self._not_judged("has losses that are not above 0, as stand-ins of unknown ones are", stop)
        spread = float(np.median(np.abs(rise[-n_last:] - level)))
        if np.median(rest) - level > max(_RISE * (first - level), _BY_CHANCE * spread / math.sqrt(len(rest))):
            raise self._not_judged(f"goes from a loss of {level:.4g} to {np.median(rest):.4g} nats", stop)

    def _not_judged(self, what: str, stop: int) -> LossLogError:
        return LossLogError(
            f"'{self.source}' {what}, after its highest learning rate at step {self.steps[stop - 1]}\n"
            "to judge its rise alone, cut the log there"
        )

    def _check_ramp(self, rates: FloatArray, stop: int) -> None:
        peak, first = float(rates.max()), int(self.steps[0])
        where, last = f"'{self.source}' is no ramp", int(self.steps[stop - 1])
        if len(rates) == 1:
            return  # too few to tell
        if peak == 0:
            raise LossLogError(f"{where}: the learning rate is 0 throughout")
        if np.all(rates == peak):
            return  # one rate throughout: judged, though no rate below it was tried
        if rates[0] == peak:
            raise LossLogError(f"{where}: the learning rate is highest, {peak:.4g}, at its first step, {first}, and falls")
        if stop < len(rates) - stop:
            raise LossLogError(
                f"{where}: the learning rate is highest, {peak:.4g}, at step {last}, and the {len(rates) - stop} of "
                f"{len(rates)} points after it are at lower ones; to judge its rise alone, cut the log there"
            )
        fallen = np.maximum.accumulate(rates[:stop]) - rates[:stop] > WOBBLE * peak
        if fallen.any():
            at = int(np.argmax(fallen))
            raise LossLogError(
                f"{where}: the learning rate falls from {rates[at - 1]:.4g} to {rates[at]:.4g} at step {self.steps[at]} and "
                "rises again; cut the log into its ramps"
            )
