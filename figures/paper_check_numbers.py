"""Checks of printed numbers against printed numbers: averages, gains, repeated numbers, trends, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from figures.paper_places import Cause, Check, Column, Comparison, Kind, Place, Reading, average_column, in_words
from figures.paper_tables import TABLES, PaperTables, PaperTablesError
from figures.printed_numbers import Interval, rounding_interval

__all__ = [
    "GainCheck",
    "GroupCheck",
    "GrowthCheck",
    "MeanCheck",
    "OrdersCheck",
    "PercentCheck",
    "SameNumbersCheck",
    "ShotsCheck",
]


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
        """Agrees if some values within rounding give both differences; if none do, one of the two means is wrong already."""
        first, second = self.ours.printed(tables), self.baseline.printed(tables)
        printed = rounding_interval(first) - rounding_interval(second)
        interval = self.our_column.mean(tables)[1] - self.baseline_column.mean(tables)[1]
        stated = Reading(f"{Decimal(first) - Decimal(second):+} ({printed} within rounding)", f"{self.ours.label}, over Pre-LN")
        middle = float(interval.low + interval.high) / 2
        yield Comparison(
            stated,
            Reading(f"{middle:+.3f} ({interval} within rounding)", "difference of the means of the columns"),
            printed.overlaps(interval),
            cause=Cause.CONSEQUENCE,
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
        points: the two places of the averages, first minus second, in the order in which the gap grows; at least two points.
    """

    kind = Kind.TREND
    points: tuple[tuple[Place, Place], ...]

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees where some values within rounding let the gap grow from one point to the next."""
        printed = [rounding_interval(a.printed(tables)) - rounding_interval(b.printed(tables)) for a, b in self.points]
        columns = [[average_column(place).mean(tables)[1] for place in pair] for pair in self.points]
        yield from self._growth(printed, where="printed averages")
        yield from self._growth([ours - baseline for ours, baseline in columns], where="means of the columns")

    def _growth(self, gaps: Sequence[Interval], *, where: str) -> Iterator[Comparison]:
        names = [in_words(*pair[0].where[-1]) for pair in self.points]
        title = TABLES[self.points[0][0].table].title
        for (before, after), (first, second) in zip(pairwise(gaps), pairwise(names), strict=True):
            growth = after - before
            change = (
                f"{_middle(before):+.1f} to {_middle(after):+.1f}, by {float(growth.low):+.3g} to {float(growth.high):+.3g}"
            )
            against = Reading(f"it changes from {change}", f"{title}, {where}, {first} to {second}")
            yield Comparison(Reading("the gap grows", self.source), against, growth.high > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersCheck(Check):
    """A ratio given in orders of magnitude against the ratio of two printed numbers.

    "Nearly n orders" is read generously: from half of 10^n up to 10^n.

    Attributes:
        words: as the paper has them.
        orders: n.
        larger: place of the larger number.
        smaller: place of the smaller one.
    """

    kind = Kind.RATIO
    words: str
    orders: int
    larger: Place
    smaller: Place

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the ratio is that large."""
        above, below = (place.printed(tables) for place in (self.larger, self.smaller))
        ratio = float(Decimal(above) / Decimal(below))
        target = 10**self.orders
        yield Comparison(
            Reading(f"{self.words}: {target // 2} to {target} times", "the text"),
            Reading(
                f"{ratio:.3g} times, 10^{math.log10(ratio):.2f}",
                f"{self.larger.label} ({above}) over {self.smaller.label} ({below})",
            ),
            target / 2 <= ratio <= target,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentCheck(Check):
    """How far one number is above another in percent, as the text has it.

    Attributes:
        stated: whole percent.
        larger: place of the larger number.
        smaller: place of the smaller one.
    """

    kind = Kind.RATIO
    stated: str
    larger: Place
    smaller: Place

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if some values within rounding are that far apart."""
        above, below = (rounding_interval(place.printed(tables)) for place in (self.larger, self.smaller))
        low, high = (100 * (a / b - 1) for a, b in ((above.low, below.high), (above.high, below.low)))
        yield Comparison(
            Reading(f"{self.stated} % above", "the text"),
            Reading(
                f"{float(low):.2f} to {float(high):.2f} % within rounding", f"{self.larger.label} over {self.smaller.label}"
            ),
            Interval(low, high).overlaps(rounding_interval(self.stated)),
        )


def _middle(interval: Interval) -> float:
    return float(interval.low + interval.high) / 2
