import re

import numpy as np
import pytest

from probes.control_variates import without_batches
from probes.divergence import Landmarks, RunRecordError, StreamingJudge, judge_run
from probes.judgement import Outcome
from probes.onset import running_median

N = 600
RNG = np.random.default_rng(5)
BATCHES = np.array([3.2, 2.4]) + RNG.standard_normal((N, 2)) @ np.array([[0.25, 0.15], [0.0, 0.1]])
COURSE = 2.6 + 2.9 * np.exp(-np.arange(N) / 40)
UNIGRAM = Landmarks(unigram_entropy=3.2, initial_loss=5.5)


def with_batches(course, coefficients=(0.4, 0.7), noise=0.02, seed=1):
    fluctuation = (BATCHES - [3.2, 2.4]) @ np.asarray(coefficients)
    return course + fluctuation + noise * np.random.default_rng(seed).standard_normal(len(course))


def deviation(losses, course=COURSE):
    return float(np.std((losses - course)[100:]))


def judged(losses, ramp_steps=None, **options):
    steps, length = np.arange(1, len(losses) + 1), ramp_steps or len(losses)
    return judge_run(steps, 0.05 * steps / length, losses, landmarks=UNIGRAM, ramp_steps=length, **options)


@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (0.4, 0.7), (0.0, 1.0), (-0.5, 1.3)], ids=str)
def test_what_the_batches_make_is_taken_off(coefficients):
    losses = with_batches(COURSE, coefficients)
    assert deviation(without_batches(losses, BATCHES)) < 0.025 < 0.08 < deviation(losses)


def test_coefficients_follow_the_run():
    """One that goes with the unigram loss alone from the middle on is cleaned on both sides."""
    losses = np.where(np.arange(N) < 300, with_batches(COURSE, (0.3, 0.8)), with_batches(COURSE, (1.0, 0.0)))
    cleaned = without_batches(losses, BATCHES)
    assert deviation(cleaned[:250], COURSE[:250]) < 0.03
    assert deviation(cleaned[350:], COURSE[350:]) < 0.03


def test_batches_that_say_nothing_change_little():
    losses = COURSE + 0.1 * np.random.default_rng(3).standard_normal(N)
    cleaned = without_batches(losses, BATCHES)
    assert deviation(cleaned) < 1.03 * deviation(losses)
    assert abs(float((cleaned - losses).mean())) < 0.005


@pytest.mark.parametrize("column", [np.zeros(N), BATCHES[:, 0]], ids=["does not vary", "varies like the other"])
def test_columns_that_add_nothing_do_no_harm(column):
    losses = with_batches(COURSE, (1.0, 0.0))
    cleaned = without_batches(losses, np.stack([BATCHES[:, 0], column], axis=1))
    assert deviation(cleaned) < 0.025


def test_the_mean_over_all_steps_stays():
    losses = with_batches(np.full(N, 3.0))
    assert without_batches(losses, BATCHES).mean() == pytest.approx(losses.mean(), abs=0.01)


def test_a_jump_stays_where_and_as_high_as_it_is():
    course = np.where(np.arange(N) < 400, 2.5, 3.2)
    cleaned = without_batches(with_batches(course), BATCHES)
    assert np.abs(cleaned - course).max() < 0.15
    assert np.median(cleaned[380:400]) == pytest.approx(2.5, abs=0.03)
    assert np.median(cleaned[400:420]) == pytest.approx(3.2, abs=0.03)


@pytest.mark.parametrize("missing", [slice(0, 150), slice(1, None, 2), slice(300, 313)], ids=["first", "half", "13 of 600"])
def test_a_run_of_which_more_than_a_few_batches_are_unknown_is_not_cleaned(missing):
    losses, batches = with_batches(COURSE), BATCHES.copy()
    batches[missing, 1] = np.nan
    np.testing.assert_array_equal(without_batches(losses, batches), losses)


@pytest.mark.parametrize("missing", [[0], [100], [599], list(range(300, 312))], ids=["first", "one", "last", "12 of 600"])
def test_a_few_unknown_batches_leave_their_own_points_alone_and_the_others_clean(missing):
    losses, batches = with_batches(COURSE), BATCHES.copy()
    batches[missing, 1] = np.nan
    cleaned = without_batches(losses, batches)
    np.testing.assert_array_equal(cleaned[missing], losses[missing])
    others = np.delete(np.arange(N), missing)
    assert deviation(cleaned[others], COURSE[others]) < 0.03


