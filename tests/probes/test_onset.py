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
    lasting_noise,
    noise_deviation,
    running_median,
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
        Bend.ROUND_LEVEL_AFTER: slope * np.minimum(0, t - tau) ** 2,
    }
    assert date_bend(t, 3 + pieces[bend], bend) == tau


@pytest.mark.parametrize("power", [1, 2])
def test_of_two_bends_the_one_that_fits_dates(power):
    t = np.arange(60.0)
    y = 3 + np.abs(np.minimum(0, t - 25) / 25) ** power
    assert date_bend(t, y, Bend.LEVEL_AFTER, Bend.ROUND_LEVEL_AFTER) == 25
    noisy = y + 0.02 * np.random.default_rng(8).standard_normal(60)
    assert abs(date_bend(t, noisy, Bend.LEVEL_AFTER, Bend.ROUND_LEVEL_AFTER) - 25) <= 3


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


def test_lasting_noise_counts_what_goes_together_and_nothing_else():
    rng = np.random.default_rng(7)
    white = rng.standard_normal(4000)
    assert lasting_noise(white, 1.0) == pytest.approx(1.0, abs=0.05)
    slow = np.convolve(white, np.ones(4) / 2, mode="same")
    assert 1.5 < lasting_noise(slow, 1.0) < 2.5  # two for endless data
