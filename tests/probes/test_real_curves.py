"""The judge on recorded curves of real ramps, beside what readers make of them."""

import numpy as np
import pytest

from probes.control_variates import without_batches
from probes.divergence import JudgeThresholds, Landmarks, StreamingJudge, judge_run
from probes.divergence_criteria import Record, find_rise
from probes.judgement import Criterion, Outcome, Status
from probes.onset import running_median
from tests._readme import readme_words
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


MISSED_WHOLE = {"scaled_shortcut_input_gain-64-0.05-seed2": "a drift that gathers pace, dated ten steps before the readings"}
"""Curves whose rise is dated otherwise once all of their points are there, and in what way."""


def _rising():
    """Curves that are judged to leave their level; those missed are expected to fail."""
    marks = {name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in MISSED_WHOLE.items()}
    rising = [curve for curve in CURVES if judged(curve).outcome is Outcome.IRRECOVERABLE_SPIKE]
    return [pytest.param(curve, id=curve.name, marks=marks.get(curve.name, [])) for curve in rising]


@pytest.mark.parametrize("curve", _rising())
def test_more_of_the_curve_dates_the_same_rise(curve):
    """Not only the verdict that stands: a fresh look at all points finds the onset where a reader would accept it."""
    rise = find_rise(record(curve), JudgeThresholds())
    assert rise is not None
    assert curve.accepted_by("irrecoverable_spike", int(curve.steps[rise.index]))


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
    assert by_most >= max(0.9, np.mean(readers) - 0.1)


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
    text = readme_words()
    one, two, first_one, first_two = counts(CURVES)
    assert f"On {one} of {len(CURVES)} at least one of them would accept its kind and onset, on {two} at least two" in text
    assert f"by their first readings alone {first_one} and {first_two}." in text
    assert f"with {len(FITTED)} of these curves in view; of the {len(HELD_OUT)} others" in text
    raw_one, raw_two, *_ = counts(CURVES, batches=False)
    assert f"Without the batch losses, as most logs come, {raw_one} and {raw_two} of {len(CURVES)} are accepted" in text
    left = np.median([record(curve).noise / record(curve, batches=False).noise for curve in CURVES])
    assert f"that leaves {left:.2f} of the noise, in the median over {len(CURVES)} recorded ramps" in text


def test_the_readme_says_where_pre_ln_stays_on_the_high_ramp():
    text = readme_words()
    below = [curve.unigram_entropy - float(np.median(record(curve).losses)) for curve in table("pre_ln", 0.25)]
    assert len(below) == 3
    assert f"its level is, in the median over the steps, {min(below):.1f} to {max(below):.1f} nats below the unigram" in text


def table(scheme, peak_lr, n_sublayers=64):
    """The curves of a cell of the table, by seed."""
    chosen = [c for c in FITTED if (c.scheme, c.peak_lr, c.n_sublayers) == (scheme, peak_lr, n_sublayers)]
    return sorted(chosen, key=lambda curve: curve.seed)


def test_the_readme_compares_ramps_and_depths_as_they_are():
    text = readme_words()
    median = {
        (scheme, peak_lr): np.median([judged(curve).max_lr for curve in table(scheme, peak_lr)])
        for scheme in ("post_ln", "deepnorm", "hybrid_norm", "mix_ln")
        for peak_lr in (0.05, 0.25)
    }
    assert "the other three have a higher Max LR on the steeper ramp" in text
    assert {scheme for scheme, _ in median if median[scheme, 0.25] > median[scheme, 0.05]} == {
        "post_ln",
        "deepnorm",
        "hybrid_norm",
    }
    (keel,), (post_ln,) = table("keel", 0.05, 256), table("post_ln", 0.05, 256)
    assert "four times Post-LN's rate" in text
    assert round(judged(keel).max_lr / judged(post_ln).max_lr) == 4
    assert "it learns to 3.0 nats" in text
    assert round(float(running_median(record(keel).losses, 21).min()), 1) == 3.0
    assert "two of its seeds end less than a tenth of what was learned above their lowest level" in text
    levels = [running_median(record(curve).losses, 21) for curve in table("keel", 0.05)]
    above = [(level[-11:].mean() - level.min()) / (np.log(256) - level.min()) for level in levels]
    assert sorted(share > 0.05 for share in above) == [False, True, True]
    assert max(above) < 0.1


