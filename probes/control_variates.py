r"""Losses without what their batches make of them.

Most of the noise of a training loss from step to step is which batch was drawn. What models that do not learn lose on the same
batches (:mod:`probes.ngram_losses`) is known exactly and varies with it: a control variate. Its fluctuation around its mean,
times a coefficient, is taken off; no choice of the coefficient biases the mean, and the least-squares one leaves the least
variance (Glasserman 2003, Monte Carlo Methods in Financial Engineering, section 4.1).

The coefficients are those of a moving window: a run that falls back to the unigram plateau goes with the unigram loss alone,
one that has learned context with the bigram loss too. Both sides of the regression are differences from a running median, so
that the course of the run is no part of it, and points far from it (spikes) do not count.

Status: approximate; estimated from the run itself. Assumes that the mean over the steps is near the expectation of the batch
losses, to sigma / sqrt(n).
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from probes.onset import FloatArray, noise_deviation, running_median

__all__ = ["without_batches"]

_WINDOW = 101  # points, odd
_LEAST = _WINDOW  # points: fewer say too little of a coefficient
_COURSE = 21  # points of the running median that is taken for the course of a run
_FAR = 4.0  # standard deviations
_RIDGE = 1e-6  # of the mean square: batch losses that do not vary, or that vary alike


def without_batches(losses: FloatArray, batch_losses: FloatArray | None) -> FloatArray:
    """Take off what the batches make of the losses.

    Args:
        losses: of a run, shape (n,), nats; those that are not finite stay as they are.
        batch_losses: of k models that do not learn, on the same batches, shape (n, k), nats; a row with a not-a-number leaves
            its point as it is. None leaves all as they are.

    Returns:
        Shape (n,), nats: as before where fewer than 101 points are known.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> batches = np.random.default_rng(0).standard_normal((200, 1))
        >>> course = np.linspace(5, 3, 200)
        >>> bool(np.abs(without_batches(course + 0.7 * batches[:, 0], batches) - course).max() < 0.1)
        True
    """
    losses = np.asarray(losses, float)
    if batch_losses is None:
        return losses
    batches = np.asarray(batch_losses, float)
    if batches.ndim != 2 or len(batches) != len(losses):
        raise ValueError(f"{len(losses)} losses and batch losses of shape {batches.shape}; they must be (n,) and (n, k)")
    known = np.isfinite(losses) & np.isfinite(batches).all(axis=1)
    if known.sum() < _LEAST:
        return losses
    cleaned = losses.copy()
    cleaned[known] -= _share_of_batches(losses[known], batches[known])
    return cleaned


def _share_of_batches(losses: FloatArray, batches: FloatArray) -> FloatArray:
    """What to take off, shape (n,)."""
    fast = losses - running_median(losses, _COURSE)
    fast_batches = np.stack([column - running_median(column, _COURSE) for column in batches.T], axis=1)
    usable = np.abs(fast) <= _FAR * noise_deviation(losses)
    coefficients = _moving_least_squares(fast_batches * usable[:, None], fast * usable)
    return cast("FloatArray", ((batches - batches.mean(axis=0)) * coefficients).sum(axis=1))


def _moving_least_squares(x: FloatArray, y: FloatArray) -> FloatArray:
    """Coefficients of the window around each point, shape (n, k); at the ends, of the outermost whole window."""
    window = min(_WINDOW, len(y))
    gram = _moving_sums(x[:, :, None] * x[:, None, :], window)
    moment = _moving_sums(x * y[:, None], window)
    scale = np.trace(gram.mean(axis=0)) / x.shape[1]
    ridge = (_RIDGE * scale if scale > 0 else 1.0) * np.eye(x.shape[1])
    coefficients = np.linalg.solve(gram + ridge, moment[..., None])[..., 0]
    centre = np.clip(np.arange(len(y)) - window // 2, 0, len(coefficients) - 1)
    return cast("FloatArray", coefficients[centre])


def _moving_sums(values: NDArray[np.float64], window: int) -> FloatArray:
    """Sums over each window, along the first axis."""
    return cast("FloatArray", sliding_window_view(values, window, axis=0).sum(axis=-1))
