"""The arithmetic of the benchmark on logs whose answer is known, and the whole of it on a tiny sweep."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import early_stopping
import pytest
from early_stopping import TimedTrial, limits_broken, makespan, stopped_runs, summary, time_trial, to_the_end

from probes.divergence import Landmarks, StreamingJudge
from probes.divergence_criteria import JudgeThresholds
from probes.run_folder import StepRecord
from probes.trial import SweepError, Trial
from probes.trial_folder import TrialFolder
from tests.probes._sweeps import one_trial, pretended_result, small_sweep

STEPS = 60
CORPUS = {"unigram_entropy": 3.0, "bigram_entropy": 2.0, "vocab_size": 256}
BREAKS = 30
"""Step from which the loss is no number."""
STOP = BREAKS + JudgeThresholds().non_finite_patience - 1


def losses(breaks: int | None = None) -> list[float]:
    """A loss that falls below the unigram entropy, and from one step on is no number."""
    plain = [2.0 + 3.5 * math.exp(-step / 10) for step in range(1, STEPS + 1)]
    return plain if breaks is None else [*plain[: breaks - 1], *[math.nan] * (STEPS - breaks + 1)]


def finished(path: Path, values: list[float], *, seconds: float = 2.0, trial: Trial | None = None) -> TrialFolder:
    """A trial that was run to its end, with a log of these losses and the judge's own verdict."""
    folder = TrialFolder(path, trial or one_trial(early_stop=False, training={"steps": STEPS, "batch_size": 2, "seq_len": 16}))
    folder.write_trial()
    folder.run_path.mkdir(parents=True)
    records = [
        StepRecord(step=step, lr=0.001 * step, loss=loss, grad_norm=1.0, time=seconds * step)
        for step, loss in enumerate(values, start=1)
    ]
    (folder.run_path / "log.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    heard = early_stopping.listen(records, folder.trial, Landmarks(unigram_entropy=3.0, initial_loss=math.log(256)))
    result = pretended_result(folder.trial)
    result["training"]["corpus"] |= CORPUS
    folder.write_result({**result, "judgement": heard.to_dict()})
    return folder


def timed(stop_seconds: float, end_seconds: float, *, may_stop: bool = True, scheme: str = "keel") -> TimedTrial:
    return TimedTrial(
        scheme=scheme,
        peak_lr=0.05,
        steps=STEPS,
        seed=0,
        may_stop=may_stop,
        outcome="stagnation",
        max_lr=0.01,
        stop_step=30 if stop_seconds < end_seconds else STEPS,
        stop_seconds=stop_seconds,
        end_step=STEPS,
        end_seconds=end_seconds,
        judge_cpu_seconds=0.001,
        equal=True,
        as_heard=True,
        holds=True,
        outcome_at_end="stagnation",
        max_lr_at_end=0.01,
    )


def test_a_ramp_that_breaks_is_stopped_where_the_judge_is_certain(tmp_path: Path) -> None:
    found = time_trial(finished(tmp_path, losses(BREAKS)), may_stop=True)
    assert (found.outcome, found.max_lr) == ("non_finite", pytest.approx(0.001 * (BREAKS - 1)))
    assert (found.stop_step, found.end_step) == (STOP, STEPS)
    assert (found.stop_seconds, found.end_seconds) == (2.0 * STOP, 2.0 * STEPS)
    assert found.committed_seconds == found.stop_seconds
    assert found.judge_cpu_seconds > 0
    assert (found.equal, found.as_heard, found.holds) == (True, True, True)


def test_every_judge_is_told_what_the_batches_make_of_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path, losses())
    told = [replace(record, unigram_loss=3.0, bigram_loss=2.0 + 0.01 * record.step) for record in folder.records()]
    (folder.run_path / "log.jsonl").write_text("".join(record.to_json() + "\n" for record in told))
    feed, heard = StreamingJudge.feed, []

    def listening(self, *arguments, batch_losses=None):
        heard.append(batch_losses)
        return feed(self, *arguments, batch_losses=batch_losses)

    monkeypatch.setattr(StreamingJudge, "feed", listening)
    time_trial(folder, may_stop=True)
    assert heard == 3 * [record.batch_losses for record in told]


def test_a_ramp_that_holds_is_run_to_its_end_either_way(tmp_path: Path) -> None:
    found = time_trial(finished(tmp_path, losses()), may_stop=True)
    assert found.outcome == "healthy"
    assert found.stop_seconds == found.end_seconds == 2.0 * STEPS
    assert found.holds


def test_a_grid_that_runs_on_costs_its_whole_ramp(tmp_path: Path) -> None:
    found = time_trial(finished(tmp_path, losses(BREAKS)), may_stop=False)
    assert (found.committed_seconds, found.stop_seconds) == (2.0 * STEPS, 2.0 * STOP)


def test_a_verdict_of_another_judge_is_told(tmp_path: Path) -> None:
    folder = finished(tmp_path, losses(BREAKS))
    result = folder.result
    result["judgement"]["max_lr"] = 0.5
    folder.write_result(result)
    found = time_trial(folder, may_stop=True)
    assert (found.equal, found.as_heard) == (True, False)


def test_a_recovery_after_the_stop_changes_no_verdict(tmp_path: Path) -> None:
    values = losses(BREAKS)
    values[STOP + 3 :] = losses()[STOP + 3 :]
    found = time_trial(finished(tmp_path, values), may_stop=True)
    assert (found.stop_step, found.equal, found.holds) == (STOP, True, True)


