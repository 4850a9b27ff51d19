"""A sweep on a real Slurm: ``make test-slurm``. Excluded from the ordinary suite, since it installs and starts daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes.sweep import Event, RunOptions, run_sweep
from probes.sweep_folder import SweepFolder
from probes.sweep_spec import Sweep
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import run_trial
from tests._slurm import one_node_cluster
from tests.probes._sweeps import numbers, small_sweep

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

_STEPS = 1500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_node_cluster(tmp_path_factory.mktemp("slurm")) as config, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        yield config


def _sweep(**changes: object) -> Sweep:
    plain = {"peaks": [0.002], "early_stop": False, "training": {"steps": _STEPS, "batch_size": 4, "seq_len": 16}}
    return small_sweep(**{**plain, "schemes": ["keel"], **changes})


def _options(**changes: object) -> RunOptions:
    return RunOptions(**{"executor": "slurm", "save_seconds": 0.5, "retries": 2, **changes})  # type: ignore[arg-type]


def _uninterrupted(sweep: Sweep, path: Path) -> TrialFolder:
    (trial,) = sweep.trials()
    folder = TrialFolder(path / trial.key, trial)
    run_trial(folder, threads=1)
    return folder


def _in_the_middle(folder: TrialFolder, strike: Callable[[TrialFolder], None]) -> threading.Thread:
    """Strike once, when the trial has saved a state and gone on from it."""

    def wait_and_strike() -> None:
        while not ((folder.run_path / "state" / "latest.safetensors").exists() and folder.steps_done > _STEPS // 10):
            time.sleep(0.02)
        strike(folder)

    thread = threading.Thread(target=wait_and_strike, daemon=True)
    thread.start()
    return thread


def _requeue(folder: TrialFolder) -> None:
    assert folder.job is not None
    subprocess.run(["scontrol", "requeue", folder.job["job_id"]], check=True)


def _preempt(folder: TrialFolder) -> None:
    """Send what submitit asks Slurm to send before a job is preempted or out of time."""
    assert folder.job is not None
    subprocess.run(["scancel", "--signal=USR2", folder.job["job_id"]], check=True)


def _kill(folder: TrialFolder) -> None:
    """SIGKILL to the process that trains, and to nothing else."""
    assert folder.job is not None
    (pid,) = _processes_of(folder.job["job_id"])
    os.kill(pid, signal.SIGKILL)


def _processes_of(job_id: str) -> list[int]:
    """Processes of a job whose command is submitit's own: the one that trains."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                command = (place / "cmdline").read_bytes()
                environment = (place / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                b"submitit.core._submit" in command
                and b"python" in command.split(b"\0")[0]
                and (f"SLURM_JOB_ID={job_id}".encode() in environment)
            ):
                found.append(int(place.name))
    return found


def test_a_sweep_of_two_schemes_comes_back_from_the_queue(cluster: Path, tmp_path: Path) -> None:
    sweep = _sweep(schemes=["keel", "post_ln"], training={"steps": 60, "batch_size": 2, "seq_len": 16})
    counts = run_sweep(sweep, tmp_path / "sweep", _options())
    assert counts == {TrialState.FINISHED: 2}
    jobs = [folder.job for folder in SweepFolder(tmp_path / "sweep").read()[1]]
    assert {job["executor"] for job in jobs if job} == {"slurm"}
    assert len({job["job_id"] for job in jobs if job}) == 2


@pytest.mark.parametrize("strike", [_requeue, _preempt, _kill], ids=["scontrol requeue", "preemption", "SIGKILL"])
def test_a_trial_that_is_struck_in_the_middle_ends_with_the_same_numbers(
    cluster: Path, tmp_path: Path, strike: Callable[[TrialFolder], None]
) -> None:
    sweep = _sweep()
    (trial,) = sweep.trials()
    folder = SweepFolder(tmp_path / "sweep").folder(trial)
    events: list[Event] = []
    thread = _in_the_middle(folder, strike)
    counts = run_sweep(sweep, tmp_path / "sweep", _options(), on_event=events.append)
    thread.join(timeout=1)
    result = folder.result
    assert counts == {TrialState.FINISHED: 1}
    assert result is not None
    sessions = result["training"]["sessions"]
    print(f"{[event.what for event in events]}; sessions {sessions}")
    assert not thread.is_alive()
    assert len(sessions) == 2
    assert sessions[1]["first_step"] > 1, "the second session went on from a saved state"
    whole = _uninterrupted(sweep, tmp_path / "whole")
    assert len(numbers(folder)) == _STEPS
    assert numbers(folder) == numbers(whole)
    assert whole.result is not None
    for name in ("judgement", "to_end"):
        assert result[name] == whole.result[name]
