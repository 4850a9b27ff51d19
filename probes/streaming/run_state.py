"""What a long run leaves on disk, so that the same command goes on where it was stopped, with the same numbers.

A folder named by a hash of everything that decides the result holds one line of results per finished step, the tensors that
the next step needs (safetensors, with everything else as JSON in the file's own header), and the residual streams in files
mapped into memory. A step counts once the tensors after it are in place: a run killed at any moment repeats at most one step.
Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from probes.errors import OutputError

__all__ = ["MappedStreams", "RunState", "open_run_state", "remove_useless_states"]

_RECORDS, _TENSORS, _DESCRIPTION, _LOCK = "steps.jsonl", "tensors.safetensors", "run.json", "lock"
_FACTS, _HEADER_LENGTH = "facts", 8
_KEY_LENGTH = 16
_PREFIX = ".keel-run-"
_GB = 1e9


class MappedStreams:
    """Streams of several batches in one file; indexing gives a view to read and write, kept by the file.

    Args:
        path: the file; it is there, and of the right size.
        shapes: (B, T, D) of each batch.
        n_streams: streams per batch.
        dtype: of the streams.
    """

    def __init__(self, path: Path, shapes: Sequence[tuple[int, ...]], n_streams: int, dtype: torch.dtype) -> None:
        sizes = _sizes(shapes, n_streams)
        flat = torch.from_file(str(path), shared=True, size=sum(sizes), dtype=dtype)
        parts = torch.split(flat, sizes)
        self._streams = [part.view(n_streams, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def __getitem__(self, batch: int) -> Tensor:
        """Streams of a batch, shape (n_streams, B, T, D)."""
        return self._streams[batch]


def _sizes(shapes: Sequence[tuple[int, ...]], n_streams: int) -> list[int]:
    """Entries of each batch's streams."""
    return [n_streams * torch.Size(shape).numel() for shape in shapes]


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == n_bytes


