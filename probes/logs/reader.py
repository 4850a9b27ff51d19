"""From a path to a run: the one way in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from probes.logs.columns import OF_BATCH, Columns, find_columns, given_columns
from probes.logs.own_runs import is_own_run, known_of_run
from probes.logs.points import Point, read_points
from probes.logs.rates import Ramp, logged_rates
from probes.logs.run_log import RunLog
from probes.logs.runs import RunChoice, rows_of_one_run
from probes.logs.series import widened
from probes.logs.sources import read_table
from probes.logs.steps import merged, one_run
from probes.logs.table import LossLogError, Row, number_in
from probes.onset import FloatArray

__all__ = ["LOSS_UNITS", "read_loss_log"]

LOSS_UNITS = {"nats": 1.0, "bits": math.log(2)}
"""Units of a loss per token, in nats."""


def read_loss_log(
    path: Path,
    *,
    need_rates: bool = True,
    columns: Mapping[str, str] | None = None,
    runs: Sequence[str] | None = (),
    ramp: Ramp | None = None,
    loss_unit: str = "nats",
) -> RunLog:
    """Read a log in any of the known formats.

    Every step that the log has is kept, whatever is known of its loss.

    Args:
        path: a file, ``-`` for stdin, or a folder: of ``keel train``, a Trainer, Lightning, TensorBoard or DeepSpeed.
        need_rates: refuse a log without learning rates (a reference run needs none).
        columns: the log's names of loss, lr, step, grad_norm, run, unigram_loss or bigram_loss, where they are not known ones.
        runs: which run to read, for each place where the log holds several; None where the user cannot say.
        ramp: the learning rates, where the log has none.
        loss_unit: of the losses in the log, one of :data:`LOSS_UNITS`; those of a run of this toolkit are in nats all the same.

    Returns:
        The run, one point per optimizer step.

    Raises:
        LossLogError: if the log cannot be read; has no losses, or no learning rates where they are needed; or holds several
            runs and none is named.
    """
    if loss_unit not in LOSS_UNITS:
        raise LossLogError(f"no unit '{loss_unit}' (--loss-unit); known are {', '.join(LOSS_UNITS)}")
    choice = RunChoice(runs)
    table = read_table(path, choice)
    source, notes = table.source, table.notes
    if not table.rows:
        raise LossLogError(f"'{source}' holds no rows; a log has one row per optimizer step with its loss and learning rate")
    rows = widened(table)
    given = given_columns(columns or {}, list(dict.fromkeys(name for row in rows for name in row)), source)
    rows = rows_of_one_run(rows, source, choice, given.get("run"))
    found = find_columns(rows, source, given=given, choice=choice, notes=notes, need_rates=need_rates and ramp is None)
    points = read_points(rows, found, source, notes)
    points = merged(one_run(points, rows, source, choice, notes), rows, source, notes)
    choice.check_spent(source)
    own = known_of_run(table.path, notes)
    unit = _unit("nats" if is_own_run(table.path) else loss_unit, notes)
    steps = np.array([point.step for point in points], dtype=np.int64)
    rates = _rates(points, steps, found.names, ramp, source, notes) if need_rates else None
    return RunLog(
        source=source,
        steps=steps,
        losses=unit * np.array([point.values.get("loss", math.nan) for point in points]),
        known=np.array(["loss" in point.values for point in points]),
        learning_rates=rates,
        grad_norms=tuple(point.values.get("grad_norm") for point in points) if "grad_norm" in found.names else None,
        batch_losses=unit * _batch_losses(points) if OF_BATCH[0] in found.names else None,
        notes=tuple(notes),
        of_own_folder=bool(own),
        total_steps=_total_steps(rows, found) or table.total_steps,
        **own if ramp is None else own | {"ramp_steps": ramp.steps},
    )


def _total_steps(rows: Sequence[Row], found: Columns) -> int | None:
    """The last step of a table that has several runs as columns: one whose cells end before it is shorter than the others."""
    if not found.of_several_runs or "step" not in found.names:
        return None
    numbers = [number_in(row.get(found.names["step"]), found.names["step"]) for row in rows]
    return max((int(number) for number in numbers if number is not None and math.isfinite(number)), default=None)


def _unit(name: str, notes: list[str]) -> float:
    if name != "nats":
        notes.append(f"losses are logged in {name} and given in nats")
    return LOSS_UNITS[name]


def _rates(
    points: Sequence[Point],
    steps: NDArray[np.int64],
    names: Mapping[str, str],
    ramp: Ramp | None,
    source: str,
    notes: list[str],
) -> FloatArray:
    """The logged learning rates, or those of the ramp that is given."""
    logged = any("lr" in point.values for point in points)
    if ramp is None and not logged:
        raise LossLogError(
            f"'{source}' has no learning rates: column '{names['lr']}' says nothing in any row\n"
            "name another with --column lr=NAME, or give --ramp START:PEAK:STEPS"
        )
    if ramp is None:
        return logged_rates(points, source, notes)
    if logged:
        raise LossLogError(f"'{source}' has learning rates, in column '{names['lr']}'; leave out --ramp")
    if "step" not in names and len(points) != ramp.steps:
        raise LossLogError(
            f"'{source}' has {len(points)} rows without steps, and a ramp of {ramp.steps} steps is given (--ramp)\n"
            "name the column of steps with --column step=NAME"
        )
    return ramp.rates(steps, source)


def _batch_losses(points: Sequence[Point]) -> FloatArray:
    """Shape (n, 2); not a number where either is unknown."""
    pairs = [[point.values.get(key) for key in OF_BATCH] for point in points]
    return np.array([[math.nan] * 2 if None in pair else pair for pair in pairs], float)
