"""Executors: what they hand to submitit, and what they say where something is missing."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probes import executors as module
from probes import trial_run
from probes.executors import JobOptions, MissingSubmititError, RunningElsewhere, make_executor, slurm_jobs_alive
from probes.trial import SweepError
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import TrialJob
from tests.probes._fake_slurm import FakeSlurm
from tests.probes._sweeps import one_trial


def work(tmp_path: Path) -> TrialJob:
    trial = one_trial()
    return TrialJob(folder=str(tmp_path / trial.key), trial=trial.to_dict(), threads=1, save_seconds=60.0, keep_weights=False)


class Recorder:
    """Stands for submitit's module and for its executors."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.parameters: dict[str, Any] = {}
        self.environment: dict[str, str | None] = {}
        self.interrupts: Any = None
        self.job: TrialJob | None = None

    def LocalExecutor(self, **values: Any) -> Recorder:
        self.made = values
        return self

    AutoExecutor = LocalExecutor

    def update_parameters(self, **values: Any) -> None:
        self.parameters = values

    def submit(self, job: TrialJob) -> Any:
        self.job = job
        self.environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.interrupts = signal.getsignal(signal.SIGINT)
        return SimpleNamespace(job_id="17")


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(module, "import_module", lambda name: recorder)
    return recorder


@pytest.mark.parametrize("gpu", [None, "3", "GPU-5a1c", "MIG-7"])
def test_a_local_process_sees_its_own_gpu_and_its_own_threads(tmp_path: Path, submitit: Recorder, gpu: str | None) -> None:
    before = (os.environ.get("OMP_NUM_THREADS"), signal.getsignal(signal.SIGINT))
    job = make_executor("local", tmp_path, JobOptions(threads=3)).submit(work(tmp_path), memory=1, gpu=gpu)
    assert job.job_id == "17"
    assert submitit.environment == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert submitit.interrupts is signal.SIG_IGN, "Ctrl-C is for the scheduler, which asks each trial to save"
    assert submitit.job is not None
    assert submitit.job.visible_gpu == gpu
    assert submitit.parameters["timeout_min"] == 7 * 24 * 60
    assert (os.environ.get("OMP_NUM_THREADS"), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("gpu", ["3", "GPU-5a1c"])
def test_the_gpu_is_named_before_the_trial_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what submitit sets where it is asked for none
    seen: list[str] = []
    monkeypatch.setattr(trial_run, "run_trial", lambda *a, **k: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    assert replace(work(tmp_path), visible_gpu=gpu)() == "finished"
    assert seen == [gpu]


def test_a_slurm_job_asks_for_what_the_trial_needs(tmp_path: Path, submitit: Recorder, slurm: FakeSlurm) -> None:
    options = JobOptions(threads=4, minutes=90, partition="gpu", parameters={"slurm_account": "us"})
    make_executor("slurm", tmp_path, options).submit(work(tmp_path), memory=2_000_000_000, gpu="0")
    assert submitit.made["cluster"] == "slurm"
    assert submitit.parameters == {
        "name": "keel",
        "cpus_per_task": 4,
        "slurm_mem": "3001M",
        "slurm_additional_parameters": {"requeue": True},
        "timeout_min": 90,
        "slurm_partition": "gpu",
        "gpus_per_node": 1,
        "slurm_account": "us",
    }


def test_a_slurm_job_without_wishes_leaves_them_to_the_cluster(tmp_path: Path, submitit: Recorder, slurm: FakeSlurm) -> None:
    make_executor("slurm", tmp_path, JobOptions()).submit(work(tmp_path), memory=1, gpu=None)
    assert submitit.parameters.keys().isdisjoint({"timeout_min", "slurm_partition", "gpus_per_node"})


def test_a_job_that_slurm_refuses_is_one_message(
    tmp_path: Path, submitit: Recorder, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: TrialJob) -> None:
        raise RuntimeError("sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission failed")

    monkeypatch.setattr(submitit, "submit", refuse)
    before = os.environ.get("OMP_NUM_THREADS")
    with pytest.raises(SweepError, match=r"Slurm refuses the job: sbatch: error: invalid partition specified: gpuu sbatch"):
        make_executor("slurm", tmp_path, JobOptions()).submit(work(tmp_path), memory=1, gpu=None)
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_a_queue_is_asked_which_jobs_are_alive(slurm: FakeSlurm) -> None:
    slurm.does(squeue="echo 3; echo 5; echo 8")
    assert slurm_jobs_alive({"3", "4", "8"}) == {"3", "8"}


def test_while_a_queue_does_not_answer_no_job_is_given_up(slurm: FakeSlurm) -> None:
    slurm.does(squeue="exit 1")
    assert slurm_jobs_alive({"3", "4"}) == {"3", "4"}


def test_a_job_of_another_scheduler_counts_while_it_waits_in_the_queue(tmp_path: Path, slurm: FakeSlurm) -> None:
    trial = one_trial()
    other = RunningElsewhere(TrialFolder(tmp_path / trial.key, trial), "8", in_slurm_queue=True)
    slurm.does(squeue="echo 8")
    assert other.alive()
    slurm.does(squeue="echo 9")
    assert not other.alive()


def test_a_machine_without_slurm_is_told(tmp_path: Path, submitit: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SweepError, match=r"executor 'slurm' needs Slurm's commands: squeue: No such file"):
        make_executor("slurm", tmp_path, JobOptions())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm controller"),
        ("exit 3", "squeue ends with code 3"),
    ],
)
def test_a_queue_that_does_not_answer_is_told_before_anything_is_submitted(
    tmp_path: Path, submitit: Recorder, slurm: FakeSlurm, body: str, message: str
) -> None:
    slurm.does(squeue=body)
    with pytest.raises(SweepError, match=rf"Slurm does not answer: .*{message}; nothing was submitted"):
        make_executor("slurm", tmp_path, JobOptions())


def test_an_unknown_executor_is_told(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"unknown executor 'cloud'; known: local, slurm, debug"):
        make_executor("cloud", tmp_path, JobOptions())


def test_without_submitit_it_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingSubmititError, match=r"pip install 'keel-dynamics\[sweep\]'"):
        make_executor("local", tmp_path, JobOptions())


def test_debug_runs_in_this_process_at_the_first_look(tmp_path: Path) -> None:
    job = work(tmp_path)
    made = make_executor("debug", tmp_path / "jobs", JobOptions()).submit(job, memory=1, gpu=None)
    place = TrialFolder(Path(job.folder), one_trial())
    assert place.state is TrialState.WAITING
    assert not made.alive()
    assert place.state is TrialState.FINISHED


def test_debug_runs_nothing_that_was_stopped_before(tmp_path: Path) -> None:
    job = work(tmp_path)
    made = make_executor("debug", tmp_path / "jobs", JobOptions()).submit(job, memory=1, gpu=None)
    made.stop()
    assert not made.alive()
    assert not Path(job.folder).exists()
