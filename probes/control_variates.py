r"""Losses without what their batches make of them.

Most of the noise of a training loss from step to step is which batch was drawn. What models that do not learn lose on the same
batches (:mod:`probes.ngram_losses`) is known and goes with it: a control variate (Glasserman 2003, Monte Carlo Methods in
Financial Engineering, section 4.1). Its deviation from its mean, times a coefficient, is taken off.

Only what can be trusted is: of a text that grows harder on the way (the sums of the deviations wander further than those of
independent ones) what is slow stays in the loss, and a batch far from the others leaves its point as it was. The coefficients
are the least-squares ones of a moving window, between deviations from running medians, so that the course of the run is no
part of them: a run that falls back to the unigram plateau goes with the unigram loss alone, one that has learned context with
the bigram loss too.

Status: approximate. With a coefficient fixed beforehand nothing would be biased; estimated from the same points it leaves a
bias of order 1/n. Assumes that batches are drawn independently.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probes.onset import FloatArray, noise_deviation, running_median

__all__ = ["LEAST_POINTS", "without_batches"]

LEAST_POINTS = 101
"""Fewer points say too little of a coefficient. Also the window of the moving least squares; odd."""
_COURSE = 21  # points of the running median that is taken for the course of a run
_CENTRE = 201  # likewise of a batch loss that drifts
_DRIFTS = 2.5  # largest sum of deviations, over the root of their number: 7 in a million of independent ones are beyond
_FAR = 4.0  # standard deviations, of a loss
_BATCH_FAR = 8.0  # likewise, of a batch loss
_MOST = 0.95  # of the batch losses are not far, or they have no one centre
_RIDGE = 1e-6  # per point, of a unit of variance: batch losses that vary alike


def without_batches(losses: FloatArray, batch_losses: FloatArray | None) -> FloatArray:
    """Take off what the batches make of the losses.

    Args:
        losses: of a run, shape (n,), nats; those that are not finite stay as they are.
        batch_losses: of k models that do not learn, on the same batches, shape (n, k), in any unit. None leaves all as they
            are; so does a row that is not finite beside a finite loss, since a run that is cleaned in part is not one run.

    Returns:
        Shape (n,), nats: as before where fewer than :data:`LEAST_POINTS` losses are finite. A finite loss stays finite.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> batches = np.random.default_rng(0).standard_normal((200, 1))
        >>> course = np.linspace(5, 3, 200)
        >>> bool(np.abs(without_batches(course + 0.7 * batches[:, 0], batches) - course).max() < 0.15)
        True
    """
    losses = np.asarray(losses, float)
    if batch_losses is None:
        return losses
    batches = np.asarray(batch_losses, float)
    if batches.ndim != 2 or len(batches) != len(losses):
        raise ValueError(f"{len(losses)} losses and batch losses of shape {batches.shape}; they must be (n,) and (n, k)")
    finite = np.isfinite(losses)
    known = np.isfinite(batches).all(axis=1)
    if finite.sum() < LEAST_POINTS or not known[finite].all():
        return losses
    cleaned = losses.copy()
    cleaned[finite] -= _share_of_batches(losses[finite], batches[finite])
    return cleaned


def _share_of_batches(losses: FloatArray, batches: FloatArray) -> FloatArray:
    """What to take off, shape (n,)."""
    fast = losses - running_median(losses, _COURSE)
    columns = [standard for column in batches.T if (standard := _standardised(column)) is not None]
    if not columns:
        return np.zeros_like(losses)
    deviations = np.stack(columns, axis=1)
    trusted: NDArray[np.bool_] = np.all(np.abs(deviations) <= _BATCH_FAR, axis=1)
    deviations = np.where(trusted[:, None], deviations, 0.0)
    fast_deviations = np.stack([column - running_median(column, _COURSE) for column in deviations.T], axis=1)
    usable = trusted & (np.abs(fast) <= _FAR * noise_deviation(losses))
    coefficients = _moving_least_squares(fast_deviations * usable[:, None], fast * usable)
    return cast("FloatArray", (deviations * coefficients).sum(axis=1))


def _standardised(column: FloatArray) -> FloatArray | None:
    """Deviations from the centre, in standard deviations; None where the column does not vary.

    The centre is the mean, few far values left out; of a column that drifts it is the running median.
    """
    largest = float(np.abs(column).max())
    scaled = column / largest if largest > 0 else column  # huge numbers must not overflow
    deviation = noise_deviation(scaled)
    if not deviation > 0:
        return None
    around: FloatArray = (scaled - np.median(scaled)) / deviation
    near = np.abs(around) <= _BATCH_FAR
    around -= around[near].mean()
    bridge = np.cumsum(np.where(near, around, 0.0))
    if near.mean() < _MOST or np.abs(bridge).max() > _DRIFTS * math.sqrt(len(bridge)):
        around = (scaled - running_median(scaled, _CENTRE)) / deviation
    return around


def _moving_least_squares(x: FloatArray, y: FloatArray) -> FloatArray:
    """Coefficients of the window around each point, shape (n, k); at the ends, of the outermost whole window."""
    gram = _moving_sums(x[:, :, None] * x[:, None, :]) + _RIDGE * LEAST_POINTS * np.eye(x.shape[1])
    moment = _moving_sums(x * y[:, None])
    coefficients = np.linalg.solve(gram, moment[..., None])[..., 0]
    centre = np.clip(np.arange(len(y)) - LEAST_POINTS // 2, 0, len(coefficients) - 1)
    return cast("FloatArray", coefficients[centre])


def _moving_sums(values: FloatArray) -> FloatArray:
    """Sums over each window, along the first axis."""
    total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    return cast("FloatArray", total[LEAST_POINTS:] - total[:-LEAST_POINTS])
