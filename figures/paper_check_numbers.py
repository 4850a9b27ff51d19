"""Checks of printed numbers against printed numbers: averages, gains, repeated numbers, trends, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from figures.paper_places import Check, Column, Comparison, Kind, Place, Reading, average_column, in_words
from figures.paper_tables import TABLES, PaperTables, PaperTablesError
from figures.printed_numbers import Interval, rounding_interval

__all__ = ["GainCheck", "GroupCheck", "GrowthCheck", "MeanCheck", "OrdersCheck", "SameNumbersCheck", "ShotsCheck"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanCheck(Check):
    """A printed mean against the numbers it is the mean of.

    Attributes:
        place: of the mean.
        column: the numbers.
    """

    kind = Kind.AVERAGE
    place: Place
    column: Column

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if some values within rounding give the printed mean."""
        reading, interval = self.column.mean(tables)
        printed = self.place.reading(tables)
        yield Comparison(printed, reading, rounding_interval(printed.text).overlaps(interval))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCheck(MeanCheck):
    """A bar of a figure against the benchmarks it sums up."""

    kind = Kind.GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class GainCheck(Check):
    """The difference of two printed means against the difference of the columns' means.

    Attributes:
        ours: place of the larger mean.
        baseline: place of the mean it is compared with.
        our_column: the numbers behind the first.
        baseline_column: the numbers behind the second.
    """

    kind = Kind.GAIN
    ours: Place
    baseline: Place
    our_column: Column
    baseline_column: Column

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if some values within rounding give both differences."""
        first, second = self.ours.printed(tables), self.baseline.printed(tables)
        printed = rounding_interval(first) - rounding_interval(second)
        interval = self.our_column.mean(tables)[1] - self.baseline_column.mean(tables)[1]
        stated = Reading(f"{Decimal(first) - Decimal(second):+} ({printed} within rounding)", f"{self.ours.label}, over Pre-LN")
        middle = float(interval.low + interval.high) / 2
        yield Comparison(
            stated,
            Reading(f"{middle:+.3f} ({interval} within rounding)", "difference of the means of the columns"),
            printed.overlaps(interval),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SameNumbersCheck(Check):
    """Numbers that two places print of the same runs.

    Attributes:
        pairs: the two places of each number.
    """

    kind = Kind.SAME
    pairs: tuple[tuple[Place, Place], ...]

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees where one value rounds to both."""
        for first, second in self.pairs:
            a, b = first.reading(tables), second.reading(tables)
            yield Comparison(a, b, rounding_interval(a.text).overlaps(rounding_interval(b.text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShotsCheck(Check):
    """A benchmark is given with the same number of examples in every table.

    Attributes:
        benchmark: its name in the tables.
    """

    kind = Kind.SAME
    benchmark: str

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees where the shots are those of the first table that has the benchmark."""
        found = []
        for table, frame in tables.frames.items():
            if "shots" in frame.columns:
                rows = frame.loc[frame["benchmark"] == self.benchmark, "shots"]
                found += [Reading(f"{shots} shots", f"{TABLES[table].title}, {self.benchmark}") for shots in rows.unique()]
        if not found:
            raise PaperTablesError(f"no table has the benchmark {self.benchmark}")
        for other in found[1:]:
            yield Comparison(other, found[0], other.text == found[0].text)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthCheck(Check):
    """A gap between two schemes that is said to grow, in the printed averages and in the columns.

    Attributes:
        before: the two places of the averages, first minus second.
        after: the same, later.
    """

    kind = Kind.TREND
    before: tuple[Place, Place]
    after: tuple[Place, Place]

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if some values within rounding let the gap grow."""
        gaps = [
            rounding_interval(a.printed(tables)) - rounding_interval(b.printed(tables)) for a, b in (self.before, self.after)
        ]
        yield self._growth(*gaps, where="printed averages")
        columns = [[average_column(place).mean(tables)[1] for place in pair] for pair in (self.before, self.after)]
        yield self._growth(columns[0][0] - columns[0][1], columns[1][0] - columns[1][1], where="means of the columns")

    def _growth(self, before: Interval, after: Interval, *, where: str) -> Comparison:
        growth = after - before
        return Comparison(
            Reading("the gap grows", self.source),
            Reading(
                f"it changes by {float(growth.low):+.3g} to {float(growth.high):+.3g}",
                f"{TABLES[self.before[0].table].title}, {where}",
            ),
            growth.high > 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersCheck(Check):
    """A ratio given in orders of magnitude against the widest ratio between numbers of one kind in the tables.

    "Nearly n orders" is read generously: from half of 10^n up to 10^n.

    Attributes:
        words: as the paper has them.
        orders: n.
    """

    kind = Kind.RATIO
    words: str
    orders: int

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if some two learning rates, or two scores of one benchmark in one table, are that far apart."""
        widest, where = max(_ratios(tables))
        target = 10**self.orders
        yield Comparison(
            Reading(f"{self.words}: {target // 2} to {target} times", "the text"),
            Reading(f"{widest:.3g} times, 10^{math.log10(widest):.2f}", f"widest ratio in any table: {where}"),
            target / 2 <= widest <= target,
        )


def _ratios(tables: PaperTables) -> Iterator[tuple[float, str]]:
    """(ratio, its two places) of the extremes of each set of like numbers: Table 1, and each benchmark of each table."""
    for table, frame in tables.frames.items():
        keys = [name for name in TABLES[table].keys if name not in {"shots", "warmup_steps", "peak_lr", "hidden_dim"}]
        if table == "table1_max_lr":
            groups = [frame]
        elif "benchmark" in frame.columns:
            groups = [rows for _, rows in frame.groupby("benchmark")]
        else:
            continue
        for rows in groups:
            low, *_, high = rows.sort_values("value", kind="stable").to_dict("records")
            places = [", ".join(in_words(name, row[name]) for name in keys) + f" ({row['printed']})" for row in (high, low)]
            yield float(high["value"] / low["value"]), f"{TABLES[table].title}, {places[0]} over {places[1]}"
