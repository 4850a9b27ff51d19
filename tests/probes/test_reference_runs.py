"""A reference run adds evidence and never takes any away; what it does not cover is not judged, and it is judged itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes.divergence import Landmarks, StreamingJudge, judge_run, reference_fault
from probes.judgement import Criterion, Judgement, Outcome, Status

N = 200
STEPS = np.arange(1, N + 1)
HEALTHY = 4 + 7 * np.exp(-STEPS / 20)
PLATEAU = np.where(STEPS < 30, 11 - 4 * STEPS / 30, 7.0)
SLOW = np.where(STEPS <= 40, HEALTHY, HEALTHY[39] - 0.003 * (STEPS - 40))
SPIKE = np.where(STEPS < 100, HEALTHY, 9.0)
ENTROPY = 7.0


def judged(losses, where=None, reference=HEALTHY, entropy=None, **options) -> Judgement:
    """A run of 200 steps beside the reference's points at ``where``; no reference for None."""
    marks = Landmarks(
        unigram_entropy=entropy,
        reference_steps=None if where is None else STEPS[where],
        reference_losses=None if where is None else reference[where],
    )
    return judge_run(STEPS, 1e-4 * STEPS, losses, ramp_steps=N, landmarks=marks, **options)


def points(*stretches: slice) -> np.ndarray:
    return np.concatenate([np.arange(N)[stretch] for stretch in stretches])


WHOLE = {
    "every step": points(slice(None)),
    "every fifth step": points(slice(0, None, 5)),
    "all but the last three": points(slice(0, -3)),
    "all but the first three": points(slice(3, None)),
}
PARTS = {
    "the first tenth": points(slice(0, 20)),
    "the first half": points(slice(0, 100)),
    "all but the last fifth": points(slice(0, 160)),
    "the last half": points(slice(100, None)),
    "beginning and end": points(slice(0, 40), slice(160, None)),
    "two points": np.array([0, N - 1]),
}


def by_name(cases):
    return pytest.mark.parametrize("where", cases.values(), ids=list(cases))


@by_name({"none": None, **WHOLE, **PARTS})
@pytest.mark.parametrize("to_end", [False, True], ids=["until certain", "to the end"])
def test_no_reference_takes_the_unigram_entropy_away(where, to_end):
    answer = judged(PLATEAU, where, entropy=ENTROPY, to_end=to_end)
    assert answer.outcome is Outcome.STAGNATION
    assert abs(answer.onset_step - 30) <= 2


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_not_even_an_unrelated_one(scale):
    answer = judged(PLATEAU, PARTS["the first tenth"], reference=scale * HEALTHY[::-1], entropy=ENTROPY)
    assert answer.outcome is Outcome.STAGNATION


@by_name(WHOLE)
def test_a_reference_over_the_whole_run_judges_degradation(where):
    slow, sound = judged(SLOW, where), judged(HEALTHY, where)
    assert (slow.outcome, sound.outcome) == (Outcome.DEGRADATION, Outcome.HEALTHY)
    assert abs(slow.onset_step - 40) <= 10
    assert sound.criterion(Criterion.DEGRADATION).status is Status.NOT_MET
    assert sound.criterion(Criterion.STAGNATION).status is Status.NOT_MET


@by_name(PARTS)
@pytest.mark.parametrize("losses", [SLOW, HEALTHY], ids=["slow", "sound"])
def test_what_a_reference_does_not_cover_is_not_judged(where, losses):
    alone, beside = judged(losses, to_end=True), judged(losses, where, to_end=True)
    assert (beside.outcome, beside.onset_step, beside.max_lr) == (alone.outcome, alone.onset_step, alone.max_lr)
    for criterion in (Criterion.DEGRADATION, Criterion.STAGNATION):
        result = beside.criterion(criterion)
        assert result.status is Status.CANNOT_JUDGE
        assert "the reference" in result.reason
    assert any("degradation: cannot judge" in reason and "the reference" in reason for reason in beside.reasons)


def test_the_reason_names_both_extents():
    reason = judged(SLOW, PARTS["the first tenth"]).criterion(Criterion.DEGRADATION).reason
    assert reason == "cannot judge where the reference has no points: steps 20 to 200 of a run from step 1 to 200"


@by_name(PARTS)
def test_a_plateau_that_it_does_not_cover_long_enough_stays_undecided(where):
    """The plateau begins at 30 and is certain after 35 % of the ramp."""
    certain = where[-1] >= 99 and len(where) >= 100 and where[0] == 0
    assert judged(PLATEAU, where).outcome is (Outcome.STAGNATION if certain else Outcome.CANNOT_JUDGE)


