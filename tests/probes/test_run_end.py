"""Runs whose last rows hide that they broke: nothing that lasts to the end is a footnote."""

import math

import numpy as np
import pytest

from probes.divergence import StreamingJudge, judge_run
from probes.judgement import Criterion, Outcome, Status

N, PEAK = 600, 0.05
STEPS = np.arange(1, N + 1)
RATES = PEAK * STEPS / N
LOSSES = 2.5 + 3.5 * np.exp(-STEPS / 80) + 0.03 * np.random.default_rng(0).standard_normal(N)


def judged(losses, norms=None, **options):
    return judge_run(STEPS.tolist(), RATES.tolist(), list(losses), norms, ramp_steps=N, **options)


def from_index(values, start, value):
    return [*values[:start], *[value] * (N - start)]


def norms_bad_from(start, bad=math.nan):
    return from_index([1.0] * N, start, bad)


HIDDEN = {
    "not logged": None,
    "not a number": math.nan,
    "infinite": math.inf,
    "zero in its place": 0.0,
    "the last one repeated": float(LOSSES[298]),
    "an average in its place": 2.9,
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("start", [1, 100, 299, 579, 590])
def test_gradients_that_are_not_finite_to_the_end_decide(hidden, bad, start):
    answer = judged(from_index(LOSSES, start, hidden), norms_bad_from(start, bad))
    assert (answer.outcome, answer.onset_step) == (Outcome.NON_FINITE, start + 1)
    assert answer.max_lr == pytest.approx(RATES[start - 1], rel=1e-12)
    assert not answer.lower_bound
    assert answer.best_loss == pytest.approx(float(np.min(LOSSES[:start])), abs=0.1)
    assert answer.best_step <= start


@pytest.mark.parametrize("start", [1, 300, 400, 579, 599])
def test_a_run_whose_last_losses_are_not_known_is_incomplete(start):
    answer = judged(from_index(LOSSES, start, None))
    assert (answer.outcome, answer.onset_step) == (Outcome.INCOMPLETE, start + 1)
    assert answer.lower_bound
    assert answer.max_lr == pytest.approx(RATES[start - 1], rel=1e-12)
    assert "losses not known from step" in answer.verdict()


def test_no_loss_at_all_is_incomplete():
    answer = judged([None] * N)
    assert (answer.outcome, answer.onset_step, answer.max_lr) == (Outcome.INCOMPLETE, 1, 0.0)
    assert math.isnan(answer.best_loss)


@pytest.mark.parametrize("every", [2, 10, 50])
@pytest.mark.parametrize("first", [0, 1])
def test_losses_logged_more_rarely_than_rates_are_no_unknown_end(every, first):
    losses = [loss if index % every == first % every else None for index, loss in enumerate(LOSSES)]
    answer = judged(losses)
    assert answer.outcome is Outcome.HEALTHY
    assert any("losses are not known" in reason for reason in answer.reasons)
    tail = [loss if index < 400 else None for index, loss in enumerate(losses)]
    assert judged(tail).outcome is Outcome.INCOMPLETE


@pytest.mark.parametrize("every", [2, 10])
def test_sparse_losses_that_end_in_not_a_number(every):
    losses = [None if index % every else (math.nan if index >= 300 else loss) for index, loss in enumerate(LOSSES)]
    answer = judged(losses)
    assert (answer.outcome, answer.onset_step) == (Outcome.NON_FINITE, 301)
    assert answer.onset_interval[0] > 301 - every


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [slice(0, 5), slice(200, 201), slice(300, 340)])
def test_gradients_that_come_back_are_transient(bad, where):
    norms = [1.0] * N
    norms[where] = [bad] * len(norms[where])
    answer = judged(LOSSES, norms)
    assert answer.outcome is Outcome.HEALTHY
    assert any(f"{len(norms[where])} gradient norms were not finite" in reason for reason in answer.reasons)


@pytest.mark.parametrize("stand_in", [0.0, "repeated", None])
def test_a_stand_in_that_comes_back_is_neither_best_nor_a_spike(stand_in):
    losses, norms = list(LOSSES), [1.0] * N
    for index in range(300, 312):
        losses[index] = float(LOSSES[299]) if stand_in == "repeated" else stand_in
        norms[index] = math.nan
    answer = judged(losses, norms)
    assert answer.outcome is Outcome.HEALTHY
    assert answer.best_loss > 2.3