@pytest.mark.parametrize("field", ["onset_step", "max_lr"])
def test_a_verdict_that_the_rest_of_the_ramp_would_change_is_told(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = early_stopping.listen

    def wavering(*arguments, to_end=False):
        judgement = listen(*arguments, to_end=to_end)
        return replace(judgement, **{field: 3}) if to_end else judgement

    monkeypatch.setattr(early_stopping, "listen", wavering)
    found = time_trial(finished(tmp_path, losses(BREAKS)), may_stop=True)
    assert (found.equal, found.as_heard, found.holds) == (True, True, False)


def test_a_clock_that_starts_again_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, losses())
    log = folder.run_path / "log.jsonl"
    records = [replace(record, time=record.time - 60.0 * (record.step > 40)) for record in folder.records()]
    log.write_text("".join(record.to_json() + "\n" for record in records))
    with pytest.raises(SweepError, match=r"the clock goes back from 80\.000 s to 22\.000 s at step 41"):
        time_trial(folder, may_stop=True)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_trial_without_a_whole_ramp_is_refused(early_stop: bool, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="has not been run to its end"):
        time_trial(TrialFolder(tmp_path, one_trial(early_stop=early_stop)), may_stop=True)


def test_every_grid_is_run_to_its_end_and_the_committed_choice_is_remembered() -> None:
    sweep = small_sweep(schemes=["keel"], grid=[{"early_stop": False}, {"peaks": [0.1]}])
    whole = to_the_end(sweep)
    assert [trial.early_stop for trial in sweep.trials()] == [False, True]
    assert [trial.early_stop for trial in whole.trials()] == [False, False]
    stops = stopped_runs(sweep)
    assert [stops[trial.config.key] for trial in whole.trials()] == [False, True]


def test_a_run_that_any_grid_takes_to_its_end_is_not_stopped() -> None:
    sweep = small_sweep(schemes=["keel"], grid=[{}, {"early_stop": False}])
    assert len(sweep.trials()) == 2
    assert list(stopped_runs(sweep).values()) == [False]
    assert len(to_the_end(sweep).trials()) == 1


def test_plain_training_is_refused() -> None:
    with pytest.raises(SweepError, match="is no stress test; only these are judged"):
        stopped_runs(small_sweep(kind="train"))


@pytest.mark.parametrize(
    ("seconds", "workers", "length"),
    [([5.0, 4.0, 3.0], 1, 12.0), ([5.0, 4.0, 3.0], 2, 7.0), ([4.0, 3.0, 3.0], 2, 6.0), ([5.0, 4.0, 3.0], 9, 5.0)],
)
def test_each_free_worker_takes_the_next_trial(seconds: list[float], workers: int, length: float) -> None:
    assert makespan(seconds, workers) == length


def test_sums_and_schedules_of_the_three_ways() -> None:
    found = summary([timed(10.0, 40.0, may_stop=False), timed(10.0, 30.0), timed(20.0, 20.0)], 2)
    assert (found["trials"], found["stopped"]) == (3, 2)
    assert found["seconds"] == {"to_the_end": 90.0, "as_committed": 70.0, "stopping_everywhere": 40.0}
    assert found["share_of_the_time"]["as_committed"] == pytest.approx(70 / 90)
    assert found["makespan_seconds"] == {"to_the_end": 50.0, "as_committed": 40.0, "stopping_everywhere": 30.0}
    assert found["share_of_the_makespan"]["stopping_everywhere"] == pytest.approx(0.6)
    assert found["judge_cpu_seconds"] == pytest.approx(0.003)


def test_limits() -> None:
    good = timed(10.0, 40.0)
    assert limits_broken([good]) == []
    (differing,) = limits_broken([good, replace(good, scheme="post_ln", equal=False)])
    assert "post_ln, peak 0.05 in 60 steps, seed 0: the verdict at the stop is not that of the whole log" in differing
    (slow,) = limits_broken([replace(good, judge_cpu_seconds=0.2)])
    assert slow == "the judge takes 2.00% of the time of training"


@pytest.mark.slow
def test_a_tiny_sweep_is_run_once_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "tiny.toml").write_text(
        'schemes = ["post_ln", "keel"]\nblocks = [2]\nwidths = [16]\nseeds = [0]\n'
        "[training]\nsteps = 60\nbatch_size = 2\nseq_len = 16\n[corpus]\nmax_bytes = 60000\n"
        "[[grid]]\npeaks = [2.0]\n[[grid]]\npeaks = [0.02]\nearly_stop = false\n"
    )
    output = tmp_path / "out.json"
    arguments = ["--sweep", str(tmp_path / "tiny.toml"), "--runs", str(tmp_path / "runs"), "--jobs", "2", "-o", str(output)]
    early_stopping.main(arguments)
    first = json.loads(output.read_text())
    assert first["table"]["trials"] == first["verdicts_equal"] == first["verdicts_as_heard"] == 4
    assert {trial["end_step"] for trial in first["trials"] if trial["outcome"] != "non_finite"} <= {60}
    assert first["table"]["stopped"] >= 1
    seconds = first["table"]["seconds"]
    assert 0 < seconds["stopping_everywhere"] <= seconds["as_committed"] < seconds["to_the_end"]
    assert seconds["to_the_end"] == pytest.approx(sum(found["seconds"]["to_the_end"] for found in first["schemes"].values()))
    out = capsys.readouterr().out
    assert "post_ln" in out
    assert "of 4 verdicts at the stop, 4 are those of the whole log" in out
    early_stopping.main(arguments)
    assert "started" not in capsys.readouterr().err
    assert json.loads(output.read_text())["table"]["seconds"] == seconds
