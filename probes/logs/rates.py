"""Learning rates of every step: as logged, between logged ones, or of a ramp that is known by its ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes.logs.points import Point
from probes.logs.table import LossLogError
from probes.onset import FloatArray

__all__ = ["Ramp", "first_ramp_step", "logged_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    r"""A linear ramp of the learning rate.

    .. math:: \eta_k = \eta_0 + (\eta_n - \eta_0)\,k / n

    in the k-th optimizer step, k = 1 to n: with start 0 the ramp of :class:`probes.training_config.TrainingConfig`.

    Attributes:
        start: rate before the first step, >= 0.
        peak: rate in the last step, above the start.
        steps: n, at least 1.
    """

    start: float
    peak: float
    steps: int

    def __post_init__(self) -> None:
        """Refuse what is no ramp."""
        if not (math.isfinite(self.start) and math.isfinite(self.peak) and 0 <= self.start < self.peak):
            raise LossLogError(f"a ramp rises from a rate of at least 0 to a higher one, got {self.start:g} to {self.peak:g}")
        if self.steps < 1:
            raise LossLogError(f"a ramp has at least 1 step, got {self.steps}")

    @classmethod
    def parse(cls, text: str) -> Ramp:
        """The ramp of ``START:PEAK:STEPS``.

        Raises:
            LossLogError: if the text is not of that form.

        Example:
            >>> Ramp.parse("0:0.05:600")
            Ramp(start=0.0, peak=0.05, steps=600)
        """
        try:
            start, peak, steps = text.split(":")
            return cls(start=float(start), peak=float(peak), steps=int(steps))
        except ValueError:
            raise LossLogError(f"--ramp is START:PEAK:STEPS such as 0:0.05:600, got '{text}'") from None

    def rates(self, steps: NDArray[np.int64], source: str) -> FloatArray:
        """Rates of a log's steps; :func:`first_ramp_step` says which of them is the first of the ramp.

        Args:
            steps: in the log's numbering, shape (n,), increasing.
            source: for messages.

        Returns:
            Shape (n,).

        Raises:
            LossLogError: if the log goes on beyond the ramp.
        """
        first = first_ramp_step(steps, self.steps)
        k = steps - first + 1
        if k[-1] > self.steps:
            raise LossLogError(
                f"'{source}' goes on to step {steps[-1]}, step {k[-1]} of a ramp of {self.steps} (--ramp)\n"
                "give the ramp its number of steps, or cut the log where the ramp ends"
            )
        return self.start + (self.peak - self.start) * k / self.steps


def first_ramp_step(steps: NDArray[np.int64], n_steps: int) -> int:
    """The number that a log gives to the first optimizer step of a ramp.

    0 where the log counts from 0. Otherwise 1, unless the numbers exceed the ramp: then the ramp begins with the log, as
    after a start from a checkpoint.

    Args:
        steps: shape (n,), increasing.
        n_steps: length of the ramp.

    Example:
        >>> [first_ramp_step(np.array(steps), 600) for steps in ([0, 1, 2], [10, 20, 30], [10_010, 10_020])]
        [0, 1, 10001]
    """
    if steps[0] == 0:
        return 0
    if steps[-1] <= n_steps:
        return 1
    distance = round(float(np.median(np.diff(steps)))) if len(steps) > 1 else 1
    return int(steps[0]) - distance + 1


def logged_rates(points: Sequence[Point], source: str, notes: list[str]) -> FloatArray:
    """The logged rates, interpolated between two of them.

    For as long as logged rates usually lie apart, the last one holds on, and those before the first follow from the first two:
    both are at most what a rising rate was, so that no step is said to have tolerated more than it did.

    Args:
        points: one per step, at least one with a rate.
        source: for messages.
        notes: how many were filled in.

    Returns:
        Shape (n,).

    Raises:
        LossLogError: if rates are missing at either end for longer.
    """
    steps = np.array([point.step for point in points], float)
    rates = np.array([point.values.get("lr", math.nan) for point in points])
    known = np.flatnonzero(~np.isnan(rates))
    if len(known) == len(rates):
        return rates
    apart = float(np.median(np.diff(steps[known]))) if len(known) > 1 else 0.0
    for missing, words in ((steps[-1] - steps[known[-1]], "after"), (steps[known[0]] - steps[0], "before")):
        if missing > apart:
            at = steps[known[-1 if words == "after" else 0]]
            raise LossLogError(
                f"'{source}' has no learning rates {words} step {at:.0f}, and its steps are {steps[0]:.0f} to {steps[-1]:.0f}\n"
                "cut the log there, or name another column with --column lr=NAME"
            )
    widest = int(max(np.diff(steps[known]), default=0))
    n_filled = len(rates) - len(known)
    notes.append(f"{n_filled} of {len(rates)} steps have no learning rate; it is interpolated, over up to {widest} steps")
    filled: FloatArray = np.interp(steps, steps[known], rates[known])
    if len(known) > 1:
        first, second = known[:2]
        slope = (rates[second] - rates[first]) / (steps[second] - steps[first])
        before = rates[first] - slope * (steps[first] - steps[:first])
        filled[:first] = np.clip(before, 0, rates[first])
    return filled