def test_a_loss_of_zero_beside_a_finite_gradient_is_a_loss():
    losses = np.maximum(LOSSES - 2.6, 0.0)
    assert judged(losses, [1.0] * N).best_loss == 0.0


@pytest.mark.parametrize("n_bad", [1, 4])
def test_a_few_gradients_at_the_very_end_leave_it_open(n_bad):
    answer = judged(LOSSES, norms_bad_from(N - n_bad))
    assert (answer.outcome, answer.onset_step) == (Outcome.INCOMPLETE, N - n_bad + 1)
    assert "gradient norms not finite from step" in answer.verdict()


def test_gradient_norms_that_were_never_finite_do_not_say_healthy():
    answer = judged(LOSSES, [math.nan] * N)
    assert answer.outcome is Outcome.INCOMPLETE
    assert answer.lower_bound


@pytest.mark.parametrize("norm", [None, 0.0, 1.0])
@pytest.mark.parametrize("start", [1, 100, 299, 579, 599])
def test_zeros_to_the_end_are_no_losses_whatever_the_norms_say(norm, start):
    """An older Trainer writes zeros and no norms."""
    answer = judged(from_index(LOSSES, start, 0.0), from_index([1.0] * N, start, norm))
    assert (answer.outcome, answer.onset_step) == (Outcome.INCOMPLETE, start + 1)
    assert answer.max_lr == pytest.approx(RATES[start - 1], rel=1e-12)
    assert answer.best_loss > 2.3


def test_zeros_alone_are_no_losses():
    assert judged([0.0] * N).outcome is Outcome.INCOMPLETE


@pytest.mark.parametrize("length", [1, 4, 20, 100])
def test_zeros_that_come_back_are_neither_best_nor_a_spike(length):
    losses = LOSSES.copy()
    losses[300 : 300 + length] = 0.0
    answer = judged(losses)
    assert answer.outcome is Outcome.HEALTHY
    assert answer.best_loss > 2.3
    assert f"{length} losses are not known" in answer.reasons


def test_a_loss_that_falls_to_zero_is_one():
    losses = np.maximum(5.5 - 0.02 * STEPS, 0.0)
    answer = judged(losses)
    assert (answer.outcome, answer.best_loss) == (Outcome.HEALTHY, 0.0)


@pytest.mark.parametrize("every", [2, 10, 20])
@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("hidden", ["zero", "repeated", "as ever"])
def test_gradients_logged_more_rarely_than_losses_decide_as_well(every, phase, hidden):
    start = 300
    value = {"zero": 0.0, "repeated": float(LOSSES[start - 1])}
    losses = LOSSES if hidden == "as ever" else from_index(LOSSES, start, value[hidden])
    norms = [norm if index % every == phase else None for index, norm in enumerate(norms_bad_from(start))]
    answer = judged(losses, norms)
    assert answer.outcome is Outcome.NON_FINITE
    assert start + 1 <= answer.onset_step <= start + every
    assert answer.best_loss > 2.3


@pytest.mark.parametrize("every", [1, 10])
def test_norms_that_are_logged_at_the_start_alone_say_nothing_of_the_end(every):
    norms = [math.inf if index < 50 and index % every == 0 else None for index in range(N)]
    assert judged(LOSSES, norms).outcome is Outcome.HEALTHY


def test_one_bad_norm_at_the_end_counts_once_however_rarely_norms_are_logged():
    norms = [None if index % 10 else (math.inf if index == 590 else 1.0) for index in range(N)]
    assert judged(LOSSES, norms).outcome is Outcome.INCOMPLETE


@pytest.mark.parametrize("good_every", [2, 3, 5])
@pytest.mark.parametrize("hidden", [math.nan, None])
def test_a_run_that_fails_again_and_again_to_the_end_is_not_healthy(good_every, hidden):
    """Never as many in a row as would end it at once."""
    fails = [index >= 300 and index % good_every != 0 for index in range(N)]
    losses = [hidden if bad else loss for bad, loss in zip(fails, LOSSES, strict=True)]
    answer = judged(losses, [math.nan if bad else 1.0 for bad in fails])
    assert answer.outcome is Outcome.NON_FINITE
    assert abs(answer.onset_step - 301) <= good_every
    assert answer.max_lr < RATES[301]


