"""From rows to points: what each row of training says of its step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probes.logs.columns import Columns, is_other_column
from probes.logs.table import LossLogError, Row, is_known, number_in

__all__ = ["Point", "read_points"]

_STEPS = 1 << 63
_FALL = 1.2  # of a learning rate: no wobble


@dataclass(slots=True)
class Point:
    """What one row, or several of one step, say of a step.

    Attributes:
        step: its number; meaningless until rows without are numbered.
        values: by quantity, those that are known.
        row: first one, from 0.
    """

    step: int
    values: dict[str, float] = field(default_factory=dict)
    row: int = 0


def read_points(rows: Sequence[Row], columns: Columns, source: str, notes: list[str]) -> list[Point]:
    """One point for each row of training, whatever is known of its loss; numbered where the log has no steps.

    Args:
        rows: of one run, or of several that follow each other.
        columns: what holds what.
        source: for messages.
        notes: rows that are left out, and how rows are numbered.

    Raises:
        LossLogError: if a cell cannot be used, or a row that says something has no step.
    """
    points, skipped = [], 0
    for number, row in enumerate(rows):
        where = f"'{source}', row {number + 1}"
        numbers = {key: number_in(row.get(name), f"{where}, column '{name}'") for key, name in columns.names.items()}
        step = numbers.pop("step", None)
        values = {key: value for key, value in numbers.items() if value is not None}
        _check_rate(values, where)
        norms = (number_in(row.get(name), f"{where}, column '{name}'") for name in columns.norms)
        broken = next((norm for norm in norms if norm is not None and not math.isfinite(norm)), None)
        if broken is not None:
            values["grad_norm"] = broken
        if values.keys().isdisjoint(("loss", "lr", "grad_norm")) and not _is_of_training(row, columns):
            continue
        if "step" not in columns.names:
            points.append(Point(number, values, number))
        elif step is not None:
            points.append(Point(_whole(step, where), values, number))
        elif "lr" in values or not all(map(math.isfinite, values.values())):
            raise LossLogError(
                f"{where} has no step, and what it says cannot be placed\nname another column with --column step=NAME"
            )
        else:
            skipped += bool(values)
    if skipped:
        notes.append(f"{skipped} rows without a step were skipped")
    if not any("loss" in point.values for point in points):
        raise LossLogError(f"'{source}' has no losses: column '{columns.names['loss']}' says nothing in any row with a step")
    return points if "step" in columns.names else _numbered(points, source, notes)


def _check_rate(values: Mapping[str, float], where: str) -> None:
    rate = values.get("lr", 0.0)
    if not (math.isfinite(rate) and rate >= 0):
        raise LossLogError(f"{where}: learning rate {rate} is not a finite number >= 0")


def _whole(step: float, where: str) -> int:
    if not math.isfinite(step) or step != int(step):
        raise LossLogError(f"{where}: step {step} is not a whole number")
    if not 0 <= step < _STEPS:
        raise LossLogError(f"{where}: step {step:g} is not at least 0 and below 2^63")
    return int(step)


def _is_of_training(row: Row, columns: Columns) -> bool:
    """Whether a row of which nothing is known is a step of training, and not an evaluation or a row of another run."""
    names = columns.names
    if columns.of_several_runs or (names["loss"] not in row and names.get("lr") not in row):
        return False
    return not any(is_other_column(name) and is_known(cell) for name, cell in row.items())


def _check_one_start(points: Sequence[Point], source: str) -> None:
    """Refuse rows without steps whose rate goes back to the first one and rises beyond where it was: a run began again."""
    rated = [point for point in points if "lr" in point.values]
    rates = [point.values["lr"] for point in rated]
    for k in range(1, len(rates)):
        if rates[k] <= rates[0] and rates[k - 1] > _FALL * rates[k] and max(rates[k:]) > rates[k - 1]:
            raise LossLogError(
                f"'{source}' has no step column, and in row {rated[k].row + 1} its learning rate is back at the first one, "
                f"{rates[0]:.4g}: several runs?\ngive a log of one of them, or name the steps with --column step=NAME"
            )


def _numbered(points: list[Point], source: str, notes: list[str]) -> list[Point]:
    """Steps for rows without: by groups of one learning rate where these are alike, else one by one."""
    _check_one_start(points, source)
    groups = [list(group) for _, group in itertools.groupby(points, key=lambda point: point.values.get("lr"))]
    sizes = [len(group) for group in groups]
    usual = sizes[0]
    regular = usual > 1 and len(groups) > 2 and set(sizes[:-1]) == {usual} and sizes[-1] <= usual
    if regular:
        notes.append(f"no step column: each {usual} rows of one learning rate are one optimizer step")
    else:
        notes.append("no step column: rows are numbered from 1")
        groups = [[point] for point in points]
    return [Point(number, point.values, point.row) for number, group in enumerate(groups, start=1) for point in group]
