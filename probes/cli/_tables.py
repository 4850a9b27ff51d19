"""Rows as text: a rich table on a terminal, aligned columns elsewhere, or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["as_json", "cell", "counted", "legend", "render", "shown_columns"]


_LEGEND_WIDTH = 120


def as_json(value: Any) -> str:
    """Indented JSON; NaN and infinities are refused, since JSON has no word for them."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def cell(value: Any) -> str:
    """A value as it stands in a table.

    Example:
        >>> [cell(v) for v in (True, 0.7071067811865476, 24.0, "rms")]
        ['yes', '0.707107', '24', 'rms']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def render(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, wide: bool) -> str:
    """The rows as a table.

    Args:
        columns: keys of the rows, in order; they are the headings with spaces for underscores.
        rows: one mapping per line.
        wide: draw it for a terminal, wrapped to its width; otherwise aligned plain text.

    Returns:
        Text without a final newline.

    Example:
        >>> print(render(["kind", "norm_in"], [{"kind": "ffn", "norm_in": "rms"}], wide=False))
        kind  norm in
        ffn   rms
    """
    headings = [name.replace("_", " ") for name in columns]
    lines = [[cell(row[name]) for name in columns] for row in rows]
    return _drawn(headings, lines) if wide else _aligned(headings, lines)


def _aligned(headings: list[str], lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in [headings, *lines])
    return "\n".join(line.rstrip() for line in padded)


def _drawn(headings: list[str], lines: list[list[str]]) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*map(escape, headings))
    for line in lines:
        table.add_row(*map(escape, line))
    console = Console(force_terminal=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def shown_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns in which some row has something.

    Example:
        >>> shown_columns(["kind", "FFN"], [{"kind": "block", "FFN": ""}])
        ['kind']
    """
    return [name for name in columns if any(row[name] != "" for row in rows)]


def legend(meanings: Mapping[str, str], shown: Collection[str]) -> list[str]:
    """What the columns of a table mean, each that is shown and no other.

    Args:
        meanings: by column.
        shown: columns of the table.

    Returns:
        Lines; none where nothing is to be explained.

    Example:
        >>> legend({"a_b": "the first", "c": "the second"}, ["c"]), legend({"a_b": "the first", "c": "the second"}, ["x"])
        (['c: the second.'], [])
    """
    told = [f"{name.replace('_', ' ')}: {meaning}" for name, meaning in meanings.items() if name in shown]
    return textwrap.wrap("; ".join(told) + ".", _LEGEND_WIDTH, break_on_hyphens=False) if told else []


def counted(number: int, noun: str) -> str:
    """The number with its noun, in the plural where there is not one.

    Example:
        >>> counted(1, "sub-layer"), counted(2, "sub-layer")
        ('1 sub-layer', '2 sub-layers')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
