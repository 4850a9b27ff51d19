"""Numbers as they are printed: which values they may stand for, in exact arithmetic.

A number printed to one decimal stands for every value that rounds to it. Two printed numbers contradict each other only if no
values behind them agree. Intervals are open: under one rule for ties (half up, or half down) for all numbers, an end point
belongs to one side only, so intervals that merely touch have no common value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

__all__ = ["Interval", "mean_interval", "rounding_interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The open interval between two exact numbers.

    Attributes:
        low: its lower end.
        high: its upper end.

    Example:
        >>> rounding_interval("60.3").overlaps(rounding_interval("60.2"))
        False
        >>> str(rounding_interval("60.3") - rounding_interval("60.2"))
        '0 to 0.2'
    """

    low: Fraction
    high: Fraction

    def overlaps(self, other: Interval) -> bool:
        """Whether some value lies in both."""
        return self.low < other.high and other.low < self.high

    def __sub__(self, other: Interval) -> Interval:
        """Every difference of a value of this interval and one of the other."""
        return Interval(self.low - other.high, self.high - other.low)

    def __str__(self) -> str:
        """Both ends to three decimals."""
        return f"{_short(self.low)} to {_short(self.high)}"


def rounding_interval(printed: str) -> Interval:
    """The values that a printed decimal number may stand for.

    Args:
        printed: as it stands in the table; its last digit says how it was rounded.

    Returns:
        Half a unit of the last digit to either side.

    Example:
        >>> str(rounding_interval("61.5")), str(rounding_interval("3"))
        ('61.45 to 61.55', '2.5 to 3.5')
    """
    number = Decimal(printed)
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        raise ValueError(f"a finite decimal number is needed, got '{printed}'")
    half = Fraction(10) ** exponent / 2
    return Interval(Fraction(number) - half, Fraction(number) + half)


def mean_interval(printed: Sequence[str]) -> Interval:
    """The means that printed numbers allow.

    Args:
        printed: at least one number, as they stand in the table.

    Returns:
        From all numbers at their lower ends to all at their upper ends.

    Example:
        >>> str(mean_interval(["1.0", "2.0", "4.5"]))
        '2.45 to 2.55'
    """
    intervals = [rounding_interval(each) for each in printed]
    count = len(intervals)
    return Interval(sum(i.low for i in intervals) / Fraction(count), sum(i.high for i in intervals) / Fraction(count))


def _short(value: Fraction) -> str:
    return f"{float(value):.3f}".rstrip("0").rstrip(".")
