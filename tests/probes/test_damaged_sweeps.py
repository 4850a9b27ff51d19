"""Sweeps whose files somebody has damaged: one trial never blocks the others, and file and field are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes import trial_folder
from probes.errors import CheckpointError
from probes.sweep_folder import SweepFolder
from probes.sweep_results import results_frame, status_rows
from probes.trial import SweepError
from probes.trial_folder import TrialFolder, TrialState
from tests._cli import run_keel
from tests.probes._damage import BROKEN_FILES, changed, identifiers, rewrite, without, wrong_values
from tests.probes._sweeps import finish, one_trial, pretended_result, small_sweep

FIELDS = {**trial_folder._TRAINED_FIELDS, **trial_folder._JUDGED_FIELDS}
WRONG = wrong_values(FIELDS)
WRONG_ROWS = wrong_values(trial_folder._CRITERION_FIELDS)


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    place = TrialFolder(tmp_path / one_trial().key, one_trial())
    finish(place)
    return place


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """Three finished trials and one that waits."""
    found, trials = SweepFolder(tmp_path / "sweep"), small_sweep(seeds=[0, 1]).trials()
    places = list(map(found.folder, trials))
    for place in places[:3]:
        finish(place)
    found.write("small", trials)
    return found


def assert_damaged(folder: TrialFolder, words: str) -> None:
    assert folder.result is None
    assert folder.state is TrialState.FAILED
    assert "result.json" in folder.damage
    assert words in folder.damage


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
def test_a_broken_result_is_a_failed_trial(folder: TrialFolder, content: bytes) -> None:
    (folder.path / "result.json").write_bytes(content)
    assert_damaged(folder, "")


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_of_a_result_is_named(folder: TrialFolder, field: str) -> None:
    rewrite(folder.path / "result.json", without(pretended_result(folder.trial), field))
    assert_damaged(folder, f"field '{field}' is missing")


@pytest.mark.parametrize(("field", "value"), WRONG, ids=identifiers(WRONG))
def test_a_wrong_field_of_a_result_is_named(folder: TrialFolder, field: str, value: Any) -> None:
    rewrite(folder.path / "result.json", changed(pretended_result(folder.trial), field, value))
    assert_damaged(folder, f"field '{field}' must be ")


@pytest.mark.parametrize(("field", "value"), WRONG_ROWS, ids=identifiers(WRONG_ROWS))
def test_a_wrong_row_of_the_criteria_is_named(folder: TrialFolder, field: str, value: Any) -> None:
    result = pretended_result(folder.trial)
    (row,) = result["to_end"]["criteria"]
    rewrite(folder.path / "result.json", changed(result, "to_end.criteria", [row, {**row, field: value}]))
    assert_damaged(folder, f"criterion 2 of 'to_end.criteria': field '{field}' must be ")


def test_plain_training_has_no_verdict_to_miss(tmp_path: Path) -> None:
    trial = one_trial(kind="train")
    place = TrialFolder(tmp_path / trial.key, trial)
    finish(place)
    assert place.state is TrialState.FINISHED


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
def test_one_damaged_trial_blocks_neither_status_nor_results(sweep: SweepFolder, content: bytes) -> None:
    damaged = sweep.read()[1][1]
    (damaged.path / "result.json").write_bytes(content)
    rows = status_rows(sweep)
    assert [row["state"] for row in rows] == ["finished", "failed", "finished", "waiting"]
    assert "result.json" in rows[1]["about"]
    assert results_frame(sweep.read()[1])["trial"].nunique() == 2


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, "sweep", *arguments)


def test_the_commands_name_the_damage_and_go_on(sweep: SweepFolder, monkeypatch, capsys) -> None:
    damaged = sweep.read()[1][1]
    rewrite(damaged.path / "result.json", without(pretended_result(damaged.trial), "to_end"))
    code, out, _ = run(monkeypatch, capsys, "status", sweep.path)
    assert code == 0
    assert "2 finished, 0 running, 1 failed, 1 waiting" in out
    code, _, err = run(monkeypatch, capsys, "results", sweep.path)
    assert code == 0
    assert "result.json: field 'to_end.best_loss' is missing; keel sweep run makes it anew" in err
    assert "2 of 4 trials are finished" in err


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
@pytest.mark.parametrize("name", ["failure.json", "job.json"])
def test_a_broken_note_blocks_nothing(sweep: SweepFolder, name: str, content: bytes) -> None:
    waiting = sweep.read()[1][3]
    waiting.write_trial()
    (waiting.path / name).write_bytes(content)
    assert waiting.job is None
    assert status_rows(sweep)[3]["state"] == ("failed" if name == "failure.json" else "waiting")
    waiting.write_failure("again")
    assert waiting.failure is not None
    assert (waiting.failure["error"], waiting.failure["attempts"]) == ("again", 1)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (None, r"cannot read .*log\.jsonl: No such file"),
        ("", r"log\.jsonl holds no step"),
        ('{"step": 1, "lr": 0.1, "grad_norm": 1.0, "time": 1.0}\n', r"log\.jsonl line 1: field 'loss' is missing"),
        ("{}\n", r"log\.jsonl line 1: field 'step' is missing"),
    ],
    ids=["missing", "empty", "no loss", "no field"],
)
def test_a_damaged_log_of_a_trial_is_named(sweep: SweepFolder, monkeypatch, capsys, log: str | None, message: str) -> None:
    place = sweep.read()[1][0]
    if log is not None:
        place.run_path.mkdir()
        (place.run_path / "log.jsonl").write_text(log, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        place.records()
    code, _, err = run(monkeypatch, capsys, "results", sweep.path, "--rejudge")
    assert code == 2
    assert "log.jsonl" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: without(v, "name"), r"field 'name' is missing"),
        (lambda v: without(v, "trials"), r"field 'trials' is missing"),
        (lambda v: changed(v, "name", 3), r"field 'name' must be a text"),
        *((lambda v, e=empty: changed(v, "trials", e), r"field 'trials' must be a list") for empty in ([], {}, 3, None, [3])),
        *(
            (lambda v, n=name: _in_trial(v, n, None), rf"trial 1: field '{name}' must be")
            for name in ("kind", "early_stop", "config")
        ),
        (lambda v: _in_trial(v, "kind", "weird"), r"trial 1: kind must be one of stress, train"),
        (lambda v: _in_trial(v, "config", {"steps": "x"}), r"trial 1: steps must be an integer"),
        (
            lambda v: _in_trial(v, "config", {"model": {**v["trials"][0]["config"]["model"], "scheme": "weird"}}),
            r"trial 1: unknown scheme",
        ),
        (lambda v: _in_trial(v, "config", {"model": 3}), r"trial 1: model must be a table"),
        (lambda v: _in_trial(v, "config", {"corpus": {"sauce": 3}}), r"trial 1: unknown field\(s\) of a text: sauce"),
        (lambda v: _in_trial(v, "config", {"nobody": 3}), r"trial 1: unknown training configuration field\(s\): nobody"),
    ],
)
def test_a_damaged_list_of_trials_is_named(sweep: SweepFolder, change, message: str) -> None:
    path = sweep.path / "sweep.json"
    rewrite(path, change(json.loads(path.read_text(encoding="utf-8"))))
    with pytest.raises(SweepError, match=rf"sweep\.json: {message}.*; run the sweep again to write it anew"):
        sweep.read()


def _in_trial(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    first, *others = values["trials"]
    return changed(values, "trials", [{**first, name: value}, *others])


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
def test_a_broken_list_of_trials_is_named(sweep: SweepFolder, content: bytes) -> None:
    (sweep.path / "sweep.json").write_bytes(content)
    with pytest.raises(SweepError, match=r"sweep\.json.*; run the sweep again to write it anew"):
        sweep.read()


@pytest.mark.parametrize("line", ["3", "[]", "{", '{"key": 3}', '{"key": []}', "[" * 100_000, "\xff"])
def test_a_damaged_line_of_the_results_is_passed_over(sweep: SweepFolder, line: str) -> None:
    sweep.catch_up(sweep.read()[1])
    before = sweep.noted()
    assert len(before) == 3
    with (sweep.path / "results.jsonl").open("a", encoding="latin-1") as file:
        file.write(f"{line}\n")
    assert sweep.noted() == before
