r"""How certain a difference of mean losses is: full model and variant read the same text, so they are resampled together.

The text is cut into samples (documents, or stretches of tokens where there are few). With :math:`s_{vg}` the summed loss of
variant v over sample g and :math:`n_g` its number of predictions, one resample draws as many samples as there are, with
replacement, and gives :math:`\sum_g w_g (s_{vg} - s_{0g}) / \sum_g w_g n_g`. The spread over resamples is widened by
:math:`\sqrt{G / (G - 1)}`, since G samples show too little of their own variance.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapters 6 and 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from probes.norms import Status

__all__ = ["Interval", "LossDifferences", "paired_differences"]

_Array: TypeAlias = "npt.NDArray[np.float64]"
_LEVEL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number with its uncertainty.

    Attributes:
        value: measured.
        standard_error: of the value; NaN where there are fewer than two samples.
        low: 2.5 % quantile.
        high: 97.5 % quantile.
    """

    value: float
    standard_error: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def status(self) -> Status:
        """Whether it is a number: ok, zero, nan or inf."""
        if math.isnan(self.value):
            return Status.NAN
        if math.isinf(self.value):
            return Status.INF
        return Status.OK if self.value else Status.ZERO

    def __format__(self, spec: str) -> str:
        """The value with its standard error, ``0.04 ± 0.01``.

        Example:
            >>> f"{Interval(value=0.0412, standard_error=0.0123):.2g}"
            '0.041 ± 0.012'
        """
        if math.isinf(self.value):
            return "Inf" if self.value > 0 else "-Inf"
        if math.isnan(self.value):
            return "NaN"
        error = f" ± {format(self.standard_error, spec.lstrip('+'))}" if math.isfinite(self.standard_error) else ""
        return f"{format(self.value, spec)}{error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDifferences:
    """Mean losses and how they differ.

    Attributes:
        loss: of the intact model, nats per token.
        perplexity: of the intact model, exp(loss), dimensionless.
        variant_loss: per variant, its own loss, nats per token; a number even where the intact model has none.
        delta_loss: per variant, its loss minus the intact one, nats per token.
        delta_perplexity: per variant, its perplexity minus the intact one, dimensionless; infinite, with the sign of the
            difference of the losses, where the perplexities leave the range of float64.
    """

    loss: Interval
    perplexity: Interval
    variant_loss: tuple[Interval, ...]
    delta_loss: tuple[Interval, ...]
    delta_perplexity: tuple[Interval, ...]


def paired_differences(
    sums: npt.ArrayLike, counts: npt.ArrayLike, *, n_resamples: int = 2000, seed: int = 0
) -> LossDifferences:
    """Differences of mean losses with bootstrap intervals.

    Args:
        sums: summed losses in nats, shape (1 + n_variants, n_samples); row 0 is the intact model.
        counts: predictions per sample, shape (n_samples,), at least one in all.
        n_resamples: bootstrap resamples.
        seed: of the resamples.

    Returns:
        Intervals; a variant with a NaN is NaN itself and leaves the others as they are.

    Example:
        >>> both = paired_differences([[2.0, 4.0], [3.0, 5.0]], [1, 1])
        >>> both.loss.value, both.delta_loss[0].value, both.delta_loss[0].standard_error
        (3.0, 1.0, 0.0)
    """
    sums_VG, counts_G = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    n_samples = len(counts_G)
    everything = np.ones((1, n_samples))
    drawn = np.random.default_rng(seed).multinomial(n_samples, np.full(n_samples, 1 / n_samples), size=n_resamples)
    usable = drawn[drawn @ counts_G > 0]
    weights_RG = np.concatenate([everything, usable]) if n_samples > 1 else everything
    with np.errstate(invalid="ignore", over="ignore"):
        means_RV = _means(sums_VG, counts_G, weights_RG)
        perplexities_RV = np.exp(means_RV)
        return LossDifferences(
            loss=_interval(means_RV[:, 0], n_samples),
            perplexity=_interval(perplexities_RV[:, 0], n_samples),
            variant_loss=tuple(_interval(means_R, n_samples) for means_R in means_RV.T[1:]),
            delta_loss=_differences(means_RV, n_samples),
            delta_perplexity=tuple(_interval(_apart(means_R, means_RV[:, 0]), n_samples) for means_R in means_RV.T[1:]),
        )


def _means(sums_VG: _Array, counts_G: _Array, weights_RG: npt.ArrayLike) -> _Array:
    """Mean losses, shape (R, V); zero weights do not hide a NaN."""
    weights = np.asarray(weights_RG, dtype=np.float64)
    means: _Array = (weights @ sums_VG.T) / (weights @ counts_G)[:, None]
    return means


def _apart(variant_R: _Array, intact_R: _Array) -> _Array:
    """exp(variant) - exp(intact); where both leave the range of float64, the sign of their difference times infinity."""
    difference: _Array = np.exp(variant_R) - np.exp(intact_R)
    apart = variant_R - intact_R
    beyond = np.isnan(difference) & np.isfinite(apart)
    return np.where(beyond, np.where(apart == 0, 0.0, np.copysign(np.inf, apart)), difference)


def _differences(values_RV: _Array, n_samples: int) -> tuple[Interval, ...]:
    return tuple(_interval(values_RV[:, v] - values_RV[:, 0], n_samples) for v in range(1, values_RV.shape[1]))


def _interval(values_R: _Array, n_samples: int) -> Interval:
    """The first value is measured, the others are resamples."""
    value, resamples = float(values_R[0]), values_R[1:]
    if not math.isfinite(value) or not len(resamples) or not np.isfinite(resamples).all():
        return Interval(value=value)
    widening = math.sqrt(n_samples / (n_samples - 1))
    low, high = (value + widening * (float(q) - value) for q in np.percentile(resamples, _LEVEL))
    return Interval(value=value, standard_error=widening * float(resamples.std()), low=low, high=high)
