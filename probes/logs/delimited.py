"""Tables in text: cells apart by commas, semicolons, tabs, bars or spaces, under one line of column names."""

from __future__ import annotations

import csv

from probes.logs.table import LossLogError, Row, listing, number_in

__all__ = ["delimited_rows"]


def delimited_rows(source: str, text: str, notes: list[str]) -> list[Row]:
    """Rows of a table.

    Lines that begin with ``#`` before the table are comments, the last of them the column names if it has as many as the table.
    A line that repeats the names, as of a program that was started again, is skipped.

    Args:
        source: for messages.
        text: of the file.
        notes: a last line that is cut short is named here.

    Raises:
        LossLogError: if it is no such table.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    lines = _without_comments(lines)
    if not lines:
        return []
    delimiter = max(",;\t|", key=lines[0].count)
    if delimiter == "|":
        lines = [line for line in (line.strip().strip("|") for line in lines) if set(line) - set("-: |")]
    spaced = delimiter not in lines[0]
    try:
        cells = (
            [line.split() for line in lines] if spaced else list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
        )
    except csv.Error as error:
        raise LossLogError(f"'{source}' is not CSV: {error}") from error
    names, *body = ([cell.strip() for cell in row] for row in cells)
    _check_names(source, names)
    body = [row for row in body if row != names]
    if len(body) > 1 and len(body[-1]) < len(names):
        notes.append("the last line is cut short and was skipped")
        body = body[:-1]
    return [_row(source, number, names, row, spaced=spaced) for number, row in enumerate(body, start=1)]


def _without_comments(lines: list[str]) -> list[str]:
    n_comments = next((i for i, line in enumerate(lines) if not line.lstrip().startswith("#")), len(lines))
    if not n_comments or n_comments == len(lines):
        return lines[n_comments:]
    names, first = lines[n_comments - 1].lstrip().lstrip("#").strip(), lines[n_comments]
    delimiter = max(",;\t|", key=first.count)
    apart = delimiter if delimiter in first else None
    named = len(names.split(apart)) == len(first.split(apart)) and all(map(_is_number, first.split(apart)))
    return [names, *lines[n_comments:]] if named else lines[n_comments:]


def _is_number(cell: str) -> bool:
    try:
        number_in(cell, "")
    except LossLogError:
        return False
    return True


def _check_names(source: str, names: list[str]) -> None:
    if all(name and _is_number(name) for name in names):
        raise LossLogError(
            f"'{source}' has no column names: its first line is {listing(names)}\nput a line such as step,loss,lr first"
        )
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise LossLogError(f"'{source}' has several columns of the name {listing(twice)}; give each a name of its own")


def _row(source: str, number: int, names: list[str], cells: list[str], *, spaced: bool) -> Row:
    extra = cells[len(names) :]
    if spaced and len(cells) != len(names):
        raise LossLogError(
            f"'{source}' is no table: row {number} has {len(cells)} cells, and there are {len(names)} column names\n"
            "text that a program printed needs lines such as 'step 10 loss 3.2 lr 1e-4', or those of nanoGPT, Megatron-LM, "
            "torchtitan or a Trainer"
        )
    if any(extra):
        raise LossLogError(f"'{source}', row {number}, has {len(cells)} cells, and there are {len(names)} column names")
    return dict(zip(names, cells + [""] * (len(names) - len(cells)), strict=False))
