"""Where text comes from: the standard library, files, folders, and data sets of ``datasets``; always in the same order."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from probes.errors import TextError

__all__ = ["STDLIB", "Documents", "has_columns", "is_there", "read_documents"]

STDLIB = "stdlib"
_HUB = "hub:"
_STDLIB_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})  # some distributions leave them out
_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts in a fixed order.

    Attributes:
        documents: none of them empty.
        n_skipped: files of folders that are not UTF-8 text.
    """

    documents: tuple[str, ...]
    n_skipped: int


def read_documents(sources: Sequence[str], *, column: str = "text", max_bytes: int) -> Documents:
    """Read texts, source by source.

    Args:
        sources: as in ``CorpusConfig.sources``.
        column: of a data set, holds the text.
        max_bytes: stop after this many bytes of UTF-8; the document at the limit is cut there.

    Returns:
        The documents; folders in the order of their sorted relative paths.

    Raises:
        TextError: if a source cannot be read, or all together hold no text; the message names it.
    """
    documents: list[str] = []
    left, n_skipped = max_bytes, 0
    for source in sources:
        for text in _documents(source, column):
            if text is None:
                n_skipped += 1
            elif text.strip():
                raw = text.encode("utf-8")
                documents.append(text if len(raw) <= left else raw[:left].decode("utf-8", "ignore"))
                left -= len(raw)
            if left <= 0:
                return Documents(tuple(documents), n_skipped)
    if not documents:
        raise TextError(
            f"no text in {', '.join(sources)}: empty, or no file of UTF-8 text; a folder of Parquet files is read as hub:FOLDER"
        )
    return Documents(tuple(documents), n_skipped)


def _documents(source: str, column: str) -> Iterator[str | None]:
    """Texts of one source; None for a file of a folder that is not text."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return map(_text_or_none, _files(root, (_NOT_STDLIB | _TESTS).__contains__, _STDLIB_SUFFIXES))
    if source.startswith(_HUB):
        return _hub_documents(source.removeprefix(_HUB), column)
    path = Path(source).expanduser()
    if has_columns(source):
        return _rows(_load_from_disk(path), column, str(path))
    if path.is_dir():
        return map(_text_or_none, _files(path, _is_hidden))
    return iter((_text(path),))


def is_there(source: str) -> bool:
    """Whether a source exists, as far as this disk tells; a data set of the hub is found by loading it."""
    return source == STDLIB or source.startswith(_HUB) or Path(source).expanduser().exists()


def has_columns(source: str) -> bool:
    """Whether it is a data set, with a column that holds the text."""
    return source.startswith(_HUB) or any((Path(source).expanduser() / name).is_file() for name in _DATASET_FILES)


def _files(root: Path, skipped: Callable[[str], bool], suffixes: frozenset[str] | None = None) -> list[Path]:
    """Files below a folder, in the order of their relative paths; skipped names are neither read nor entered."""
    found: list[PurePath] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not skipped(name)]
        kept = (name for name in names if not skipped(name) and (suffixes is None or Path(name).suffix in suffixes))
        found.extend(PurePath(folder, name).relative_to(root) for name in kept)
    return [root / path for path in sorted(found, key=PurePath.as_posix)]


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _text_or_none(path: Path) -> str | None:
    raw = _read(path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\x00" in text else text


def _text(path: Path) -> str:
    raw = _read(path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text (byte {error.start}); give plain text") from error
    if "\x00" in text:
        raise TextError(f"{path} holds a NUL character at position {text.index(chr(0))}: a binary file; give plain text")
    if not text.strip():
        raise TextError(f"the text {path} is empty")
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TextError(f"there is no text file or folder {path}") from error
    except OSError as error:
        raise TextError(f"cannot read the text {path}: {error.strerror}") from error


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise TextError(
            "data sets need the package 'datasets': pip install 'keel-dynamics[data]', or pip install datasets; text files "
            "work without it"
        ) from error


def _load_from_disk(path: Path) -> Any:
    library = _datasets()
    try:
        loaded = library.load_from_disk(str(path))
    except Exception as error:  # the library raises anything, from FileNotFoundError to pyarrow's own
        raise TextError(f"the data set {path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict):
        return loaded
    if "train" not in loaded:
        raise TextError(f"the data set {path} has no split 'train'; its splits: {', '.join(loaded)}")
    return loaded["train"]


def _hub_documents(name: str, column: str) -> Iterator[str | None]:
    library = _datasets()
    path, _, subset = name.partition("@")
    try:
        rows = library.load_dataset(path, subset or None, split="train", streaming=True)
        yield from _rows(rows, column, f"hub:{name}")
    except TextError:
        raise
    except Exception as error:  # connection, authorisation, unknown name: each has its own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TextError(
            f"the data set '{name}' cannot be loaded from the hub ({type(error).__name__}: {reason}); offline, give a folder "
            "that datasets' save_to_disk wrote, or text files"
        ) from error


def _rows(rows: Iterable[Any], column: str, source: str) -> Iterator[str | None]:
    for row in rows:
        if column not in row:
            raise TextError(f"the data set {source} has no column '{column}'; its columns: {', '.join(row)}")
        if not isinstance(row[column], str):
            raise TextError(f"column '{column}' of the data set {source} holds {type(row[column]).__name__}, not text")
        yield row[column]
