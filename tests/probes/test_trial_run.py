"""One trial in this process: what it leaves, and how a job reports what went wrong."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import probes.divergence
import probes.training
import probes.trial_run as module
from probes.control_variates import without_batches
from probes.errors import TextError
from probes.run_folder import StepRecord
from probes.trial import SweepError, Trial
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import TrialJob, judge_records, run_trial
from tests.probes._sweeps import numbers, one_trial


def place(path: Path, trial: Trial | None = None) -> TrialFolder:
    trial = trial or one_trial()
    return TrialFolder(path / trial.key, trial)


def job(folder: TrialFolder) -> TrialJob:
    return TrialJob(folder=str(folder.path), trial=folder.trial.to_dict(), threads=1, save_seconds=60.0, keep_weights=False)


def test_a_stress_test_leaves_its_verdict(tmp_path: Path) -> None:
    folder = place(tmp_path)
    values = run_trial(folder, threads=1)
    assert folder.state is TrialState.FINISHED
    assert json.loads((folder.path / "result.json").read_text(encoding="utf-8")) == values
    assert values["key"] == folder.path.name
    assert values["peak_memory"] > 10_000_000
    assert values["judgement"]["last_step"] <= values["training"]["steps_done"]
    assert 0 < values["judged_seconds"] <= values["training"]["seconds"]
    assert [criterion["criterion"] for criterion in values["to_end"]["criteria"]] == [
        "non_finite",
        "irrecoverable_spike",
        "stagnation",
        "degradation",
    ]


def test_the_recorded_steps_are_judged_as_the_run_was(tmp_path: Path) -> None:
    folder = place(tmp_path)
    values = run_trial(folder, threads=1)
    again = judge_records(folder.records(), values["training"]["corpus"], ramp_steps=60)
    assert again.to_dict() == values["judgement"]


def test_a_replay_is_given_the_batches_and_a_reference_without_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old steps, of which the batches are not known, are among them."""
    rng = np.random.default_rng(0)
    of_batch = rng.normal(3.0, 0.1, (200, 2))
    records = [
        StepRecord(step=k, lr=1e-3 * k, loss=float(2.0 + b), grad_norm=1.0, time=0.1 * k, unigram_loss=u, bigram_loss=b)
        for k, (u, b) in enumerate(of_batch.tolist(), start=1)
    ]
    run = [replace(record, unigram_loss=None) if record.step <= 5 else record for record in records]
    given: dict[str, Any] = {}
    monkeypatch.setattr(probes.divergence, "judge_run", lambda *a, **options: given.update(options))
    judge_records(run, {"unigram_entropy": 3.0, "bigram_entropy": 2.0, "vocab_size": 256}, ramp_steps=200, reference=records)
    assert np.isnan(given["batch_losses"][:5]).all()
    assert given["batch_losses"][5:].tolist() == of_batch[5:].tolist()
    losses = np.array([record.loss for record in records])
    assert given["landmarks"].reference_losses.tolist() == without_batches(losses, of_batch).tolist()
    assert given["landmarks"].reference_losses.std() < 0.2 * losses.std()


def test_plain_training_is_not_judged(tmp_path: Path) -> None:
    trial = one_trial(kind="train", training={"steps": 60, "batch_size": 2, "seq_len": 16, "validation_tokens": 64})
    values = run_trial(place(tmp_path, trial), threads=1)
    assert "judgement" not in values
    assert values["training"]["validation_loss"] > 0


@pytest.mark.parametrize("keep", [False, True])
def test_weights_are_kept_if_asked_for(tmp_path: Path, keep: bool) -> None:
    folder = place(tmp_path)
    run_trial(folder, threads=1, keep_weights=keep)
    assert (folder.run_path / "model.safetensors").exists() is keep


def test_a_finished_trial_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place(tmp_path)
    first = run_trial(folder, threads=1)
    monkeypatch.setattr(module, "_train", lambda *a: pytest.fail("it was trained again"))
    assert run_trial(folder, threads=1) == first


def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_trial(place(tmp_path), threads=before + 1)
    assert torch.get_num_threads() == before


def test_a_trial_that_is_being_run_is_refused(tmp_path: Path) -> None:
    folder = place(tmp_path)
    with folder.locked(), pytest.raises(SweepError, match=r"another process runs the trial"):
        run_trial(folder)


def test_a_job_survives_pickling_and_says_that_it_finished(tmp_path: Path) -> None:
    folder = place(tmp_path)
    work = pickle.loads(pickle.dumps(job(folder)))
    assert work() == "finished"
    assert folder.state is TrialState.FINISHED


@pytest.mark.parametrize(
    ("error", "user_error"), [(RuntimeError("out of luck"), False), (TextError("no text"), True)], ids=["ours", "the user's"]
)
def test_an_error_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, user_error: bool
) -> None:
    def breaks(*args: Any) -> None:
        raise error

    folder = place(tmp_path)
    monkeypatch.setattr(module, "_train", breaks)
    assert job(folder)() == "failed"
    assert folder.state is TrialState.FAILED
    assert folder.failure is not None
    assert folder.failure["error"] == f"{type(error).__name__}: {error}"
    assert folder.failure["user_error"] is user_error
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_job_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise probes.training.TrainingInterrupted("stopped after step 3")

    folder = place(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", interrupted)
        assert job(folder)() == "interrupted"
    assert folder.interrupted
    assert folder.state is TrialState.WAITING
    assert job(folder)() == "finished"
    assert not folder.interrupted


def test_a_job_that_is_queued_again_is_the_same_job(tmp_path: Path) -> None:
    folder = place(tmp_path)
    work = job(folder)
    again = work.checkpoint()
    assert again.function is work
    assert again.result() == "finished"
    whole = place(tmp_path / "whole")
    run_trial(whole, threads=1)
    assert numbers(folder) == numbers(whole)


def test_the_package_that_queues_is_needed_only_then() -> None:
    import subprocess

    code = "import sys; import probes.trial_run, probes.sweep, probes.cli.sweep; print('submitit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
