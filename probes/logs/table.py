"""What every format is read into: rows of cells under the log's own column names, and numbers out of cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from probes.errors import KeelError

__all__ = ["Cell", "LossLogError", "Row", "Table", "is_known", "listing", "number_in", "words"]

Cell: TypeAlias = Any
Row: TypeAlias = Mapping[str, Cell]

_UNKNOWN = frozenset({"", "none", "null", "nil", "n/a", "na", "<na>", "#n/a", "-", "--", "–", "—", "?", "missing", "unknown"})
_NOT_FINITE = {"1.#inf": math.inf, "-1.#inf": -math.inf} | dict.fromkeys(
    ("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan", "nan(ind)", "-nan(ind)"), math.nan
)
_LISTED = 8
_SHOWN = 40  # characters of a cell in a message


class LossLogError(KeelError):
    """A log that cannot be read as a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A log as it was written.

    Attributes:
        source: where it comes from, for messages.
        rows: in their order; a column may be missing from a row.
        path: the file, or None for stdin.
        notes: what was skipped, in words; readers may add to it.
        total_steps: of the run, where its program says how many it was to have.
    """

    source: str
    rows: Sequence[Row]
    path: Path | None = None
    notes: list[str] = field(default_factory=list)
    total_steps: int | None = None

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def words(name: str) -> list[str]:
    """The words of a column's name, in lower case.

    Example:
        >>> words("A - train/learning_rate")
        ['a', 'train', 'learning', 'rate']
    """
    return "".join(c if c.isalnum() else " " for c in str(name).lower()).split()


def is_known(cell: Cell) -> bool:
    """Whether a cell says anything: ``None``, an empty text and words such as ``null`` and ``N/A`` do not, ``NaN`` does.

    Example:
        >>> is_known("N/A"), is_known("nan"), is_known(0.0)
        (False, True, True)
    """
    return cell is not None and not (isinstance(cell, str) and cell.strip().lower() in _UNKNOWN)


def number_in(cell: Cell, where: str) -> float | None:
    """The number in a cell, NaN and infinities included; None where it is unknown.

    Args:
        cell: its value.
        where: it stands, for the message.

    Raises:
        LossLogError: if it is something else.
    """
    if not is_known(cell):
        return None
    try:
        if isinstance(cell, bool):
            raise TypeError
        if isinstance(cell, str) and cell.strip().lower() in _NOT_FINITE:
            return _NOT_FINITE[cell.strip().lower()]
        return float(cell)
    except OverflowError:
        raise LossLogError(f"{where}: a number of too many digits") from None
    except (TypeError, ValueError):
        shown = repr(cell)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise LossLogError(f"{where}: {shown} is not a number") from None


def listing(names: Iterable[object]) -> str:
    """Names for a message, the first few of many.

    Example:
        >>> listing(range(100))
        '0, 1, 2, 3, 4, 5, 6, 7 and 92 more'
    """
    texts = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in map(str, names)]
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more} more" if more > 0 else "") if texts else "none"
