"""One run out of a log of several: by a column of their names, by the columns' own names, by folder, or by a new start."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from probes.logs.table import Cell, LossLogError, Row, is_known, listing, words

__all__ = ["RUN_COLUMNS", "RunChoice", "rows_of_one_run"]

RUN_COLUMNS = frozenset(
    {"run", "run_id", "run_name", "trial", "trial_id", "trial_name", "experiment", "experiment_id", "experiment_name"}
    | {"exp", "exp_name", "name", "scheme", "n_sublayers", "seed", "random_seed", "replicate"}
)


class RunChoice:
    """The names that were given for runs; each is spent where a log holds several.

    Args:
        names: as given, in the order in which they are needed; None where there is no way to give one.
    """

    def __init__(self, names: Sequence[str] | None = ()) -> None:
        self._names = list(names or ())
        self._can_choose = names is not None

    def among(self, labels: Sequence[str], source: str, told_by: str, cure: str = "") -> str:
        """The one that is to be read.

        Args:
            labels: of the runs that are there, at least one.
            source: of the log.
            told_by: what tells them apart, in words.
            cure: another than choosing.

        Raises:
            LossLogError: if there are several and none is named, or none has that name.
        """
        if len(labels) == 1:
            if self._names[:1] == list(labels):
                self._names.pop(0)
            return labels[0]
        found = f"'{source}' holds {len(labels)} runs, told apart by {told_by}: {listing(labels)}"
        if not self._can_choose:
            raise LossLogError(f"{found}\ngive a log of one run")
        if not self._names:
            raise LossLogError(f"{found}\nchoose one, such as --run {shlex.quote(labels[0])}{cure}")
        name = self._names.pop(0)
        if name not in labels:
            raise LossLogError(f"no run '{name}'; {found}")
        return name

    def check_spent(self, source: str) -> None:
        """Refuse a name that no choice was left for.

        Raises:
            LossLogError: naming it.
        """
        if self._names:
            raise LossLogError(f"no run '{self._names[0]}' in '{source}': there is one run; leave out --run")


def rows_of_one_run(rows: Sequence[Row], source: str, choice: RunChoice, column: str | None = None) -> list[Row]:
    """Rows of the run that is chosen; all of them where no column names runs, or it names one.

    Args:
        rows: of the log.
        source: for messages.
        choice: of the runs.
        column: that names them; one of :data:`RUN_COLUMNS` where None.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [column] if column is not None else [name for name in names if "_".join(words(name)) in RUN_COLUMNS]
    most = len(rows) if column is not None else max(1, len(rows) // 2)  # more are no names of runs
    columns = [name for name in columns if 1 < len(_labels(rows, [name])) <= most]
    if not columns:
        if column is not None:
            choice.among(_labels(rows, [column]) or [""], source, f"column '{column}'")
        return list(rows)
    n_runs = len(_labels(rows, columns))
    alone = next((name for name in columns if len(_labels(rows, [name])) == n_runs), None)
    columns = columns if alone is None else [alone]
    unnamed = sum(_label(row, columns) is None for row in rows)
    if unnamed:
        raise LossLogError(
            f"'{source}' does not say of {unnamed} of {len(rows)} rows of which run they are: column '{columns[0]}'"
        )
    told_by = f"column{'s' if len(columns) > 1 else ''} {', '.join(map(repr, columns))}"
    chosen = choice.among(_labels(rows, columns), source, told_by)
    return [row for row in rows if _label(row, columns) == chosen]


def _labels(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    labels = dict.fromkeys(_label(row, columns) for row in rows)
    return [label for label in labels if label is not None]


def _label(row: Row, columns: Sequence[str]) -> str | None:
    """None where the row does not say."""
    cells = [row.get(name) for name in columns]
    return "/".join(map(_text, cells)) if all(map(is_known, cells)) else None


def _text(cell: Cell) -> str:
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()
