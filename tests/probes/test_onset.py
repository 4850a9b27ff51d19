import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.onset import (
    Bend,
    aged_median,
    aged_windows,
    date_bend,
    date_rise_bend,
    lasting_noise,
    noise_deviation,
    running_median,
    straight_pieces,
    trend,
)


def slow_median(values, window):
    """Obvious twin of the running median of five: the end values are repeated."""
    half = window // 2
    padded = [values[0]] * half + list(values) + [values[-1]] * half
    return [sorted(padded[i : i + window])[half] for i in range(len(values))]


@given(st.lists(st.floats(-10, 10), min_size=5, max_size=40))
def test_running_median_equals_its_slow_twin(values):
    assert running_median(np.array(values), 5).tolist() == slow_median(values, 5)


@pytest.mark.parametrize("window", [5, 11, 31])
def test_median_keeps_edges_where_they_are(window):
    values = np.where(np.arange(200) < 120, 5.0, 3.0)
    np.testing.assert_array_equal(running_median(values, window), values)


def test_short_curves_are_left_alone():
    assert running_median(np.array([3.0, 1.0]), 5).tolist() == [3.0, 1.0]
    assert noise_deviation(np.array([3.0, 1.0])) == 0.0


@pytest.mark.parametrize("deviation", [0.01, 0.3])
def test_noise_is_measured_under_trend_and_spikes(deviation):
    rng = np.random.default_rng(0)
    values = 5 * np.exp(-np.arange(3000) / 900) + deviation * rng.standard_normal(3000)
    values[::97] += 4.0
    assert noise_deviation(values) == pytest.approx(deviation, rel=0.1)


def test_aged_windows_grow_with_age_only():
    windows = aged_windows(3000)
    assert windows[0] == 5
    assert windows[-1] == 191
    assert np.all(np.diff(windows) >= 0)
    assert np.all(windows[48:] <= np.arange(48, 3000) / 8)


def test_aged_median_keeps_an_early_bend_and_calms_the_end():
    rng = np.random.default_rng(1)
    curve = np.where(np.arange(3000) < 20, 5.0, 3.0)
    smooth = aged_median(curve + 0.1 * rng.standard_normal(3000))
    assert np.all(smooth[:19] > 4.5)
    assert np.all(smooth[21:] < 3.5)
    assert np.std(smooth[2000:2900]) < 0.02


@settings(max_examples=40, deadline=None)
@given(tau=st.integers(5, 54), slope=st.sampled_from([-0.5, 0.3, 2.0]), bend=st.sampled_from(Bend))
def test_exact_bends_are_dated_exactly(tau, slope, bend):
    t = np.arange(60.0)
    pieces = {
        Bend.LEVEL_BEFORE: slope * np.maximum(0, t - tau),
        Bend.LEVEL_AFTER: slope * np.minimum(0, t - tau),
        Bend.FREE: -0.1 * t + slope * np.maximum(0, t - tau),
    }
    assert date_bend(t, 3 + pieces[bend], bend) == tau


@pytest.mark.parametrize("n", [600, 5000])
def test_bends_of_long_curves_are_found_to_the_point(n):
    t = np.arange(float(n))
    tau = round(0.37 * n)
    assert abs(date_bend(t, np.maximum(0, t - tau), Bend.LEVEL_BEFORE) - tau) <= 1


def test_bend_in_noise_lies_within_its_error():
    rng = np.random.default_rng(2)
    t = np.arange(400.0)
    dated = [date_bend(t, 0.01 * np.maximum(0, t - 200) + 0.1 * rng.standard_normal(400), Bend.LEVEL_BEFORE) for _ in range(20)]
    assert abs(np.median(dated) - 200) < 10


