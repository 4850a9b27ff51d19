"""The judge on recorded curves of real ramps, beside what readers make of them."""

from pathlib import Path

import numpy as np
import pytest

from probes.control_variates import without_batches
from probes.divergence import JudgeThresholds, Landmarks, StreamingJudge, judge_run
from probes.divergence_criteria import Record
from tests.probes._real_curves import real_curves

CURVES = real_curves()
FITTED = [curve for curve in CURVES if not curve.held_out]
HELD_OUT = [curve for curve in CURVES if curve.held_out]
by_curve = pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)


def landmarks(curve):
    return Landmarks(unigram_entropy=curve.unigram_entropy, initial_loss=curve.initial_loss)


def judged(curve, stop=None, *, batches=True, **options):
    return judge_run(
        curve.steps[:stop],
        curve.learning_rates[:stop],
        curve.losses[:stop],
        batch_losses=curve.batch_losses[:stop] if batches else None,
        ramp_steps=curve.ramp_steps,
        landmarks=landmarks(curve),
        **options,
    )


def accepted(curve, answer):
    return curve.accepted_by(answer.outcome.value, answer.onset_step)


def test_every_curve_has_three_readings_and_every_outcome_is_among_them():
    assert {len({reading.reader for reading in curve.readings}) for curve in CURVES} == {3}
    kinds = {way.kind for curve in CURVES for reading in curve.readings for way in reading.ways}
    assert {"healthy", "stagnation", "irrecoverable_spike"} <= kinds
    assert len({curve.name for curve in CURVES}) == len(CURVES)
    assert len(HELD_OUT) >= 18
    assert all(len(curve.losses) == curve.ramp_steps for curve in CURVES)


@by_curve
def test_a_reader_would_accept_kind_and_onset(curve):
    answer = judged(curve)
    assert accepted(curve, answer), answer.verdict()


@pytest.mark.parametrize("curves", [FITTED, HELD_OUT], ids=["in view", "not in view"])
def test_most_readers_accept_as_they_accept_each_other(curves):
    """The judge is accepted by two of three readers nearly as often as a reader is by at least one of the other two."""
    by_most = np.mean([accepted(curve, judged(curve)) >= 2 for curve in curves])
    readers = []
    for curve in curves:
        for reading in curve.readings:
            first, others = reading.ways[0], [other for other in curve.readings if other is not reading]
            kind = first.kind.split("|")[0]
            readers.append(any(other.allows(kind, first.middle) for other in others))
    print(f"\n{len(curves)} curves: accepted by two of three {by_most:.3f}; readers by one of two {np.mean(readers):.3f}")
    assert by_most >= np.mean(readers) - 0.1


@by_curve
def test_the_verdict_is_the_same_streamed_replayed_cut_off_and_listened_to_the_end(curve):
    judge = StreamingJudge(ramp_steps=curve.ramp_steps, landmarks=landmarks(curve))
    fed = 0
    for step, rate, loss, batch in zip(curve.steps, curve.learning_rates, curve.losses, curve.batch_losses, strict=True):
        fed += 1
        if judge.feed(int(step), float(rate), float(loss), None, batch.tolist()):
            break
    streamed, replayed = judge.judgement(), judged(curve)
    assert repr(streamed) == repr(replayed) == repr(judged(curve, stop=fed))
    to_end = judged(curve, to_end=True)
    parts = ("outcome", "onset_step", "max_lr", "detected_step")
    assert [getattr(to_end, part) for part in parts] == [getattr(streamed, part) for part in parts]
    decided = next((c for c in streamed.criteria if c.criterion.value == streamed.outcome.value), None)
    assert decided is None or to_end.criterion(decided.criterion).onset_step == decided.onset_step


@by_curve
def test_batches_make_most_of_the_noise(curve):
    """Taken off, they leave a quarter of the standard deviation from step to step in the median, and four tenths at most."""
    assert record(curve).noise < 0.4 * record(curve, batches=False).noise


