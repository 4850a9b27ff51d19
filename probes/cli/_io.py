"""Reading options and writing results: what every command group needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

from probes.errors import OutputError

__all__ = ["emit", "guarded_stdout", "output_folder", "stdout_errors", "write_text_atomically"]


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
    """Handle failing writes wherever they come from, help texts too: the parser would end them in its own way."""
    plain = sys.stdout
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
        A temporary folder inside it; when the body ends well its files are moved up, each by a rename.

    Raises:
        OutputError: at once, before any work, if the place cannot be written to.
    """
    if folder is None:
        yield None
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write into '{folder}': {reason}; name a folder you may write to") from error
    try:
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
