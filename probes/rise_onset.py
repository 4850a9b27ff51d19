r"""Where a rise began that was recognised later: the foot of the climb that carries the level out of its usual range for good.

The *usual range* is what the level keeps to before: from where it is first within half the tolerance of its lowest value, to
where it last is; its upper end is the nine-tenths quantile of that stretch. A run that wanders about its level therefore does
not begin to rise where it happens to be low. The level is *left* where it is last within the usual range, and *up* where it
then first is three quarters of the tolerance above its lowest value, and a quarter above the usual range; no tolerance is more
than three fifths of the whole rise. The foot is the bend between a level and a rise, by least squares over that climb, a
quarter of the smoothing window after it, and before it twice its length (the smoothing window if that is more).
What comes after is another matter: a second rise does not move the onset of the first.

Sharp rises, whose points stand out of the noise one by one, begin with the first such point.

The onset of a drift within the noise is as uncertain as the place where two lines meet that hardly differ; people read it off
differently, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from probes.onset import Bend, FloatArray, date_bend, running_median

if TYPE_CHECKING:
    from probes.divergence_criteria import Record

__all__ = ["date_rise", "earliest_drift", "has_jump"]

_BEFORE_SHARP = slice(-20, -4)  # points before a rise was recognised: the level that a sharp one leaves
_STANDS_OUT = 4.0  # standard deviations: a point of a sharp rise
_SHARP = 6.0  # likewise: its level, within two points ...
_SHARP_SHARE = 0.25  # ... and of the whole rise
_SHARP_POINTS = 6  # a sharp rise takes no more
_SMOOTH = 4.0  # standard deviations of the noise that the level is to tell from the tolerance
_USUAL = 0.9  # quantile
_NEAR = 0.5  # tolerances above the lowest level: still the level before
_UP = 0.75  # likewise: up
_UP_BEYOND = 0.25  # tolerances above the usual range, at least
_MOST = 0.6  # of the whole rise: a tolerance is no larger
_BEFORE = 2.0  # lengths of the climb
_AFTER = 0.25  # of the smoothing window, after the climb


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
    sharp = _date_sharp_rise(record, recognised, smooth)
    return _date_climb(record, recognised, tolerance) if sharp is None else sharp


def earliest_drift(record: Record, onset: int, tolerance: float) -> int:
    """Index of the first point of a drift before an onset; the onset where the level has not drifted.

    By chance, a drift towards a jump is dated as its beginning or passed over. What could be taken for one counts here: from
    a quarter of the tolerance above the lowest level, told from the noise.

    Args:
        record: up to now.
        onset: index, as dated.
        tolerance: by which the level had to rise, nats.

    Returns:
        The index, at most the onset.
    """
    before = record.until(onset)
    window = record.lasting_window(tolerance, _SMOOTH * record.lasting_noise)
    if onset < 2 * window:
        return onset
    level = running_median(before.clipped, window)
    base, end = float(level.min()), float(np.median(before.losses[-window:]))
    drifted = max(_UP_BEYOND * tolerance, _SMOOTH * record.lasting_noise / window**0.5)
    if end - base < drifted:
        return onset
    near = np.flatnonzero(level <= base + _NEAR * (end - base))
    start = int(near[0])
    foot = date_bend(before.steps[start:], before.clipped[start:], Bend.LEVEL_BEFORE)
    return min(onset, int(np.searchsorted(record.steps, foot, side="right")))


def has_jump(record: Record, onset: int) -> bool:
    """Whether the level jumps, within a few points, at an onset or later.

    Args:
        record: up to now.
        onset: index.

    Returns:
        Whether any such jump is a quarter of the whole rise and stands out of the noise.
    """
    level = record.level[max(onset - _SHARP_POINTS, 0) :]
    if len(level) <= _SHARP_POINTS:
        return False
    steps = level[_SHARP_POINTS:] - level[:-_SHARP_POINTS]
    rise = float(np.median(level[-_SHARP_POINTS:])) - float(level.min())
    return bool(steps.max() > max(_SHARP_SHARE * rise, _SHARP * record.noise))


def _date_sharp_rise(record: Record, recognised: int, smooth: FloatArray) -> int | None:
    """A sharp rise: the first of a few neighbours whose own loss stands out of the noise; None where the rise takes longer."""
    base = float(smooth[:recognised].min())
    top = float(smooth[-3:].min()) if len(smooth) - recognised > 3 else float(smooth[-1])
    first, last = _BEFORE_SHARP.start, _BEFORE_SHARP.stop
    usual = float(np.median(record.losses[max(0, recognised + first) : max(1, recognised + last)]))
    index = recognised
    while index > 1 and record.losses[index - 1] > usual + _STANDS_OUT * record.noise:
        index -= 1
    soon = float(record.level[min(recognised + 2, len(record.level) - 1)])
    sharp = soon > max(base + _SHARP_SHARE * (top - base), usual + _SHARP * record.noise)
    return index if sharp and recognised - index <= _SHARP_POINTS else None


def _date_climb(record: Record, recognised: int, tolerance: float) -> int:
    """The foot of a climb that takes its time."""
    window = record.lasting_window(tolerance, _SMOOTH * record.lasting_noise)
    level = running_median(record.clipped, window)
    base = float(level[:recognised].min())
    tolerance = min(tolerance, _MOST * max(float(np.median(level[recognised:])) - base, 0.0))
    lowest_after = np.minimum.accumulate(level[::-1])[::-1]
    gone = int(np.argmax(lowest_after >= base + tolerance)) if lowest_after[-1] >= base + tolerance else recognised
    gone = max(gone, 1)
    near = np.flatnonzero(level[:gone] <= base + _NEAR * tolerance)
    if not len(near):
        return recognised
    usual = float(np.quantile(level[near[0] : near[-1] + 1], _USUAL))
    within = np.flatnonzero(level[:gone] <= usual)
    first, left = int(within[0]), int(within[-1])
    up = np.flatnonzero(level[left:] >= max(base + _UP * tolerance, usual + _UP_BEYOND * tolerance))
    end = left + int(up[0]) if len(up) else len(level) - 1
    start = max(first, left - int(max(_BEFORE * (end - left), window)))
    end = min(end + int(_AFTER * window), len(level) - 1)
    climb = slice(start, end + 1)
    if end + 1 - start < 4:
        return left + 1
    foot = date_bend(record.steps[climb], record.clipped[climb], Bend.LEVEL_BEFORE)
    return int(np.searchsorted(record.steps, foot, side="right"))
