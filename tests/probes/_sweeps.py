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


def numbers(folder: TrialFolder) -> list[tuple[int, float, float, float]]:
    """What must be the same in every repetition of a trial: everything but the time."""
    return [(r.step, r.lr, r.loss, r.grad_norm) for r in folder.records()]


def finish(folder: TrialFolder) -> None:
    """What a plain training leaves."""
    folder.write_trial()
    folder.write_result({"key": folder.trial.key, "training": {"outcome": "finished", "final_loss": 1.0}})


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
    gpus: list[int | None] = field(default_factory=list)
    jobs: list[PretendedJob] = field(default_factory=list)
    most_side_by_side: int = 0
    most_memory: int = 0
    _memory: dict[str, int] = field(default_factory=dict)

    def submit(self, job: TrialJob, *, memory: int, gpu: int | None) -> Job:
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
