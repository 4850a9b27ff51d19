r"""Losses without what their batches make of them.

Most of the noise of a training loss from step to step is which batch was drawn. What models that do not learn lose on the same
batches (:mod:`probes.ngram_losses`) is known and goes with it: a control variate (Glasserman 2003, Monte Carlo Methods in
Financial Engineering, section 4.1). Its deviation from its mean, times a coefficient, is taken off.

Only what can be trusted is. A column that drifts (a text that grows harder on the way: the sums of its deviations wander
further than those of independent ones) is left out, since nobody can tell its drift from the run's. A batch far from the
others, or one that is not known, leaves its point as it was; where many are not known, all points stay, since a run that is
cleaned in part is not one run. The coefficients are the least-squares ones of a moving window, between deviations from running
medians, so that the course of the run is no part of them: a run that falls back to the unigram plateau goes with the unigram
loss alone, one that has learned context with the bigram loss too.

Status: approximate. With coefficients fixed beforehand nothing would be biased; estimated from the same points they leave a
bias of order 1/n, and of many columns a part of the noise stays. Assumes that batches are drawn independently.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probes.onset import FloatArray, noise_deviation, running_median

__all__ = ["LEAST_POINTS", "clean", "without_batches"]

LEAST_POINTS = 101
"""Fewer points say too little of a coefficient. Also the window of the moving least squares; odd."""
_COURSE = 21  # points of the running median that is taken for the course of a run
_UNKNOWN = 0.02  # of the points: with more batches unknown, nothing is taken off
_FAR = 4.0  # standard deviations, of a loss
_BATCH_FAR = 8.0  # likewise, of a batch loss
_DRIFTS = 2.5  # largest sum of deviations over the root of their number: of independent normal ones 7 in a million are beyond
_MOST = 0.95  # of the batch losses are not far, or they have no one centre
_NOT_TAKEN = "what the batches make of the loss is not taken off"
_RIDGE = 1e-6  # per point, of a unit of variance: batch losses that vary alike


def without_batches(losses: FloatArray, batch_losses: FloatArray | None) -> FloatArray:
    """Take off what the batches make of the losses.

    Args:
        losses: of a run, shape (n,), nats; those that are not finite stay as they are.
        batch_losses: of k models that do not learn, on the same batches, shape (n, k), in any unit; not finite where unknown.
            None leaves all as they are.

    Returns:
        Shape (n,), nats: as before where fewer than :data:`LEAST_POINTS` losses are finite, more than 2 % of their batches
        are unknown, or every column is constant or drifts. A finite loss stays finite.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> batches = np.random.default_rng(0).standard_normal((200, 1))
        >>> course = np.linspace(5, 3, 200)
        >>> bool(np.abs(without_batches(course + 0.7 * batches[:, 0], batches) - course).max() < 0.15)
        True
    """
    return clean(losses, batch_losses)[0]


def clean(losses: FloatArray, batch_losses: FloatArray | None) -> tuple[FloatArray, str | None]:
    """Take off what the batches make of the losses, and say so.

    Args:
        losses: as of :func:`without_batches`, shape (n,), nats.
        batch_losses: likewise, shape (n, k), in any unit.

    Returns:
        What :func:`without_batches` returns, shape (n,), nats; and what was done or why nothing was, in words, None without
        batch losses.

    Raises:
        ValueError: if the shapes do not fit.
    """
    losses = np.asarray(losses, float)
    if batch_losses is None:
        return losses, None
    batches = np.asarray(batch_losses, float)
    if batches.ndim != 2 or len(batches) != len(losses):
        raise ValueError(f"{len(losses)} losses and batch losses of shape {batches.shape}; they must be (n,) and (n, k)")
    finite = np.isfinite(losses)
    n_points, n_unknown = int(finite.sum()), int((finite & ~np.isfinite(batches).all(axis=1)).sum())
    if n_points < LEAST_POINTS:
        return losses, f"{_NOT_TAKEN}: {n_points} points, and it takes {LEAST_POINTS}"
    if n_unknown > _UNKNOWN * n_points:
        return losses, f"{_NOT_TAKEN}, for it is not known of {n_unknown} of {n_points} steps"
    share = _share_of_batches(losses[finite], batches[finite])
    if share is None:
        return losses, f"{_NOT_TAKEN}: the losses of the batches do not vary, or drift"
    cleaned = losses.copy()
    cleaned[finite] -= share
    before, after = noise_deviation(losses[finite]), noise_deviation(cleaned[finite])
    return cleaned, f"what the batches make of the loss is taken off: that leaves a noise of {after:.2g} nats, of {before:.2g}"


def _share_of_batches(losses: FloatArray, batches: FloatArray) -> FloatArray | None:
    """What to take off, shape (n,); None where no column can be used."""
    known = np.isfinite(batches).all(axis=1)
    columns = [z for column in batches.T if (z := _standardised(np.where(known, column, np.nan))) is not None]
    if not columns:
        return None
    deviations = np.stack(columns, axis=1)
    trusted: NDArray[np.bool_] = known & np.all(np.abs(deviations) <= _BATCH_FAR, axis=1)
    deviations = np.where(trusted[:, None], deviations, 0.0)
    fast_deviations = np.stack([column - running_median(column, _COURSE) for column in deviations.T], axis=1)
    fast = losses - running_median(losses, _COURSE)
    usable = trusted & (np.abs(fast) <= _FAR * noise_deviation(losses))
    coefficients = _moving_least_squares(np.where(usable[:, None], fast_deviations, 0.0), np.where(usable, fast, 0.0))
    return cast("FloatArray", (deviations * coefficients).sum(axis=1))


def _standardised(column: FloatArray) -> FloatArray | None:
    """Deviations from the mean, few far values left out, in standard deviations; 0 where not known.

    None where most of its values are alike, or it drifts.
    """
    known = np.isfinite(column)
    largest = float(np.abs(column[known]).max(initial=0.0))
    if not largest > 0:
        return None
    scaled = column / largest  # huge numbers must not overflow
    deviation = noise_deviation(scaled[known])
    if not deviation > 0:
        return None
    around: FloatArray = np.where(known, (scaled - np.median(scaled[known])) / deviation, 0.0)
    near = np.abs(around) <= _BATCH_FAR
    around = np.where(known, around - around[near & known].mean(), 0.0)
    bridge = np.cumsum(np.where(near, around, 0.0))
    drifts = near.mean() < _MOST or np.abs(bridge).max() > _DRIFTS * math.sqrt(len(bridge))
    return None if drifts else around


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
