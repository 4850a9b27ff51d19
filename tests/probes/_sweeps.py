"""Small sweeps shared by the tests, and an executor that only pretends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.executors import Job
from probes.sweep_spec import Sweep, sweep_from_dict
from probes.trial import Trial
from probes.trial_folder import TrialFolder
from probes.trial_run import TrialJob

SMALL: dict[str, Any] = {
    "name": "small",
    "schemes": ["keel", "post_ln"],
    "blocks": [2],
    "widths": [16],
    "peaks": [0.02],
    "training": {"steps": 60, "batch_size": 2, "seq_len": 16},
    "corpus": {"max_bytes": 60_000},
}


def small_sweep(**changes: Any) -> Sweep:
    """Two trials of about a second."""
    return sweep_from_dict({**SMALL, **changes})


def one_trial(**changes: Any) -> Trial:
    (trial,) = small_sweep(**{"schemes": ["keel"], **changes}).trials()
    return trial


def numbers(folder: TrialFolder) -> list[tuple[float | None, ...]]:
    """What must be the same in every repetition of a trial: everything but the time."""
    return [(r.step, r.lr, r.loss, r.grad_norm, r.unigram_loss, r.bigram_loss) for r in folder.records()]


def pretended_result(trial: Trial) -> dict[str, Any]:
    """What a finished trial leaves, every field that is read of it included."""
    corpus = {
        "sources": ["stdlib"],
        "content_hash": "0",
        "n_train_tokens": 1000,
        "vocab_size": 256,
        "unigram_entropy": 3.0,
        "bigram_entropy": 2.0,
        "python_stdlib": "3.11.7",
    }
    training = {
        "outcome": "finished",
        "steps_done": 60,
        "final_loss": 1.0,
        "best_loss": 1.0,
        "validation_loss": None,
        "seconds": 1.0,
        "corpus": corpus,
        "sessions": [{"first_step": 1, "threads": 1}],
        "provenance": {"versions": {"python": "3.11.7"}, "commit": None, "platform": "Linux"},
    }
    row = {"criterion": "rise", "status": "not_met", "onset_step": None, "max_lr": 0.02, "lower_bound": True}
    judged = {
        "outcome": "healthy",
        "onset_step": None,
        "max_lr": 0.02,
        "lower_bound": True,
        "resolution": 0.001,
        "last_step": 60,
        "reasons": ["no criterion is met"],
        "best_loss": 1.0,
        "criteria": [row],
    }
    plain = {"key": trial.key, "training": training, "peak_memory": 1000}
    return plain if trial.kind == "train" else {**plain, "judgement": judged, "to_end": judged, "judged_seconds": 1.0}


def finish(folder: TrialFolder) -> None:
    """What a trial leaves that has come to its end."""
    folder.write_trial()
    folder.write_result(pretended_result(folder.trial))


@dataclass
class PretendedJob:
    job_id: str
    folder: TrialFolder
    end: Callable[[TrialFolder], None]
    looks: int = 2

    def alive(self) -> bool:
        """Alive for a few looks; then it leaves what it leaves."""
        self.looks -= 1
        if self.looks == 0:
            self.end(self.folder)
        return self.looks > 0

    def stop(self) -> None:
        self.looks = min(self.looks, 1)


@dataclass
class PretendingExecutor:
    """Trains nothing; each trial ends as told, the first attempt first, and well when nothing is told."""

    endings: dict[str, list[Callable[[TrialFolder], None]]] = field(default_factory=dict)
    name: Any = "debug"
    outlives: bool = False
    submitted: list[Trial] = field(default_factory=list)
    gpus: list[str | None] = field(default_factory=list)
    jobs: list[PretendedJob] = field(default_factory=list)
    most_side_by_side: int = 0
    most_memory: int = 0
    _memory: dict[str, int] = field(default_factory=dict)

    def submit(self, job: TrialJob, *, memory: int, gpu: str | None) -> Job:
        trial = Trial.from_dict(job.trial)
        folder = TrialFolder(Path(job.folder), trial)
        told = self.endings.get(trial.config.model.scheme, [])
        self.submitted.append(trial)
        self.gpus.append(gpu)
        mine = PretendedJob(str(len(self.submitted)), folder, told.pop(0) if told else finish)
        self.jobs.append(mine)
        self._memory[mine.job_id] = memory
        running = [each for each in self.jobs if each.looks > 0]
        self.most_side_by_side = max(self.most_side_by_side, len(running))
        self.most_memory = max(self.most_memory, sum(self._memory[each.job_id] for each in running))
        return mine
