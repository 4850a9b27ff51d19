"""Reading options and writing results: what every command group needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from probes.errors import OutputError

__all__ = ["emit", "output_folder", "write_text_atomically"]


def emit(text: str, output: Path | None) -> None:
    """Print the text to stdout, or write it to a file where one is named."""
    if output is None:
        print(text)
    else:
        write_text_atomically(output, text + "\n")


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