def test_trend_and_its_error_match_repeated_draws():
    rng = np.random.default_rng(3)
    t = np.arange(200.0)
    rises, errors = zip(*(trend(t, -0.01 * t + rng.standard_normal(200)) for _ in range(300)), strict=True)
    assert np.mean(rises) == pytest.approx(-1.99, abs=4 * np.std(rises) / math.sqrt(300))
    assert np.std(rises) == pytest.approx(np.mean(errors), rel=0.15)


def test_trend_of_correlated_noise_is_less_sure():
    rng = np.random.default_rng(4)
    white = rng.standard_normal(500)
    slow = np.convolve(white, np.ones(8) / 8, mode="same")
    slow *= white.std() / slow.std()
    t = np.arange(500.0)
    assert trend(t, slow)[1] > 2 * trend(t, white)[1]


def test_trend_of_few_points_is_unknown():
    assert trend(np.arange(3.0), np.arange(3.0)) == (0.0, math.inf)


# --- straight pieces ---


def slow_partition_cost(t, y, price):
    """Obvious twin of the dynamic program: every way to cut, pieces of three points or more."""

    def cost(a, b):
        level = float(((y[a:b] - y[a:b].mean()) ** 2).sum())
        line = np.polyval(np.polyfit(t[a:b], y[a:b], 1), t[a:b])
        return min(level + 2 * price, float(((y[a:b] - line) ** 2).sum()) + 3 * price)

    def best(stop):
        cuts = [(best(a)[0] + cost(a, stop), [*best(a)[1], stop]) for a in range(3, stop - 2)]
        return min([*cuts, (cost(0, stop), [0, stop])])

    return best(len(y))


@pytest.mark.parametrize("seed", range(6))
def test_pieces_equal_the_best_of_all_partitions(seed):
    rng = np.random.default_rng(seed)
    t = np.arange(13.0)
    y = np.where(t < 6, 5 - 0.4 * t, 1.0) + 0.3 * rng.standard_normal(13)
    pieces = straight_pieces(t, y, 0.3)
    assert [0, *(piece.stop for piece in pieces)] == slow_partition_cost(t, y, math.log(14) * 0.3**2)[1]


def test_pieces_find_a_level_that_the_noise_hides_from_point_to_point():
    rng = np.random.default_rng(5)
    t = np.arange(600.0)
    y = np.where(t < 200, 5 - 0.01 * t, np.where(t < 400, 3.0, 3.3)) + 0.25 * rng.standard_normal(600)
    first, level, last = straight_pieces(t, y, 0.25)
    assert abs(level.start - 200) <= 25
    assert abs(level.stop - 400) <= 10
    assert level.first == pytest.approx(3.0, abs=0.08)
    assert (first.start, last.stop) == (0, 600)


def test_noise_alone_is_one_piece():
    rng = np.random.default_rng(6)
    assert [len(straight_pieces(np.arange(500.0), rng.standard_normal(500), 1.0)) for _ in range(20)].count(1) >= 18


@pytest.mark.parametrize("n", [1, 2, 3, 5000])
def test_pieces_cover_the_curve(n):
    pieces = straight_pieces(np.arange(float(n)), np.sin(np.arange(n) / 300), 0.01)
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
    assert pieces[-1].stop == n


def test_lasting_noise_counts_what_goes_together_and_nothing_else():
    rng = np.random.default_rng(7)
    white = rng.standard_normal(4000)
    assert lasting_noise(white, 1.0) == pytest.approx(1.0, abs=0.05)
    slow = np.convolve(white, np.ones(4) / 2, mode="same")
    assert 1.5 < lasting_noise(slow, 1.0) < 2.5  # two for endless data


@pytest.mark.parametrize("slope", [-0.02, 0.0, 0.02])
def test_a_rise_before_the_bend_belongs_to_the_rise(slope):
    t = np.arange(300.0)
    y = 3 + slope * np.minimum(t - 200, 0) + 0.2 * np.maximum(t - 200, 0)
    tau = date_rise_bend(t, y, 0.01)
    assert tau == 200 if slope <= 0 else tau < 200
