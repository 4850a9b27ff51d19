"""A training run on disk, such that a kill at any moment loses nothing that was saved.

``training.json``
    The configuration and the text's hash, written once. A run that resumes under another one is refused, field by field.
``log.jsonl``
    One line per optimizer step, only ever appended to, with the fields of :class:`StepRecord`. Numbers that JSON has no word
    for are the texts ``nan``, ``inf``.
``state/latest.safetensors``
    Weights, optimizer state and random state, with everything else as JSON in the file's own header: one file, so that one
    rename replaces all of it at once. It knows how long the log was; what the log holds beyond that is cut off on resume.
``result.json``
    Written last; where it is, the run is finished.

Every file is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probes.errors import CheckpointError, OutputError
from probes.stored_json import (
    COUNT,
    NUMBER,
    NUMBER_OR_NONE,
    TABLE,
    TEXT,
    Kind,
    check_fields,
    list_of,
    one_of,
    parse_object,
    read_object,
)
from probes.training_config import TrainingConfig

if TYPE_CHECKING:
    from probes.onset import FloatArray

__all__ = [
    "RESULT_FIELDS",
    "Outcome",
    "RunFolder",
    "SavedState",
    "StepRecord",
    "batch_losses",
    "folder_trouble",
    "random_state",
    "read_log",
    "restore_random_state",
]

_CONFIG, _LOG, _RESULT, _LOCK = "training.json", "log.jsonl", "result.json", ".lock"
_STATE = Path("state", "latest.safetensors")
_FACTS = "facts"


class Outcome(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    NON_FINITE = "non-finite"
    STOPPED = "stopped"
    """``on_step`` asked for it."""


_START_ANEW = "restore it, or remove the folder 'state' to start the run anew"

_WORDS = ("nan", "inf", "-inf")
_STEP_NUMBER = Kind(
    lambda value: value in _WORDS if isinstance(value, str) else NUMBER.holds(value), "a number, or one of " + ", ".join(_WORDS)
)
_SESSION = Kind(
    lambda value: isinstance(value, dict) and all(COUNT.holds(value.get(name)) for name in ("first_step", "threads")),
    "a table with first_step and threads",
)
_MEASURED, _OF_BATCH = ("lr", "loss", "grad_norm", "time"), ("unigram_loss", "bigram_loss")
_RECORD_FIELDS = {"step": COUNT, **dict.fromkeys(_MEASURED, _STEP_NUMBER)}
_BATCH_FIELDS = dict.fromkeys(_OF_BATCH, _STEP_NUMBER)
_CONFIG_FIELDS = {"config": TABLE, "corpus": TABLE}
_FACTS_FIELDS = {"step": COUNT, "seconds": NUMBER, "sessions": list_of(_SESSION), "log_bytes": COUNT}
RESULT_FIELDS: Mapping[str, Kind] = {
    "outcome": one_of(*(outcome.value for outcome in Outcome)),
    "steps_done": COUNT,
    "final_loss": NUMBER_OR_NONE,
    "best_loss": NUMBER_OR_NONE,
    "validation_loss": NUMBER_OR_NONE,
    "seconds": NUMBER,
    "corpus.sources": list_of(TEXT, least=1),
    "corpus.content_hash": TEXT,
    "corpus.n_train_tokens": COUNT,
    "corpus.vocab_size": Kind(lambda value: COUNT.holds(value) and value > 0, "a count above 0"),
    "corpus.unigram_entropy": NUMBER,
    "corpus.bigram_entropy": NUMBER,
    "sessions": list_of(_SESSION, least=1),
    "provenance.versions": TABLE,
}
"""What every reader of a result counts on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step has shown.

    Attributes:
        step: 1-based.
        lr: learning rate of the step.
        loss: mean over its micro-batches, before the update, nats per token.
        grad_norm: norm of the whole gradient, before clipping.
        time: seconds of training since the run began, pauses left out.
        unigram_loss: on the same batch, of a model that knows how often each token occurs in the training text, nats per
            token; None where that is not known.
        bigram_loss: likewise, of a model that knows how often each pair of tokens occurs.
    """

    step: int
    lr: float
    loss: float
    grad_norm: float
    time: float
    unigram_loss: float | None = None
    bigram_loss: float | None = None

    @property
    def batch_losses(self) -> tuple[float, float] | None:
        """What the batch itself makes of the loss, by tokens and by pairs; None where either is not known."""
        if self.unigram_loss is None or self.bigram_loss is None:
            return None
        return self.unigram_loss, self.bigram_loss

    def to_json(self) -> str:
        """One line of the log, without its end and without what is not known."""
        known = {name: _word(value) for name, value in asdict(self).items() if value is not None}
        return json.dumps(known, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The record of a line; every number comes back bit for bit.

        Raises:
            CheckpointError: if it is not one; the message names the field.
        """
        return cls._read(line, "the line", "")

    @classmethod
    def _read(cls, line: str, where: str, advice: str) -> StepRecord:
        values = parse_object(line, _RECORD_FIELDS, where, error=CheckpointError, advice=advice)
        of_batch = {name: kind for name, kind in _BATCH_FIELDS.items() if name in values}
        check_fields(values, of_batch, where, error=CheckpointError, advice=advice)
        return cls(step=values["step"], **{name: float(values[name]) for name in (*_MEASURED, *of_batch)})