def test_losses_that_are_not_finite_stay_as_they_are():
    losses, batches = with_batches(COURSE), BATCHES.copy()
    losses[[5, 200]] = np.nan, np.inf
    batches[5] = np.nan  # beside such a loss nothing need be known
    cleaned = without_batches(losses, batches)
    np.testing.assert_array_equal(cleaned[[5, 200]], losses[[5, 200]])
    assert deviation(np.delete(cleaned, [5, 200]), np.delete(COURSE, [5, 200])) < 0.025


@pytest.mark.parametrize("wild", [20.0, 1e4, -1e300])
def test_a_wild_batch_loss_leaves_its_own_point_alone_and_the_others_clean(wild):
    losses, batches = with_batches(COURSE), BATCHES.copy()
    batches[300, 0] = wild
    cleaned = without_batches(losses, batches)
    assert cleaned[300] == losses[300]
    assert deviation(np.delete(cleaned, 300), np.delete(COURSE, 300)) < 0.03


@pytest.mark.parametrize("scales", [(1e8, 1.0), (1.0, 1e-8), (1e200, 1e-200), (-3.0, 1.0)], ids=str)
def test_units_of_the_columns_do_not_matter(scales):
    losses = with_batches(COURSE)
    np.testing.assert_allclose(without_batches(losses, BATCHES * scales), without_batches(losses, BATCHES), atol=1e-6)


STEPS = np.arange(N)
SLOW = {f"drift by {height:g}": height * STEPS / N for height in (-20, -10, -5, -3, 3, 5, 10, 15, 40)}
SLOW |= {f"another text at {at}, {height:g}": height * (at <= STEPS) for at in (200, 400, 500) for height in (-1, 1, 2, 5)}


@pytest.mark.parametrize("slow", SLOW.values(), ids=list(SLOW))
@pytest.mark.parametrize("stop", [150, 300, 450, 530, N])
def test_what_is_slow_in_the_batches_makes_no_drift_of_the_loss(slow, stop):
    """At whatever point it is asked. The two columns count 1.1 together; what is too small to be seen is a fifth of a nat."""
    losses = with_batches(COURSE)[:stop]
    cleaned = without_batches(losses, (BATCHES + slow[:, None])[:stop])
    seen, before = (np.abs(running_median(each - COURSE[:stop], 51)).max() for each in (cleaned, losses))
    assert seen < max(before, 0.25)


@pytest.mark.parametrize("slow", [SLOW["drift by -10"], SLOW["drift by 5"], SLOW["another text at 400, 2"]], ids=str)
def test_a_sound_run_over_a_text_that_changes_is_sound(slow):
    answer = judged(with_batches(COURSE), batch_losses=BATCHES + slow[:, None])
    assert answer.outcome is judged(with_batches(COURSE)).outcome is Outcome.HEALTHY
    assert any("is not taken off: the losses of the batches do not vary, or drift" in reason for reason in answer.reasons)


def test_independent_batches_do_not_drift():
    """Else only what is fast would be taken off, and the means of many points would keep their noise."""
    errors = []
    for seed in range(40):
        batches = np.random.default_rng(seed).standard_normal((N, 1))
        errors.append(np.mean(without_batches(COURSE + batches[:, 0], batches)[200:300] - COURSE[200:300]))
    assert np.std(errors) < 0.06  # of 0.1 before; the mean over the whole run is not known better than to 0.04


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_any_number_of_columns_will_do(columns):
    batches = np.random.default_rng(9).standard_normal((N, columns))
    losses = COURSE + 0.1 * batches.sum(axis=1)
    assert deviation(without_batches(losses, batches)) < 0.02


@pytest.mark.parametrize("n_known", [0, 30, 100])
def test_few_points_say_nothing(n_known):
    losses = with_batches(COURSE)
    batches = np.full_like(BATCHES, np.nan)
    batches[:n_known] = BATCHES[:n_known]
    np.testing.assert_array_equal(without_batches(losses, batches), losses)


def test_without_batches_nothing_changes():
    losses = with_batches(COURSE)
    np.testing.assert_array_equal(without_batches(losses, None), losses)


@pytest.mark.parametrize("shape", [(N,), (N - 1, 2), (N, 2, 1)], ids=str)
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \(n,\) and \(n, k\)"):
        without_batches(COURSE, np.zeros(shape))


