import json
import math

import numpy as np
import pytest

from probes.divergence import Landmarks, judge_run
from probes.judgement import Criterion, Outcome


def judged(losses, **options):
    n = len(losses)
    return judge_run(range(1, n + 1), [0.05 * k / n for k in range(1, n + 1)], losses, **options)


SPIKE = np.concatenate([np.linspace(5, 3, 300), np.full(300, 8.0)])


def test_verdict_has_kind_onset_max_lr_and_resolution():
    assert judged(SPIKE).verdict() == "irrecoverable spike from step 301 of 600; Max LR 0.025 (resolution 8.3e-05)"


def test_healthy_verdict_says_that_it_is_a_lower_bound():
    answer = judged(np.linspace(5, 3, 100))
    assert answer.verdict().startswith("healthy: no divergence up to the end of the ramp (step 100); Max LR >= 0.05")
    assert "Max LR is a lower bound" in answer.reasons[0]


def test_frame_has_a_row_per_criterion_and_one_for_all():
    frame = judged(SPIKE, landmarks=Landmarks(unigram_entropy=3.5)).to_frame().set_index("criterion")
    assert list(frame.index) == ["overall", *(criterion.value for criterion in Criterion)]
    assert frame.loc["overall", "onset_step"] == frame.loc["irrecoverable_spike", "onset_step"] == 301
    assert frame.loc["irrecoverable_spike", "status"] == "met"
    assert frame.loc["degradation", "status"] == "cannot_judge"
    assert frame.loc["stagnation", "status"] == "not_met"
    assert bool(frame.loc["stagnation", "lower_bound"])
    assert frame["best_loss"].eq(judged(SPIKE).best_loss).all()


@pytest.mark.parametrize("losses", [SPIKE, [math.nan] * 20, np.linspace(5, 3, 50)], ids=["spike", "nan", "healthy"])
def test_everything_can_be_written_as_json(losses):
    answer = judged(losses)
    plain = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert plain["outcome"] == answer.outcome.value
    assert plain["max_lr"] == answer.max_lr
    assert len(plain["criteria"]) == 4


def test_best_loss_is_where_it_was_reached():
    answer = judged(SPIKE)
    assert answer.best_step == 298  # of a running median of five
    assert answer.best_loss == pytest.approx(SPIKE[297])


def test_outcomes_that_are_divergences_are_the_criteria():
    assert {outcome for outcome in Outcome if outcome.diverged} == {criterion.outcome for criterion in Criterion}


def test_frame_holds_the_ends_of_the_intervals_and_none_where_there_is_no_onset():
    answer = judged(SPIKE)
    frame = answer.to_frame().set_index("criterion")
    for row in (frame.loc["overall"], frame.loc["irrecoverable_spike"]):
        assert (row["onset_earliest"], row["onset_latest"]) == answer.onset_interval
        assert (row["max_lr_low"], row["max_lr_high"]) == answer.max_lr_interval
        assert not row["upper_bound"]
    sound = judged(np.linspace(5, 3, 100)).to_frame()
    assert sound[["onset_earliest", "onset_latest", "max_lr_low", "max_lr_high"]].isna().all(axis=None)