def _reserve(paths: Sequence[Path], n_bytes: int) -> None:
    """Make files whose blocks are really there, so that no later write can fail for want of space; all of them or none."""
    folder, needed = paths[0].parent, len(paths) * n_bytes
    try:
        for path in paths:
            path.unlink(missing_ok=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError("no space left")
        for path in paths:
            with path.open("wb") as stream:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(stream.fileno(), 0, n_bytes)
                else:
                    stream.truncate(n_bytes)
    except OSError as error:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
        raise OutputError(
            f"the residual streams take {needed / _GB:.3g} GB and do not fit into '{folder}' ({error.strerror or error}); "
            "free some space, name a folder on another disk (-o, or XDG_CACHE_HOME without it), or use fewer tokens"
        ) from error


class RunState:
    """The steps of one run that are done.

    Args:
        folder: of this run alone; made if missing.

    Attributes:
        records: one per finished step, as they were given.
        tensors: what the last finished step handed on; empty if none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self.tensors: dict[str, Any] = {}
        self._read()

    @property
    def n_steps(self) -> int:
        """Number of finished steps."""
        return len(self.records)

    def streams(self, name: str, shapes: Sequence[tuple[int, ...]], n_streams: int, dtype: torch.dtype) -> MappedStreams:
        """Streams kept in a file of this run, as :meth:`all_streams` of one name."""
        return self.all_streams((name,), shapes, n_streams, dtype)[0]

    def all_streams(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], n_streams: int, dtype: torch.dtype
    ) -> list[MappedStreams]:
        """Streams kept in files of this run; made while no step is finished, and as the last finished step left them after.

        Args:
            names: of the files, which are of one size.
            shapes: (B, T, D) of each batch.
            n_streams: streams per batch.
            dtype: of the streams.

        Raises:
            OutputError: if the disk has no room for all of them, said before anything is computed; if steps are finished and
                a file is missing or of another size.
        """
        n_bytes = max(1, sum(_sizes(shapes, n_streams))) * dtype.itemsize
        paths = [self.folder / f"{name}.streams" for name in names]
        wrong = [path for path in paths if not _has_size(path, n_bytes)]
        if wrong and self.n_steps:
            found = f"has {wrong[0].stat().st_size} bytes" if wrong[0].is_file() else "is missing"
            raise self._damaged(f"{wrong[0].name} of {n_bytes} bytes {found}")
        if wrong:
            _reserve(wrong, n_bytes)
        return [MappedStreams(path, shapes, n_streams, dtype) for path in paths]

    def finish_step(self, record: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
        """A step is done.

        Args:
            record: its results, as JSON has them.
            tensors: what the next step needs: tensors, numbers, text, None, and lists and dictionaries of them.

        Raises:
            OutputError: if it cannot be written; the steps before it stay as they are.
        """
        handed_on = dict(tensors or {})
        temporary = self.folder / f".{_TENSORS}"
        try:
            with (self.folder / _RECORDS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
            _write_tensors(temporary, self.n_steps + 1, handed_on)
            temporary.replace(self.folder / _TENSORS)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise OutputError(
                f"cannot write the state of the run into '{self.folder}': {reason}; the {self.n_steps} steps done so far are "
                "kept there: free some space and run the same command again"
            ) from error
        self.records.append(dict(record))
        self.tensors = handed_on

    def part(self, name: str) -> RunState:
        """The state of a later part of the same run, which goes with it."""
        folder = self.folder / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot keep the state of the run in '{folder}': {error.strerror}") from error
        return RunState(folder)

    def remove(self) -> None:
        """The run has ended well: nothing of it is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Around what reads records and tensors of finished steps: whatever is not in them makes the state a damaged one.

        Raises:
            OutputError: naming the folder and what to do.
        """
        try:
            yield
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            missing = isinstance(error, KeyError)
            raise self._damaged(f"{error} is not in it" if missing else str(error)) from error

    def _damaged(self, reason: str) -> OutputError:
        return OutputError(
            f"the state of an earlier run in '{self.folder}' cannot be read ({reason}); delete that folder to start anew"
        )

    def _read(self) -> None:
        path = self.folder / _TENSORS
        if not path.exists():
            (self.folder / _RECORDS).unlink(missing_ok=True)
            return
        with self.restoring():
            n_steps, self.tensors = _read_tensors(path)
            found = (self.folder / _RECORDS).read_text(encoding="utf-8")
            lines = found.splitlines()[:n_steps]
            self.records = [json.loads(line) for line in lines]
            if len(lines) < n_steps:
                raise ValueError(f"{_RECORDS} holds {len(lines)} of {n_steps} finished steps")
        whole = "".join(f"{line}\n" for line in lines)
        if found != whole:  # a line that was begun, or belongs to a step not handed on, goes
            self._replace_records(whole)

    def _replace_records(self, text: str) -> None:
        """By a rename: who is killed meanwhile leaves the old lines or the new ones."""
        temporary = self.folder / f".{_RECORDS}"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.folder / _RECORDS)
        except OSError as error:
            raise OutputError(f"cannot write the state of the run into '{self.folder}': {error.strerror or error}") from error


def _write_tensors(path: Path, n_steps: int, values: Mapping[str, Any]) -> None:
    """One file for everything, so that one rename replaces all of it at once."""
    tensors: dict[str, Tensor] = {}
    facts = {"n_steps": n_steps, "values": _taken_apart(values, tensors)}
    save_file(tensors, path, metadata={_FACTS: json.dumps(facts)})


def _read_tensors(path: Path) -> tuple[int, dict[str, Any]]:
    content = path.read_bytes()
    length = int.from_bytes(content[:_HEADER_LENGTH], "little")
    tensors = load(content)  # first: it checks the header
    facts = json.loads(json.loads(content[_HEADER_LENGTH : _HEADER_LENGTH + length])["__metadata__"][_FACTS])
    values = _put_together(facts["values"], tensors)
    return int(facts["n_steps"]), dict(values)


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON has it: tensors go into the table, and their names into the value."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)  # a file of tensors holds no views
        return {"tensor": name}
    if isinstance(value, Mapping):  # as pairs, since JSON turns the number 4 as a key into text
        return {"pairs": [[key, _taken_apart(inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_taken_apart(inner, tensors) for inner in value]
    return value


def _put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_together(inner, tensors) for inner in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _put_together(inner, tensors) for key, inner in value["pairs"]}
    return value


@contextmanager
def open_run_state(place: Path, description: Mapping[str, object]) -> Iterator[RunState]:
    """The state of one run, new or left by an earlier one; removed when the body ends well or no step is finished.

    Args:
        place: folder that holds such states; made if missing.
        description: everything that decides the result; another description is another run.

    Yields:
        The state.

    Raises:
        OutputError: if the place cannot be written to, or another process is at the same run.
    """
    text = json.dumps(description, sort_keys=True, default=str)
    folder = place / f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]}"
    missing = [path for path in (place, *place.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise OutputError(
            f"cannot keep the state of the run in '{place}': {error.strerror}; name a folder you may write to"
        ) from error
    with lock:
        _lock(lock.fileno(), folder)
        state = RunState(folder)
        try:
            yield state
        except BaseException:
            if not state.n_steps:  # nothing to go on from: no reason to keep the streams on a disk that may be full
                state.remove()
                for path in missing:  # innermost first; only what is still empty goes
                    with contextlib.suppress(OSError):
                        path.rmdir()
            raise
        state.remove()


def remove_useless_states(place: Path, has_changed: Callable[[Mapping[str, Any]], bool]) -> list[Path]:
    """Remove states that no run will ever go on from: without a finished step, or of a checkpoint that is no more.

    Args:
        place: folder that holds such states.
        has_changed: whether what the description of a run speaks of has changed since.

    Returns:
        The folders that stay; those of running processes are among them.
    """
    found = [path for path in sorted(place.glob(f"{_PREFIX}*")) if path.is_dir() and not path.is_symlink()]
    return [path for path in found if not _removed_as_useless(path, has_changed)]


def _removed_as_useless(folder: Path, has_changed: Callable[[Mapping[str, Any]], bool]) -> bool:
    if os.name != "posix":  # whether a process is at it cannot be known
        return False
    try:
        with (folder / _LOCK).open("r+") as lock:
            _lock(lock.fileno(), folder)
            description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
            if (folder / _TENSORS).exists() and not has_changed(description):
                return False
            shutil.rmtree(folder)
            return True
    except (OSError, ValueError, LookupError, AttributeError, OutputError):  # in use, or not to be read: not ours to judge
        return False


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows: two runs at once are then not noticed
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OutputError(f"another process is at the same run (its state is in '{folder}'); wait for it to end") from error
    if not (folder / _LOCK).exists():  # removed between its opening and its locking
        raise OutputError(f"another process has just removed '{folder}'; run again")
