r"""The ways to diverge, each as a function of the record so far.

Notation: a run's *level* is its loss under a running median of five points. What it has learned is its first loss minus its
lowest level; every tolerance is a share of that, or a multiple of the noise, whichever is larger, so that the same thresholds
serve losses of any scale and sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probes.onset import (
    Bend,
    FloatArray,
    aged_median,
    aged_windows,
    date_bend,
    lasting_noise,
    noise_deviation,
    running_median,
    trend,
)
from probes.rise_onset import date_rise, earliest_drift, has_jump

__all__ = [
    "JudgeThresholds",
    "Lag",
    "LagKind",
    "Landmarks",
    "Record",
    "Rise",
    "find_non_finite",
    "find_plateau",
    "find_rise",
    "lag_at_entropy",
    "lag_behind_reference",
    "telling_entropy",
    "uncovered",
]


_TELLING = 0.01  # of the unigram entropy: what the token before must tell for the entropy to be a landmark
_WINDOWS = (0.02, 0.1)  # of the ramp: narrowest and widest window of a lasting level
_LEAST_LEARNED = 0.05  # of the first loss: what a run or a reference has learned at least
_LASTS_BESIDE = 0.6  # of the time since the departure: a plateau beside a reference lasts as long
_AT_PLATEAU = (2.0, 0.01)  # within so many standard deviations, or this share of the fall
_FAR_FROM_PLATEAU = (8.0, 0.05)  # likewise: still falling towards it
_SLOW = 0.05  # of the ramp: a rise that takes longer to count, without a jump, is a drift


def telling_entropy(unigram_entropy: float, bigram_entropy: float) -> float | None:
    """The unigram entropy, nats, where standing still there says something of a run.

    Args:
        unigram_entropy: of the training text, nats.
        bigram_entropy: likewise, of a token given the one before it.

    Returns:
        None where the token before tells next to nothing (a hundredth of it), as in a text of one token: a good model may
        stand still there.

    Example:
        >>> telling_entropy(3.2, 2.4), telling_entropy(0.0, 0.0)
        (3.2, None)
    """
    return unigram_entropy if unigram_entropy - bigram_entropy > _TELLING * unigram_entropy else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeThresholds:
    """Every threshold of what counts; the same for all schemes.

    They say what counts. How an onset is dated once something counts, how far is smoothed and how the noise of the batches is
    taken off is not for choice: see :mod:`probes.rise_onset`, :mod:`probes.onset` and :mod:`probes.control_variates`.

    Shares of the ramp are of its number of steps. Shares of what is learned are dimensionless.

    Attributes:
        non_finite_patience: this many losses in a row that are not finite are a divergence; fewer are one only where the data
            end with them.
        rise: a rise counts from this share of what the run had learned ...
        rise_noise: ... and this many standard deviations of the noise.
        rise_tail: share of the ramp that must follow a rise before a record that ends is held to be unrecovered.
        rise_patience: share of the ramp after which an unrecovered rise is certain, unless the loss is on its way back.
        plateau_margin: a plateau lower than the unigram entropy by this share of (first loss - entropy) is no stagnation.
        plateau_patience: share of the ramp that a plateau must last when only the unigram entropy is known; certain from then.
        gap: a run lags behind its reference from this share of what the reference had learned by that step ...
        gap_noise: ... and this many standard deviations of the noise of the two.
        gap_patience: share of the ramp that the lag must last up to the end of the data.
        still_falling: a plateau still falls if its trend is more than this share of what was learned ...
        still_falling_noise: ... and than this many standard errors.
        blind_level: without landmarks, a plateau above this share of the first loss makes the run undecidable.
        min_points: a run of fewer finite losses is not searched for anything but non-finite ones.
    """

    non_finite_patience: int = 5
    rise: float = 0.1
    rise_noise: float = 4.0
    rise_tail: float = 0.05
    rise_patience: float = 0.15
    plateau_margin: float = 0.05
    plateau_patience: float = 0.35
    gap: float = 0.05
    gap_noise: float = 3.0
    gap_patience: float = 0.15
    still_falling: float = 0.01
    still_falling_noise: float = 4.0
    blind_level: float = 0.55
    min_points: int = 8

    def __post_init__(self) -> None:
        """Refuse what cannot be a threshold."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"threshold {name} must be a positive finite number, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landmarks:
    """What is known about a healthy run.

    Attributes:
        unigram_entropy: of the training text, nats: what a model reaches that ignores its context.
        initial_loss: of an untrained model, nats (ln V); the first recorded loss where None.
        reference_steps: optimizer steps of a healthy run, shape (m,), increasing; None without a reference.
        reference_losses: its losses, shape (m,), nats, what its own batches make of them taken off where that is known
            (:func:`probes.control_variates.without_batches`); may hold not-a-numbers.
    """

    unigram_entropy: float | None = None
    initial_loss: float | None = None
    reference_steps: FloatArray | None = None
    reference_losses: FloatArray | None = None

    def __post_init__(self) -> None:
        """Refuse landmarks that are not finite or do not fit together."""
        for name in ("unigram_entropy", "initial_loss"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if (self.reference_steps is None) != (self.reference_losses is None):
            raise ValueError("a reference run needs both its steps and its losses")
        if self.reference_steps is not None and self.reference_losses is not None:
            self._set_reference(np.asarray(self.reference_steps, float), np.asarray(self.reference_losses, float))

    def _set_reference(self, steps: FloatArray, losses: FloatArray) -> None:
        if steps.shape != losses.shape or steps.ndim != 1:
            raise ValueError(f"the reference has {steps.shape} steps and {losses.shape} losses; both must be vectors alike")
        finite = np.isfinite(losses)
        if finite.sum() < 2 or np.any(np.diff(steps) <= 0):
            raise ValueError("a reference run needs at least two finite losses at increasing steps")
        object.__setattr__(self, "reference_steps", steps)
        object.__setattr__(self, "reference_losses", losses)

    @classmethod
    def of_text(cls, *, unigram_entropy: float, bigram_entropy: float, vocab_size: int) -> Landmarks:
        """What a text says of any run over it.

        Args:
            unigram_entropy: of the training text, nats.
            bigram_entropy: likewise, of a token given the one before it.
            vocab_size: V; an untrained model loses ln V.

        Returns:
            Landmarks, with the entropy of :func:`telling_entropy`.
        """
        entropy = telling_entropy(unigram_entropy, bigram_entropy)
        return cls(unigram_entropy=entropy, initial_loss=math.log(vocab_size))

    @property
    def has_reference(self) -> bool:
        """Whether a healthy run is given."""
        return self.reference_steps is not None

    @property
    def reference(self) -> tuple[FloatArray, FloatArray]:
        """Steps and losses of the healthy run where its loss is finite; nothing without one."""
        if self.reference_steps is None or self.reference_losses is None:
            return np.empty(0), np.empty(0)
        finite = np.isfinite(self.reference_losses)
        return self.reference_steps[finite], self.reference_losses[finite]

    def without_reference(self) -> Landmarks:
        """All but the healthy run."""
        return replace(self, reference_steps=None, reference_losses=None)


@dataclass(frozen=True, eq=False)
class Record:
    """The finite losses of a run up to some point.

    Attributes:
        steps: shape (n,), increasing.
        losses: shape (n,), finite.
        ramp_steps: length of the ramp.
        landmarks: what is known about a healthy run.
    """

    steps: FloatArray
    losses: FloatArray
    ramp_steps: int
    landmarks: Landmarks

    @cached_property
    def level(self) -> FloatArray:
        """Running median of five points."""
        return running_median(self.losses)

    @cached_property
    def noise(self) -> float:
        """Standard deviation from point to point."""
        return noise_deviation(self.losses)

    @cached_property
    def lasting_noise(self) -> float:
        """The deviation that counts for means of many points."""
        return lasting_noise(self.losses, self.noise)

    @cached_property
    def clipped(self) -> FloatArray:
        """The losses, single ones far from the level brought to within three standard deviations of it, shape (n,)."""
        return np.clip(self.losses, self.level - 3 * self.noise, self.level + 3 * self.noise)

    @cached_property
    def initial(self) -> float:
        """Loss of the untrained model."""
        known = self.landmarks.initial_loss
        return float(self.losses[0]) if known is None else known

    def lasting_window(self, tolerance: float, noise: float) -> int:
        """Points, odd: 2 % of the ramp, and up to 10 % where the noise would not average out to the tolerance before.

        Args:
            tolerance: nats.
            noise: times the standard deviations asked for, nats.
        """
        spacing = (self.steps[-1] - self.steps[0]) / max(len(self.steps) - 1, 1)
        whole = self.ramp_steps / max(float(spacing), 1e-9)
        needed = 5 * (noise / tolerance) ** 2 if tolerance > 0 else math.inf
        narrowest, widest = (share * whole for share in _WINDOWS)
        return int(max(5, min(max(needed, narrowest), widest))) | 1

    @cached_property
    def aged_level(self) -> FloatArray:
        """Running median whose window grows with the age of the run, to an eighth of it: five points at the start."""
        return aged_median(self.losses)

    @cached_property
    def aged_noise(self) -> FloatArray:
        """Standard deviation of ``aged_level``, shape (n,), for noise that lasts a few points."""
        return self.noise * np.sqrt(5 / aged_windows(len(self.losses)))

    def until(self, stop: int) -> Record:
        """The first points alone."""
        return Record(self.steps[:stop], self.losses[:stop], self.ramp_steps, self.landmarks)

    def share(self, first: int, last: int = -1) -> float:
        """Length between two points as a share of the ramp."""
        return float(self.steps[last] - self.steps[first]) / self.ramp_steps


def find_non_finite(losses: FloatArray, thresholds: JudgeThresholds, known: NDArray[np.bool_] | None = None) -> int | None:
    """Index of the first of the losses that are not finite and stay so, or None.

    Args:
        losses: shape (n,).
        thresholds: how many in a row are enough where the data go on.
        known: shape (n,), whether a loss is known; those that are not are passed over. All are where None.

    Returns:
        The index; a stretch at the end of the data counts however short.

    Example:
        >>> find_non_finite(np.array([5.0, 4.0, 3.0, np.nan, np.nan]), JudgeThresholds())
        3
    """
    places = np.arange(len(losses)) if known is None else np.flatnonzero(known)
    bad = np.concatenate([[False], ~np.isfinite(losses[places]), [False]])
    edges = np.flatnonzero(bad[1:] != bad[:-1])
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if stop - start >= thresholds.non_finite_patience or stop == len(places):
            return int(places[start])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The loss left its level and has not been back.

    Attributes:
        index: of the first point of the trouble, dated back.
        earliest: index of the first point of a drift that may be its beginning; ``index`` where there is none.
        recognised: index of the first point after which the level stays too high.
        slow: whether it took its time and no jump followed: a drift, which may as well be a run that learns too slowly.
        before: level before, nats.
        after: lowest level since, nats.
        tolerance: by which the level had to rise to count, nats.
        settled: whether enough of the ramp has followed to call it unrecovered.
        certain: whether looking further is pointless.
    """

    index: int
    earliest: int
    recognised: int
    slow: bool
    before: float
    after: float
    tolerance: float
    settled: bool
    certain: bool


def find_rise(record: Record, thresholds: JudgeThresholds) -> Rise | None:
    """The first point from which on the level stays above the lowest level before, by more than the tolerance.

    Transient spikes come back and are therefore never found, whatever their height.

    Args:
        record: finite losses.
        thresholds: the tolerances.

    Returns:
        The rise, or None.
    """
    sharp = _find_rise(record, thresholds, record.level, np.full(len(record.losses), record.noise))
    slow, window = _find_slow_rise(record, thresholds)
    if sharp is not None and sharp.settled:
        return _dated(record, sharp, slow)
    if slow is not None and slow.settled and _is_up(record, slow, window):
        return _dated(record, slow, sharp)
    return _dated(record, sharp, None) if sharp is not None and _stands_out(record, sharp) else None


def _find_slow_rise(record: Record, thresholds: JudgeThresholds) -> tuple[Rise | None, int]:
    """A rise of the level smoothed until the noise averages out, and the points of that window."""
    learned = max(record.initial - float(record.level.min()), 0.0)
    window = record.lasting_window(thresholds.rise * learned, thresholds.rise_noise * record.noise)
    calm = np.full(len(record.losses), record.noise * math.sqrt(5 / window))
    return _find_rise(record, thresholds, running_median(record.losses, window), calm), window


def _dated(record: Record, rise: Rise, other: Rise | None) -> Rise:
    """The rise with the earliest drift that may be its beginning, and whether it is a drift alone."""
    indices = [rise.index, earliest_drift(record, rise.index, rise.tolerance)]
    if other is not None and other.index < rise.recognised:
        indices.append(other.index)
    slow = record.share(rise.index, rise.recognised) > _SLOW and not has_jump(record, rise.index)
    return replace(rise, earliest=min(indices), slow=slow)


def _is_up(record: Record, rise: Rise, window: int) -> bool:
    """Whether the last points are up too, as many as tell the level before from the one since; a wide window overlooks them."""
    needed = (4 * record.noise / max(rise.after - rise.before, 1e-9)) ** 2
    last = record.losses[-int(min(max(needed, 5), window)) :]
    return float(np.median(last)) > rise.before + rise.tolerance / 2


def _stands_out(record: Record, rise: Rise) -> bool:
    """Whether the few points after a rise stand above where the run was, not only above the luckiest of its points."""
    base = float(record.aged_level[: rise.recognised].min())
    return float(np.median(record.losses[rise.recognised :])) > base + rise.tolerance


def _find_rise(record: Record, thresholds: JudgeThresholds, level: FloatArray, noise: FloatArray) -> Rise | None:
    lowest_before = np.concatenate([[np.inf], np.minimum.accumulate(level)[:-1]])
    lowest_after = np.minimum.accumulate(level[::-1])[::-1]
    learned = np.maximum(record.initial - lowest_before, _LEAST_LEARNED * abs(record.initial))
    where_lowest = np.maximum.accumulate(np.where(level[:-1] < lowest_before[:-1], np.arange(len(level) - 1), 0))
    noise = np.maximum(noise, noise[np.concatenate([[0], where_lowest])])
    tolerance = np.maximum(thresholds.rise * learned, thresholds.rise_noise * noise)
    risen = np.flatnonzero(lowest_after[1:] - lowest_before[1:] > tolerance[1:])
    if not len(risen):
        return None
    recognised = int(risen[0]) + 1
    before = float(lowest_before[recognised])
    lasted = record.share(recognised)
    enough_points = len(level) - recognised >= thresholds.min_points
    index = date_rise(record, recognised, level, float(tolerance[recognised]))
    return Rise(
        index=index,
        earliest=index,
        recognised=recognised,
        slow=False,
        before=before,
        after=float(lowest_after[recognised]),
        tolerance=float(tolerance[recognised]),
        settled=enough_points and lasted >= thresholds.rise_tail,
        certain=enough_points
        and lasted >= thresholds.rise_patience
        and not _returns(record, recognised, before + float(tolerance[recognised])),
    )


def _returns(record: Record, recognised: int, target: float) -> bool:
    """Whether the trend of the second half since the rise would bring the level back before the end of the ramp."""
    half = (recognised + len(record.losses)) // 2
    rise, error = trend(record.steps[half:], record.level[half:])
    if rise > -2 * error or rise >= 0:
        return False
    pace = rise / (record.steps[-1] - record.steps[half])
    left = record.ramp_steps - record.steps[-1]
    return bool(float(np.median(record.level[half:])) + pace * left < target)


class LagKind(Enum):
    """How a run lags behind."""

    FLAT = "stands still"
    FALLING = "still falls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The run stands too high, to the end of the record.

    Attributes:
        kind: standing still or falling.
        index: first point of the trouble, dated back.
        earliest: first point at which it may have begun.
        latest: last such point.
        level: level at the end, nats.
        expected: level that a healthy run is known to reach by then, nats.
        beside: what tells of that level, in words.
        certain: whether looking further is pointless.
    """

    kind: LagKind
    index: int
    earliest: int
    latest: int
    level: float
    expected: float
    beside: str
    certain: bool


def lag_at_entropy(record: Record, thresholds: JudgeThresholds) -> Lag | None:
    """Stagnation by the unigram entropy: standing still, not below it, up to the end of the record.

    Args:
        record: finite losses.
        thresholds: the tolerances.

    Returns:
        The lag; None without one, or where the entropy is not known.
    """
    entropy = record.landmarks.unigram_entropy
    if entropy is None or len(record.losses) < thresholds.min_points:
        return None
    margin = thresholds.plateau_margin * max(record.initial - entropy, 0.0)
    return find_plateau(record, thresholds, entropy - margin, entropy)


def find_plateau(record: Record, thresholds: JudgeThresholds, limit: float, expected: float) -> Lag | None:
    """A plateau above a limit that lasts to the end of the record and for ``plateau_patience``."""
    learned = max(record.initial - float(record.level.min()), 0.0)
    window = record.lasting_window(thresholds.plateau_margin * learned, thresholds.gap_noise * record.noise)
    start = _last_stretch(running_median(record.losses, window) > limit)
    if start is None or record.share(start) < thresholds.plateau_patience:
        return None
    knee, far, reached = _date_knee(record, max(start - window, 0))  # a rise to it has crossed the limit before it gets there
    if record.share(knee) < thresholds.plateau_patience or _falls(record, knee, thresholds):
        return None
    return Lag(
        kind=LagKind.FLAT,
        index=knee,
        earliest=min(far, knee),
        latest=max(reached, knee),
        level=_end_level(record, knee),
        expected=expected,
        beside="the unigram entropy is",
        certain=True,
    )


def uncovered(record: Record, thresholds: JudgeThresholds) -> tuple[float, float] | None:
    """The longest stretch of a record in which the reference has no points.

    Stretches no longer than the distance of the reference's points, or than ``rise_tail`` of the ramp, do not count.

    Args:
        record: finite losses.
        thresholds: the tolerances.

    Returns:
        Its first and last step; the whole record where the reference has too few points; None where all is covered, or
        without a reference.
    """
    if not record.landmarks.has_reference:
        return None
    steps, _ = record.landmarks.reference
    first, last = float(record.steps[0]), float(record.steps[-1])
    if len(steps) < thresholds.min_points:
        return first, last
    edges = np.concatenate([[first], np.clip(steps, first, last), [last]])
    longest = int(np.argmax(np.diff(edges)))
    allowed = max(float(np.median(np.diff(steps))), thresholds.rise_tail * record.ramp_steps)
    if edges[longest + 1] - edges[longest] <= allowed:
        return None
    return float(edges[longest]), float(edges[longest + 1])


def lag_behind_reference(record: Record, thresholds: JudgeThresholds) -> Lag | None:
    """Stagnation or degradation: above the reference at the same step, up to the end of the record.

    Args:
        record: finite losses.
        thresholds: the tolerances.

    Returns:
        The lag; None without one, or where the reference does not cover the record.
    """
    if not record.landmarks.has_reference or uncovered(record, thresholds) is not None:
        return None
    reference = _reference_at(record)
    inside = np.flatnonzero(np.isfinite(reference.losses))
    if len(inside) < thresholds.min_points:
        return None
    record, reference = record.until(int(inside[-1]) + 1), reference.until(int(inside[-1]) + 1)
    first = int(inside[0])
    noise = thresholds.gap_noise * math.hypot(record.noise, reference.noise)
    window = record.lasting_window(thresholds.gap * max(reference.initial - float(reference.level.min()), 0.0), noise)
    healthy = running_median(reference.losses, window)
    learned = np.maximum(reference.initial - healthy, _LEAST_LEARNED * abs(reference.initial))
    gap = running_median(record.losses, window) - healthy
    limit = np.maximum(thresholds.gap * learned, noise * math.sqrt(5 / window))
    above = gap > limit
    above[:first] = False
    start = _last_stretch(above)
    if start is None or len(above) - start < thresholds.min_points or record.share(start) < thresholds.gap_patience:
        return None
    ahead = np.flatnonzero(gap[first:start] < -limit[first:start])  # a run that leads has not begun to lag
    departure = _date_departure(record, reference, first + int(ahead[-1]) + 1 if len(ahead) else first, start)
    knee, far, reached = _date_knee(record, 0)
    flat = knee < len(above) - thresholds.min_points and not _falls(record, knee, thresholds)
    flat = flat and record.share(knee) >= max(thresholds.gap_patience, _LASTS_BESIDE * record.share(departure))
    end, expected = _end_level(record, knee), float(healthy[-1])
    certain = flat and min(record.share(knee), record.share(start)) >= thresholds.plateau_patience
    return Lag(
        kind=LagKind.FLAT if flat else LagKind.FALLING,
        index=knee if flat else departure,
        earliest=min(far, knee) if flat else departure,
        latest=max(reached, knee) if flat else max(start, departure),
        level=end,
        expected=expected,
        beside="the reference is at",
        certain=certain,
    )


def _reference_at(record: Record) -> Record:
    """The reference at the run's steps; not a number beyond its ends."""
    steps, losses = record.landmarks.reference
    values = np.interp(record.steps, steps, losses, left=np.nan, right=np.nan)
    inside = np.flatnonzero(np.isfinite(values))
    if len(inside):
        values[: inside[0]] = values[inside[0]]
    return Record(record.steps, values, record.ramp_steps, Landmarks())


def _last_stretch(condition: NDArray[np.bool_]) -> int | None:
    """Index from which on the condition holds to the end; None where it does not hold at the end."""
    failures = np.flatnonzero(~condition)
    start = int(failures[-1]) + 1 if len(failures) else 0
    return start if start < len(condition) else None


def _end_level(record: Record, start: int) -> float:
    """Median of the last third since a point."""
    return float(np.median(record.losses[start + 2 * (len(record.losses) - start) // 3 :]))


def _date_knee(record: Record, start: int) -> tuple[int, int, int]:
    """Where a fall, or a rise, from ``start`` on ends in the plateau at the end of the record.

    The date, the last point that is clearly not on the plateau yet, and the first that is not told from it.
    """
    distance = np.abs(record.aged_level[start:] - _end_level(record, start))
    height, noise = float(distance[0]), record.aged_noise[start:]
    inside = distance <= np.maximum(_AT_PLATEAU[0] * noise, _AT_PLATEAU[1] * height)
    if inside[0]:
        return start, start, start
    reached = int(np.argmax(inside))
    far = np.flatnonzero(distance[:reached] > np.maximum(_FAR_FROM_PLATEAU[0] * noise[:reached], _FAR_FROM_PLATEAU[1] * height))
    first = min(int(far[-1]) if len(far) else 0, max(reached - 4, 0))
    last = min(len(distance), reached + 2 * max(reached - first, 5))
    window = slice(start + first, start + last)
    tau = date_bend(record.steps[window], record.level[window], Bend.LEVEL_AFTER, Bend.ROUND_LEVEL_AFTER)
    earliest = int(far[-1]) + 1 if len(far) else 0
    return int(np.searchsorted(record.steps, tau)), start + earliest, start + reached


def _falls(record: Record, knee: int, thresholds: JudgeThresholds) -> bool:
    rise, error = trend(record.steps[knee:], record.losses[knee:])
    learned = max(record.initial - _end_level(record, knee), 0.0)
    return -rise > max(thresholds.still_falling * learned, thresholds.still_falling_noise * error)


def _date_departure(record: Record, reference: Record, first: int, start: int) -> int:
    """Where the gap to the reference begins to open; a run that leads loses its lead first, which is no gap."""
    gap = np.maximum(record.level - reference.level, 0)
    if start <= first:
        return first
    window = slice(first, min(len(gap), start + max((start - first) // 4, 5)))
    tau = date_bend(record.steps[window], gap[window], Bend.LEVEL_BEFORE)
    return int(np.searchsorted(record.steps, tau, side="right"))
