"""Logs that keep every quantity by itself: one row per step out of many series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from probes.logs.columns import is_share_column
from probes.logs.runs import RUN_COLUMNS
from probes.logs.table import Cell, Row, Table, number_in, words

__all__ = ["rows_of_series", "widened"]

_METRIC = frozenset({"metric", "metric_name", "tag", "key", "name", "variable"})
_STEP = frozenset({"step", "global_step", "iteration"})


def rows_of_series(series: Mapping[str, Iterable[tuple[float, Cell]]]) -> list[Row]:
    """One row per step that any series has; a step that a series has twice gives two rows.

    Where the steps of a series go back, as in a run that was started again, later rows follow the earlier ones.

    Args:
        series: (step, value) pairs in the order in which they were written, by column.

    Example:
        >>> rows_of_series({"loss": [(1, 5.0), (2, 4.0)], "lr": [(1, 0.1)]})
        [{'step': 1, 'loss': 5.0, 'lr': 0.1}, {'step': 2, 'loss': 4.0}]
    """
    rows: dict[tuple[int, float, int], dict[str, Any]] = {}
    for name, pairs in series.items():
        part = again = 0
        last: float | None = None
        for step, value in pairs:
            part += last is not None and step < last
            again = again + 1 if step == last else 0
            rows.setdefault((part, step, again), {"step": step})[name] = value
            last = step
    return [rows[key] for key in sorted(rows)]


def widened(table: Table) -> list[Row]:
    """The rows of a table of metrics (columns such as metric, value and step) with one column per metric; others as they are.

    Rows of single sub-layers, as in profiles over depth, are left out.
    """
    plain = {"_".join(words(name)): name for name in table.columns}
    metric, step = (next((plain[name] for name in plain if name in known), None) for known in (_METRIC, _STEP))
    value = plain.get("value")
    if metric is None or step is None or value is None:
        return list(table.rows)
    kept = [name for name in table.columns if "_".join(words(name)) in RUN_COLUMNS or is_share_column(name)]
    kept = [name for name in kept if name not in (metric, step, value)]
    groups: dict[tuple[Cell, ...], dict[str, list[tuple[float, Cell]]]] = {}
    for number, row in enumerate(table.rows, start=1):
        at = number_in(row.get(step), f"'{table.source}', row {number}, column '{step}'")
        if at is None or str(row.get("sublayer", -1)) not in ("-1", ""):
            continue
        series = groups.setdefault(tuple(row.get(name) for name in kept), {})
        series.setdefault(str(row.get(metric)), []).append((at, row.get(value)))
    return [
        {**dict(zip(kept, label, strict=True)), **row} for label, series in groups.items() for row in rows_of_series(series)
    ]
