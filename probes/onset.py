r"""Where a curve changes: robust smoothing, the size of its noise, and least-squares dating of a bend.

A trouble is recognised late and dated back. Dating fits two straight pieces that meet at tau,

.. math:: y(t) = c_0 + c_1 t + c_2 \max(0, t - \tau),

to a window around the recognised place and takes the tau with the smallest sum of squares. Windows are short against the ramp
and smoothing is a running median of five points, which keeps edges in place: a fall that ends at step 30 of 5,000 is still
dated to a step or two.

Where the noise hides a rise from point to point, the whole curve is cut into straight pieces: the cut that minimises

.. math:: \sum_i (y_i - \hat y_i)^2 / \sigma^2 + k \ln m

over all of them, k the parameters of the pieces (a place and a level each, and a slope where one pays) and m the points:
Schwarz's criterion, minimised exactly by dynamic programming.

Source: Schwarz 1978, Annals of Statistics 6, 461; Jackson et al. 2005, IEEE Signal Processing Letters 12, 105 (the program).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

__all__ = [
    "Bend",
    "FloatArray",
    "Piece",
    "aged_median",
    "aged_windows",
    "date_bend",
    "date_rise_bend",
    "lasting_noise",
    "noise_deviation",
    "running_median",
    "straight_pieces",
    "trend",
]

FloatArray: TypeAlias = "NDArray[np.float64]"

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_MAX_CANDIDATES = 64
_MAX_POINTS = 512
_NOISE_WINDOW = 31
_MAX_BINS = 256
_MIN_BINS = 3
_AGED = (5, 11, 23, 47, 95, 191)


class Bend(Enum):
    """What the two pieces are allowed to do."""

    FREE = "any slope before, another after"
    LEVEL_BEFORE = "level before, any slope after"
    LEVEL_AFTER = "any slope before, level after"


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


def date_bend(positions: FloatArray, values: FloatArray, bend: Bend) -> float:
    """The position tau at which two straight pieces meet, by least squares over a grid of the positions.

    Args:
        positions: shape (n,), increasing, n >= 1.
        values: shape (n,), finite.
        bend: which of the pieces is level.

    Returns:
        One of the positions (the first and the last are never chosen where there are four or more).

    Example:
        >>> t = np.arange(20.0)
        >>> date_bend(t, np.maximum(0, t - 12), Bend.LEVEL_BEFORE)
        12.0
    """
    stride = -(-len(values) // _MAX_POINTS)
    t, y = positions[::stride], values[::stride]
    inner = t[1:-1] if len(t) >= 4 else t
    candidates = inner[:: -(-len(inner) // _MAX_CANDIDATES)]
    coarse = _best(candidates, t, y, bend)
    width = float(candidates[1] - candidates[0]) if len(candidates) > 1 else 0.0
    near = positions[1:-1] if len(positions) >= 4 else positions
    fine = near[(near >= coarse - width) & (near <= coarse + width)]
    return _best(fine[:: -(-len(fine) // _MAX_CANDIDATES)], t, y, bend) if len(fine) else coarse


def _best(candidates: FloatArray, t: FloatArray, y: FloatArray, bend: Bend) -> float:
    """The candidate with the smallest sum of squares; all fits at once, arrays (candidates, points, columns)."""
    distance = t[None, :] - candidates[:, None]
    columns = [np.ones_like(distance)]
    if bend is not Bend.LEVEL_BEFORE:
        columns.append(np.minimum(0, distance))
    if bend is not Bend.LEVEL_AFTER:
        columns.append(np.maximum(0, distance))
    design = np.stack(columns, axis=2)
    transposed = design.transpose(0, 2, 1)
    gram = transposed @ design
    ridge = 1e-12 * np.trace(gram, axis1=1, axis2=2)  # a piece without points leaves its slope free
    gram += ridge[:, None, None] * np.eye(len(columns))
    weights = np.linalg.solve(gram, transposed @ y[None, :, None])
    residual = y[None, :] - (design @ weights)[:, :, 0]
    return float(candidates[int(np.argmin((residual**2).sum(axis=1)))])


def date_rise_bend(positions: FloatArray, values: FloatArray, deviation: float) -> float:
    """The bend from a level, or from a fall where Schwarz's criterion says that there is one, into a rise.

    A rise before the bend is no part of a level: it belongs to the rise.

    Args:
        positions: shape (n,), increasing, n >= 1.
        values: shape (n,), finite.
        deviation: of independent noise, the values' unit.

    Returns:
        One of the positions.

    Example:
        >>> t = np.arange(40.0)
        >>> date_rise_bend(t, np.maximum(0, t - 25), 0.1), date_rise_bend(t, abs(t - 25), 0.1)
        (25.0, 25.0)
    """
    level, free = date_bend(positions, values, Bend.LEVEL_BEFORE), date_bend(positions, values, Bend.FREE)
    after = np.maximum(0, positions - free)
    columns = np.stack([np.ones_like(after), after, np.minimum(0, positions - free)], axis=1)
    weights, bent = _least_squares(columns, values)
    flat = np.stack([np.ones_like(after), np.maximum(0, positions - level)], axis=1)
    price = math.log(min(len(values), _MAX_BINS)) * deviation**2
    return free if weights[2] < 0 and bent + price < _least_squares(flat, values)[1] else level


def _least_squares(columns: FloatArray, values: FloatArray) -> tuple[FloatArray, float]:
    """Weights and the sum of squares that is left."""
    weights = np.asarray(np.linalg.lstsq(columns, values, rcond=None)[0], dtype=np.float64)
    residual = values - columns @ weights
    return weights, float(residual @ residual)


@dataclass(frozen=True, slots=True)
class Piece:
    """A straight piece of a curve.

    Attributes:
        start: index of its first point.
        stop: index after its last point.
        first: fitted value at the first point.
        last: fitted value at the last point.
    """

    start: int
    stop: int
    first: float
    last: float

    def __len__(self) -> int:
        """Points."""
        return self.stop - self.start


def straight_pieces(positions: FloatArray, values: FloatArray, deviation: float) -> tuple[Piece, ...]:
    """The curve in as many straight pieces as its noise allows to tell apart; neighbours need not meet.

    Args:
        positions: shape (n,), increasing, n >= 1.
        values: shape (n,), finite.
        deviation: of independent noise, the values' unit.

    Returns:
        The pieces, in order and without gaps; of at least three points where there are as many, and cut at one of 256 places.

    Example:
        >>> t = np.arange(60.0)
        >>> [(p.start, p.stop) for p in straight_pieces(t, np.where(t < 20, 5 - 0.1 * t, 4.0), 0.01)]
        [(0, 20), (20, 60)]
    """
    edges = np.unique(np.linspace(0, len(values), min(len(values), _MAX_BINS) + 1).round().astype(np.int64))
    cuts = edges[_cuts(_running_sums(positions, values)[:, edges], math.log(len(edges)) * deviation**2)]
    return tuple(_fit(positions, values, int(a), int(b)) for a, b in pairwise(cuts))


def _running_sums(t: FloatArray, y: FloatArray) -> FloatArray:
    """Of 1, t, t^2, y, t y and y^2 up to each point, shape (6, n + 1)."""
    t, y = t - t.mean(), y - y.mean()
    columns = np.stack([np.ones_like(t), t, t * t, y, t * y, y * y])
    return np.concatenate([np.zeros((6, 1)), np.cumsum(columns, axis=1)], axis=1)


def _cuts(sums: FloatArray, price: float) -> list[int]:
    """Where to cut, among the columns of the sums, at this price of a parameter; the first and the last included."""
    m = sums.shape[1] - 1
    shortest = min(_MIN_BINS, m)
    best, previous = np.full(m + 1, np.inf), np.zeros(m + 1, np.int64)
    best[0] = 0.0
    for stop in range(shortest, m + 1):
        starts = stop - shortest + 1
        total = best[:starts] + _piece_costs(sums[:, [stop]] - sums[:, :starts], price)
        previous[stop] = int(np.argmin(total))
        best[stop] = total[previous[stop]]
    cuts = [m]
    while cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    return cuts[::-1]


def _piece_costs(sums: FloatArray, price: float) -> FloatArray:
    """Of one piece from each of some starts: squares left and parameters, with or without a slope, whichever is cheaper."""
    n, st, stt, sy, sty, syy = sums
    spread, level, both = stt - st * st / n, np.maximum(syy - sy * sy / n, 0), sty - st * sy / n
    sloped = np.maximum(level - np.divide(both * both, spread, out=np.zeros_like(both), where=spread > 0), 0)
    costs: FloatArray = np.minimum(level + 2 * price, sloped + 3 * price)
    return costs


def _fit(t: FloatArray, y: FloatArray, start: int, stop: int) -> Piece:
    centred = t[start:stop] - t[start:stop].mean()
    spread, mean = float(centred @ centred), float(y[start:stop].mean())
    slope = float(centred @ y[start:stop]) / spread if spread > 0 else 0.0
    return Piece(start, stop, mean + slope * float(centred[0]), mean + slope * float(centred[-1]))
