"""What a ramp's steps are called and how its rates rise: kind and rate are the same, bounds are told as bounds."""

import numpy as np
import pytest

from probes.divergence import Landmarks, RunRecordError, StreamingJudge, judge_run
from probes.judgement import Criterion, Outcome, Status
from tests.probes._real_curves import real_curves

N, PEAK = 600, 0.05
STEPS = np.arange(1, N + 1)
RATES = PEAK * STEPS / N


def course(seed=0, noise=0.03):
    return 2.5 + 3.5 * np.exp(-STEPS / 80) + noise * np.random.default_rng(seed).standard_normal(N)


COURSES = {
    "healthy": course(),
    "spike": course() + np.where(STEPS >= 300, 3.0, 0.0),
    "not a number": np.where(STEPS >= 300, np.nan, course()),
    "plateau": np.where(STEPS < 30, np.minimum(course(), 6), 3.3 + 0.02 * np.random.default_rng(1).standard_normal(N)),
}
NUMBERINGS = {
    "from 0": lambda steps: steps - 1,
    "from 10,001": lambda steps: steps + 10_000,
    "from 250": lambda steps: steps + 249,
    "every second": lambda steps: 2 * steps,
    "every tenth": lambda steps: 10 * steps,
    "every tenth from 0": lambda steps: 10 * (steps - 1),
}


def same(one, other):
    assert (one.outcome, one.max_lr, one.max_lr_interval, one.resolution, one.lower_bound) == (
        other.outcome,
        other.max_lr,
        other.max_lr_interval,
        other.resolution,
        other.lower_bound,
    )


@pytest.mark.parametrize("number", NUMBERINGS.values(), ids=NUMBERINGS)
@pytest.mark.parametrize("losses", COURSES.values(), ids=COURSES)
def test_the_numbering_of_steps_changes_nothing(losses, number):
    known = Landmarks(unigram_entropy=3.31)
    plain = judge_run(STEPS, RATES, losses, landmarks=known)
    numbered = judge_run(number(STEPS), RATES, losses, landmarks=known)
    same(plain, numbered)
    assert plain.onset_step is None or numbered.onset_step == number(np.array(plain.onset_step))
    assert plain.ramp_steps == N
    spacing = number(STEPS)[1] - number(STEPS)[0]
    assert N * spacing - spacing < numbered.ramp_steps <= N * spacing


@pytest.mark.parametrize("curve", real_curves()[::5], ids=lambda curve: curve.name)
@pytest.mark.parametrize("number", [NUMBERINGS["from 0"], NUMBERINGS["from 10,001"]], ids=["from 0", "from 10,001"])
def test_the_numbering_of_recorded_ramps_changes_nothing(curve, number):
    known = Landmarks(unigram_entropy=curve.unigram_entropy, initial_loss=curve.initial_loss)
    rest = {"batch_losses": curve.batch_losses, "landmarks": known}
    same(
        judge_run(curve.steps, curve.learning_rates, curve.losses, **rest),
        judge_run(number(curve.steps), curve.learning_rates, curve.losses, **rest),
    )


@pytest.mark.parametrize("every", [2, 10])
@pytest.mark.parametrize("name", ["healthy", "spike", "not a number", "plateau"])
def test_fewer_points_give_the_same_kind_and_nearly_the_same_rate(name, every):
    known = Landmarks(unigram_entropy=3.31)
    whole = judge_run(STEPS, RATES, COURSES[name], landmarks=known)
    few = judge_run(STEPS[every - 1 :: every], RATES[every - 1 :: every], COURSES[name][every - 1 :: every], landmarks=known)
    assert few.outcome is whole.outcome
    assert few.ramp_steps == N
    assert few.max_lr == pytest.approx(whole.max_lr, abs=1.1 * every * PEAK / N)


def test_a_ramp_that_does_not_begin_at_its_first_step_names_the_place():
    words = judge_run(STEPS + 10_000, RATES, COURSES["spike"]).verdict()
    assert "from step 10300, number 300 of 600;" in words
    assert "from step 300 of 600;" in judge_run(STEPS, RATES, COURSES["spike"]).verdict()


def test_a_ramp_of_a_given_length_begins_where_its_steps_do():
    late = judge_run(STEPS[20:], RATES[20:], COURSES["spike"][20:], ramp_steps=N)
    assert (late.outcome, late.onset_step, late.first_step) == (Outcome.IRRECOVERABLE_SPIKE, 300, 1)
    part = judge_run(STEPS[:200] + 10_000, RATES[:200], course()[:200], ramp_steps=N)
    assert (part.outcome, part.first_step) == (Outcome.INCOMPLETE, 10_001)


