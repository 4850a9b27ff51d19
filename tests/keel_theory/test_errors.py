from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from keel_theory.errors import (
    DomainError,
    EquationError,
    TheoryError,
    require_at_least,
    require_non_negative,
    require_positive,
)


@pytest.mark.parametrize("error", [DomainError, EquationError])
def test_all_are_theory_and_value_errors(error: type[TheoryError]) -> None:
    assert issubclass(error, TheoryError)
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_positive(value: float) -> None:
    assert require_positive("alpha", 1e-300) == 1e-300
    with pytest.raises(DomainError, match=f"alpha must be a positive finite number, got {value}"):
        require_positive("alpha", value)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_non_negative(value: float) -> None:
    assert require_non_negative("q", 0.0) == 0.0
    with pytest.raises(DomainError, match=f"q must be a non-negative finite number, got {value}"):
        require_non_negative("q", value)


@pytest.mark.parametrize("value", [0, -3, 2.5, math.nan, math.inf])
def test_whole_numbers(value: float) -> None:
    assert require_at_least("depth", 1, 1) == 1
    with pytest.raises(DomainError, match=f"depth must be a whole number of at least 1, got {value}"):
        require_at_least("depth", value, 1)


@pytest.mark.parametrize(
    "require", [require_positive, require_non_negative, lambda name, value: require_at_least(name, value, 1)]
)
def test_a_whole_number_past_float64_is_refused(require: Callable[[str, int], float]) -> None:
    with pytest.raises(DomainError, match=r"^depth .*past float64"):
        require("depth", 10**400)