def batch_losses(records: Sequence[StepRecord]) -> FloatArray | None:
    """What the batches of a run make of its loss.

    Args:
        records: one per optimizer step.

    Returns:
        Nats per token by tokens and by pairs, shape (n, 2), with rows of not-a-numbers where it is not known; None where it is
        known of no step.
    """
    known = [record.batch_losses for record in records]
    if not any(known):
        return None
    return np.array([(math.nan, math.nan) if losses is None else losses for losses in known])


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def read_log(path: str | Path) -> list[StepRecord]:
    """The records of a ``log.jsonl``; a last line that a kill cut short is left out.

    Raises:
        CheckpointError: if there is no log, or it is damaged; the message names line and field.
    """
    advice = "restore the file, or train again in another folder"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"cannot read {path}: {reason}; {advice}") from error
    lines = text.split("\n")[:-1]
    records = [StepRecord._read(line, f"{path} line {n}", advice) for n, line in enumerate(lines, 1)]
    for n, record in enumerate(records, 1):
        if record.step != n:
            raise CheckpointError(f"{path} line {n} is of step {record.step}: a line is missing or twice there; {advice}")
    return records


@dataclass(frozen=True, slots=True)
class SavedState:
    """Everything that a run needs to go on.

    Attributes:
        tensors: by name.
        facts: JSON values.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class RunFolder:
    """One run's files.

    Args:
        path: the folder; made if needed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._log: IO[str] | None = None

    @contextmanager
    def opened(self, config: TrainingConfig, corpus: Mapping[str, Any]) -> Iterator[RunFolder]:
        """Take the folder for this run, alone. Where the body breaks before it has logged a step, nothing is claimed.

        Args:
            config: of the run.
            corpus: JSON values that tell one text from another.

        Yields:
            The folder itself.

        Raises:
            CheckpointError: if it holds a run of another configuration or text, or another process trains in it.
            OutputError: if it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise OutputError(f"cannot write the run to {self.path}: {folder_trouble(error)}") from error
        with lock:
            self._lock(lock)
            is_new = self._claim(config, corpus)
            try:
                yield self
            except BaseException:
                if is_new and not (self.path / _LOG).exists():
                    (self.path / _CONFIG).unlink(missing_ok=True)
                raise
            finally:
                self._close_log()

    def _lock(self, file: IO[str]) -> None:
        """An advisory lock that the system drops with the process; where there is none (Windows), no check is made."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
            raise CheckpointError(f"another process is training in {self.path}; wait for it, or name another folder") from error

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when it was met
                self._log.close()
            self._log = None

    def _claim(self, config: TrainingConfig, corpus: Mapping[str, Any]) -> bool:
        """Whether the folder was nobody's before."""
        path = self.path / _CONFIG
        try:
            stored = read_object(path, _CONFIG_FIELDS, error=CheckpointError, advice="restore it, or name another folder")
        except FileNotFoundError:
            stranger = next((n for n in ("config.json", _LOG) if (self.path / n).exists()), None)
            if stranger:
                raise CheckpointError(
                    f"{self.path} holds {stranger} but no {_CONFIG}: not a run of this command; name another folder"
                ) from None
            self.write_json(_CONFIG, {"key": config.key, "config": config.to_dict(), "corpus": dict(corpus)})
            return True
        differing = config.differences(stored["config"])
        if differing:
            told = "; ".join(
                f"{name} is {_at(stored['config'], name)!r} there, {_at(config.to_dict(), name)!r} here" for name in differing
            )
            raise CheckpointError(
                f"{self.path} holds a run of another configuration: {told}. Resume with the same, or name another folder"
            )
        for name, value in corpus.items():
            there = stored["corpus"].get(name)
            if there != value:
                raise CheckpointError(f"{self.path} holds a run on another text: {name} is {there!r} there, {value!r} here")
        return False

    @property
    def result(self) -> dict[str, Any] | None:
        """What a finished run has left, with all of :data:`RESULT_FIELDS`; or None.

        Raises:
            CheckpointError: if it is damaged.
        """
        path = self.path / _RESULT
        try:
            return read_object(path, RESULT_FIELDS, error=CheckpointError, advice="restore it, or name another folder")
        except FileNotFoundError:
            return None

    @property
    def corpus_fields(self) -> dict[str, Any] | None:
        """The stored configuration of the text, or None where no run is."""
        with contextlib.suppress(FileNotFoundError):
            found = read_object(self.path / _CONFIG, {"config.corpus": TABLE}, error=CheckpointError)["config"]["corpus"]
            return dict(found)
        return None

    @property
    def is_finished(self) -> bool:
        """Whether a run has left its result here."""
        return (self.path / _RESULT).exists()

    def finished_records(self, n_steps: int) -> list[StepRecord]:
        """The whole log of a finished run.

        Args:
            n_steps: that its result knows.

        Raises:
            CheckpointError: if the log is missing, damaged or of another length.
        """
        records = read_log(self.path / _LOG)
        if len(records) != n_steps:
            raise CheckpointError(
                f"{self.path / _LOG} holds {len(records)} steps, {_RESULT} beside it knows {n_steps}; restore the log, or "
                "train again in another folder"
            )
        return records

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """A JSON file, whole or not at all."""
        self.write_bytes(name, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """A file, whole or not at all.

        Raises:
            OutputError: if it cannot be written; what was there before is unharmed.
        """

        def write(path: Path) -> None:
            path.write_bytes(content)

        self._replace(self.path / name, write)

    def append(self, record: StepRecord) -> None:
        """A line of the log.

        Raises:
            OutputError: if it cannot be written.
        """
        try:
            if self._log is None:
                self._log = (self.path / _LOG).open("a", encoding="utf-8")
            self._log.write(record.to_json() + "\n")
            self._log.flush()
        except OSError as error:
            raise self._failed(_LOG, error) from error

    def save(self, state: SavedState) -> None:
        """The state to resume from, after the log that belongs to it.

        Raises:
            OutputError: if either cannot be written; the state saved before is unharmed.
        """
        try:
            if self._log is not None:
                os.fsync(self._log.fileno())
            (self.path / _STATE).parent.mkdir(exist_ok=True)
        except OSError as error:
            raise self._failed(_LOG, error) from error
        log = self.path / _LOG
        facts = state.facts | {"log_bytes": log.stat().st_size if log.exists() else 0}

        def write(path: Path) -> None:
            save_file(state.tensors, path, metadata={_FACTS: json.dumps(facts)})

        self._replace(self.path / _STATE, write)

    def resume(self) -> tuple[SavedState | None, list[StepRecord]]:
        """The last saved state and the log up to it; the log's later lines are cut off.

        Returns:
            The state, None where nothing was saved yet, and the records.

        Raises:
            CheckpointError: if a file is damaged or lines of the log are missing.
        """
        state = self._load()
        log = self.path / _LOG
        kept = state.facts["log_bytes"] if state is not None else 0
        size = log.stat().st_size if log.exists() else 0
        if size < kept:
            raise CheckpointError(
                f"{log} has {size} bytes, its saved state knows {kept}: lines are missing; restore it or start anew"
            )
        if size > kept:
            os.truncate(log, kept)
        records = read_log(log) if kept else []
        if state is not None and len(records) != state.facts["step"]:
            raise CheckpointError(
                f"{log} holds {len(records)} steps, its saved state is of step {state.facts['step']}; restore it or start anew"
            )
        return state, records

    def _load(self) -> SavedState | None:
        path = self.path / _STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get(_FACTS, "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable state of a run: {error}; {_START_ANEW}") from error
        facts = parse_object(text, _FACTS_FIELDS, f"the '{_FACTS}' of {path}", error=CheckpointError, advice=_START_ANEW)
        return SavedState(tensors, facts)

    def forget_state(self) -> None:
        """Free the disk of what only a resumed run needs."""
        shutil.rmtree((self.path / _STATE).parent, ignore_errors=True)

    def _replace(self, path: Path, write: Any) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            write(partial)
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._failed(path.name, error) from error

    def _failed(self, name: str, error: Exception) -> OutputError:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return OutputError(
            f"cannot write {name} in {self.path}: {reason}; what was saved before is unharmed, free some space and resume"
        )


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_trouble(error: OSError) -> str:
    """Why a folder cannot be made or used, in words."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "a file is in the way; name a folder, or a place that is free"
    return error.strerror or str(error)


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the generators that a run on this device may draw from."""
    states = {"cpu": torch.random.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Undo what was drawn since :func:`random_state`.

    Raises:
        CheckpointError: if a state is missing or none of this machine's generators.
    """
    try:
        torch.random.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"the saved random state cannot be used: {error}; {_START_ANEW}") from error