@pytest.mark.parametrize("curve", [c for c in FITTED if c.scheme != "pre_ln" and c.n_sublayers == 64], ids=lambda c: c.name)
def test_no_run_of_the_table_is_a_degradation_beside_pre_ln(curve):
    (healthy,) = [c for c in table("pre_ln", curve.peak_lr) if c.seed == curve.seed]
    known = Landmarks(
        unigram_entropy=curve.unigram_entropy,
        initial_loss=curve.initial_loss,
        reference_steps=healthy.steps.astype(float),
        reference_losses=record(healthy).losses,
    )
    answer = judge_run(
        curve.steps,
        curve.learning_rates,
        curve.losses,
        batch_losses=curve.batch_losses,
        ramp_steps=curve.ramp_steps,
        landmarks=known,
    )
    assert answer.criterion(Criterion.DEGRADATION).status is Status.NOT_MET


def test_the_readme_says_what_the_former_thresholds_make_of_the_table():
    text = readme_words()
    former = JudgeThresholds(rise=0.05, plateau_margin=0.1)

    def by_seed(*cell):
        return [judged(curve, thresholds=former) for curve in table(*cell)]

    words = ["healthy" if each.lower_bound else f"{each.max_lr:.4f}" for each in by_seed("pre_ln", 0.25)]
    assert f"Pre-LN's Max LR on the ramp to 0.25 is {words[0]}, {words[1]} and {words[2]} in the three seeds" in text
    assert f"Keel's stays at {np.median([each.max_lr for each in by_seed('keel', 0.25)]):.3f}" in text
    assert sum(each.diverged for each in by_seed("keel", 0.05)) == 2
    assert sum(each.diverged for each in by_seed("scaled_shortcut_normed_input_gain", 0.05)) == 3
    (deep,) = by_seed("keel", 0.05, 256)
    assert f"at 256 sub-layers ends in an {deep.outcome.words} at {deep.max_lr:.4f}" in text
    for weak in ("post_ln", "deepnorm", "hybrid_norm", "mix_ln"):
        for peak_lr in (0.05, 0.25):
            assert [judged(c).max_lr for c in table(weak, peak_lr)] == [each.max_lr for each in by_seed(weak, peak_lr)]


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


PARTS = {"even steps": slice(1, None, 2), "odd steps": slice(0, None, 2), "without the first twenty": slice(20, None)}


def judged_again(curve, part=slice(None), seed=None):
    noise = 0.0 if seed is None else 0.05 * np.random.default_rng(seed).standard_normal(len(curve.losses))
    return judge_run(
        curve.steps[part],
        curve.learning_rates[part],
        (curve.losses + noise)[part],
        batch_losses=curve.batch_losses[part],
        ramp_steps=curve.ramp_steps,
        landmarks=landmarks(curve),
    )


MOVED = {
    "mix_ln-64-0.05-seed1": "a rise of about what counts to the unigram level: spike or plateau, as readers have it",
    "scaled_shortcut_normed_input_gain-64-0.05-seed1": "a drift that comes to a tenth of what was learned at the end alone",
}
"""Curves whose kind or interval a little noise moves further, and why."""


def _moving():
    marks = {name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in MOVED.items()}
    return [pytest.param(curve, id=curve.name, marks=marks.get(curve.name, [])) for curve in CURVES[::5]]


@pytest.mark.parametrize("curve", _moving())
def test_noise_and_fewer_points_change_no_kind_but_to_one_that_a_reader_names_and_intervals_overlap(curve):
    """To the distance of two points."""
    read = {kind for reading in curve.readings for way in reading.ways for kind in way.kind.split("|")}
    plain = judged_again(curve)
    again = [judged_again(curve, part) for part in PARTS.values()] + [judged_again(curve, seed=seed) for seed in range(2)]
    for other in again:
        assert other.outcome is plain.outcome or other.outcome.value in read
        if plain.onset_interval is None or other.onset_interval is None:
            continue
        low, high = other.onset_interval
        assert low <= other.onset_step <= high
        assert max(low, plain.onset_interval[0]) <= min(high, plain.onset_interval[1]) + 2