def counts(curves, **options):
    """On how many curves at least one reader, and at least two, would accept the judge; and by their first readings alone."""
    answers = [judged(curve, **options) for curve in curves]
    every = [accepted(curve, answer) for curve, answer in zip(curves, answers, strict=True)]
    first = [
        sum(reading.ways[0].allows(answer.outcome.value, answer.onset_step) for reading in curve.readings)
        for curve, answer in zip(curves, answers, strict=True)
    ]
    return [sum(vote >= n for vote in votes) for votes in (every, first) for n in (1, 2)]


def test_the_readme_says_how_often_readers_accept_the_judge_and_how_much_noise_is_left():
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    one, two, first_one, first_two = counts(CURVES)
    assert f"On {one} of {len(CURVES)} at least one of them would accept its kind and onset, on {two} at least two" in text
    assert f"by their first readings alone {first_one} and {first_two}." in text
    assert f"with {len(FITTED)} of these curves in view; of the {len(HELD_OUT)} others" in text
    raw_one, raw_two, *_ = counts(CURVES, batches=False)
    assert f"Without the batch losses, as most logs come, {raw_one} and {raw_two} of {len(CURVES)} are accepted" in text
    left = np.median([record(curve).noise / record(curve, batches=False).noise for curve in CURVES])
    assert f"that leaves {left:.2f} of the noise, in the median over {len(CURVES)} recorded ramps" in text


def test_the_readme_says_where_pre_ln_stays_on_the_high_ramp():
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    curves = [curve for curve in FITTED if curve.scheme == "pre_ln" and curve.peak_lr == 0.25]
    below = [curve.unigram_entropy - float(np.median(record(curve).losses)) for curve in curves]
    assert len(below) == 3
    assert f"its level is, in the median over the steps, {min(below):.1f} to {max(below):.1f} nats below the unigram" in text


def test_the_readme_says_what_the_former_thresholds_make_of_the_table():
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    former = JudgeThresholds(rise=0.05, plateau_margin=0.1)

    def by_seed(scheme, peak_lr, n_sublayers=64):
        chosen = [c for c in FITTED if (c.scheme, c.peak_lr, c.n_sublayers) == (scheme, peak_lr, n_sublayers)]
        return [judged(c, thresholds=former) for c in sorted(chosen, key=lambda c: c.seed)]

    words = ["healthy" if each.lower_bound else f"{each.max_lr:.4f}" for each in by_seed("pre_ln", 0.25)]
    assert f"Pre-LN's Max LR on the ramp to 0.25 is {words[0]}, {words[1]} and {words[2]} in the three seeds" in text
    assert f"Keel's stays at {np.median([each.max_lr for each in by_seed('keel', 0.25)]):.3f}" in text
    assert sum(each.diverged for each in by_seed("keel", 0.05)) == 2
    assert sum(each.diverged for each in by_seed("scaled_shortcut_normed_input_gain", 0.05)) == 3
    (deep,) = by_seed("keel", 0.05, 256)
    assert f"at 256 sub-layers ends in an {deep.outcome.words} at {deep.max_lr:.4f}" in text
    for weak in ("post_ln", "deepnorm", "hybrid_norm", "mix_ln"):
        for peak_lr in (0.05, 0.25):
            now = [judged(c).max_lr for c in FITTED if (c.scheme, c.peak_lr, c.n_sublayers) == (weak, peak_lr, 64)]
            assert sorted(now) == sorted(each.max_lr for each in by_seed(weak, peak_lr))


def record(curve, *, batches=True):
    losses = without_batches(curve.losses, curve.batch_losses if batches else None)
    return Record(curve.steps.astype(float), losses, curve.ramp_steps, landmarks(curve))


@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_units_do_not_matter(scale):
    """Nats or any other unit: the onset of a real curve stays where it is."""
    curve = next(c for c in CURVES if c.name == "scaled_shortcut_input_gain-64-0.25-seed0")
    known = Landmarks(unigram_entropy=scale * curve.unigram_entropy, initial_loss=scale * curve.initial_loss)
    moved = judge_run(
        curve.steps,
        curve.learning_rates,
        scale * curve.losses,
        batch_losses=scale * curve.batch_losses,
        ramp_steps=curve.ramp_steps,
        landmarks=known,
    )
    assert moved.onset_step == judged(curve).onset_step
    assert np.isclose(moved.best_loss, scale * judged(curve).best_loss)
