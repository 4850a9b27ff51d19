r"""A sweep on disk: a folder of trials that any number of changed sweeps share, and an append-only list of results."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from keel_theory.depth_expression import DepthExpressionError
from keel_theory.spec import SchemeError
from probes.errors import KeelError, OutputError
from probes.run_folder import RunFolder, folder_trouble
from probes.stored_json import FLAG, TABLE, TEXT, check_fields, list_of, read_object
from probes.trial import SweepError, Trial
from probes.trial_folder import TrialFolder, TrialState, hold

__all__ = ["SweepFolder"]

_SWEEP, _LEDGER, _LOCK, _TRIALS, _JOBS = "sweep.json", "results.jsonl", ".lock", "trials", "jobs"
_SWEEP_FIELDS = {"name": TEXT, "trials": list_of(TABLE, least=1)}
_TRIAL_FIELDS = {"kind": TEXT, "early_stop": FLAG, "config": TABLE}
_ANEW = "run the sweep again to write it anew"


class SweepFolder:
    """The files of a sweep.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_new = False
        """Whether :meth:`owned` has made it."""

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders inside."""
        return ((self.path / _TRIALS).absolute(), self.jobs_path)

    @property
    def jobs_path(self) -> Path:
        """For the executor's files and the jobs' output."""
        return (self.path / _JOBS).absolute()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Be the only scheduler.

        Raises:
            OutputError: if the folder cannot be written.
            SweepError: if another process runs a sweep here.
        """
        self.is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write the sweep to {self.path}: {folder_trouble(error)}") from error
        with hold(self.path / _LOCK, f"another process runs a sweep in {self.path}; wait for it, or name another folder"):
            yield

    def folder(self, trial: Trial) -> TrialFolder:
        """Where a trial is or will be."""
        return TrialFolder((self.path / _TRIALS / trial.key).absolute(), trial)

    def write(self, name: str, trials: Sequence[Trial]) -> None:
        """Make these trials the present sweep; what others have left stays."""
        values = {"name": name, "trials": [trial.to_dict() for trial in trials]}
        RunFolder(self.path).write_json(_SWEEP, values)

    def read(self) -> tuple[str, tuple[TrialFolder, ...]]:
        """Name and trials of the present sweep.

        Raises:
            SweepError: if there is none.
        """
        path = self.path / _SWEEP
        try:
            values = read_object(path, _SWEEP_FIELDS, error=SweepError, advice=_ANEW)
        except FileNotFoundError as error:
            raise SweepError(
                f"{self.path} holds no sweep ({_SWEEP} is missing); keel sweep run FILE -o DIR makes one"
            ) from error
        places = []
        for number, stored in enumerate(values["trials"], 1):
            where = f"{path}: trial {number}"
            check_fields(stored, _TRIAL_FIELDS, where, error=SweepError, advice=_ANEW)
            try:
                places.append(self.folder(Trial.from_dict(stored)))
            except (KeelError, SchemeError, DepthExpressionError) as error:
                raise SweepError(f"{where}: {error}; {_ANEW}") from error
        return values["name"], tuple(places)

    def note(self, event: dict[str, Any]) -> None:
        """Append a line to the list: a finished trial's result, or a failure.

        Raises:
            OutputError: if it cannot be written.
        """
        line = json.dumps(event, allow_nan=False) + "\n"
        try:
            with (self.path / _LEDGER).open("ab+") as file:
                file.write((b"\n" if _is_torn(file) else b"") + line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write {self.path / _LEDGER}: {error.strerror or error}") from error

    def noted(self) -> set[str]:
        """Keys of the trials whose result is in the list; a line that a kill cut short is passed over."""
        return {event["key"] for event in self._events() if event.get("state") == TrialState.FINISHED.value}

    def _events(self) -> Iterator[dict[str, Any]]:
        path = self.path / _LEDGER
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("key"), str):
                yield event

    def catch_up(self, folders: Iterable[TrialFolder]) -> None:
        """Note every finished trial that is not in the list yet."""
        noted = self.noted()
        for folder in folders:
            result = folder.result
            if result is not None and folder.trial.key not in noted:
                self.note({"key": folder.trial.key, "state": TrialState.FINISHED.value, "result": result})

    def counts(self, folders: Iterable[TrialFolder]) -> Counter[TrialState]:
        """How many trials are in each state."""
        return Counter(folder.state for folder in folders)


def _is_torn(file: BinaryIO) -> bool:
    """Whether a kill has cut the last line short."""
    if not file.tell():
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
