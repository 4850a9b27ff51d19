r"""Where a rise began that was recognised later: the last bend up before the level is left for good.

The *base* is the lowest level before the rise was recognised. The level is *left* where it is last within half the tolerance
of the base, and the rise is *plain* where the level has gained two tolerances for good, or three fifths of all that it gains by
the end of the data. What comes after is another matter: a second rise does not move the onset of the first.

- Sharp rises, whose points stand out of the noise one by one, begin with the first such point.
- Otherwise the curve is cut into straight pieces (:func:`probes.onset.straight_pieces`), so that a level is the mean of many
  points and not the luckiest few of them. A jump between two pieces is the onset where it carries the loss further on the way
  to plain than the drift before it had.
- Else the onset is the bend from the base into the rise, by least squares from where the base is first reached to where the
  rise is plain, transient rises as high as that left out.
  What drifts up before the bend belongs to the rise, so that of a slow drift that gathers pace the onset is where most of it
  begins.

Of a drift that stays within the noise for long, the onset is as uncertain as the place where two lines meet that hardly differ;
people read it off differently, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from probes.onset import FloatArray, Piece, date_rise_bend

if TYPE_CHECKING:
    from probes.divergence_criteria import Record

__all__ = ["date_rise"]

_PLAIN = 2.0  # tolerances above the base
_PLAIN_SHARE = 0.6  # of the whole rise
_SIGNIFICANT = 2.0  # standard errors
_CLIMB = 0.02  # of the ramp: a jump takes no longer


def date_rise(record: Record, recognised: int, smooth: FloatArray, tolerance: float) -> int:
    """Index of the first point of a rise.

    Args:
        record: up to now.
        recognised: index from which on ``smooth`` stays too high.
        smooth: the level in which it was recognised, shape (n,), nats.
        tolerance: by which the level had to rise, nats.

    Returns:
        The index.
    """
    base = float(smooth[:recognised].min())
    lowest_after = np.minimum.accumulate(smooth[::-1])[::-1]
    top = float(lowest_after[-3:].min()) if len(smooth) - recognised > 3 else float(smooth[-1])
    sharp = _date_sharp_rise(record, recognised, base + 0.25 * (top - base))
    if sharp is not None:
        return sharp
    earlier = [k for k, piece in enumerate(record.pieces) if piece.start <= recognised]
    lowest = min(_lowest(record, record.pieces[k]) for k in earlier)
    if lowest > base + 0.5 * min(tolerance, top - base):
        base = lowest  # that of the smooth level was a lucky few of its points
    height = max(top - base, 0.0)
    limit = base + 0.5 * min(tolerance, height)
    plain = base + min(_PLAIN_SHARE * height, _PLAIN * tolerance)
    low = [k for k in earlier if _lowest(record, record.pieces[k]) <= limit]
    jump = _date_jump(record, low[-1], base, plain)
    if jump is not None:
        return jump
    clear = recognised + int(np.argmax(lowest_after[recognised:] >= plain))
    chosen = _from_base_to(record, low[-1], limit, plain, clear)
    tau = date_rise_bend(record.steps[chosen], record.clipped[chosen], record.lasting_noise)
    return int(np.searchsorted(record.steps, tau, side="right"))


def _date_sharp_rise(record: Record, recognised: int, height: float) -> int | None:
    """A sharp rise: the first of a few neighbours whose own loss stands out of the noise; None where the rise takes longer."""
    usual = float(np.median(record.losses[max(0, recognised - 20) : max(1, recognised - 4)]))
    index = recognised
    while index > 1 and record.losses[index - 1] > usual + 4 * record.noise:
        index -= 1
    soon = float(record.level[min(recognised + 2, len(record.level) - 1)])
    sharp = recognised - index <= 6 and soon > max(height, usual + 6 * record.noise)
    return index if sharp else None


def _lowest(record: Record, piece: Piece) -> float:
    """The lower end of a piece, as high as its standard error allows."""
    return min(piece.first, piece.last) + 2 * record.lasting_noise / math.sqrt(len(piece))


def _from_base_to(record: Record, k: int, limit: float, plain: float, clear: int) -> NDArray[np.intp]:
    """Points from where the base is first reached to where the rise is clear, without transient rises as high as that."""
    fit = np.concatenate([np.linspace(piece.first, piece.last, len(piece)) for piece in record.pieces])
    at_base = np.flatnonzero(fit[: record.pieces[k].stop] <= limit)
    first, last = int(at_base[0]), int(at_base[-1])
    points = np.arange(first, max(clear, last + 3) + 1)
    points = points[points < len(fit)]
    return points[(fit[points] <= plain) | (points > last)]


def _date_jump(record: Record, k: int, base: float, plain: float) -> int | None:
    """A jump from one piece to the next, where it does more than the drift before; None where there is none."""
    if k + 1 == len(record.pieces):
        return None
    one, other = record.pieces[k], record.pieces[k + 1]
    height = min(other.first, plain) - one.last
    error = 2 * record.lasting_noise * math.sqrt(1 / len(one) + 1 / len(other))
    return _date_climb(record, one, other) if height > max(_SIGNIFICANT * error, one.last - base) else None


def _date_climb(record: Record, one: Piece, other: Piece) -> int:
    """Where the straight climb from one piece to the next begins.

    The posterior median, under a flat prior for its place and a scale-free one for its length: a longer climb always fits
    better in noise, and the best fit alone would therefore begin too early.
    """
    points = _CLIMB * record.ramp_steps / max(float(record.steps[-1] - record.steps[0]) / max(len(record.steps) - 1, 1), 1e-9)
    reach = int(min(points, len(one) / 2, len(other) / 2))
    if reach < 2 or record.lasting_noise == 0:
        return other.start
    around = np.arange(other.start - reach, other.start + reach)
    low = _line(record, one.start, max(other.start - reach, one.start + 2), around)
    high = _line(record, min(other.start + reach, other.stop - 2), other.stop, around)
    first, stop = np.meshgrid(np.arange(reach + 1), np.arange(reach, 2 * reach), indexing="ij")
    length = np.maximum(stop - first, 1)
    share = np.clip((np.arange(2 * reach) - first[..., None]) / length[..., None], 0, 1)
    square = (((1 - share) * low + share * high - record.clipped[around]) ** 2).sum(axis=-1)
    weight = np.where(stop > first, np.exp(-0.5 * (square - square.min()) / record.lasting_noise**2) / length, 0)
    mass = np.cumsum(weight.sum(axis=1))
    return int(around[np.searchsorted(mass, 0.5 * mass[-1])]) + 1


def _line(record: Record, start: int, stop: int, at: NDArray[np.int64]) -> FloatArray:
    """The least-squares line through some points, at other points."""
    t, y = record.steps[start:stop], record.clipped[start:stop]
    centred = t - t.mean()
    slope = float(centred @ y) / float(centred @ centred)
    line: FloatArray = y.mean() + slope * (record.steps[at] - t.mean())
    return line
