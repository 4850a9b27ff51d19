"""Intervals of paired differences: known cases, coverage, and what is not a number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes.norms import Status
from probes.paired_bootstrap import Interval, paired_differences


def test_means_weigh_every_token_alike() -> None:
    result = paired_differences([[2.0, 9.0], [4.0, 12.0]], [1, 3])
    assert result.loss.value == pytest.approx(11 / 4)
    assert result.delta_loss[0].value == pytest.approx(5 / 4)
    assert result.delta_perplexity[0].value == pytest.approx(math.exp(4) - math.exp(11 / 4))


def test_a_constant_difference_is_certain_however_uneven_the_text_is() -> None:
    counts = np.arange(1, 21)
    intact = np.random.default_rng(0).exponential(3, 20) * counts
    result = paired_differences([intact, intact + 0.5 * counts], counts)
    assert result.loss.standard_error > 0.1
    assert result.delta_loss[0].standard_error == pytest.approx(0, abs=1e-12)
    assert (result.delta_loss[0].low, result.delta_loss[0].high) == pytest.approx((0.5, 0.5))


def test_standard_error_is_that_of_a_mean() -> None:
    differences = np.random.default_rng(1).normal(0.3, 1.0, 400)
    result = paired_differences([np.zeros(400), differences], np.ones(400), n_resamples=4000)
    assert result.delta_loss[0].standard_error == pytest.approx(differences.std(ddof=1) / 20, rel=0.05)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        differences = np.random.default_rng(seed).normal(0.1, 1.0, 30)
        interval = paired_differences([np.zeros(30), differences], np.ones(30), n_resamples=400, seed=seed).delta_loss[0]
        covered += interval.low <= 0.1 <= interval.high
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 200) <= covered / 200  # four standard errors of the share


def test_one_nan_stays_in_its_own_variant() -> None:
    result = paired_differences([[1.0, 2.0, 3.0], [math.nan, 2.0, 3.0], [2.0, 3.0, 4.5]], [1, 1, 1])
    assert result.delta_loss[0].status is Status.NAN
    assert math.isnan(result.delta_loss[0].high)
    assert result.delta_loss[1].value == pytest.approx(3.5 / 3)
    assert math.isfinite(result.delta_loss[1].high)


def test_a_variant_keeps_its_own_loss_where_the_intact_model_has_none() -> None:
    result = paired_differences([[math.nan, 2.0], [3.0, 5.0]], [1, 1])
    assert result.loss.status is Status.NAN
    assert result.delta_loss[0].status is Status.NAN
    assert result.variant_loss[0].value == 4.0
    assert math.isfinite(result.variant_loss[0].high)


def test_a_perplexity_beyond_float64_is_infinite_and_its_loss_is_not() -> None:
    result = paired_differences([[1.0, 1.0], [900.0, 900.0]], [1, 1])
    assert result.delta_perplexity[0].status is Status.INF
    assert result.delta_loss[0].value == 899.0


def test_one_sample_has_no_interval() -> None:
    interval = paired_differences([[2.0], [3.0]], [2]).delta_loss[0]
    assert interval.value == 0.5
    assert all(map(math.isnan, (interval.standard_error, interval.low, interval.high)))


def test_seeds_make_it_repeatable() -> None:
    sums = np.random.default_rng(2).normal(size=(3, 12))
    one, again, other = (paired_differences(sums, np.ones(12), seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(value=0.0412, standard_error=0.0123), "+0.0412 ± 0.0123"),
        (Interval(value=-1.0), "-1"),
        (Interval(value=math.nan), "NaN"),
        (Interval(value=math.inf), "Inf"),
    ],
)
def test_text(interval: Interval, text: str) -> None:
    assert f"{interval:+.3g}" == text


HUGE = [(6500.0, 6428.0), (6428.0, 6500.0), (6428.0, 6428.0), (7000.0, 2.0), (2.0, 7000.0)]


@pytest.mark.parametrize(("variant", "intact"), HUGE)
def test_a_huge_but_finite_loss_keeps_the_sign_of_both_differences(variant: float, intact: float) -> None:
    result = paired_differences(np.outer([intact, variant], np.ones(12)), np.ones(12))
    assert result.delta_loss[0].value == pytest.approx(variant - intact)
    assert math.isfinite(result.delta_loss[0].high)
    delta = result.delta_perplexity[0].value
    assert not math.isnan(delta)
    assert np.sign(delta) == np.sign(variant - intact)
    assert math.isinf(delta) == (variant != intact)
