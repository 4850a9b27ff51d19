r"""A sweep as data: grids over schemes, depths, widths, peaks and seeds, from a TOML file or from flags.

A file holds defaults at its top level and in the tables ``[training]``, ``[model]`` and ``[corpus]``, and any number of
``[[grid]]`` tables that override them::

    name = "two_ramps"
    schemes = ["post_ln", "keel"]
    seeds = [0, 1, 2]

    [training]
    batch_size = 4

    [[grid]]
    peaks = [0.05]
    training = { steps = 600 }

    [[grid]]
    schemes = ["keel"]
    peaks = [0.25]
    training = { steps = 1000 }

A sweep is the union of its grids. A trial is known by its configuration alone, so the same trial in two grids, or in two
sweeps, is one.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from dataclasses import replace as _replace
from itertools import product
from pathlib import Path
from typing import Any

from keel_theory.depth_expression import DepthExpressionError
from keel_theory.schemes import get_scheme
from keel_theory.spec import SchemeError
from probes.config import ModelConfig
from probes.corpus import CorpusConfig
from probes.errors import KeelError
from probes.tokenization import N_BYTES
from probes.training_config import TrainingConfig, evenly_spaced, proportions
from probes.trial import SweepError, Trial

__all__ = ["Grid", "Sweep", "read_sweep", "sweep_from_dict"]

_TABLES = ("training", "model", "corpus")
_AXES = ("schemes", "blocks", "widths", "peaks", "seeds")
_OWN_FIELDS = {"model": {"scheme", "n_blocks", "width", "seed"}, "training": {"model", "corpus", "peak_lr", "seed"}}
"""Fields that the axes set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of its axes.

    Attributes:
        schemes: names.
        blocks: Transformer blocks.
        widths: of the stream; FFN width and heads follow each, unless ``model`` says otherwise.
        peaks: highest learning rates.
        seeds: of weights and data.
        kind: ``stress`` or ``train``.
        early_stop: of stress tests.
        profiles: optimizer steps, evenly spaced, at which the gradients' profile over depth is measured.
        training: other fields of :class:`~probes.training_config.TrainingConfig`.
        model: other fields of :class:`~probes.config.ModelConfig`.
        corpus: fields of :class:`~probes.corpus.CorpusConfig`.
    """

    schemes: tuple[str, ...] = ("keel",)
    blocks: tuple[int, ...] = (32,)
    widths: tuple[int, ...] = (64,)
    peaks: tuple[float, ...] = (5e-2,)
    seeds: tuple[int, ...] = (0,)
    kind: str = "stress"
    early_stop: bool = True
    profiles: int = 0
    training: Mapping[str, Any]
    model: Mapping[str, Any]
    corpus: Mapping[str, Any]

    def trials(self) -> Iterator[Trial]:
        """Every combination, as trials.

        Yields:
            In the order of the axes, seeds fastest.
        """
        corpus = CorpusConfig(**self.corpus)
        for scheme, n_blocks, width, peak, seed in product(self.schemes, self.blocks, self.widths, self.peaks, self.seeds):
            run = TrainingConfig(corpus=corpus, peak_lr=peak, **{"validation_tokens": 0, **self.training})
            model = ModelConfig(
                scheme=scheme,
                n_blocks=n_blocks,
                **{
                    "vocab_size": _vocabulary(corpus),
                    "context_length": run.seq_len,
                    **proportions(width, given=self.model),
                },
            )
            run = _replace(run, model=model, probe_steps=run.probe_steps or evenly_spaced(run.steps, self.profiles))
            yield Trial(kind=self.kind, config=run.with_seed(seed), early_stop=self.early_stop)  # type: ignore[arg-type]  # checked there


def _vocabulary(corpus: CorpusConfig) -> int:
    """Tokens of a byte or BPE tokenizer; another file's are named by ``model.vocab_size``."""
    kind, _, size = corpus.tokenizer.partition(":")
    return int(size) if kind == "bpe" and size.isdigit() else N_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A named union of grids.

    Attributes:
        name: of the sweep.
        grids: at least one.
    """

    name: str
    grids: tuple[Grid, ...]

    def trials(self) -> tuple[Trial, ...]:
        """Every trial once, in the order of the grids.

        Raises:
            SweepError: if there is none.
        """
        unique = {trial.key: trial for grid in self.grids for trial in grid.trials()}
        if not unique:
            raise SweepError(f"sweep '{self.name}' has no trial: an axis is empty; each needs at least one value")
        return tuple(unique.values())


def read_sweep(path: str | Path) -> Sweep:
    """The sweep of a TOML file, checked to the last trial.

    Args:
        path: the file; its stem is the sweep's name where it has none.

    Raises:
        SweepError: if the file cannot be read, or a key is unknown or of the wrong type; the message names it.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SweepError(f"cannot read the sweep '{path}': {reason}") from error
    except ValueError as error:  # tomllib's own, and Python's for an integer of thousands of digits
        raise SweepError(f"'{path}' is not TOML: {error}") from error
    try:
        return sweep_from_dict({"name": path.stem, **values})
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from error


