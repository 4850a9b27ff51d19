r"""Max LR over several seeds: the median, and a bootstrap interval that does not pretend to know what was not seen.

A run without divergence tells only that its Max LR is at least the peak: a censored value. Every median is therefore computed
twice, with censored values at what was seen (a lower bound of the median) and at infinity (an upper bound). Where the two agree
the median is known in spite of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probes.judgement import Judgement
from probes.onset import FloatArray

__all__ = ["SeedSummary", "combine_seeds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSummary:
    """Max LR over seeds.

    Attributes:
        n_seeds: runs.
        n_censored: those among them that give a lower bound only.
        median: of Max LR; with ``median_is_bound`` the true one may be larger.
        median_is_bound: whether censored runs leave the median open upwards.
        low: lower end of the bootstrap interval; None for a single run.
        high: upper end; None for a single run or where ``high_is_open``.
        high_is_open: whether nothing bounds the interval from above.
        level: of the interval.
    """

    n_seeds: int
    n_censored: int
    median: float
    median_is_bound: bool
    low: float | None
    high: float | None
    high_is_open: bool
    level: float

    def words(self) -> str:
        """For a table: ``>= 0.05``, ``0.010 (0.008 to 0.012)``, ``0.04 (0.03 upwards)``."""
        median = f"{'>= ' if self.median_is_bound else ''}{self.median:.3g}"
        if self.low is None:
            return median
        return f"{median} ({self.low:.3g} {'upwards' if self.high is None else f'to {self.high:.3g}'})"


def combine_seeds(
    judgements: Sequence[Judgement], *, n_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> SeedSummary:
    """Median Max LR over runs that differ in their seed, with a percentile bootstrap interval.

    Args:
        judgements: one per seed, at least one.
        n_resamples: bootstrap samples, >= 1.
        level: of the interval, in (0, 1).
        seed: of the resampling.

    Returns:
        The summary; the same for the same seed.

    Raises:
        ValueError: if there are no judgements, or level or n_resamples are outside their domain.
    """
    if not judgements:
        raise ValueError("no judgements to combine; give at least one")
    if not 0 < level < 1 or n_resamples < 1:
        raise ValueError(f"level must be in (0, 1) and n_resamples >= 1, got {level} and {n_resamples}")
    seen = np.array([judgement.max_lr for judgement in judgements])
    censored = np.array([judgement.lower_bound for judgement in judgements])
    possible = np.where(censored, math.inf, seen)
    draws = np.random.default_rng(seed).integers(len(seen), size=(n_resamples, len(seen)))
    low = _quantile(_medians(seen[draws]), (1 - level) / 2)
    high = _quantile(_medians(possible[draws]), (1 + level) / 2)
    single = len(seen) == 1
    return SeedSummary(
        n_seeds=len(seen),
        n_censored=int(censored.sum()),
        median=float(np.median(seen)),
        median_is_bound=bool(_medians(possible[None])[0] > np.median(seen)),
        low=None if single else low,
        high=None if single or math.isinf(high) else high,
        high_is_open=math.isinf(high),
        level=level,
    )


def _medians(samples: FloatArray) -> FloatArray:
    """Row medians; the mean of two middle values, infinite if either is."""
    ordered = np.sort(samples, axis=1)
    n = ordered.shape[1]
    middle: FloatArray = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    return middle


def _quantile(values: FloatArray, share: float) -> float:
    """The smallest value with at least that share of the values at or below it."""
    return float(np.sort(values)[max(0, math.ceil(share * len(values)) - 1)])
