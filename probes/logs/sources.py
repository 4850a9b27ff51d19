"""From a path to a table: what a folder holds, and which format a file is in."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probes.logs.console import console_rows
from probes.logs.delimited import delimited_rows
from probes.logs.event_files import event_rows, is_event_file
from probes.logs.json_rows import json_rows
from probes.logs.runs import RunChoice
from probes.logs.series import rows_of_series
from probes.logs.table import LossLogError, Row, Table, number_in

__all__ = ["read_table"]

_FILES = ("log.jsonl", "trainer_state.json", "metrics.csv")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MAX_STEPS = re.compile(r'"max_steps":\s*(\d{1,18})\b')
_STEP_OF = re.compile(r"\b(?:step|iteration|iter)\b[\s:=#\[]*[\d,]+\s*(?:/|of)\s*(\d[\d,]{0,18})\b", re.IGNORECASE)
_DEPTH = 3  # folders inside folders that are searched
_KNOWN = "CSV, JSON, JSON lines, Parquet, trainer_state.json, TensorBoard event files and console text"


def read_table(path: Path, choice: RunChoice) -> Table:
    """Read a log in any of the known formats.

    Args:
        path: a file, a folder that holds one, or ``-`` for stdin.
        choice: of a run, where a folder holds several.

    Raises:
        LossLogError: if there is nothing that can be read.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise LossLogError("stdin is closed; name a file")
        return _table("stdin", sys.stdin.buffer.read(), None)
    if not path.exists():
        raise LossLogError(f"no file '{path}'")
    try:
        if path.is_dir():
            return _of_folder(path, choice)
        if is_event_file(path):
            return Table(source=str(path), path=path, rows=event_rows([path]))
        return _table(str(path), path.read_bytes(), path)
    except OSError as error:
        raise LossLogError(f"cannot read '{error.filename or path}': {error.strerror or error}") from error


def _table(source: str, content: bytes, path: Path | None) -> Table:
    notes: list[str] = []
    if content.startswith(b"PAR1"):
        return Table(source=source, path=path, rows=_parquet_rows(source, content))
    if source.endswith(".wandb"):
        raise LossLogError(f"'{source}' is a file of wandb's own; export the run's history as CSV or JSON lines and name that")
    text = _decoded(source, content)
    rows: list[Row] = console_rows(text, notes)
    if not rows:
        read: Callable[[str, str, list[str]], list[Row]] = json_rows if text.lstrip()[:1] in ("{", "[") else delimited_rows
        rows = read(source, text, notes)
    return Table(source=source, path=path, rows=rows, notes=notes, total_steps=_total_steps(text))


def _total_steps(text: str) -> int | None:
    """As a Trainer's state has it, or as it is printed beside each step; None where there is no one such number."""
    found = _MAX_STEPS.findall(text) if '"log_history"' in text else _STEP_OF.findall(text)
    totals = {int(total.replace(",", "")) for total in found}
    return totals.pop() or None if len(totals) == 1 else None


def _decoded(source: str, content: bytes) -> str:
    utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # as PowerShell redirects text
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise LossLogError(f"cannot read '{source}': it is no text ({error.reason}); known are {_KNOWN}") from error
    if "\0" in text:
        raise LossLogError(f"cannot read '{source}': it is no text (it holds zero bytes); known are {_KNOWN}")
    return text


def _parquet_rows(source: str, content: bytes) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Row] = pq.read_table(io.BytesIO(content)).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise LossLogError(f"cannot read '{source}' as Parquet: {str(error).splitlines()[0]}") from error
    return rows


def _of_folder(folder: Path, choice: RunChoice) -> Table:
    found = _log_in(folder)
    if found is not None:
        return found()
    places = [place for place in _subfolders(folder, _DEPTH) if _log_in(place) is not None]
    if not places:
        raise LossLogError(
            f"folder '{folder}' holds no {', '.join(_FILES)}, TensorBoard event file or CSV files of DeepSpeed\nname a log file"
        )
    names = {str(place.relative_to(folder)): place for place in places}
    chosen = names[choice.among(list(names), str(folder), "their folders")]
    found = _log_in(chosen)
    assert found is not None
    return found()


def _subfolders(folder: Path, depth: int) -> list[Path]:
    """Folders below, in order of their names; none inside one that holds a log."""
    found = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        found += [place] if depth == 1 or _log_in(place) is not None else [place, *_subfolders(place, depth - 1)]
    return found


def _log_in(folder: Path) -> Callable[[], Table] | None:
    """How the log that a folder holds is read; None where it holds none."""
    for name in _FILES:
        if (folder / name).is_file():
            return lambda: read_table(folder / name, RunChoice())
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    events = [path for path in files if is_event_file(path)]
    if events:
        return lambda: Table(source=str(folder), path=folder, rows=event_rows(events))
    states = {int(match[1]): path for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))}
    states = {step: path / "trainer_state.json" for step, path in states.items() if (path / "trainer_state.json").is_file()}
    if states:
        return lambda: read_table(states[max(states)], RunChoice())
    metrics = [path for path in files if path.suffix == ".csv" and _is_metric_file(path)]
    return (lambda: _metric_table(folder, metrics)) if metrics else None


def _is_metric_file(path: Path) -> bool:
    """Whether a CSV file holds one metric, as DeepSpeed writes them: step, and the end of the metric's name."""
    with path.open(encoding="utf-8", errors="replace") as file:
        names = file.readline().strip().split(",")
    return len(names) == 2 and names[0] == "step" and path.stem.endswith(names[1].replace(" ", "_").replace("/", "_"))


def _metric_table(folder: Path, files: list[Path]) -> Table:
    notes = ["steps are counted as DeepSpeed does, in samples"]
    series: dict[str, list[tuple[float, Any]]] = {}
    for path in files:
        content = path.read_bytes()
        rows = delimited_rows(str(path), _decoded(str(path), content), notes)
        pairs = [(number_in(row["step"], f"'{path}', row {k}"), row) for k, row in enumerate(rows, start=1)]
        series[path.stem] = [(step, list(row.values())[1]) for step, row in pairs if step is not None]
    return Table(source=str(folder), path=folder, rows=rows_of_series(series), notes=notes)