def test_steps_before_the_ramp_are_refused():
    judge = StreamingJudge(ramp_steps=10, first_step=100)
    with pytest.raises(RunRecordError, match=r"step 99 lies before the ramp of 10 steps, which are 100 to 109"):
        judge.feed(99, 0.1, 1.0)
    with pytest.raises(RunRecordError, match=r"step 110 lies beyond the ramp of 10 steps"):
        judge.feed(110, 0.1, 1.0)


# --- the onset and its interval ---


def drift_and_jump(height, seed):
    """A drift from step 300 on, and a jump at step 400."""
    return course(seed, noise=0.05) + height * np.clip((STEPS - 300) / 100, 0, 1) + np.where(STEPS >= 400, 3.0, 0.0)


SELECTIONS = {
    "all": slice(None),
    "every second": slice(1, None, 2),
    "the other second": slice(0, None, 2),
    "without the first twenty": slice(20, None),
}


@pytest.mark.parametrize("height", [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0])
def test_the_interval_holds_what_chance_does_to_the_date(height):
    answers = [
        judge_run(STEPS[part], RATES[part], drift_and_jump(height, seed)[part], ramp_steps=N)
        for part in SELECTIONS.values()
        for seed in range(4)
    ]
    for one in answers:
        assert one.outcome is Outcome.IRRECOVERABLE_SPIKE
        assert not one.slow
        low, high = one.onset_interval
        assert low <= one.onset_step <= high
        assert one.max_lr_interval[0] <= one.max_lr <= one.max_lr_interval[1]
    earliest, latest = max(one.onset_interval[0] for one in answers), min(one.onset_interval[1] for one in answers)
    assert earliest <= latest + 2, "every interval overlaps every other, to the distance of two points"


def test_the_interval_of_a_clean_jump_is_its_step():
    answer = judge_run(STEPS, RATES, drift_and_jump(0.0, 0))
    assert answer.onset_interval == (400, 400)
    assert "between" not in answer.verdict()
    assert answer.max_lr_interval == (answer.max_lr, answer.max_lr)


def test_a_wide_interval_is_in_the_first_line_and_in_json():
    answer = judge_run(STEPS, RATES, drift_and_jump(0.3, 0))
    low, high = answer.onset_interval
    assert f"(between {low} and {high})" in answer.verdict()
    assert f"({answer.max_lr_interval[0]:.4g} to {answer.max_lr_interval[1]:.4g}; resolution" in answer.verdict()
    assert answer.to_dict()["onset_interval"] == [low, high]
    assert answer.to_dict()["max_lr_interval"] == list(answer.max_lr_interval)


@pytest.mark.parametrize("length", [200, 300])
def test_a_slow_rise_is_called_one_where_no_reference_tells(length):
    losses = course() + 1.5 * np.clip((STEPS - 250) / length, 0, 1)
    alone = judge_run(STEPS, RATES, losses)
    assert (alone.outcome, alone.slow) == (Outcome.IRRECOVERABLE_SPIKE, True)
    assert alone.verdict().startswith("slow rise (degradation or spike cannot be told apart without a reference) from step")
    known = Landmarks(reference_steps=STEPS.astype(float), reference_losses=course(1))
    assert not judge_run(STEPS, RATES, losses, landmarks=known).slow


@pytest.mark.parametrize("height", [0.5, 3.0])
def test_a_spike_is_not_called_slow(height):
    assert not judge_run(STEPS, RATES, course() + np.where(STEPS >= 300, height, 0.0)).slow


# --- rates that are no linear ramp ---


@pytest.mark.parametrize("at", [100, 300, 500])
def test_the_resolution_is_the_distance_to_the_next_rate_at_the_onset(at):
    rates = 1e-6 * 1e5 ** (STEPS / N)
    answer = judge_run(STEPS, rates, course() + np.where(at <= STEPS, 3.0, 0.0))
    assert answer.onset_step == at
    assert answer.max_lr == rates[at - 2]
    assert answer.resolution == pytest.approx(rates[at - 1] - rates[at - 2], rel=1e-12)
    assert f"a factor of {rates[1] / rates[0]:.3g}" in answer.verdict()


def test_a_linear_ramp_has_one_resolution_and_no_factor():
    answer = judge_run(STEPS, RATES, COURSES["spike"])
    assert answer.resolution == pytest.approx(PEAK / N, rel=1e-9)
    assert "factor" not in answer.verdict()


