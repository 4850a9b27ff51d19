"""Labelled synthetic loss curves of ramps, independent of the judge; all but those that wander were written before it.

A curve is a mean (what the run does) plus autocorrelated noise (batches). Loss levels are those of byte models (ln 256 = 5.55
at the start, unigram entropy about 3.2, 2 to 2.5 at the end) and of token models (11, 7, 4). A label says what was done to
the healthy mean and at which step, so it needs no judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["HELD_OUT", "MAKERS", "TUNED_ON", "Curve", "Shapes", "make_curves"]

FloatArray = NDArray[np.float64]
PEAK = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run with its right answer.

    Attributes:
        name: how it was made.
        kind: ``healthy``, ``non_finite``, ``stagnation``, ``irrecoverable_spike`` or ``degradation``.
        onset: step at which the trouble begins; None for a healthy run.
        losses: nats, one per step, steps 1 ... n.
        unigram_entropy: nats, or None where the judge is not told.
        reference: losses of a healthy run at the same steps, or None.
    """

    name: str
    kind: str
    onset: int | None
    losses: FloatArray
    unigram_entropy: float | None
    reference: FloatArray | None

    @property
    def n_steps(self) -> int:
        return len(self.losses)

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.arange(1, self.n_steps + 1)

    @property
    def learning_rates(self) -> FloatArray:
        return PEAK * self.steps / self.n_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What curves are drawn from."""

    ramps: tuple[int, ...]
    levels: tuple[tuple[float, float, float], ...]
    """(start, unigram entropy, lowest floor) in nats."""
    noises: tuple[float, ...]
    """Standard deviation, as a share of start minus unigram entropy."""
    correlations: tuple[float, ...]
    heavy_tails: bool
    decay: Callable[[FloatArray, float], FloatArray]
    """(ramp fraction since the second stage began, its scale) -> share of the way to the floor that is left."""


def _power_law(x: FloatArray, scale: float) -> FloatArray:
    return (1 + x / scale) ** -0.8


def _stretched(x: FloatArray, scale: float) -> FloatArray:
    return np.exp(-((x / (1.5 * scale)) ** 0.6))


TUNED_ON = Shapes(
    ramps=(100, 200, 300, 600, 1000, 2000, 5000),
    levels=((5.55, 3.2, 2.0), (10.8, 7.2, 3.8)),
    noises=(0.004, 0.012, 0.03),
    correlations=(0.0, 0.5),
    heavy_tails=False,
    decay=_power_law,
)
HELD_OUT = Shapes(
    ramps=(120, 250, 500, 800, 1500, 3000, 5000),
    levels=((5.55, 3.35, 2.2), (6.9, 4.6, 2.6), (11.5, 7.6, 4.2)),
    noises=(0.003, 0.008, 0.02, 0.035),
    correlations=(0.3, 0.7),
    heavy_tails=True,
    decay=_stretched,
)


@dataclass
class _Draw:
    """One drawing: the setting that all makers start from."""

    rng: np.random.Generator
    shapes: Shapes

    def __post_init__(self) -> None:
        self.n = int(self.rng.choice(self.shapes.ramps))
        self.x = np.arange(1, self.n + 1) / self.n
        self.start, self.unigram, lowest = self.shapes.levels[self.rng.integers(len(self.shapes.levels))]
        self.span = self.start - self.unigram
        self.floor = lowest + self.rng.uniform(0, 0.4) * (self.unigram - lowest)
        self.noise = float(self.rng.choice(self.shapes.noises))
        self.scale = self.rng.uniform(0.05, 0.2)
        self.healthy = self._healthy(stay=self.rng.uniform(0, 0.15))

    def _healthy(self, stay: float) -> FloatArray:
        """Fall to the unigram plateau, perhaps stay there for a while, then learn; a little worse again at the hot end."""
        fall = max(self.rng.uniform(0.004, 0.02), 2 / self.n)
        first = self.span * np.exp(-self.x / fall)
        since = np.maximum(self.x - 3 * fall - stay, 0)
        second = (self.unigram - self.floor) * self.shapes.decay(since, self.scale)
        heat = self.rng.uniform(0, 0.02) * self.span * self.x**3
        return self.floor + first + second + heat

    def uniform_step(self, low: float, high: float) -> int:
        """A step between two fractions of the ramp, the fourth at the earliest."""
        return max(4, round(self.rng.uniform(low, high) * self.n))

    def noisy(self, mean: FloatArray) -> FloatArray:
        """The mean with noise whose deviation grows by half towards the peak."""
        white = self.rng.standard_t(4, self.n) / np.sqrt(2) if self.shapes.heavy_tails else self.rng.standard_normal(self.n)
        phi = float(self.rng.choice(self.shapes.correlations))
        noise = np.empty(self.n)
        state = white[0]
        for i, shock in enumerate(white):
            state = phi * state + np.sqrt(1 - phi**2) * shock
            noise[i] = state
        return mean + noise * self.noise * self.span * (1 + 0.5 * self.x)

    def spiky(self, mean: FloatArray, count: int, before: int) -> FloatArray:
        """The mean with spikes that are gone after at most 4 % of the ramp, all over before a step."""
        mean = mean.copy()
        for _ in range(count):
            length = max(3, round(self.rng.uniform(0.004, 0.04) * self.n))
            last = before - length
            if last <= 0.08 * self.n:
                continue
            at = int(self.rng.integers(round(0.08 * self.n), last))
            height = self.rng.uniform(0.15, 1.2) * self.span
            mean[at : at + length] += height * np.linspace(1, 0, length, endpoint=False)
        return mean

    def curve(self, name: str, kind: str, onset: int | None, mean: FloatArray, landmarks: str = "unigram") -> Curve:
        """A labelled curve with the landmarks that the judge is told: unigram, reference, both or none."""
        reference = self.noisy(self.healthy) if landmarks in ("reference", "both") else None
        unigram = self.unigram if landmarks in ("unigram", "both") else None
        return Curve(
            name=f"{name}, ramp {self.n}, noise {self.noise}, {landmarks}",
            kind=kind,
            onset=onset,
            losses=self.noisy(mean),
            unigram_entropy=unigram,
            reference=reference,
        )

    def any_landmarks(self) -> str:
        return str(self.rng.choice(["unigram", "reference", "both", "none"]))

    def some_landmarks(self) -> str:
        """Without any, nobody can tell a plateau that is too high from the end of learning."""
        return str(self.rng.choice(["unigram", "reference", "both"]))


def healthy(draw: _Draw) -> Curve:
    return draw.curve("healthy", "healthy", None, draw.healthy, draw.any_landmarks())


def one_spike(draw: _Draw) -> Curve:
    return draw.curve("one spike", "healthy", None, draw.spiky(draw.healthy, 1, draw.n - 1), draw.any_landmarks())


def many_spikes(draw: _Draw) -> Curve:
    count = int(draw.rng.integers(2, 7))
    return draw.curve("many spikes", "healthy", None, draw.spiky(draw.healthy, count, draw.n - 1), draw.any_landmarks())


def not_a_number(draw: _Draw) -> Curve:
    """Sound until it is not a number."""
    onset = draw.uniform_step(0, 0.97)
    curve = draw.curve("NaN at once", "non_finite", onset, draw.healthy, draw.any_landmarks())
    losses = curve.losses.copy()
    losses[onset - 1 :] = np.nan
    return replace(curve, losses=losses)


def blow_up(draw: _Draw) -> Curve:
    """A steep rise over a few steps that ends in infinity and NaN."""
    onset = draw.uniform_step(0.05, 0.9)
    length = int(draw.rng.integers(2, 7))
    mean = draw.spiky(draw.healthy, 1, onset - 2)
    curve = draw.curve("blow-up to NaN", "non_finite", onset, mean, draw.any_landmarks())
    losses = curve.losses.copy()
    rise = draw.span * draw.rng.uniform(0.5, 1.5) * np.arange(1, length + 1)
    losses[onset - 1 : onset - 1 + length] += rise
    losses[onset - 1 + length :] = np.nan
    losses[onset - 1 + length] = np.inf
    return replace(curve, losses=losses)


def early_stagnation(draw: _Draw) -> Curve:
    """Falls to the unigram plateau within the first steps and stays; the plateau rises a little with the learning rate."""
    onset = max(5, round(draw.rng.uniform(0.004, 0.03) * draw.n))
    level = draw.unigram + draw.rng.uniform(0, 0.08) * draw.span
    rate = draw.rng.uniform(2.0, 3.5) / onset
    steps = np.arange(1, draw.n + 1)
    below = level - draw.span * np.exp(-rate * onset)
    mean = np.maximum(below + (draw.start - below) * np.exp(-rate * steps), 0)
    frozen = mean[onset - 1]
    mean[onset - 1 :] = frozen
    mean += draw.rng.uniform(0, 0.04) * draw.span * draw.x**2
    return draw.curve("early stagnation", "stagnation", onset, mean, draw.some_landmarks())


def late_stagnation(draw: _Draw) -> Curve:
    """Falls evenly and slowly towards the unigram plateau, then stops there."""
    onset = draw.uniform_step(0.04, 0.35)
    level = draw.unigram + draw.rng.uniform(0, 0.08) * draw.span
    steps = np.arange(1, draw.n + 1)
    curvature = draw.rng.uniform(1.0, 2.2)
    left = np.clip(1 - steps / onset, 0, None) ** curvature if curvature < 1.3 else np.exp(-curvature * steps / onset)
    end = left[onset - 1]
    left = np.where(steps < onset, (left - end) / (1 - end), 0.0)
    return draw.curve("late stagnation", "stagnation", onset, level + (draw.start - level) * left, draw.some_landmarks())


def stagnation_beside_reference(draw: _Draw) -> Curve:
    """Follows the healthy run for a while and then stops learning, well above where the reference ends."""
    left = (draw.healthy - draw.healthy[-1]) / (draw.unigram - draw.floor)
    candidates = np.flatnonzero((left > 0.35) & (left < 0.9) & (draw.x > 0.01))
    onset = max(5, int(draw.rng.choice(candidates)) + 1)
    mean = draw.healthy.copy()
    mean[onset - 1 :] = mean[onset - 1]
    return draw.curve("stagnation beside a reference", "stagnation", onset, mean, "both")


def sharp_rise(draw: _Draw) -> Curve:
    """A spike that comes back by a part at most."""
    onset = draw.uniform_step(0.1, 0.82)
    climb = int(draw.rng.integers(1, max(2, draw.n // 100) + 1))
    height = draw.rng.uniform(0.3, 1.5) * draw.span
    kept = draw.rng.uniform(0.5, 1.0)
    after = np.arange(draw.n - onset + 1)
    rise = np.minimum((after + 1) / climb, 1.0)
    settle = kept + (1 - kept) * np.exp(-after / (0.05 * draw.n))
    mean = draw.spiky(draw.healthy, int(draw.rng.integers(0, 3)), onset - 2)
    mean[onset - 1 :] = mean[onset - 2] + height * rise * settle
    return draw.curve("sharp rise", "irrecoverable_spike", onset, mean, draw.any_landmarks())


def fall_back(draw: _Draw) -> Curve:
    """Learns, then loses all of it over some per cent of the ramp: back to the unigram plateau."""
    onset = draw.uniform_step(0.2, 0.75)
    length = max(3, round(draw.rng.uniform(0.02, 0.1) * draw.n))
    after = np.arange(draw.n - onset + 1)
    share = 1 - np.exp(-3 * after / length) if draw.rng.random() < 0.5 else np.minimum((after + 1) / length, 1.0)
    mean = draw.healthy.copy()
    before = mean[onset - 2]
    mean[onset - 1 :] = before + (draw.unigram - before) * share
    return draw.curve("fall back", "irrecoverable_spike", onset, mean, draw.any_landmarks())


def slowly_worse(draw: _Draw) -> Curve:
    """From some step on a steady rise, without a spike and without an end."""
    onset = draw.uniform_step(0.25, 0.7)
    mean = draw.healthy.copy()
    before = mean[onset - 2]
    height = draw.rng.uniform(0.15, 0.6) * draw.span
    mean[onset - 1 :] = before + height * np.linspace(0, 1, draw.n - onset + 1) ** draw.rng.uniform(0.7, 1.0)
    return draw.curve("slowly worse", "irrecoverable_spike", onset, mean, draw.any_landmarks())


def drift_then_rise(draw: _Draw) -> Curve:
    """A drift of a fraction of what counts as a rise, and then the rise: the drift is none of the trouble.

    Without a reference, beside which the drift would be a lag.
    """
    onset = draw.uniform_step(0.4, 0.75)
    drift = round(draw.rng.uniform(0.1, 0.3) * draw.n)
    mean, before = _drifting(draw, onset - drift, drift, draw.rng.uniform(0.01, 0.03) * draw.span)
    length = max(2, round(draw.rng.uniform(0.005, 0.05) * draw.n))
    rise = draw.rng.uniform(0.3, 1.2) * draw.span * np.minimum(np.arange(1, draw.n - onset + 2) / length, 1.0)
    mean[onset - 1 :] = before + rise
    return draw.curve("drift then rise", "irrecoverable_spike", onset, mean, str(draw.rng.choice(["unigram", "none"])))


def drift_that_counts(draw: _Draw) -> Curve:
    """A drift that leaves the level for good long before a jump makes it worse: the trouble begins with the drift."""
    onset = draw.uniform_step(0.3, 0.5)
    drift = round(draw.rng.uniform(0.15, 0.3) * draw.n)
    mean, before = _drifting(draw, onset, drift, draw.rng.uniform(0.3, 0.5) * draw.span)
    mean[onset + drift - 1 :] = before + draw.rng.uniform(0.2, 0.6) * draw.span
    return draw.curve("drift that counts", "irrecoverable_spike", onset, mean, draw.any_landmarks())


def _drifting(draw: _Draw, onset: int, length: int, height: float) -> tuple[FloatArray, float]:
    """The healthy mean that rises evenly from a step on; and its value at the end of that."""
    mean = draw.healthy.copy()
    mean[onset - 1 : onset + length] = mean[onset - 2] + height * np.linspace(0, 1, length + 1)
    return mean, float(mean[onset + length - 1])


def wandering(draw: _Draw) -> Curve:
    """Learns, and wanders about its level without leaving it."""
    return draw.curve("wandering", "healthy", None, _wander(draw, draw.healthy), draw.any_landmarks())


def wander_then_jump(draw: _Draw) -> Curve:
    """Wanders about its level, then goes up within a few per cent of the ramp and stays there: the wandering is no trouble."""
    onset = draw.uniform_step(0.3, 0.8)
    length = max(2, round(draw.rng.uniform(0.005, 0.04) * draw.n))
    height = draw.rng.uniform(0.25, 1.2) * draw.span
    mean = draw.healthy.copy()
    mean[onset - 1 :] = mean[onset - 2] + height * np.minimum(np.arange(1, draw.n - onset + 2) / length, 1.0)
    return draw.curve("wander then jump", "irrecoverable_spike", onset, _wander(draw, mean), draw.any_landmarks())


def wander_then_drift(draw: _Draw) -> Curve:
    """Wanders about its level, then rises to the end of the ramp."""
    onset = draw.uniform_step(0.3, 0.6)
    mean = draw.healthy.copy()
    height = draw.rng.uniform(0.4, 1.0) * draw.span
    mean[onset - 1 :] = mean[onset - 2] + height * np.linspace(0, 1, draw.n - onset + 1)
    return draw.curve("wander then drift", "irrecoverable_spike", onset, _wander(draw, mean), draw.any_landmarks())


def _wander(draw: _Draw, mean: FloatArray) -> FloatArray:
    """The mean with a fluctuation that lasts: an Ornstein-Uhlenbeck process of up to 1.5 % of what is learned."""
    memory = max(3.0, draw.rng.uniform(0.01, 0.03) * draw.n)
    stay = np.exp(-1 / memory)
    state = np.zeros(draw.n)
    for i, shock in enumerate(draw.rng.standard_normal(draw.n - 1), start=1):
        state[i] = stay * state[i - 1] + np.sqrt(1 - stay**2) * shock
    deviation = draw.rng.uniform(0.005, 0.015) * (draw.start - draw.floor)
    fallen = np.clip((draw.start - mean) / draw.span, 0, 1)  # it begins as the run learns
    wandered: FloatArray = mean + deviation * state * fallen
    return wandered


def slow_learning(draw: _Draw) -> Curve:
    """Still falling, at a fraction of the reference's pace from some step on."""
    slowed = draw.rng.uniform(0.15, 0.4)
    left = (draw.healthy - draw.healthy[-1]) / (draw.unigram - draw.floor)
    candidates = np.flatnonzero((left > 0.55) & (left < 1.2) & (draw.x > 0.01))
    onset = max(5, int(draw.rng.choice(candidates)) + 1)
    mean = draw.healthy.copy()
    lost = mean[onset - 1] - draw.floor
    since = draw.x[onset - 1 :] - draw.x[onset - 1]
    mean[onset - 1 :] = mean[onset - 1] - slowed * lost * (1 - np.exp(-2 * since)) / (1 - np.exp(-2))
    return draw.curve("slow learning", "degradation", onset, mean, "both")


MAKERS: tuple[Callable[[_Draw], Curve], ...] = (
    healthy,
    one_spike,
    many_spikes,
    not_a_number,
    blow_up,
    early_stagnation,
    late_stagnation,
    stagnation_beside_reference,
    sharp_rise,
    fall_back,
    slowly_worse,
    slow_learning,
    drift_then_rise,
    drift_that_counts,
    wandering,
    wander_then_jump,
    wander_then_drift,
)


def make_curves(shapes: Shapes, per_maker: int, seed: int) -> list[Curve]:
    """The same number of curves from every maker; the same numbers for the same seed."""
    rng = np.random.default_rng(seed)
    return [maker(_Draw(rng, shapes)) for maker in MAKERS for _ in range(per_maker)]
