r"""Finished logs as runs: CSV, JSON lines, Hugging Face ``trainer_state.json`` and TensorBoard event files.

A point is one optimizer step. Rows that repeat a step are its micro-batches, and their mean is the step's loss; where a run was
resumed and steps come again, the last ones count. Without a step column, rows of one learning rate are one step if such groups
are all of one size, and otherwise every row is a step.

What the batches themselves make of the loss is read from columns ``unigram_loss`` and ``bigram_loss``, as ``keel train`` writes
them, where a log has both.

In the folder of a run of this toolkit the length of its ramp and what is known of its text are read too. Noted is what is
skipped or replaced in passing; a log of which most would be, or that is no ramp, is refused.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes.divergence_criteria import telling_entropy
from probes.errors import KeelError
from probes.onset import FloatArray
from probes.tensorboard_events import event_rows, is_event_file

__all__ = ["LossLogError", "RunLog", "read_loss_log"]

_NAMES = {
    "loss": ("loss", "train_loss", "training_loss", "loss_train", "lm_loss", "train_lm_loss", "loss_avg"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_0", "learning_rate_0", "lr_adamw"),
    "step": ("step", "global_step", "optimizer_step", "train_step", "train_global_step", "iteration", "iter", "steps"),
    "grad_norm": ("grad_norm", "gradient_norm", "train_grad_norm", "total_grad_norm", "total_norm", "gradnorm"),
    "unigram_loss": ("unigram_loss", "train_unigram_loss"),
    "bigram_loss": ("bigram_loss", "train_bigram_loss"),
}
_OF_BATCH = ("unigram_loss", "bigram_loss")
_VALIDATION = frozenset({"eval", "val", "valid", "validation", "test", "dev"})
_OTHER = _VALIDATION | {"unigram", "bigram"}  # a loss under one of these words is not the run's own
_WOBBLE = 0.01  # of the highest learning rate: what rounding, or a mean over micro-batches, may take off a ramp
_NOT_JSON = (ValueError, RecursionError)  # also numbers of too many digits, and brackets in too many brackets
_STEPS = 1 << 63
_UNKNOWN = (math.nan, math.nan)
_WORDS = {"loss": "losses", "lr": "learning rates"}


class LossLogError(KeelError):
    """A log that cannot be read as a run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLog:
    """A run as it was logged.

    Attributes:
        source: file it came from.
        steps: optimizer steps, shape (n,), increasing.
        losses: shape (n,), as logged; may hold not-a-numbers.
        learning_rates: shape (n,); None where the log has none.
        grad_norms: n values, None where one is missing; None where the log has none.
        batch_losses: on the same batches, of models that know the frequencies of tokens and of pairs, nats per token, shape
            (n, 2), a row of not-a-numbers where either is missing; None where the log does not have both.
        notes: what was averaged, skipped or replaced, in words.
        ramp_steps: length of the ramp, where the log is of a run of this toolkit; None where that is not known.
        unigram_entropy: of its text, nats, likewise.
        initial_loss: of an untrained model on its text (ln V), nats, likewise.
    """

    source: str
    steps: NDArray[np.int64]
    losses: FloatArray
    learning_rates: FloatArray | None
    grad_norms: tuple[float | None, ...] | None
    notes: tuple[str, ...]
    ramp_steps: int | None = None
    unigram_entropy: float | None = None
    initial_loss: float | None = None
    batch_losses: FloatArray | None = None

    def ramp(self) -> RunLog:
        """The part up to the last point at the highest learning rate: what decays after it is no part of the ramp.

        Raises:
            LossLogError: if the log has no learning rates, or they are no ramp, or only the smaller part of the log is one.
        """
        if self.learning_rates is None:
            raise LossLogError(f"'{self.source}' has no learning rates")
        rates = self.learning_rates
        stop = len(rates) - int(np.argmax(rates[::-1]))
        dropped = len(rates) - stop
        self._check_ramp(rates, stop)
        note = f"{dropped} points after the last one at the highest learning rate ({rates.max():.4g}) are not judged"
        return replace(
            self,
            steps=self.steps[:stop],
            losses=self.losses[:stop],
            learning_rates=rates[:stop],
            grad_norms=None if self.grad_norms is None else self.grad_norms[:stop],
            batch_losses=None if self.batch_losses is None else self.batch_losses[:stop],
            notes=(*self.notes, note) if dropped else self.notes,
        )

    def _check_ramp(self, rates: FloatArray, stop: int) -> None:
        peak, first = float(rates.max()), int(self.steps[0])
        where, last = f"'{self.source}' is no ramp", int(self.steps[stop - 1])
        if len(rates) == 1:
            return  # too few to tell
        if peak == 0:
            raise LossLogError(f"{where}: the learning rate is 0 throughout")
        if rates[0] == peak:
            what = "does not change" if np.all(rates == peak) else "falls"
            raise LossLogError(f"{where}: the learning rate is highest, {peak:.4g}, at its first step, {first}, and {what}")
        if stop < len(rates) - stop:
            raise LossLogError(
                f"{where}: the learning rate is highest, {peak:.4g}, at step {last}, and the {len(rates) - stop} of "
                f"{len(rates)} points after it are at lower ones; to judge its rise alone, cut the log there"
            )
        fallen = np.maximum.accumulate(rates[:stop]) - rates[:stop] > _WOBBLE * peak
        if fallen.any():
            at = int(np.argmax(fallen))
            raise LossLogError(
                f"{where}: the learning rate falls from {rates[at - 1]:.4g} to {rates[at]:.4g} at step {self.steps[at]} and "
                "rises again; cut the log into its ramps"
            )