@pytest.mark.parametrize("length", [2, 4, 20])
def test_failures_that_end_are_transient(length):
    losses = LOSSES.copy()
    losses[300 : 300 + 2 * length : 2] = math.nan
    assert judged(losses).outcome is Outcome.HEALTHY


def test_norms_that_were_never_finite_do_not_move_the_step_at_which_the_loss_breaks():
    answer = judged(from_index(LOSSES, 299, math.nan), [math.inf] * N)
    assert (answer.outcome, answer.onset_step) == (Outcome.NON_FINITE, 300)


def test_losses_that_are_logged_more_rarely_from_some_step_on_are_no_unknown_end():
    losses = [loss if index < 100 or index % 10 == 0 else None for index, loss in enumerate(LOSSES)]
    assert judged(losses).outcome is Outcome.HEALTHY
    assert judged(from_index(losses, 570, None)).outcome is Outcome.INCOMPLETE


def test_what_broke_before_the_end_is_unknown_decides():
    losses = LOSSES + np.where(STEPS >= 200, 3.0, 0.0)
    answer = judged(from_index(losses, 400, None))
    assert (answer.outcome, answer.onset_step) == (Outcome.IRRECOVERABLE_SPIKE, 200)
    assert answer.criterion(Criterion.NON_FINITE).status is Status.NOT_MET


def test_gradients_alone_stop_no_run():
    judge = StreamingJudge(ramp_steps=N)
    rows = zip(STEPS.tolist(), RATES.tolist(), LOSSES.tolist(), strict=True)
    stops = [judge.feed(step, rate, loss, math.inf if step <= 40 else 1.0) for step, rate, loss in rows]
    assert not any(stops)
    assert judge.judgement().outcome is Outcome.HEALTHY


@pytest.mark.parametrize("start", [50, 300])
def test_the_same_answer_while_the_run_goes_on(start):
    norms = norms_bad_from(start)
    judge = StreamingJudge(ramp_steps=N)
    for row in zip(STEPS.tolist(), RATES.tolist(), from_index(LOSSES, start, 0.0), norms, strict=True):
        judge.feed(*row)
    assert judge.judgement() == judged(from_index(LOSSES, start, 0.0), norms)


@pytest.mark.parametrize("n_points", [1, 2, 3])
def test_a_loss_that_explodes_in_the_last_points_is_open(n_points):
    losses = LOSSES.copy()
    losses[-n_points:] = [12.0, 14.0, 15.0][:n_points]
    answer = judged(losses)
    assert answer.outcome is Outcome.INCOMPLETE
    assert answer.onset_step == N - n_points + 1
    assert "a spike open from step" in answer.verdict()


@pytest.mark.parametrize("level", [10.8, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_run_that_never_learns_is_not_healthy(level, noise):
    losses = level + noise * np.random.default_rng(0).standard_normal(N)
    assert judged(losses).outcome is Outcome.CANNOT_JUDGE
    fallen = np.maximum(losses, losses + 0.8 * (1 - STEPS / 30))
    assert judged(fallen).outcome is Outcome.CANNOT_JUDGE


@pytest.mark.parametrize("known_again", [1, 3])
def test_a_few_known_losses_after_a_long_stretch_without_do_not_make_the_end_known(known_again):
    losses = [*LOSSES[:300], *[None] * (300 - known_again), *LOSSES[-known_again:]]
    answer = judged(losses)
    assert (answer.outcome, answer.onset_step) == (Outcome.INCOMPLETE, 301)


@pytest.mark.parametrize("every", [2, 4, 8])
def test_what_fails_again_and_again_to_the_end_is_not_healthy(every):
    bad = (STEPS >= 300) & (STEPS % every == 0)
    assert judged(np.where(bad, np.nan, LOSSES)).outcome is Outcome.NON_FINITE
    assert judged(LOSSES, np.where(bad, np.nan, 1.0).tolist()).outcome is Outcome.INCOMPLETE