@pytest.mark.parametrize("start", [1, 300])
def test_a_constant_rate_at_which_a_run_broke_is_an_upper_bound(start):
    answer = judge_run(STEPS, [0.01] * N, np.where(start <= STEPS, np.nan, course()))
    assert answer.outcome is Outcome.NON_FINITE
    assert answer.upper_bound
    assert answer.max_lr == 0.01
    assert "Max LR < 0.01 " in answer.verdict()
    assert answer.max_lr_interval == (0.0, 0.01)


def test_a_constant_rate_that_is_borne_is_a_lower_bound():
    answer = judge_run(STEPS, [0.01] * N, course())
    assert (answer.outcome, answer.lower_bound, answer.upper_bound) == (Outcome.HEALTHY, True, False)


def test_the_rate_of_a_plateau_on_which_a_run_broke_is_an_upper_bound():
    answer = judge_run(STEPS, np.minimum(RATES, RATES[199]), COURSES["spike"])
    assert answer.upper_bound
    assert answer.max_lr == RATES[199]


@pytest.mark.parametrize("digits", [3, 4])
def test_a_ramp_that_was_rounded_is_told_to_its_last_digit(digits):
    answer = judge_run(STEPS, np.round(RATES, digits), COURSES["spike"])
    low, high = answer.max_lr_interval
    assert low - 1e-12 <= RATES[298] + 10.0**-digits
    assert high >= RATES[298] - 10.0**-digits
    assert high - low <= 1.001 * 10.0**-digits


@pytest.mark.parametrize("length", [20, 50, 100])
@pytest.mark.parametrize("to_end", [False, True])
@pytest.mark.parametrize("broken", [np.nan, 9.0])
def test_a_staircase_of_rates_is_told_by_the_stair_that_held_and_the_one_that_did_not(length, to_end, broken):
    rates = 0.005 * (1 + (STEPS - 1) // length)
    at = 3 * length + length // 2
    answer = judge_run(STEPS, rates, np.where(at <= STEPS, broken, course()), to_end=to_end)
    assert answer.onset_step == at
    assert answer.upper_bound
    assert answer.max_lr_interval == pytest.approx((0.015, 0.02))
    assert "Max LR < 0.02 (0.015 to 0.02;" in answer.verdict()


@pytest.mark.parametrize("steps", [[1, *range(10, 601, 10)], [*range(1, 301), *range(310, 601, 10)]], ids=["first", "later"])
def test_points_that_lie_unevenly_do_not_lengthen_the_ramp(steps):
    chosen = np.array(steps)
    assert judge_run(chosen, RATES[chosen - 1], course()[chosen - 1]).ramp_steps == N


@pytest.mark.parametrize("shift", [-1, 10_000])
def test_a_reference_may_count_its_steps_from_elsewhere(shift):
    slow, healthy = course() + 1.5 * (1 - np.exp(-STEPS / 60)), course(1)
    answers = [
        judge_run(STEPS, RATES, slow, landmarks=Landmarks(reference_steps=numbers.astype(float), reference_losses=healthy))
        for numbers in (STEPS, STEPS + shift)
    ]
    assert answers[0].outcome is Outcome.DEGRADATION
    same(*answers)


def test_criteria_that_are_not_met_are_so_up_to_what_is_known():
    answer = judge_run(STEPS, RATES, [*course()[:300], *[None] * 300])
    assert {result.max_lr for result in answer.criteria} == {RATES[299]}
    assert answer.criterion(Criterion.NON_FINITE).status is Status.CANNOT_JUDGE


@pytest.mark.parametrize("peak", [100, 200, 290])
def test_a_run_that_broke_while_the_rate_fell_bears_less_than_its_highest_rate(peak):
    rates = np.where(peak >= STEPS, PEAK * STEPS / peak, PEAK * (N - STEPS + 1) / (N - peak + 1))
    broken, sound = judge_run(STEPS, rates, COURSES["spike"]), judge_run(STEPS, rates, COURSES["healthy"])
    assert (broken.onset_step, broken.max_lr, broken.upper_bound) == (300, rates.max(), True)
    assert (sound.max_lr, sound.lower_bound, sound.upper_bound) == (rates.max(), True, False)


@pytest.mark.parametrize("every", [2, 10, 50])
def test_a_rate_at_which_nothing_was_known_is_none_that_was_borne(every):
    """Rates at every step, losses more rarely: the break shows at step 400, and the run was last seen sound well before."""
    losses = [loss if step % every == 0 else None for step, loss in zip(STEPS, drift_and_jump(0.0, 0), strict=True)]
    answer = judge_run(STEPS, RATES, losses)
    assert (answer.onset_step, answer.max_lr) == (400, RATES[400 - every - 1])
