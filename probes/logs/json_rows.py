"""Rows out of JSON: a list of rows, a Trainer's state, columns as lists, or one object a line."""

from __future__ import annotations

import json
from typing import Any

from probes.logs.table import LossLogError, Row, listing

__all__ = ["NOT_JSON", "TRAINER_NOTE", "json_rows"]

NOT_JSON = (ValueError, RecursionError)  # also numbers of too many digits, and brackets in too many brackets
TRAINER_NOTE = "a Trainer log shows no losses that are not finite unless it ran with logging_nan_inf_filter=False"


def json_rows(source: str, text: str, notes: list[str]) -> list[Row]:
    """Rows of JSON or JSON lines; objects in a row are columns ``outer/inner``.

    Args:
        source: for messages.
        text: of the file.
        notes: a last line that is cut short is named here, and what a Trainer leaves out.

    Raises:
        LossLogError: if it is neither.
    """
    try:
        whole = json.loads(text)
    except NOT_JSON:
        return _json_lines(source, text, notes)
    if isinstance(whole, dict) and "log_history" in whole:
        notes.append(TRAINER_NOTE)
        whole = whole["log_history"]
    if isinstance(whole, dict):
        whole = _by_columns(source, whole)
    if not isinstance(whole, list) or not all(isinstance(row, dict) for row in whole):
        raise LossLogError(f"'{source}' is JSON, but no list of rows, no object of columns and no object with 'log_history'")
    return [_flat(row) for row in whole]


def _by_columns(source: str, whole: dict[str, Any]) -> list[Any]:
    """An object of lists of one length, of objects with the same keys, or of column names and data; else one row."""
    if isinstance(whole.get("columns"), list) and isinstance(whole.get("data"), list):
        return [dict(zip(whole["columns"], row, strict=False)) for row in whole["data"]]
    lists = {name: column for name, column in whole.items() if isinstance(column, list)}
    objects = {name: column for name, column in whole.items() if isinstance(column, dict)}
    if len(lists) > 1 or (lists and len(lists) == len(whole)):
        lengths = {name: len(column) for name, column in lists.items()}
        if len(set(lengths.values())) > 1:
            told = listing(f"{name} ({length})" for name, length in lengths.items())
            raise LossLogError(f"'{source}' holds columns of different lengths: {told}")
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    if len(objects) > 1 and len(objects) == len(whole):
        keys = dict.fromkeys(key for column in objects.values() for key in column)
        return [{name: column.get(key) for name, column in objects.items()} for key in keys]
    return [whole]


def _json_lines(source: str, text: str, notes: list[str]) -> list[Row]:
    lines = [line for line in text.splitlines() if line.strip()]
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except NOT_JSON as error:
            if number == len(lines) and rows:
                notes.append("the last line is cut short and was skipped")
                break
            raise LossLogError(f"'{source}', line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise LossLogError(f"'{source}', line {number}, is not a JSON object")
        rows.append(_flat(row))
    return rows


def _flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{before}{name}/") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat
