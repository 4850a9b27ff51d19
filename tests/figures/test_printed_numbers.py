"""What a printed number may stand for."""

from fractions import Fraction

import pytest

from figures.printed_numbers import Interval, mean_interval, rounding_interval


@pytest.mark.parametrize(
    ("printed", "low", "high"),
    [("61.5", "61.45", "61.55"), ("3", "2.5", "3.5"), ("0.0003", "0.00025", "0.00035"), ("-1.20", "-1.205", "-1.195")],
)
def test_last_digit_is_the_precision(printed: str, low: str, high: str) -> None:
    assert rounding_interval(printed) == Interval(Fraction(low), Fraction(high))


@pytest.mark.parametrize(
    ("other", "overlap"), [("60.2", False), ("60.3", True), ("60.4", False), ("60.25", True), ("60", True)]
)
def test_numbers_that_only_touch_have_no_common_value(other: str, overlap: bool) -> None:
    assert rounding_interval("60.3").overlaps(rounding_interval(other)) is overlap
    assert rounding_interval(other).overlaps(rounding_interval("60.3")) is overlap


def test_mean_of_equally_rounded_numbers_is_as_uncertain_as_each() -> None:
    interval = mean_interval(["56.9", "72.7", "52.9"])
    assert interval.high - interval.low == Fraction(1, 10)
    assert (interval.low + interval.high) / 2 == Fraction(1825, 30)


def test_differences_are_as_uncertain_as_both_together() -> None:
    assert rounding_interval("5.5") - rounding_interval("4.2") == Interval(Fraction("1.2"), Fraction("1.4"))


@pytest.mark.parametrize("text", ["inf", "nan"])
def test_refuses_what_was_never_rounded(text: str) -> None:
    with pytest.raises(ValueError, match=f"finite decimal number is needed, got '{text}'"):
        rounding_interval(text)
