"""From points to steps: one run, its rows of one step put together, micro-batches averaged."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from probes.logs.columns import OF_BATCH, is_share_column
from probes.logs.points import Point
from probes.logs.runs import RunChoice
from probes.logs.table import LossLogError, Row, listing

__all__ = ["WOBBLE", "merged", "one_run"]

_FEW_STEPS = 20  # in which losses may differ by their place for other reasons
_BY_CHANCE = 6.0  # standard errors
_SAME = 0.05  # of what the run learns: runs that differ by less have one verdict
_RESTART = 0.05  # of a run's steps: what is resumed keeps more of them
_EARLY = 0.1  # of all steps: what begins again so early, after losses that are not finite, is no resumed run
_STRAY = 2  # rows out of their place
WOBBLE = 0.01  # of the highest learning rate: what rounding, or a mean over micro-batches, may take off a ramp


def one_run(
    points: Sequence[Point], rows: Sequence[Row], source: str, choice: RunChoice, notes: list[str]
) -> list[list[Point]]:
    """The points of one run, grouped by step, in increasing order of steps.

    Steps that go back to the first one, or to the first twentieth of a run, begin another run, unless they repeat the earlier
    rows to the letter. Where they go back to a later one, the run was resumed from a checkpoint, and what was logged before
    from there on is dropped. A single step out of its place, after which the steps go on as before it, is dropped itself.

    Args:
        points: in the order of the log.
        rows: of the log.
        source: for messages.
        choice: of a run, by its number from 1 where there are several.
        notes: what was dropped.

    Raises:
        LossLogError: if there are several runs and none is chosen, or a resumed one does not go on at its old rate.
    """
    ordered = _by_shares(_rising(points, notes), rows)
    groups = [list(group) for _, group in itertools.groupby(_joined(ordered), key=lambda point: point.step)]
    runs, stray = _split(groups)
    runs = [run for run, later in itertools.zip_longest(runs, runs[1:]) if later is None or not _is_repeated(run, later)]
    labels = {str(number): run for number, run in enumerate(runs, start=1)}
    told_by = f"steps that start again at the first one ({_spans(runs)})"
    cure = "; if they are epochs of one run, number its steps through"
    run = labels[choice.among(list(labels), source, told_by, cure)]
    if stray:
        notes.append(f"{stray} rows out of the order of steps were skipped")
    return _without_overlap(run, source, notes)


def _spans(runs: Sequence[list[list[Point]]]) -> str:
    shown = [f"{run[0][0].step} to {run[-1][0].step}" for run in runs[:4]]
    return ", ".join(shown + ["..."] * (len(runs) > len(shown)))


def _rising(points: Sequence[Point], notes: list[str]) -> Sequence[Point]:
    """A log whose newest row is the first, turned round; one of each step once in no order, sorted."""
    if points[0].step > points[-1].step and all(after.step <= point.step for point, after in itertools.pairwise(points)):
        notes.append("the newest row is the first: rows are read from the last one on")
        return points[::-1]
    n_back = sum(after.step < point.step for point, after in itertools.pairwise(points))
    if n_back > _STRAY and len({point.step for point in points}) == len(points):
        notes.append("rows are not in the order of their steps, and have each step once: they are sorted")
        return sorted(points, key=lambda point: point.step)
    return points


def _by_shares(points: Sequence[Point], rows: Sequence[Row]) -> Sequence[Point]:
    """Ordered by step, where micro-batches or ranks are named and each of them goes through the steps by itself."""
    name = _share_column(rows)
    if name is None:
        return points
    last: dict[str, int] = {}
    for point in points:
        share = str(rows[point.row].get(name))
        if last.get(share, -1) > point.step:
            return points
        last[share] = point.step
    return sorted(points, key=lambda point: point.step)


def _share_column(rows: Sequence[Row]) -> str | None:
    names = dict.fromkeys(name for row in rows for name in row if is_share_column(name))
    return next((name for name in names if len({str(row.get(name)) for row in rows}) > 1), None)


def _joined(points: Iterable[Point]) -> list[Point]:
    """A row that adds to what an earlier row of its step says, and repeats nothing of it, is put together with that one."""
    kept: list[Point] = []
    latest: dict[int, Point] = {}
    for point in points:
        before = latest.get(point.step)
        if before is not None and before.values.keys().isdisjoint(point.values):
            before.values |= point.values
            continue
        if kept and kept[-1].step > point.step:
            latest.clear()  # what comes before a step back is not added to
        latest[point.step] = point
        kept.append(point)
    return kept


def _split(groups: list[list[Point]]) -> tuple[list[list[list[Point]]], int]:
    """Runs, and the number of rows out of their place."""
    runs: list[list[list[Point]]] = [[]]
    stray = 0
    n_steps = len({group[0].step for group in groups})
    for group, following in itertools.zip_longest(groups, groups[1:]):
        run, step = runs[-1], group[0].step
        if run and run[-1][0].step > step:
            if following is not None and following[0].step > run[-1][0].step:
                stray += len(group)
                continue
            kept = sum(earlier[0].step < step for earlier in run)
            broken = _n_broken(point for earlier in run if earlier[0].step >= step for point in earlier)
            if kept <= _RESTART * len(run) or (broken and kept <= _EARLY * n_steps):
                runs.append([group])
                continue
        run.append(group)
    return runs, stray


def _n_broken(points: Iterable[Point]) -> int:
    """Rows whose loss or gradient norm is not finite."""
    return sum(not all(math.isfinite(point.values.get(key, 0.0)) for key in ("loss", "grad_norm")) for point in points)


def _is_repeated(run: list[list[Point]], later: list[list[Point]]) -> bool:
    """Whether a later run has every row of this one, as where a log is written anew by a run that goes on."""
    written = {group[0].step: [_text(point) for point in group] for group in later}
    return all(written.get(group[0].step) == [_text(point) for point in group] for group in run)


def _text(point: Point) -> str:
    return repr(sorted(point.values.items()))  # so that not-a-numbers are equal


def _without_overlap(groups: list[list[Point]], source: str, notes: list[str]) -> list[list[Point]]:
    kept: list[list[Point]] = []
    dropped = broken = 0
    for group in groups:
        step = group[0].step
        if kept and kept[-1][0].step > step:
            _check_resumed(source, kept, group[0])
            dropped += sum(len(earlier) for earlier in kept if earlier[0].step >= step)
            broken += _n_broken(point for earlier in kept if earlier[0].step >= step for point in earlier)
            kept = [earlier for earlier in kept if earlier[0].step < step]
        kept.append(group)
    n_rows = sum(map(len, groups))
    if 2 * dropped > n_rows:
        raise LossLogError(
            f"'{source}': steps go back, and {dropped} of {n_rows} rows would be replaced by later ones of the same steps; "
            "give a log of one run, its steps numbered through"
        )
    if dropped:
        notes.append(f"steps go back: {dropped} rows were replaced by later ones of the same steps")
    _note_broken(broken, notes)
    return kept


def _note_broken(n_broken: int, notes: list[str]) -> None:
    if n_broken:
        notes.append(f"{n_broken} of the rows that were replaced held losses or gradient norms that are not finite")


def _check_resumed(source: str, kept: Sequence[Sequence[Point]], again: Point) -> None:
    """A resumed run comes back to a step at the rate it had there."""
    before = next((point.values["lr"] for group in kept for point in group if _is_rate_of(point, again.step)), math.nan)
    rate = again.values.get("lr", math.nan)
    if abs(before - rate) > WOBBLE * max(before, rate):
        raise LossLogError(
            f"'{source}': steps go back to {again.step}, where the learning rate was {before:.4g} and is {rate:.4g} now: "
            "that is no resumed run; give a log of one run, its steps numbered through"
        )


def _is_rate_of(point: Point, step: int) -> bool:
    return point.step == step and "lr" in point.values


def merged(groups: Sequence[list[Point]], rows: Sequence[Row], source: str, notes: list[str]) -> list[Point]:
    """One point per step: the mean over micro-batches or ranks, or the last row where a repeated step is an exception.

    Args:
        groups: of each step.
        rows: of the log.
        source: for messages.
        notes: what was averaged or replaced.

    Raises:
        LossLogError: if a column that names neither micro-batches nor ranks tells the rows of each step apart, or their
            losses differ as those of several runs.
    """
    usual = Counter(map(len, groups)).most_common(1)[0][0]
    if usual == 1:
        repeated = sum(len(group) - 1 for group in groups)
        if repeated:
            notes.append(f"{repeated} rows repeat a step; the last one counts")
        if _n_broken(groups[0][:-1]):
            raise LossLogError(
                f"'{source}' begins again at its first step, {groups[0][0].step}, after a loss or gradient norm that is not "
                "finite: two runs?\ngive a log of one of them"
            )
        _note_broken(sum(_n_broken(group[:-1]) for group in groups), notes)
        return [_last(group) for group in groups]
    name = _share_column(rows)
    if name is None:
        _refuse_runs(groups, rows, source)
        _check_alike(groups, source)
    named = "" if name is None else f" (column '{name}')"
    notes.append(f"each step has {usual} rows: its loss is the mean over these micro-batches{named}")
    if len(groups[-1]) < usual:
        notes.append(f"the last step has {len(groups[-1])} of {usual} micro-batches; its loss is the mean over them")
    return _means(groups, usual, notes)


def _refuse_runs(groups: Sequence[Sequence[Point]], rows: Sequence[Row], source: str) -> None:
    for name in dict.fromkeys(name for row in rows for name in row):
        labels = [[rows[point.row].get(name) for point in group] for group in groups]
        first = list(map(str, labels[0]))
        if (
            len(set(first)) > 1
            and len(set(first)) == len(first)
            and all(set(map(str, group)) <= set(first) for group in labels)
        ):
            raise LossLogError(
                f"'{source}' has {len(first)} rows of each step, told apart by column '{name}': {listing(first)}\n"
                f"if these are runs, choose one: --column run={name} --run NAME; a column of micro-batches is named micro_batch"
            )


def _check_alike(groups: Sequence[Sequence[Point]], source: str) -> None:
    """Refuse rows of a step that differ by their place in it, as runs that are written side by side do."""
    usual = max(map(len, groups))
    table = np.array([[point.values["loss"] for point in group] for group in groups if _is_full(group, usual)])
    if len(table) < _FEW_STEPS:
        return
    levels = table.mean(axis=1)
    apart = table - levels[:, None]
    means = np.abs(apart.mean(axis=0))
    by_chance = _BY_CHANCE * apart.std() / math.sqrt(len(table))
    if means.max() > max(by_chance, _SAME * np.ptp(levels)):
        raise LossLogError(
            f"'{source}' has {usual} rows of each step, whose losses differ by place by {means.max():.2g}: several runs?\n"
            "give a log of one run; if they are micro-batches, number them in a column micro_batch"
        )


def _is_full(group: Sequence[Point], usual: int) -> bool:
    return len(group) == usual and all(math.isfinite(point.values.get("loss", math.nan)) for point in group)


def _last(group: Sequence[Point]) -> Point:
    values = {key: value for point in group for key, value in point.values.items()}
    return Point(group[0].step, values, group[0].row)


def _means(groups: Sequence[list[Point]], usual: int, notes: list[str]) -> list[Point]:
    """Means over the micro-batches; no loss where that of one of them is unknown, unless such a row is in every step."""
    lacking = [usual - sum("loss" in point.values for point in group) for group in groups]
    lacking[-1] -= max(0, usual - len(groups[-1]))  # a log may end within a step
    always = max(0, min(lacking))
    points = [_mean(group) for group in groups]
    n_unknown = 0
    for point, n_lacking in zip(points, lacking, strict=True):
        if n_lacking > always and math.isfinite(point.values.get("loss", math.nan)):
            del point.values["loss"]
            n_unknown += 1
    if n_unknown:
        notes.append(f"{n_unknown} steps lack the loss of a micro-batch; their losses are unknown")
    return points


def _mean(group: Sequence[Point]) -> Point:
    point = _last(group)
    for key in ("loss", *OF_BATCH):
        known = [each.values[key] for each in group if key in each.values]
        if known and (key == "loss" or len(known) == len(group)):
            point.values[key] = sum(known) / len(known)
        else:
            point.values.pop(key, None)
    norms = [each.values.get("grad_norm", 0.0) for each in group]
    broken = next((norm for norm in norms if not math.isfinite(norm)), None)
    if broken is not None:
        point.values["grad_norm"] = broken
    return point
