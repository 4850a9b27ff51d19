"""The judge beside its slow, obvious twin, on every committed curve. Where they differ the curve is listed, and why."""

from dataclasses import replace

import numpy as np
import pytest

from probes.control_variates import without_batches
from probes.divergence import Landmarks, judge_run
from probes.judgement import DEFINITION
from tests.probes._curves import HELD_OUT, TUNED_ON, make_curves
from tests.probes._obvious_judge import obvious_verdict
from tests.probes._real_curves import real_curves

ALLOWED = 0.04
"""Of the ramp: how far the twin's onset may lie outside the judge's interval."""
LOWEST = "the twin begins a rise behind the lowest point; the judge where the level leaves the range it wandered in"
EARLIER = "the twin takes the plateau's margin for its beginning, the judge the rise to it for the trouble"
SMALL = "a rise of about a tenth of what was learned: the twin's window hides its end"
EARLY = "the twin begins the rise with a drift before it that is a hundredth of what was learned"
DIFFERENT_REAL = {
    "mix_ln-64-0.05-seed1": EARLIER,
    "scaled_shortcut_input_gain-64-0.05-seed0": LOWEST,
    "scaled_shortcut_normed_input_gain-64-0.05-seed1": SMALL,
    "keel-64-0.25-seed2": LOWEST,
    "scaled_shortcut_input_gain-64-0.25-seed2": LOWEST,
    "scaled_shortcut_normed_input_gain-64-0.25-seed0": LOWEST,
    "keel-64-0.25-seed3": LOWEST,
}
SHAPES = ((TUNED_ON, 1), (HELD_OUT, 20260130))
SYNTHETIC = [
    curve
    for shapes, seed in SHAPES
    for curve in make_curves(replace(shapes, ramps=(100, 200, 300, 600)), 2, seed)
    if curve.reference is None
]
DIFFERENT_SYNTHETIC = {
    "drift then rise, ramp 200, noise 0.004, unigram": EARLY,
    "drift then rise, ramp 600, noise 0.008, none": EARLY,
    "late stagnation, ramp 200, noise 0.02, unigram": "a plateau of a third of the ramp, which noise makes shorter or longer",
}


def agree(answer, kind, step):
    """Whether the twin's kind is the judge's, and its onset within the judge's interval or a little beside it."""
    if kind != answer.outcome.value:
        return False
    if step is None:
        return answer.onset_step is None
    low, high = answer.onset_interval
    return low - ALLOWED * answer.ramp_steps <= step <= high + ALLOWED * answer.ramp_steps


@pytest.mark.parametrize("curve", real_curves(), ids=lambda curve: curve.name)
def test_recorded_ramps(curve):
    known = Landmarks(unigram_entropy=curve.unigram_entropy, initial_loss=curve.initial_loss)
    ramp = (curve.steps, curve.learning_rates, curve.losses)
    answer = judge_run(*ramp, batch_losses=curve.batch_losses, ramp_steps=curve.ramp_steps, landmarks=known)
    cleaned = without_batches(curve.losses, curve.batch_losses)
    kind, at = obvious_verdict(cleaned, entropy=curve.unigram_entropy, initial=curve.initial_loss)
    step = None if at is None else int(curve.steps[at])
    assert agree(answer, kind, step) == (curve.name not in DIFFERENT_REAL), (answer.verdict(), kind, step)


@pytest.mark.parametrize("curve", SYNTHETIC, ids=lambda curve: curve.name)
def test_synthetic_curves(curve):
    answer = judge_run(
        curve.steps, curve.learning_rates, curve.losses, landmarks=Landmarks(unigram_entropy=curve.unigram_entropy)
    )
    kind, at = obvious_verdict(curve.losses, entropy=curve.unigram_entropy, initial=None)
    step = None if at is None else int(curve.steps[at])
    assert agree(answer, kind, step) == (curve.name not in DIFFERENT_SYNTHETIC), (answer.verdict(), kind, step)


def test_curves_that_differ_are_curves_and_few():
    assert set(DIFFERENT_REAL) <= {curve.name for curve in real_curves()}
    assert set(DIFFERENT_SYNTHETIC) <= {curve.name for curve in SYNTHETIC}
    assert len(DIFFERENT_REAL) <= 0.1 * len(real_curves())
    assert len(DIFFERENT_SYNTHETIC) <= 0.1 * len(SYNTHETIC)


@pytest.mark.parametrize(("bad", "kind"), [(np.nan, "non_finite"), (np.inf, "non_finite")])
def test_not_a_number_to_the_end(bad, kind):
    losses = np.r_[np.linspace(5, 3, 60), [bad] * 40]
    assert obvious_verdict(losses, entropy=None, initial=None) == (kind, 60)


def test_the_definition_is_five_sentences():
    assert DEFINITION.count(". ") + DEFINITION.endswith(".") == 5
