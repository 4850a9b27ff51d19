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

    @property
    def n_steps(self) -> int:
        """Optimizer steps from the first to the last, the distance between two of them included."""
        apart = float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0
        return round(float(self.steps[-1] - self.steps[0]) + apart)

    def ramp(self) -> RunLog:
        """The part up to the last point at the highest learning rate: what decays after it is no part of the ramp.

        Raises:
            LossLogError: if the log has no learning rates, or they are no ramp, or only the smaller part of the log is one,
                or its end behind the ramp is unknown or not finite.
        """
        if self.learning_rates is None:
            raise LossLogError(f"'{self.source}' has no learning rates")
        rates = self.learning_rates
        stop = len(rates) - int(np.argmax(rates[::-1]))
        dropped = len(rates) - stop
        self._check_ramp(rates, stop)
        self._check_rest(stop)
        note = f"{dropped} points after the last one at the highest learning rate ({rates.max():.4g}) are not judged"
        return replace(
            self,
            steps=self.steps[:stop],
            losses=self.losses[:stop],
            known=self.known[:stop],
            learning_rates=rates[:stop],
            grad_norms=None if self.grad_norms is None else self.grad_norms[:stop],
            batch_losses=None if self.batch_losses is None else self.batch_losses[:stop],
            notes=(*self.notes, note) if dropped else self.notes,
        )

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
        """Refuse what ends in not-a-numbers, or in nothing, behind its ramp: the ramp alone would look healthy."""
        if stop == len(self.steps):
            return
        norm = None if self.grad_norms is None else self.grad_norms[-1]
        known = np.flatnonzero(self.known)
        n_unknown, apart = len(self.known) - 1 - known[-1], np.median(np.diff(known)) if len(known) > 1 else 1
        broken = (self.known[-1] and not math.isfinite(self.losses[-1])) or (norm is not None and not math.isfinite(norm))
        if broken or n_unknown > apart:
            raise LossLogError(
                f"'{self.source}' ends in losses or gradient norms that are unknown or not finite, after its highest learning "
                f"rate at step {self.steps[stop - 1]}\nto judge its rise alone, cut the log there"
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
