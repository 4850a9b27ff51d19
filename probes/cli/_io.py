"""Reading options and writing results: what every command group needs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO, cast

from probes.errors import OutputError

__all__ = ["emit", "ended_by_exception", "guarded_stdout", "output_folder", "stdout_errors", "write_text_atomically"]


def emit(text: str, output: Path | None) -> None:
    """Print the text to stdout, or write it to a file where one is named."""
    if output is None:
        with stdout_errors():
            print(text, flush=True)
    else:
        write_text_atomically(output, text + "\n")


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """Turn what can go wrong on stdout into an end that a shell understands.

    Raises:
        SystemExit: with 141, as of a process that SIGPIPE ends, if the reader has closed the pipe (``| head``).
        OutputError: if stdout cannot take the text, as a full device.
    """
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(_PIPE_CLOSED) from None
    except OSError as error:
        _drop_stdout()
        raise OutputError(f"cannot write to stdout: {error.strerror or error}; name a file with -o") from error


_PIPE_CLOSED = 128 + 13


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """Handle failing writes wherever they come from, help texts too: the parser would end them in its own way.

    Raises:
        OutputError: if stdout is closed: the next file that is opened would take its place.
    """
    plain = sys.stdout
    if plain is None:
        raise OutputError("stdout is closed; send it to a file or to /dev/null")
    sys.stdout = cast("TextIO", _Guarded(plain))
    try:
        yield
    finally:
        sys.stdout = plain
        with stdout_errors():
            plain.flush()


class _Guarded:
    """A text stream whose writes fail as :func:`stdout_errors` says; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with stdout_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with stdout_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter would fail on it once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_text_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file that is either complete or absent: a temporary file in the same folder, then a rename.

    Args:
        path: the file; its folder must exist. An existing file is replaced and keeps its permissions.
        text: its content.

    Raises:
        OutputError: if the place cannot be written to; no partial file is left behind.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a folder or a device")  # a rename would replace /dev/null itself
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            Path(temporary).chmod(mode)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write '{path}': {reason}; name a file in an existing folder you may write to") from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@contextlib.contextmanager
def output_folder(folder: Path | None) -> Iterator[Path | None]:
    """A place for a result of several files that appear together at the end, or not at all.

    Args:
        folder: where they are to appear; made if it is missing. None for no output.

    Yields:
        A temporary folder inside it; when the body ends well its files are moved up, each by a rename. Where a signal that
        asks the process to end arrives, it is removed too; what a killed run has left is removed by the next one.

    Raises:
        OutputError: at once, before any work, if the place cannot be written to.
        SystemExit: with 128 and the signal's number, if SIGTERM or SIGHUP arrives.
    """
    if folder is None:
        yield None
        return
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=f"{_PARTIAL}{os.getpid()}-{platform.node()}-"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write into '{folder}': {reason}; name a folder you may write to") from error
    try:
        with ended_by_exception():
            yield work
            for path in sorted(work.iterdir()):
                path.replace(folder / path.name)
    except OSError as error:
        raise OutputError(f"cannot write into '{folder}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for path in missing:  # innermost first; only what is still empty goes
            with contextlib.suppress(OSError):
                path.rmdir()


_PARTIAL = ".partial-"
"""Start of a temporary folder's name; the process that fills it follows, and its machine, as folders can be shared."""

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def ended_by_exception() -> Iterator[None]:
    """Let a signal that asks the process to end unwind it, so that everything is cleared away; one that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread alone
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    replaced = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}
    for number in replaced:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _remove_stale(folder: Path) -> None:
    """Remove what runs that were killed have left: temporary folders whose process is gone."""
    for path in folder.glob(f"{_PARTIAL}*"):
        owner, _, rest = path.name.removeprefix(_PARTIAL).partition("-")
        local = owner.isdecimal() and rest.startswith(f"{platform.node()}-")
        if local and path.is_dir() and not path.is_symlink() and not _is_running(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 asks on POSIX alone
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        return True
    return True