# --- the judge ---


def test_judge_sees_a_rise_that_the_batches_hide():
    """Of 0.4 nats, where the standard deviation over batches is twice that."""
    course = COURSE + np.clip((np.arange(N) - 420) / 60, 0, 1) * 0.4
    losses = with_batches(course, (2.0, 2.0))
    assert judged(losses).outcome is not Outcome.IRRECOVERABLE_SPIKE
    seeing = judged(losses, batch_losses=BATCHES)
    assert seeing.outcome is Outcome.IRRECOVERABLE_SPIKE
    assert abs(seeing.onset_step - 421) <= 12


def test_plateau_that_goes_with_its_batches_is_dated_to_a_few_steps():
    course = np.maximum(5.5 - 2.3 * np.arange(N) / 30, 3.2)
    answer = judged(with_batches(course, (1.0, 0.0), noise=0.01), batch_losses=BATCHES)
    assert (answer.outcome, abs(answer.onset_step - 31) <= 3) == (Outcome.STAGNATION, True)


def test_the_judge_says_how_much_noise_it_took_off():
    (note,) = [reason for reason in judged(with_batches(COURSE), batch_losses=BATCHES).reasons if "batches" in reason]
    left, of = (float(word) for word in re.findall(r"[0-9.]+[0-9]", note))
    assert left < 0.1 < of
    assert not any("batches" in reason for reason in judged(with_batches(COURSE)).reasons)


def test_streamed_and_replayed_are_the_same():
    losses = with_batches(np.where(np.arange(N) < 300, COURSE, 3.3))
    judge = StreamingJudge(ramp_steps=N, landmarks=UNIGRAM)
    for step, (loss, batch) in enumerate(zip(losses, BATCHES, strict=True), start=1):
        if judge.feed(step, 0.05 * step / N, loss, None, tuple(batch)):
            break
    assert repr(judge.judgement()) == repr(judged(losses, batch_losses=BATCHES))


@pytest.mark.parametrize("unknown", [range(1, 101), range(500, N + 1)], ids=["at first", "at last"])
def test_a_run_whose_batches_are_known_in_part_is_judged_without(unknown):
    losses = with_batches(COURSE)
    judge = StreamingJudge(ramp_steps=N, landmarks=UNIGRAM)
    for step, (loss, batch) in enumerate(zip(losses, BATCHES, strict=True), start=1):
        judge.feed(step, 0.05 * step / N, loss, None, None if step in unknown else tuple(batch))
    answer, raw = judge.judgement(), judged(losses)
    assert (answer.outcome, answer.onset_step, answer.best_loss) == (raw.outcome, raw.onset_step, raw.best_loss)
    assert any(f"is not known of {len(unknown)} of {N} steps" in reason for reason in answer.reasons)


def test_streamed_looks_are_those_at_the_points_so_far():
    losses = with_batches(np.where(np.arange(N) < 400, COURSE, 3.3))
    judge = StreamingJudge(ramp_steps=N, landmarks=UNIGRAM, to_end=True)
    for step, (loss, batch) in enumerate(zip(losses, BATCHES, strict=True), start=1):
        judge.feed(step, 0.05 * step / N, loss, None, tuple(batch))
        if step in (90, 101, 350, 430):
            replayed = judged(losses[:step], batch_losses=BATCHES[:step], ramp_steps=N, to_end=True)
            assert judge.judgement().reasons == replayed.reasons
            assert judge.judgement().best_loss == replayed.best_loss


def test_finite_losses_stay_finite_however_large():
    losses = np.where(np.arange(N) % 2, 1e300, -1e300)
    assert np.isfinite(without_batches(losses, BATCHES)).all()


def test_the_judge_says_that_few_points_are_not_cleaned():
    answer = judged(with_batches(COURSE)[:60], batch_losses=BATCHES[:60])
    assert any("60 points, and it takes 101" in reason for reason in answer.reasons)


def test_another_number_of_batch_losses_is_refused():
    judge = StreamingJudge(ramp_steps=10)
    judge.feed(1, 0.1, 5.0, None, (3.2, 2.4))
    with pytest.raises(RunRecordError, match="1 batch losses at step 2, and 2 before"):
        judge.feed(2, 0.2, 5.0, None, (3.2,))
    with pytest.raises(RunRecordError, match=r"batch losses of shape \(5, 2\)"):
        judged(COURSE, batch_losses=BATCHES[:5])
