"""The scheduler: order, slots, memory, skipping, retrying; and real sweeps in processes of this machine."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes import sweep as module
from probes.errors import TextError
from probes.executors import JobOptions
from probes.sweep import Event, RunOptions, SweepInterrupted, biggest_first, run_sweep, verdict, visible_gpus
from probes.sweep_folder import SweepFolder
from probes.sweep_spec import Sweep
from probes.trial import SweepError, predicted_flops, predicted_memory
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import run_trial
from tests.probes._fake_slurm import FakeSlurm
from tests.probes._sweeps import PretendingExecutor, finish, numbers, one_trial, small_sweep


def pretend(monkeypatch: pytest.MonkeyPatch, **endings: list[Callable[[TrialFolder], None]]) -> PretendingExecutor:
    executor = PretendingExecutor(endings=endings)
    monkeypatch.setattr(module, "make_executor", lambda name, folder, options: executor)
    monkeypatch.setattr(module, "_POLL", {"local": 0.0, "debug": 0.0, "slurm": 0.0})
    executor.name = "local"
    return executor


def breaks(folder: TrialFolder) -> None:
    folder.write_failure("RuntimeError: broken")


def misconfigured(folder: TrialFolder) -> None:
    folder.write_failure("TextError: no text", user_error=True)


def dies(folder: TrialFolder) -> None:
    """Leave nothing, as a process does that was killed."""


def ends_by_request(folder: TrialFolder) -> None:
    folder.mark_interrupted()


def depths(*blocks: int) -> Sweep:
    return small_sweep(schemes=["keel"], blocks=list(blocks))


def test_biggest_comes_first() -> None:
    trials = biggest_first(depths(1, 4, 2).trials())
    assert [trial.config.model.n_blocks for trial in trials] == [4, 2, 1]
    costs = [predicted_flops(trial.config) for trial in trials]
    assert costs == sorted(costs, reverse=True)


def test_trials_are_submitted_biggest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    counts = run_sweep(depths(1, 4, 2), tmp_path, RunOptions(jobs=1))
    assert [trial.config.model.n_blocks for trial in executor.submitted] == [4, 2, 1]
    assert counts == {TrialState.FINISHED: 3}


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_never_more_jobs_than_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    executor = pretend(monkeypatch)
    run_sweep(small_sweep(seeds=[0, 1, 2]), tmp_path, RunOptions(jobs=jobs, memory=1 << 50))
    assert executor.most_side_by_side == jobs


@pytest.mark.parametrize(("threads", "jobs"), [(1, 6), (2, 3), (6, 1), (16, 1)])
def test_cpus_are_shared_out_in_slots_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, jobs: int
) -> None:
    executor = pretend(monkeypatch)
    monkeypatch.setattr(module, "available_cpus", lambda: 6)
    run_sweep(small_sweep(seeds=[0, 1, 2, 3]), tmp_path, RunOptions(memory=1 << 50, job=JobOptions(threads=threads)))
    assert executor.most_side_by_side == jobs


def test_memory_caps_what_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    sweep = small_sweep(seeds=[0, 1, 2])
    cap = int(2.5 * predicted_memory(sweep.trials()[0].config))
    counts = run_sweep(sweep, tmp_path, RunOptions(jobs=6, memory=cap))
    assert executor.most_side_by_side == 2
    assert executor.most_memory <= cap
    assert counts == {TrialState.FINISHED: 6}


def test_a_trial_that_does_not_fit_lets_smaller_ones_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    sweep = small_sweep(schemes=["keel"], widths=[16, 512, 1024])
    small, middle, big = (predicted_memory(trial.config) for trial in sweep.trials())
    assert middle + small <= big + small < big + middle
    run_sweep(sweep, tmp_path, RunOptions(jobs=3, memory=big + small))
    assert [trial.config.model.width for trial in executor.submitted] == [1024, 16, 512]


def test_a_trial_that_is_too_large_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    counts = run_sweep(small_sweep(), tmp_path, RunOptions(jobs=2, memory=1))
    assert counts == {TrialState.FINISHED: 2}
    assert executor.most_side_by_side == 1


def test_each_trial_on_a_gpu_has_one_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    monkeypatch.setattr(module, "visible_gpus", lambda: ["2", "GPU-3", "5"])
    sweep = small_sweep(seeds=[0, 1], training={"steps": 60, "seq_len": 16, "device": "cuda"})
    run_sweep(sweep, tmp_path, RunOptions(jobs=4, gpus=2, memory=1 << 50))
    assert executor.most_side_by_side == 2
    assert executor.gpus == ["2", "GPU-3", "2", "GPU-3"]


def test_a_gpu_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(module, "visible_gpus", list)
    sweep = small_sweep(training={"steps": 60, "seq_len": 16, "device": "cuda"})
    with pytest.raises(SweepError, match=r"asks for device 'cuda', and there is no GPU to give it"):
        run_sweep(sweep, tmp_path)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("4,6", ["4", "6"]),
        ("4, 6,7", ["4", "6"]),
        ("", ["0", "1"]),
        ("GPU-8,GPU-2", ["GPU-8", "GPU-2"]),
        ("MIG-1,MIG-2", ["MIG-1", "MIG-2"]),
    ],
)
def test_gpus_are_named_as_the_environment_does(monkeypatch: pytest.MonkeyPatch, named: str, found: list[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def test_finished_trials_are_skipped_across_changed_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    run_sweep(small_sweep(seeds=[0]), tmp_path)
    run_sweep(small_sweep(seeds=[0, 1], schemes=["keel"]), tmp_path)
    assert [(t.config.model.scheme, t.config.seed) for t in executor.submitted] == [("keel", 0), ("post_ln", 0), ("keel", 1)]
    _, folders = SweepFolder(tmp_path).read()
    assert [folder.trial.config.seed for folder in folders] == [0, 1]
    assert SweepFolder(tmp_path).noted() == {trial.key for trial in executor.submitted}


@pytest.mark.parametrize("breaking", [breaks, dies], ids=["error", "killed without a word"])
def test_a_broken_trial_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: Callable[[TrialFolder], None]
) -> None:
    executor = pretend(monkeypatch, keel=[breaking])
    events: list[Event] = []
    counts = run_sweep(small_sweep(), tmp_path, RunOptions(retries=1), on_event=events.append)
    assert counts == {TrialState.FINISHED: 2}
    assert [t.config.model.scheme for t in executor.submitted].count("keel") == 2
    assert [e.what for e in events if e.folder.trial.config.model.scheme == "keel"] == [
        "started",
        "failed",
        "started",
        "finished",
    ]


def test_what_keeps_breaking_is_left_and_the_next_run_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch, keel=[breaks, dies])
    assert run_sweep(small_sweep(), tmp_path, RunOptions(retries=1)) == {TrialState.FINISHED: 1, TrialState.FAILED: 1}
    (keel, _) = SweepFolder(tmp_path).read()[1]
    assert keel.failure is not None
    assert keel.failure["attempts"] == 2
    assert "killed by a signal, or out of memory" in keel.failure["error"]
    assert run_sweep(small_sweep(), tmp_path) == {TrialState.FINISHED: 2}
    assert len(executor.submitted) == 4


def test_a_trial_whose_configuration_is_at_fault_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch, keel=[misconfigured])
    assert run_sweep(small_sweep(), tmp_path, RunOptions(retries=5)) == {TrialState.FINISHED: 1, TrialState.FAILED: 1}
    assert len(executor.submitted) == 2


def test_an_interrupted_trial_goes_on_and_counts_as_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch, keel=[ends_by_request] * 3)
    assert run_sweep(small_sweep(), tmp_path, RunOptions(retries=0)) == {TrialState.FINISHED: 2}
    assert len(executor.submitted) == 5


def test_a_trial_that_another_process_runs_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    sweep = small_sweep(schemes=["keel"])
    folder = SweepFolder(tmp_path).folder(sweep.trials()[0])
    folder.write_trial()
    looks = iter([True, True, True])
    states = iter([True, True])

    def running(self: TrialFolder) -> bool:
        if next(states, False):
            return True
        if next(looks, None) is not None:
            finish(folder)
        return False

    monkeypatch.setattr(TrialFolder, "running", property(running))
    events: list[Event] = []
    assert run_sweep(sweep, tmp_path, on_event=events.append) == {TrialState.FINISHED: 1}
    assert [event.what for event in events] == ["waiting for another process", "finished"]
    assert executor.submitted == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_ends_what_runs_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    executor = pretend(monkeypatch, keel=[ends_by_request], post_ln=[ends_by_request])
    before = signal.getsignal(number)

    def strike(event: Event) -> None:
        os.kill(os.getpid(), number)

    with pytest.raises(SweepInterrupted, match=r"stopped; the same command goes on from"):
        run_sweep(small_sweep(), tmp_path, RunOptions(jobs=1), on_event=strike)
    assert not any(job.looks > 0 for job in executor.jobs)
    assert signal.getsignal(number) is before
    assert run_sweep(small_sweep(), tmp_path) == {TrialState.FINISHED: 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jobs": 0}, r"jobs must be at least 1, got 0"),
        ({"gpus": -1}, r"gpus must be at least 0, got -1"),
        ({"retries": -1}, r"retries must be at least 0, got -1"),
        ({"memory": 0}, r"memory must be at least 1, got 0"),
        ({"job": JobOptions(threads=0)}, r"threads must be at least 1, got 0"),
        ({"job": JobOptions(minutes=0)}, r"time must be at least 1 minute, got 0"),
        ({"save_seconds": math.nan}, r"save_seconds must be at least 0, got nan"),
    ],
)
def test_options_outside_their_domain_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        replace(RunOptions(), **changes)


@pytest.mark.parametrize(
    ("executor", "changes", "name"),
    [
        ("debug", {"jobs": 2}, "jobs"),
        ("debug", {"gpus": 3}, "gpus"),
        ("debug", {"memory": 1}, "memory"),
        ("debug", {"job": JobOptions(minutes=5)}, "time"),
        ("debug", {"job": JobOptions(partition="gpu")}, "partition"),
        ("local", {"job": JobOptions(partition="gpu")}, "partition"),
        ("local", {"job": JobOptions(parameters={"slurm_account": "us"})}, "parameters"),
        ("slurm", {"gpus": 3}, "gpus"),
        ("slurm", {"memory": 1}, "memory"),
    ],
)
def test_options_of_another_executor_are_named(executor: str, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(SweepError, match=rf"{name} cannot be given with executor '{executor}': {name} belongs to executor"):
        RunOptions(executor=executor, **changes)


@pytest.mark.parametrize(
    ("squeue", "sbatch", "message"),
    [
        ("echo no controller >&2; exit 1", "exit 0", r"Slurm does not answer: no controller"),
        ("exit 0", "echo invalid partition >&2; exit 1", r"Slurm refuses the job: .*invalid partition"),
    ],
    ids=["no controller", "refused"],
)
@pytest.mark.parametrize("earlier", [False, True], ids=["new folder", "earlier sweep"])
def test_a_sweep_that_slurm_refuses_leaves_everything_as_it_was(
    tmp_path: Path, slurm: FakeSlurm, squeue: str, sbatch: str, message: str, earlier: bool
) -> None:
    pytest.importorskip("submitit")
    slurm.does(squeue=squeue, sbatch=sbatch)
    folder = SweepFolder(tmp_path / "sweep")
    if earlier:
        before = small_sweep(seeds=[7]).trials()
        finish(folder.folder(before[0]))
        folder.write("before", before)
    events: list[Event] = []
    with pytest.raises(SweepError, match=message):
        run_sweep(small_sweep(), folder.path, RunOptions(executor="slurm"), on_event=events.append)
    assert events == []
    assert folder.path.exists() == earlier
    if earlier:
        assert folder.read()[0] == "before"
        assert {path.name for path in folder.path.iterdir()} <= {"sweep.json", "trials", ".lock"}
        assert len(list((folder.path / "trials").iterdir())) == 1


def test_a_text_that_is_not_there_is_told_before_anything_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    with pytest.raises(TextError, match=r"there is no text file or folder nofile"):
        run_sweep(small_sweep(corpus={"sources": ["nofile"]}), tmp_path / "sweep")
    assert executor.submitted == []
    assert not (tmp_path / "sweep").exists()


def test_a_damaged_result_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pretend(monkeypatch)
    run_sweep(small_sweep(), tmp_path)
    damaged = SweepFolder(tmp_path).read()[1][0]
    (damaged.path / "result.json").write_text("{", encoding="utf-8")
    assert run_sweep(small_sweep(), tmp_path) == {TrialState.FINISHED: 2}
    assert [trial.key for trial in executor.submitted].count(damaged.trial.key) == 2
    assert (damaged.path / "result.json.damaged").exists()


def test_verdict_of_plain_training_is_its_loss() -> None:
    assert verdict({"training": {"outcome": "finished", "final_loss": 2.5}}) == "finished, loss 2.5"
    assert verdict({"training": {"outcome": "non-finite", "final_loss": None}}) == "non-finite, loss not finite"


@pytest.mark.slow
def test_two_trials_in_processes_of_their_own(tmp_path: Path) -> None:
    sweep = small_sweep()
    counts = run_sweep(sweep, tmp_path / "sweep", RunOptions(jobs=2))
    assert counts == {TrialState.FINISHED: 2}
    folders = SweepFolder(tmp_path / "sweep").read()[1]
    jobs = {folder.job["job_id"] for folder in folders if folder.job}
    assert len(jobs) == 2
    assert str(os.getpid()) not in jobs
    for folder in folders:
        assert folder.result is not None
        assert folder.result["training"]["sessions"] == [{"first_step": 1, "threads": 1}]
        assert folder.result["judgement"]["ramp_steps"] == 60
        assert not (folder.run_path / "model.safetensors").exists()
        whole = TrialFolder(tmp_path / folder.trial.key, folder.trial)
        run_trial(whole, threads=1)
        assert numbers(folder) == numbers(whole), "another process makes no difference"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected_events"),
    [
        (signal.SIGKILL, ["started", "failed", "resumed", "finished"]),
        (signal.SIGTERM, ["started", "interrupted", "resumed", "finished"]),
        (signal.SIGUSR2, ["started", "finished"]),  # submitit's signal of preemption: the job queues itself again
    ],
)
def test_a_trial_that_is_struck_in_the_middle_goes_on_and_ends_bit_equal(
    tmp_path: Path, number: signal.Signals, expected_events: list[str]
) -> None:
    trial = one_trial(training={"steps": 400, "batch_size": 2, "seq_len": 16}, early_stop=False, peaks=[0.002])
    sweep = small_sweep(
        schemes=["keel"], training={"steps": 400, "batch_size": 2, "seq_len": 16}, early_stop=False, peaks=[0.002]
    )
    folder = SweepFolder(tmp_path / "sweep").folder(trial)

    def strike() -> None:
        while not ((folder.run_path / "state" / "latest.safetensors").exists() and folder.steps_done > 40):
            time.sleep(0.01)
        assert folder.job is not None
        watcher = folder.job["job_id"]
        (child,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text(encoding="ascii").split()
        os.kill(int(child), number)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    events: list[Event] = []
    counts = run_sweep(sweep, tmp_path / "sweep", RunOptions(jobs=1, save_seconds=0.1), on_event=events.append)
    thread.join(timeout=1)
    assert counts == {TrialState.FINISHED: 1}
    assert [event.what for event in events] == expected_events
    result = folder.result
    assert result is not None
    _, second = result["training"]["sessions"]
    assert second["first_step"] > 1, "it went on from its saved state"
    whole = TrialFolder(tmp_path / "whole", trial)
    expected = run_trial(whole, threads=1)
    assert len(numbers(folder)) == 400
    assert numbers(folder) == numbers(whole)
    assert {name: result[name] for name in ("judgement", "to_end")} == {
        name: expected[name] for name in ("judgement", "to_end")
    }
