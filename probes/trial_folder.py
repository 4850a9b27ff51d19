r"""One trial on disk, named by its key.

``trial.json``
    What is run.
``seed_N/``
    The training run, as ``probes/run_folder.py`` writes it; it resumes.
``result.json``
    Written last; where it is, the trial is finished and never run again.
``failure.json``
    Why the last attempt broke, and how many did so far; gone once the trial is finished.
``interrupted``
    Empty; the last attempt saved its state and ended because it was asked to.
``job.json``
    Who runs it, for a scheduler that comes back later.

While a process works on the trial it holds a lock that the system drops with it, so a dead trial never looks alive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from probes.errors import CheckpointError, OutputError
from probes.run_folder import RESULT_FIELDS, RunFolder, StepRecord, folder_trouble, read_log
from probes.stored_json import COUNT, FLAG, LIST, NUMBER, NUMBER_OR_NONE, TEXT, Kind, check_fields, list_of, read_object
from probes.trial import SweepError, Trial

__all__ = ["TrialFolder", "TrialState", "hold"]

_TRIAL, _RESULT, _FAILURE, _JOB, _LOCK = "trial.json", "result.json", "failure.json", "job.json", ".lock"
_LOG = "log.jsonl"
_INTERRUPTED = "interrupted"
_DAMAGED = "result.json.damaged"
_PATIENCE = 1.0  # seconds; someone who only looks holds the lock for far less

_ONSET = Kind(lambda value: value is None or COUNT.holds(value), "a count or null")
_TRAINED_FIELDS = {
    "key": TEXT,
    "peak_memory": _ONSET,
    **{f"training.{name}": kind for name, kind in RESULT_FIELDS.items()},
    "training.provenance.commit": Kind(lambda value: value is None or TEXT.holds(value), "a text or null"),
    "training.provenance.platform": TEXT,
    "training.corpus.python_stdlib": Kind(lambda value: value is None or TEXT.holds(value), "a text or null"),
}
_JUDGED_FIELDS = {
    "judgement.outcome": TEXT,
    "judgement.onset_step": _ONSET,
    "judgement.max_lr": NUMBER,
    "judgement.lower_bound": FLAG,
    "judgement.resolution": NUMBER,
    "judgement.last_step": COUNT,
    "judgement.reasons": list_of(TEXT, least=1),
    "to_end.best_loss": NUMBER_OR_NONE,
    "to_end.criteria": LIST,
    "judged_seconds": NUMBER,
}
_CRITERION_FIELDS = {"criterion": TEXT, "status": TEXT, "onset_step": _ONSET, "max_lr": NUMBER, "lower_bound": FLAG}
_FAILURE_FIELDS = {"error": TEXT, "user_error": FLAG, "attempts": COUNT, "steps_done": COUNT}
_JOB_FIELDS = {"executor": TEXT, "job_id": TEXT}


class TrialState(str, Enum):
    """Where a trial stands."""

    FINISHED = "finished"
    RUNNING = "running"
    FAILED = "failed"
    WAITING = "waiting"
    """Not begun, or interrupted; it begins or resumes with the next ``keel sweep run``."""


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The files of one trial.

    Attributes:
        path: the folder.
        trial: what is run there.
    """

    path: Path
    trial: Trial

    @property
    def run_path(self) -> Path:
        """Of the training run."""
        return self.path / f"seed_{self.trial.config.seed}"

    @property
    def state(self) -> TrialState:
        """Where the trial stands, from what is on the disk."""
        if self._result.values is not None:
            return TrialState.FINISHED
        if self.running:
            return TrialState.RUNNING
        return TrialState.FAILED if self.failure is not None else TrialState.WAITING

    @property
    def running(self) -> bool:
        """Whether a process works on it."""
        path = self.path / _LOCK
        if not path.exists():
            return False
        with path.open("r") as file:
            return not _lock(file, shared=True)

    @property
    def steps_done(self) -> int:
        """Optimizer steps in the log."""
        path = self.run_path / _LOG
        if not path.exists():
            return 0
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

    @property
    def result(self) -> dict[str, Any] | None:
        """What the finished trial has found, every field that is read of it included; None where it is damaged."""
        return self._result.values

    @property
    def damage(self) -> str:
        """What is wrong with the file of the result; empty where nothing is."""
        return self._result.damage

    @property
    def _result(self) -> _Read:
        found = _read(self.path / _RESULT, _TRAINED_FIELDS)
        if found.values is None or self.trial.kind == "train":
            return found
        try:
            check_fields(found.values, _JUDGED_FIELDS, str(self.path / _RESULT), error=SweepError)
            for number, row in enumerate(found.values["to_end"]["criteria"], 1):
                where = f"{self.path / _RESULT}: criterion {number} of 'to_end.criteria'"
                check_fields(row if isinstance(row, dict) else {}, _CRITERION_FIELDS, where, error=SweepError)
        except SweepError as error:
            return _Read(None, str(error))
        return found

    @property
    def failure(self) -> dict[str, Any] | None:
        """``error``, ``user_error``, ``attempts``, ``steps_done`` of the last attempt that broke, or None.

        A damaged result is one too: the trial is there to be run again.
        """
        found = _read(self.path / _FAILURE, _FAILURE_FIELDS)
        attempts = 0 if found.values is None else found.values["attempts"]
        damage = self.damage or found.damage
        if damage:
            words = f"{damage}; keel sweep run makes it anew"
            return {"error": words, "user_error": False, "attempts": attempts, "steps_done": self.steps_done}
        return found.values

    @property
    def job(self) -> dict[str, Any] | None:
        """``executor`` and ``job_id`` of the last submission, or None; a damaged file tells of nobody."""
        return _read(self.path / _JOB, _JOB_FIELDS).values

    @property
    def interrupted(self) -> bool:
        """Whether the last attempt saved its state and ended by request."""
        return (self.path / _INTERRUPTED).exists()

    def mark_interrupted(self) -> None:
        """Note that this attempt does."""
        (self.path / _INTERRUPTED).touch()

    def write_trial(self) -> None:
        """Make the folder, say what it is for, and begin an attempt; a damaged result is put aside."""
        _make(self.path)
        (self.path / _INTERRUPTED).unlink(missing_ok=True)
        if self.damage:
            (self.path / _RESULT).replace(self.path / _DAMAGED)
        RunFolder(self.path).write_json(_TRIAL, {"key": self.trial.key, "label": self.trial.label, **self.trial.to_dict()})

    def write_result(self, values: Mapping[str, Any]) -> None:
        """Finish the trial."""
        RunFolder(self.path).write_json(_RESULT, values)
        (self.path / _FAILURE).unlink(missing_ok=True)

    def write_failure(self, error: str, *, user_error: bool = False) -> None:
        """Note an attempt that broke."""
        _make(self.path)
        attempts = (self.failure or {}).get("attempts", 0) + 1
        facts = {"error": error, "user_error": user_error, "attempts": attempts, "steps_done": self.steps_done}
        RunFolder(self.path).write_json(_FAILURE, facts)

    def write_job(self, executor: str, job_id: str) -> None:
        """Note who runs it."""
        _make(self.path)
        RunFolder(self.path).write_json(_JOB, {"executor": executor, "job_id": job_id})

    def records(self) -> list[StepRecord]:
        """The steps of the training run's log.

        Raises:
            CheckpointError: if it is missing, empty or damaged.
        """
        records = read_log(self.run_path / _LOG)
        if not records:
            raise CheckpointError(f"{self.run_path / _LOG} holds no step; restore it, or run the trial again")
        return records

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that works on the trial.

        Raises:
            SweepError: if another one does.
        """
        _make(self.path)
        with hold(self.path / _LOCK, f"another process runs the trial in {self.path}; wait for it"):
            yield


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {folder_trouble(error)}") from error


@contextmanager
def hold(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file for the body.

    Args:
        path: of the lock file; made if needed.
        refusal: what to say where another process holds it.

    Raises:
        SweepError: with the refusal.
        OutputError: if the file cannot be written.
    """
    try:
        file = path.open("w")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        end = time.monotonic() + _PATIENCE
        while not _lock(file, shared=False):
            if time.monotonic() > end:
                raise SweepError(refusal)
            time.sleep(0.02)
        yield


def _lock(file: IO[str], *, shared: bool) -> bool:
    """Whether the lock is had now; always, where the system or the file system has no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    with contextlib.suppress(BlockingIOError, PermissionError):
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, (BlockingIOError, PermissionError)):
                raise
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Read:
    """What a file holds, or what is wrong with it; nothing where there is none."""

    values: dict[str, Any] | None
    damage: str = ""


def _read(path: Path, fields: Mapping[str, Kind]) -> _Read:
    try:
        return _Read(read_object(path, fields, error=SweepError))
    except FileNotFoundError:
        return _Read(None)
    except SweepError as error:
        return _Read(None, str(error))