def read_loss_log(path: Path, *, need_rates: bool = True) -> RunLog:
    """Read a log in any of the known formats.

    Args:
        path: a CSV, TSV, JSON lines or JSON file, a TensorBoard event file, or a folder with ``log.jsonl`` (of ``keel
            train``), ``trainer_state.json`` or event files.
        need_rates: refuse a log without learning rates (a reference run needs none).

    Returns:
        The run, one point per optimizer step.

    Raises:
        LossLogError: if the file cannot be read, or has no losses, or no learning rates where they are needed.
    """
    path = _inside(path)
    notes: list[str] = []
    rows = _rows(path, notes)
    if not rows:
        raise LossLogError(f"'{path}' holds no rows; a log has one row per optimizer step with its loss and learning rate")
    columns = _columns(path, rows, need_rates=need_rates)
    notes += _half_known(rows)
    points = _points(path, rows, columns, notes)
    if "step" not in columns:
        points = _number(points, notes)
    points = _merge(_drop_overlap(path, points, notes), notes)
    known = _known_of_run(path, notes)
    return replace(_run_log(path, points, columns, notes), **known)


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    loss: float
    rate: float
    grad_norm: float | None
    batch: tuple[float, float] | None


def _inside(path: Path) -> Path:
    if not path.exists():
        raise LossLogError(f"no file '{path}'")
    if not path.is_dir():
        return path
    for name in ("log.jsonl", "trainer_state.json"):
        if (path / name).exists():
            return path / name
    if any(map(is_event_file, path.iterdir())):
        return path
    raise LossLogError(f"folder '{path}' holds no log.jsonl, trainer_state.json or TensorBoard event file; name a log file")


def _rows(path: Path, notes: list[str]) -> Sequence[Mapping[str, Any]]:
    if path.is_dir() or is_event_file(path):
        return event_rows(path, _chosen)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LossLogError(
            f"cannot read '{path}': {error}; known are CSV, JSON lines, trainer_state.json, event files"
        ) from error
    start = text.lstrip()[:1]
    if start == "{" or start == "[":
        return _json_rows(path, text, notes)
    return _csv_rows(path, text)


