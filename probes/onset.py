r"""Where a curve changes: robust smoothing, the size of its noise, and least-squares dating of a bend.

A trouble is recognised late and dated back. Dating fits a level and what leads to it or away from it,

.. math:: y(t) = c_0 + c_1 \max(0, t - \tau) \quad\text{or}\quad c_0 + c_1 \min(0, t - \tau)^{1, 2},

to a window around the recognised place and takes the tau with the smallest sum of squares. Windows are short against the ramp
and smoothing is a running median of five points, which keeps edges in place: a fall that ends at step 30 of 5,000 is still
dated to a step or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

__all__ = [
    "Bend",
    "FloatArray",
    "aged_median",
    "aged_windows",
    "date_bend",
    "lasting_noise",
    "noise_deviation",
    "running_median",
    "trend",
]

FloatArray: TypeAlias = "NDArray[np.float64]"

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_MAX_CANDIDATES = 64
_MAX_POINTS = 512
_NOISE_WINDOW = 31
_AGED = (5, 11, 23, 47, 95, 191)


class Bend(Enum):
    """What the curve does before and after the bend."""

    LEVEL_BEFORE = "level before, any slope after"
    LEVEL_AFTER = "any slope before, level after"
    ROUND_LEVEL_AFTER = "levels out like a parabola, level after"


_PIECES: Mapping[Bend, Callable[[FloatArray], FloatArray]] = {
    Bend.LEVEL_BEFORE: lambda distance: np.maximum(0, distance),
    Bend.LEVEL_AFTER: lambda distance: np.minimum(0, distance),
    Bend.ROUND_LEVEL_AFTER: lambda distance: np.minimum(0, distance) ** 2,
}
"""What is no level, of the distance to the bend."""


def running_median(values: FloatArray, window: int = 5) -> FloatArray:
    """Median over a centred window, the curve mirrored at its ends; five points or fewer repeat the end value instead.

    Args:
        values: shape (n,), finite.
        window: points, odd.

    Returns:
        Shape (n,).

    Example:
        >>> running_median(np.array([3.0, 3.0, 9.0, 3.0, 3.0]), 3).tolist()
        [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    if window < 3 or len(values) < 3:
        return values.copy()
    smooth: FloatArray = median_filter(values, size=window, mode="nearest" if window <= 5 else "reflect")
    return smooth


def aged_windows(n: int) -> NDArray[np.int64]:
    """Windows of :func:`aged_median`: per point, the largest of 5, 11, 23 ... 191 that is at most an eighth of its index.

    Example:
        >>> aged_windows(100)[[0, 50, 99]].tolist()
        [5, 5, 11]
    """
    widths = np.array(_AGED)
    return np.asarray(widths[np.clip(np.searchsorted(widths, np.arange(n) / 8, side="right") - 1, 0, None)], dtype=np.int64)


def aged_median(values: FloatArray) -> FloatArray:
    """Running median whose window grows with the index, so that relative to its age an early bend is as sharp as a late one.

    Args:
        values: shape (n,), finite.

    Returns:
        Shape (n,).
    """
    windows = aged_windows(len(values))
    result = values.copy()
    for width in np.unique(windows):
        chosen = windows == width
        result[chosen] = running_median(values, int(width))[chosen]
    return result


def noise_deviation(values: FloatArray) -> float:
    """Standard deviation of the fluctuation from point to point, by the median absolute residual, so that spikes do not count.

    Args:
        values: shape (n,), finite, same unit as the result.

    Returns:
        The deviation about a running median of at most 31 points; 0 for fewer than five points.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> round(noise_deviation(5 - np.linspace(0, 1, 4000) + 0.1 * rng.standard_normal(4000)), 2)
        0.1
    """
    if len(values) < 5:
        return 0.0
    window = min(_NOISE_WINDOW, max(5, len(values) // 8) | 1)
    residual = np.abs(values - running_median(values, window))
    return float(_MAD_TO_DEVIATION * np.median(residual) * math.sqrt(1 + math.pi / (2 * window)))


def lasting_noise(values: FloatArray, deviation: float) -> float:
    """The deviation that independent noise would need for means as uncertain as these: neighbours that go together count.

    That of the points times sqrt((1 + r) / (1 - r)), r their lag-one correlation as far as it is significant (two standard
    errors, 2 / sqrt(n), are taken off).

    Args:
        values: shape (n,), finite.
        deviation: of :func:`noise_deviation`; residuals beyond three times this do not count.

    Returns:
        The deviation, in the values' unit.
    """
    rest = np.clip(values - running_median(values, _NOISE_WINDOW), -3 * deviation, 3 * deviation)
    square = float(rest @ rest)
    correlation = float(rest[1:] @ rest[:-1]) / square - 2 / math.sqrt(len(rest)) if square > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    return deviation * math.sqrt((1 + correlation) / (1 - correlation))


def trend(positions: FloatArray, values: FloatArray) -> tuple[float, float]:
    """Rise of the least-squares line over the whole range, and its standard error.

    The error allows for neighbouring residuals that go together: it is that of independent ones times
    sqrt((1 + r) / (1 - r)), r their lag-one correlation.

    Args:
        positions: shape (n,), increasing.
        values: shape (n,), finite.

    Returns:
        (rise from first to last position, standard error), both in the values' unit; (0, infinity) for fewer than five.

    Example:
        >>> rise, error = trend(np.arange(5.0), np.array([4.0, 3.0, 2.0, 1.0, 0.0]))
        >>> round(rise, 9), round(error, 9)
        (-4.0, 0.0)
    """
    n = len(values)
    if n < 5:
        return 0.0, math.inf
    centred = positions - positions.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values) / spread
    residual = values - values.mean() - slope * centred
    square = float(residual @ residual)
    correlation = float(residual[1:] @ residual[:-1]) / square if square > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.95)
    error = math.sqrt(square / (n - 2) / spread * (1 + correlation) / (1 - correlation))
    length = float(positions[-1] - positions[0])
    return slope * length, error * length


def date_bend(positions: FloatArray, values: FloatArray, *bends: Bend) -> float:
    """The position tau of a bend, by least squares over a grid of the positions.

    Args:
        positions: shape (n,), increasing, n >= 1.
        values: shape (n,), finite.
        bends: what the curve does; of several, what fits best.

    Returns:
        One of the positions (the first and the last are never chosen where there are four or more).

    Example:
        >>> t = np.arange(20.0)
        >>> date_bend(t, np.maximum(0, t - 12), Bend.LEVEL_BEFORE)
        12.0
        >>> date_bend(t, np.minimum(0, t - 12) ** 2, Bend.LEVEL_AFTER, Bend.ROUND_LEVEL_AFTER)
        12.0
    """
    stride = -(-len(values) // _MAX_POINTS)
    t, y = positions[::stride], values[::stride]
    inner = t[1:-1] if len(t) >= 4 else t
    candidates = inner[:: -(-len(inner) // _MAX_CANDIDATES)]
    coarse = _best(candidates, t, y, bends)
    width = float(candidates[1] - candidates[0]) if len(candidates) > 1 else 0.0
    near = positions[1:-1] if len(positions) >= 4 else positions
    fine = near[(near >= coarse - width) & (near <= coarse + width)]
    return _best(fine[:: -(-len(fine) // _MAX_CANDIDATES)], t, y, bends) if len(fine) else coarse


def _best(candidates: FloatArray, t: FloatArray, y: FloatArray, bends: Sequence[Bend]) -> float:
    """The candidate with the smallest sum of squares, whatever the bend."""
    squares = np.minimum.reduce([_squares_left(candidates, t, y, bend) for bend in bends])
    return float(candidates[int(np.argmin(squares))])


def _squares_left(candidates: FloatArray, t: FloatArray, y: FloatArray, bend: Bend) -> FloatArray:
    """Of each candidate's fit, all fits at once: arrays (candidates, points, columns)."""
    distance = (t[None, :] - candidates[:, None]) / max(float(t[-1] - t[0]), 1.0)
    piece = _PIECES[bend](distance)
    design = np.stack([np.ones_like(piece), piece], axis=2)
    transposed = design.transpose(0, 2, 1)
    gram = transposed @ design
    ridge = 1e-12 * np.trace(gram, axis1=1, axis2=2)  # a piece without points leaves its slope free
    gram += ridge[:, None, None] * np.eye(2)
    weights = np.linalg.solve(gram, transposed @ y[None, :, None])
    residual = y[None, :] - (design @ weights)[:, :, 0]
    squares: FloatArray = (residual**2).sum(axis=1)
    return squares
