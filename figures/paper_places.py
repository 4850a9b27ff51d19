"""What a check of the paper is made of: places of printed numbers, readings, comparisons, and the base of all checks.

A check is data: a frozen object with the statement, where the paper makes it, and the places that it names. It knows no number
of a table; those are read when it is run, so that another copy of the tables gives another answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import ClassVar

from figures.paper_tables import TABLES, Key, PaperTables
from figures.printed_numbers import Interval, mean_interval

__all__ = [
    "Cause",
    "Check",
    "Column",
    "Comparison",
    "Kind",
    "Place",
    "Reading",
    "average_column",
    "combinations",
    "in_words",
    "number_list",
]

_WORDS = {
    "keel": "Keel",
    "pre_ln": "Pre-LN",
    "post_ln": "Post-LN",
    "deepnorm": "DeepNorm",
    "hybrid_norm": "HybridNorm",
    "mix_ln": "Mix-LN",
}
_PHRASES = {
    "n_sublayers": "{} sub-layers",
    "hidden_dim": "width {}",
    "peak_lr": "peak LR {:g}",
    "tokens_billion": "{}B tokens",
}


class Kind(str, Enum):
    """What a check is about; the report counts by it."""

    AVERAGE = "average against its columns"
    GROUP = "figure's mean against the table"
    GAIN = "gain over Pre-LN"
    SAME = "same number in two places"
    DEPTH = "depths in captions and words"
    RATIO = "ratio in words"
    SIZE = "parameter count"
    RESOLUTION = "multiples of what can be measured"
    SETTING = "training settings"
    TREND = "trend in words"


@dataclass(frozen=True, slots=True)
class Reading:
    """A value and where it stands."""

    text: str
    where: str


class Cause(str, Enum):
    """Why two readings differ."""

    NUMBERS = "numbers"
    """No reading of the words reconciles them."""
    CONSEQUENCE = "consequence"
    """A number that enters is contradicted by what it is made of, which is a finding of its own."""
    WORDING = "wording"
    """Another reading of a word reconciles them, as blocks for layers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two readings of what should be one thing.

    Attributes:
        stated: the first.
        against: the second.
        agrees: whether both can be true.
        note: what would reconcile them, or what else there is to know.
        cause: of a difference.
    """

    stated: Reading
    against: Reading
    agrees: bool
    note: str = ""
    cause: Cause = Cause.NUMBERS


@dataclass(frozen=True, slots=True)
class Place:
    """One printed number of a table.

    Attributes:
        table: name in ``figures.paper_tables.TABLES``.
        where: key column and value, so that one row is left.

    Example:
        >>> Place("table5_deeper_vs_wider", (("benchmark", "MMLU"), ("architecture", "keel"), ("n_sublayers", 512))).label
        'Table 5, MMLU, Keel, 512 sub-layers'
    """

    table: str
    where: tuple[tuple[str, Key], ...]

    @property
    def label(self) -> str:
        """In words."""
        return ", ".join([TABLES[self.table].title, *(in_words(column, value) for column, value in self.where)])

    def printed(self, tables: PaperTables) -> str:
        """The number as it stands there."""
        return tables.printed(self.table, **dict(self.where))

    def reading(self, tables: PaperTables) -> Reading:
        """The number and the place."""
        return Reading(self.printed(tables), self.label)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of scores: a table of benchmarks with everything else fixed.

    Attributes:
        table: name in ``figures.paper_tables.TABLES``.
        where: what is fixed.
        benchmarks: the rows meant; empty for all but the average.
    """

    table: str
    where: tuple[tuple[str, Key], ...]
    benchmarks: tuple[str, ...] = ()

    def place(self, benchmark: str) -> Place:
        """One of its rows."""
        return Place(self.table, (("benchmark", benchmark), *self.where))

    def printed(self, tables: PaperTables) -> list[str]:
        """Its numbers.

        Raises:
            PaperTablesError: if one of its benchmarks is missing.
        """
        if self.benchmarks:
            return [self.place(benchmark).printed(tables) for benchmark in self.benchmarks]
        rows = tables.frame(self.table, **dict(self.where))
        return [str(text) for text in rows.loc[rows["benchmark"] != "Average", "printed"]]

    def mean(self, tables: PaperTables) -> tuple[Reading, Interval]:
        """The mean of its numbers, and the means that their rounding allows."""
        numbers = self.printed(tables)
        interval = mean_interval(numbers)
        middle = float(interval.low + interval.high) / 2
        rows = ", ".join(self.benchmarks) or "benchmarks"
        words = ", ".join([TABLES[self.table].title, *(in_words(column, value) for column, value in self.where)])
        text = f"{short(middle)} ({interval} within rounding)"
        return Reading(text, f"mean of the {len(numbers)} {rows} of {words}"), interval


def average_column(place: Place) -> Column:
    """The column that an average stands under."""
    return Column(place.table, tuple((name, value) for name, value in place.where if name != "benchmark"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(ABC):
    """One statement of the paper, to be held against its numbers.

    Attributes:
        id: short name.
        statement: what is stated or implied.
        source: where in the paper; "implied" where a sum or an identity states itself.
        premise: what would have to be so for a difference to be a contradiction, where the paper's tables do not say it.
    """

    kind: ClassVar[Kind]
    id: str
    statement: str
    source: str
    premise: str = ""

    @abstractmethod
    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """The comparisons that decide it, at least one."""


def combinations(**values: Sequence[Key]) -> Iterator[tuple[tuple[str, Key], ...]]:
    """Every combination of key values, as the ``where`` of a place.

    Example:
        >>> list(combinations(architecture=["keel"], n_sublayers=[64, 128]))
        [(('architecture', 'keel'), ('n_sublayers', 64)), (('architecture', 'keel'), ('n_sublayers', 128))]
    """
    for chosen in product(*values.values()):
        yield tuple(zip(values, chosen, strict=True))


def in_words(column: str, value: Key) -> str:
    """A key's value as a reader names it.

    Example:
        >>> in_words("n_sublayers", 512), in_words("architecture", "pre_ln")
        ('512 sub-layers', 'Pre-LN')
    """
    if column in _PHRASES:
        return _PHRASES[column].format(value)
    return _WORDS.get(str(value), str(value).replace("_", " "))


def number_list(values: Sequence[float]) -> str:
    """Numbers with commas between them."""
    return ", ".join(f"{value:g}" for value in values)


def short(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