def _csv_rows(path: Path, text: str) -> list[Mapping[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    delimiter = max(",;\t", key=lines[0].count)
    try:
        return list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise LossLogError(f"'{path}' is not CSV: {error}") from error


def _json_rows(path: Path, text: str, notes: list[str]) -> list[Mapping[str, Any]]:
    """One JSON value (a list of rows, or an object with ``log_history``), or one object a line; a torn last line is skipped."""
    try:
        whole = json.loads(text)
    except _NOT_JSON:
        return _json_lines(path, text, notes)
    if isinstance(whole, dict) and "log_history" in whole:
        notes.append("a Trainer log shows no losses that are not finite unless it ran with logging_nan_inf_filter=False")
        whole = whole["log_history"]
    rows = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(row, dict) for row in rows):
        raise LossLogError(f"'{path}' is JSON, but not a list of rows or an object with 'log_history'")
    return rows


def _json_lines(path: Path, text: str, notes: list[str]) -> list[Mapping[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except _NOT_JSON as error:
            if number == len(lines) and rows:
                notes.append("the last line is cut short and was skipped")
                break
            raise LossLogError(f"'{path}', line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise LossLogError(f"'{path}', line {number}, is not a JSON object")
        rows.append(row)
    return rows


def _columns(path: Path, rows: Sequence[Mapping[str, Any]], *, need_rates: bool) -> dict[str, str]:
    """The log's own names of what is read of it."""
    found = list(dict.fromkeys(name for row in rows for name in row if name is not None))
    columns = _chosen(found)
    for wanted in ("loss", "lr") if need_rates else ("loss",):
        if wanted not in columns:
            raise LossLogError(
                f"'{path}' has no {_WORDS[wanted]}: columns found are {', '.join(map(str, found)) or 'none'}; "
                f"a column of one of these names would do: {', '.join(_NAMES[wanted])}"
            )
    return columns


def _half_known(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note where a log has only one of the losses of a batch."""
    found = _choose(dict.fromkeys(name for row in rows for name in row if name is not None), _NAMES)
    known, missing = ([key for key in _OF_BATCH if (key in found) is there] for there in (True, False))
    if not known or not missing:
        return []
    return [f"column '{found[known[0]]}' is not used: there is no {missing[0]} beside it"]


def _chosen(found: Iterable[str]) -> dict[str, str]:
    """The log's own names of what is known under :data:`_NAMES`; of the losses of a batch both or none."""
    columns = _choose(found, _NAMES)
    return columns if all(key in columns for key in _OF_BATCH) else {k: v for k, v in columns.items() if k not in _OF_BATCH}


def _choose(found: Iterable[str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """For each wanted quantity the column of the first known name.

    Example:
        >>> _choose(["Step", "train/loss", "LR-AdamW"], _NAMES)
        {'loss': 'train/loss', 'lr': 'LR-AdamW', 'step': 'Step'}
    """
    plain = {_plain(name): name for name in reversed(list(found))}
    choices = {key: _match(plain, known) for key, known in names.items()}
    return {key: name for key, name in choices.items() if name is not None}


def _match(plain: Mapping[str, str], known: Sequence[str]) -> str | None:
    """The first known name, or the only column that ends in one (a run's name may stand before it) and is no other loss."""
    for name in known:
        if name in plain:
            return plain[name]
    ends = [column for column in plain if column.endswith(tuple("_" + name for name in known))]
    other = _OTHER.difference(*(name.split("_") for name in known))
    ends = [column for column in ends if not other.intersection(column.split("_"))]
    return plain[ends[0]] if len(ends) == 1 else None


def _plain(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in str(name).lower()).split())


def _points(path: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], notes: list[str]) -> list[_Point]:
    points, skipped = [], 0
    for number, row in enumerate(rows, start=1):
        value = {key: _number_in(path, number, name, row.get(name)) for key, name in columns.items()}
        if value["loss"] is None or value.get("lr", 0.0) is None or value.get("step", 0.0) is None:
            skipped += 1
            continue
        points.append(_point(path, number, value))
    if skipped:
        notes.append(f"{skipped} rows without a loss, a learning rate or a step were skipped")
    if not points:
        raise LossLogError(f"no row of '{path}' has all of {', '.join(columns.values())}")
    return points


def _point(path: Path, row: int, value: Mapping[str, float | None]) -> _Point:
    step, rate = value.get("step", 0.0), value.get("lr", math.nan)
    if step is None or not math.isfinite(step) or step != int(step):
        raise LossLogError(f"'{path}', row {row}: step {step} is not a whole number")
    if not 0 <= step < _STEPS:
        raise LossLogError(f"'{path}', row {row}: step {step:g} is not at least 0 and below 2^63")
    if rate is not None and "lr" in value and not (math.isfinite(rate) and rate >= 0):
        raise LossLogError(f"'{path}', row {row}: learning rate {rate} is not a finite number >= 0")
    loss = value["loss"]
    assert loss is not None  # such rows are skipped
    return _Point(int(step), loss, math.nan if rate is None else rate, value.get("grad_norm"), _batch_losses(value))


def _batch_losses(value: Mapping[str, float | None]) -> tuple[float, float] | None:
    """Both, or None."""
    unigram, bigram = (value.get(key) for key in _OF_BATCH)
    return None if unigram is None or bigram is None else (unigram, bigram)


def _number_in(path: Path, row: int, column: str, value: object) -> float | None:
    """A number, not-a-number words included; None for an empty cell."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # whatever is no number raises
    except OverflowError:
        raise LossLogError(f"'{path}', row {row}, column '{column}': a number of too many digits") from None
    except (TypeError, ValueError):
        raise LossLogError(f"'{path}', row {row}, column '{column}': {value!r} is not a number") from None


def _number(points: list[_Point], notes: list[str]) -> list[_Point]:
    """Steps for rows without: by groups of one learning rate where these are alike, else one by one."""
    groups = [list(group) for _, group in itertools.groupby(points, key=lambda point: point.rate)]
    sizes = [len(group) for group in groups]
    usual = sizes[0]
    regular = usual > 1 and len(groups) > 2 and set(sizes[:-1]) == {usual} and sizes[-1] <= usual
    if not regular:
        notes.append("no step column: rows are numbered from 1")
        return [replace(point, step=number) for number, point in enumerate(points, start=1)]
    notes.append(f"no step column: each {usual} rows of one learning rate are one optimizer step")
    return [replace(point, step=number) for number, group in enumerate(groups, start=1) for point in group]


def _drop_overlap(path: Path, points: list[_Point], notes: list[str]) -> list[_Point]:
    """Where steps go back (a run resumed from a checkpoint), what was logged before from there on is dropped.

    A single step out of its place, after which the steps go on as before it, is dropped itself.

    Raises:
        LossLogError: if the steps start anew rather than go on: most rows would be dropped, or the rates of a step differ.
    """
    kept: list[_Point] = []
    dropped = stray = 0
    groups = [list(group) for _, group in itertools.groupby(points, key=lambda point: point.step)]
    for group, following in itertools.zip_longest(groups, groups[1:]):
        step = group[0].step
        if kept and kept[-1].step > step:
            if following is not None and following[0].step > kept[-1].step:
                stray += len(group)
                continue
            _check_resumed(path, kept, group[0])
            before = len(kept)
            kept = [earlier for earlier in kept if earlier.step < step]
            dropped += before - len(kept)
        kept += group
    if 2 * dropped > len(points):
        raise LossLogError(
            f"'{path}': steps go back, and {dropped} of {len(points)} rows would be replaced by later ones of the same steps; "
            "give a log of one run, its steps numbered through"
        )
    if dropped:
        notes.append(f"steps go back: {dropped} rows were replaced by later ones of the same steps")
    if stray:
        notes.append(f"{stray} rows out of the order of steps were skipped")
    return kept


def _check_resumed(path: Path, kept: list[_Point], again: _Point) -> None:
    """A resumed run comes back to a step at the rate it had there."""
    before = next((point.rate for point in kept if point.step == again.step), math.nan)
    if abs(before - again.rate) > _WOBBLE * max(before, again.rate):
        raise LossLogError(
            f"'{path}': steps go back to {again.step}, where the learning rate was {before:.4g} and is {again.rate:.4g} now: "
            "that is no resumed run; give a log of one run, its steps numbered through"
        )


def _merge(points: list[_Point], notes: list[str]) -> list[_Point]:
    """One point per step: the mean over micro-batches, or the last row where a repeated step is an exception."""
    groups = [list(group) for _, group in itertools.groupby(points, key=lambda point: point.step)]
    usual = Counter(map(len, groups)).most_common(1)[0][0]
    if usual == 1:
        repeated = sum(len(group) - 1 for group in groups)
        if repeated:
            notes.append(f"{repeated} rows repeat a step; the last one counts")
        return [group[-1] for group in groups]
    notes.append(f"each step has {usual} rows: its loss is the mean over these micro-batches")
    if len(groups[-1]) < usual:
        notes.append(f"the last step has {len(groups[-1])} of {usual} micro-batches; its loss is the mean over them")
    return [_mean(group) for group in groups]


def _mean(group: list[_Point]) -> _Point:
    loss = sum(point.loss for point in group) / len(group)
    known = [point.batch for point in group if point.batch is not None]
    if len(known) < len(group):
        return replace(group[-1], loss=loss, batch=None)
    unigram, bigram = (sum(losses) / len(group) for losses in zip(*known, strict=True))
    return replace(group[-1], loss=loss, batch=(unigram, bigram))


def _run_log(path: Path, points: list[_Point], columns: Mapping[str, str], notes: list[str]) -> RunLog:
    return RunLog(
        source=str(path),
        steps=np.array([point.step for point in points], dtype=np.int64),
        losses=np.array([point.loss for point in points]),
        learning_rates=np.array([point.rate for point in points]) if "lr" in columns else None,
        grad_norms=tuple(point.grad_norm for point in points) if "grad_norm" in columns else None,
        notes=tuple(notes),
        batch_losses=np.array([point.batch or _UNKNOWN for point in points]) if _OF_BATCH[0] in columns else None,
    )


def _known_of_run(log: Path, notes: list[str]) -> dict[str, Any]:
    """Ramp and text of a run of this toolkit, from the files beside its log."""
    if log.name != "log.jsonl":
        return {}
    config = _object_in(log.with_name("training.json"), notes).get("config")
    if not isinstance(config, dict):
        return {}
    known: dict[str, Any] = {}
    steps = config.get("steps")
    if config.get("schedule") == "ramp" and isinstance(steps, int) and steps > 0:
        known["ramp_steps"] = steps
    corpus = _object_in(log.with_name("result.json"), notes).get("corpus")
    if isinstance(corpus, dict):
        entropy, n_tokens = corpus.get("unigram_entropy"), corpus.get("vocab_size")
        pairs = corpus.get("bigram_entropy", 0.0)
        if isinstance(entropy, float) and isinstance(pairs, float) and math.isfinite(entropy) and math.isfinite(pairs):
            known["unigram_entropy"] = telling_entropy(entropy, pairs)
        if isinstance(n_tokens, int) and n_tokens > 1:
            known["initial_loss"] = math.log(n_tokens)
    return known


def _object_in(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *_NOT_JSON) as error:
        notes.append(f"{path.name} beside the log cannot be read and is not used: {error}")
        return {}
    return values if isinstance(values, dict) else {}