def sweep_from_dict(values: Mapping[str, Any]) -> Sweep:
    """The sweep of a file's values, checked to the last trial.

    Args:
        values: as TOML gives them.

    Raises:
        SweepError: if a key is unknown or of the wrong type, or a trial is impossible; the message names it.

    Example:
        >>> sweep = sweep_from_dict({"name": "a", "schemes": ["keel"], "seeds": [0, 1], "grid": [{"peaks": [0.1, 0.2]}]})
        >>> len(sweep.trials())
        4
    """
    shared = {key: value for key, value in values.items() if key not in ("name", "grid")}
    name, grids = values.get("name", "sweep"), values.get("grid", [{}])
    if not isinstance(name, str) or not name:
        raise SweepError(f"name must be a text, got {name!r}")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise SweepError("grid must be one or more [[grid]] tables")
    _check(shared, "", also=("name", "grid"))
    for number, grid in enumerate(grids):
        _check(grid, f"grid {number + 1}: ")
    sweep = Sweep(name=name, grids=tuple(_grid(_merged(shared, grid)) for grid in grids))
    _check_trials(sweep)
    return sweep


def _check_trials(sweep: Sweep) -> None:
    """Build every trial, so that a mistake is told before anything runs."""
    for number, grid in enumerate(sweep.grids):
        try:
            for _ in grid.trials():
                pass
        except (KeelError, SchemeError, DepthExpressionError) as error:
            raise SweepError(f"grid {number + 1}: {error}") from error
    sweep.trials()


def _grid(values: Mapping[str, Any]) -> Grid:
    plain: dict[str, Any] = {key: tuple(value) if key in _AXES else value for key, value in values.items()}
    plain["peaks"] = tuple(map(float, plain.get("peaks", (5e-2,))))
    for scheme in plain.get("schemes", ()):
        get_scheme(scheme)
    return Grid(**plain)


def _merged(shared: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    tables = {table: {**shared.get(table, {}), **grid.get(table, {})} for table in _TABLES}
    return {**shared, **grid, **tables}


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return isinstance(value, int) and _integer(value) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and _integer(value) and abs(value) <= sys.float_info.max)


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(check, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


_CHECKS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "schemes": (_list_of(_text), "a list of names"),
    "blocks": (_list_of(_integer), "a list of integers"),
    "widths": (_list_of(_integer), "a list of integers"),
    "peaks": (_list_of(_number), "a list of numbers"),
    "seeds": (_list_of(_integer), "a list of integers"),
    "kind": (_text, "'stress' or 'train'"),
    "early_stop": (lambda value: isinstance(value, bool), "true or false"),
    "profiles": (_count, "an integer of at least 0"),
    "training": (lambda value: isinstance(value, dict), "a table"),
    "model": (lambda value: isinstance(value, dict), "a table"),
    "corpus": (lambda value: isinstance(value, dict), "a table"),
}


def _check(values: Mapping[str, Any], where: str, also: tuple[str, ...] = ()) -> None:
    known = {*_CHECKS, *also}
    for key in values:
        if key not in known:
            raise SweepError(f"{where}unknown key '{key}'; known: {', '.join(sorted(known))}")
    for key, (check, wanted) in _CHECKS.items():
        if key in values and not check(values[key]):
            raise SweepError(f"{where}{key} must be {wanted}, got {values[key]!r}")
    for table, config in (("training", TrainingConfig), ("model", ModelConfig), ("corpus", CorpusConfig)):
        allowed = {f.name for f in fields(config)} - _OWN_FIELDS.get(table, set())
        for key in values.get(table, {}):
            if key not in allowed:
                raise SweepError(f"{where}unknown key '{table}.{key}'; known: {', '.join(sorted(allowed))}")
