"""A trial on disk: its state, its lock, and what it says of broken attempts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probes.errors import OutputError
from probes.trial import SweepError
from probes.trial_folder import TrialFolder, TrialState, hold
from tests.probes._sweeps import finish, one_trial


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    trial = one_trial()
    return TrialFolder(tmp_path / trial.key, trial)


def test_states_follow_what_is_on_the_disk(folder: TrialFolder) -> None:
    assert folder.state is TrialState.WAITING
    folder.write_trial()
    assert folder.state is TrialState.WAITING
    folder.write_failure("OSError: no")
    assert folder.state is TrialState.FAILED
    finish(folder)
    assert folder.state is TrialState.FINISHED
    assert folder.failure is None, "a finished trial is not broken any more"


def test_attempts_are_counted(folder: TrialFolder) -> None:
    folder.write_failure("first")
    folder.write_failure("second", user_error=True)
    assert folder.failure == {"error": "second", "user_error": True, "attempts": 2, "steps_done": 0}


def test_it_is_running_while_a_process_holds_it_and_not_after_that_was_killed(folder: TrialFolder) -> None:
    folder.write_trial()
    code = f"""
import time, pathlib
from probes.trial_folder import hold
with hold(pathlib.Path({str(folder.path / ".lock")!r}), "taken"):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "held"
        assert folder.state is TrialState.RUNNING
        with pytest.raises(SweepError, match=r"another process runs the trial in .*; wait for it"), folder.locked():
            pass
        process.kill()
        process.wait()
    assert folder.state is TrialState.WAITING
    with folder.locked():
        pass


def test_a_look_at_the_lock_keeps_nobody_out(folder: TrialFolder) -> None:
    folder.write_trial()
    with folder.locked():
        assert folder.running
    assert not folder.running


def test_a_lock_file_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*lock: No such file"), hold(tmp_path / "no" / "lock", "taken"):
        pass


def test_a_damaged_result_is_a_failure_that_says_so_and_is_put_aside(folder: TrialFolder) -> None:
    folder.write_failure("first")
    (folder.path / "result.json").write_text("{", encoding="utf-8")
    assert folder.result is None
    assert folder.state is TrialState.FAILED
    assert folder.failure is not None
    assert (folder.failure["attempts"], folder.failure["user_error"]) == (1, False)
    assert "result.json" in folder.failure["error"]
    assert "keel sweep run makes it anew" in folder.failure["error"]
    folder.write_trial()
    assert (folder.path / "result.json.damaged").read_text(encoding="utf-8") == "{"
    assert folder.damage == ""
    finish(folder)
    assert folder.state is TrialState.FINISHED


def test_steps_are_the_lines_of_the_log(folder: TrialFolder) -> None:
    assert folder.steps_done == 0
    folder.run_path.mkdir(parents=True)
    (folder.run_path / "log.jsonl").write_text("{}\n{}\n{}", encoding="utf-8")
    assert folder.steps_done == 2, "a line that is being written does not count"
