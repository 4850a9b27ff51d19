import math

import numpy as np
import pytest

from probes.divergence import judge_run
from probes.seed_summary import combine_seeds


def diverged_after(step):
    """A run of 600 steps to 0.06 whose Max LR is step * 1e-4."""
    losses = np.concatenate([np.linspace(5, 3, step), np.full(600 - step, 9.0)])
    return judge_run(range(1, 601), [1e-4 * k for k in range(1, 601)], losses)


HEALTHY = judge_run(range(1, 601), [1e-4 * k for k in range(1, 601)], np.linspace(5, 3, 600))


def test_median_and_interval_of_seeds():
    summary = combine_seeds([diverged_after(step) for step in (100, 200, 300, 400, 500)])
    assert summary.median == pytest.approx(0.03)
    assert not summary.median_is_bound
    assert summary.n_censored == 0
    assert summary.low == pytest.approx(0.01)
    assert summary.high == pytest.approx(0.05)
    assert summary.words() == "0.03 (0.01 to 0.05)"


def test_interval_of_three_is_what_the_resamples_allow():
    """Of the 27 equally likely resamples 7 have the smallest as median: the 95 % interval is the whole range."""
    summary = combine_seeds([diverged_after(step) for step in (100, 200, 300)], level=0.95)
    narrow = combine_seeds([diverged_after(step) for step in (100, 200, 300)], level=0.4)
    assert (summary.low, summary.high) == (pytest.approx(0.01), pytest.approx(0.03))
    assert (narrow.low, narrow.high) == (pytest.approx(0.02), pytest.approx(0.02))


def test_one_run_without_divergence_leaves_the_median_known_and_the_interval_open():
    summary = combine_seeds([diverged_after(200), diverged_after(300), HEALTHY])
    assert summary.median == pytest.approx(0.03)
    assert not summary.median_is_bound
    assert summary.low == pytest.approx(0.02)
    assert summary.high is None
    assert summary.high_is_open
    assert summary.words() == "0.03 (0.02 upwards)"


def test_two_of_three_without_divergence_bound_the_median():
    summary = combine_seeds([diverged_after(200), HEALTHY, HEALTHY])
    assert summary.median_is_bound
    assert summary.median == pytest.approx(0.06)
    assert summary.words().startswith(">= 0.06 (")


def test_even_number_with_one_open_side():
    summary = combine_seeds([diverged_after(200), HEALTHY])
    assert summary.median == pytest.approx(0.04)
    assert summary.median_is_bound


def test_single_seed_has_no_interval():
    summary = combine_seeds([diverged_after(200)])
    assert (summary.low, summary.high, summary.high_is_open) == (None, None, False)
    assert summary.words() == "0.02"


def test_resampling_is_seeded():
    runs = [diverged_after(step) for step in (100, 150, 220, 300, 480)]
    assert combine_seeds(runs, n_resamples=50, seed=1) == combine_seeds(runs, n_resamples=50, seed=1)
    levels = {combine_seeds(runs, n_resamples=15, seed=seed, level=0.5).low for seed in range(30)}
    assert len(levels) > 1


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "no judgements to combine"),
        ([HEALTHY], {"level": 1.0}, r"level must be in \(0, 1\)"),
        ([HEALTHY], {"level": math.nan}, r"level must be in \(0, 1\)"),
        ([HEALTHY], {"n_resamples": 0}, "n_resamples >= 1"),
    ],
)
def test_bad_input(runs, options, message):
    with pytest.raises(ValueError, match=message):
        combine_seeds(runs, **options)
