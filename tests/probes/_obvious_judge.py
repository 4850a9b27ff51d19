"""The judge as its definition says it, and nothing more: slow, and blind in noise. See ``probes.judgement.DEFINITION``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["obvious_verdict"]


def obvious_verdict(losses: NDArray[np.float64], *, entropy: float | None, initial: float | None) -> tuple[str, int | None]:
    """Kind and the index of the first point of the trouble.

    Args:
        losses: of all steps of a ramp, shape (n,), nats.
        entropy: unigram entropy of the text, nats, where known.
        initial: loss of an untrained model, nats; the first loss where None.
    """
    n = len(losses)
    broken = first_broken(losses)
    good = losses[:broken]
    found: list[tuple[int, str]] = [] if broken is None else [(broken, "non_finite")]
    if len(good) >= 8:
        level = running_median(good, max(5, n // 50))
        first = float(good[0]) if initial is None else initial
        found += [(at, "irrecoverable_spike") for at in rises(level, first, noise(good), n)]
        found += [(at, "stagnation") for at in flat_ends(level, first, entropy, n) if broken is None]
    if not found:
        return "healthy", None
    at, kind = min(found)
    return kind, at


def first_broken(losses: NDArray[np.float64]) -> int | None:
    """The first of five losses in a row, or of the last losses, that are not finite."""
    for at in range(len(losses)):
        if not np.isfinite(losses[at : at + 5]).any():
            return at
    return None


def running_median(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Of the points around each, where they are finite."""
    return np.array([np.nanmedian(values[max(0, at - width // 2) : at + width // 2 + 1]) for at in range(len(values))])


def noise(losses: NDArray[np.float64]) -> float:
    """Of a running median of n // 50 points, from the differences of neighbours."""
    differences = np.abs(np.diff(losses[np.isfinite(losses)]))
    return float(1.05 * np.median(differences)) / math.sqrt(max(5, len(losses) // 50))


def rises(level: NDArray[np.float64], first: float, deviation: float, n: int) -> Sequence[int]:
    """Where the level is last at its minimum before it stays a tenth of what was learned above it, for a twentieth of n."""
    for at in range(1, len(level) - n // 20):
        lowest = level[:at].min()
        if level[at:].min() > lowest + max(0.1 * (first - lowest), 4 * deviation):
            return [int(np.flatnonzero(level[:at] <= lowest + 2 * deviation)[-1]) + 1]
    return []


def flat_ends(level: NDArray[np.float64], first: float, entropy: float | None, n: int) -> Sequence[int]:
    """Where a level comes down to that of its end, if it stays at the unigram entropy or above from there on, a third of n."""
    if entropy is None:
        return []
    end = float(np.median(level[-n // 6 :]))
    limit = entropy - 0.05 * (first - entropy)
    below = np.flatnonzero(level < limit)
    start = int(below[-1]) + 1 if len(below) else 0
    down = np.flatnonzero(level[start:] <= end + 0.02 * abs(first - end))
    start += int(down[0]) if len(down) else 0
    return [start] if len(level) - start >= n // 3 else []