def test_a_run_that_ends_early_needs_a_reference_up_to_there_only():
    marks = Landmarks(reference_steps=STEPS[:120], reference_losses=HEALTHY[:120])
    answer = judge_run(STEPS[:110], 1e-4 * STEPS[:110], SLOW[:110], ramp_steps=N, landmarks=marks)
    assert answer.outcome is Outcome.DEGRADATION


BROKEN = {
    "spike": (SPIKE, Outcome.IRRECOVERABLE_SPIKE),
    "not a number": (np.where(STEPS < 100, HEALTHY, math.nan), Outcome.NON_FINITE),
    "plateau": (PLATEAU, Outcome.STAGNATION),
}


@pytest.mark.parametrize(("reference", "kind"), BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("losses", [SLOW, HEALTHY, SPIKE, PLATEAU], ids=["slow", "sound", "spike", "plateau"])
def test_a_reference_that_diverges_is_named_and_not_used(reference, kind, losses):
    alone = judged(losses, entropy=ENTROPY)
    beside = judged(losses, WHOLE["every step"], reference=reference, entropy=ENTROPY)
    assert (beside.outcome, beside.onset_step, beside.max_lr) == (alone.outcome, alone.onset_step, alone.max_lr)
    result = beside.criterion(Criterion.DEGRADATION)
    assert result.status is Status.CANNOT_JUDGE
    assert f"the reference diverges itself ({kind.words} from step" in result.reason


@pytest.mark.parametrize(("reference", "kind"), BROKEN.values(), ids=list(BROKEN))
def test_the_fault_of_a_reference_can_be_asked_before_a_run(reference, kind):
    marks = Landmarks(unigram_entropy=ENTROPY, reference_steps=STEPS, reference_losses=reference)
    assert kind.words in reference_fault(marks, ramp_steps=N)
    assert reference_fault(Landmarks(reference_steps=STEPS, reference_losses=HEALTHY), ramp_steps=N) is None
    assert reference_fault(Landmarks(), ramp_steps=N) is None


def test_a_longer_reference_is_judged_over_its_own_length():
    """Seen up to the end of the run alone it stands at the entropy for too long; it learns after it."""
    steps = np.arange(1, 601)
    losses = np.where(steps < 120, 7.0, 4 + 3 * np.exp(-(steps - 120) / 60))
    marks = Landmarks(unigram_entropy=ENTROPY, reference_steps=steps, reference_losses=losses)
    assert reference_fault(marks, ramp_steps=200) is None


def test_a_reference_that_stands_still_is_named_where_nothing_tells_whether_it_may():
    answer = judged(PLATEAU, WHOLE["every step"], reference=PLATEAU)
    assert any(reason.startswith("the reference stands still itself from step 30;") for reason in answer.reasons)
    assert not any("stands still itself" in reason for reason in judged(HEALTHY, WHOLE["every step"]).reasons)


@by_name({"none": None, **WHOLE, **PARTS})
@pytest.mark.parametrize("losses", [SLOW, HEALTHY, SPIKE, PLATEAU], ids=["slow", "sound", "spike", "plateau"])
def test_a_log_is_judged_as_the_run_was(where, losses):
    marks = Landmarks(
        reference_steps=None if where is None else STEPS[where],
        reference_losses=None if where is None else HEALTHY[where],
    )
    judge = StreamingJudge(ramp_steps=N, landmarks=marks)
    for step, loss in zip(STEPS, losses, strict=True):
        judge.feed(int(step), float(1e-4 * step), float(loss))
    assert repr(judge.judgement()) == repr(judged(losses, where))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("hurry", [3, 4, 8])
def test_a_run_that_leads_has_not_begun_to_lag(noise, hurry):
    """Learns faster at first, as at a larger learning rate, then slower: the lag begins after the two have crossed."""
    rng = np.random.default_rng(0)
    faster = 5 * np.exp(-STEPS * hurry / 20) + 6 - 0.005 * STEPS
    crossed = int(STEPS[faster < HEALTHY][-1])
    answer = judged(faster + noise * rng.standard_normal(N), WHOLE["every step"])
    assert answer.outcome is Outcome.DEGRADATION
    assert answer.onset_step is not None
    assert crossed - 10 * (noise > 0) <= answer.onset_step <= crossed + N // 10


@pytest.mark.parametrize("lead", [0.0, 0.3, 1.0])
def test_a_run_lags_from_where_its_lead_is_lost(lead):
    """It falls at half the pace of the reference all along, and has begun to lag once it is behind."""
    reference, gap = 11 - 6 * STEPS / N, 3 * STEPS / N - lead
    noise = 0.01 * np.random.default_rng(4).standard_normal(N)
    answer = judged(reference + gap + noise, points(slice(None)), reference)
    behind = int(np.argmax(gap > 0)) + 1
    assert answer.outcome is Outcome.DEGRADATION
    assert abs(answer.onset_step - behind) <= 6
