"""Errors of the theory: each says which quantity was outside its domain, its value, and what would work."""

import math

__all__ = ["DomainError", "EquationError", "TheoryError", "require_at_least", "require_non_negative", "require_positive"]


class TheoryError(ValueError):
    """A question that the theory cannot answer as it was put."""


class DomainError(TheoryError):
    """A number outside the domain of a formula."""


class EquationError(TheoryError):
    """An equation that is not in the registry."""


def require_positive(name: str, value: float) -> float:
    """The value, if it is a positive finite number.

    Raises:
        DomainError: otherwise.

    Example:
        >>> require_positive("alpha", 2.0)
        2.0
        >>> require_positive("alpha", 0.0)
        Traceback (most recent call last):
        ...
        keel_theory.errors.DomainError: alpha must be a positive finite number, got 0.0
    """
    if not (_is_finite(value) and value > 0):
        raise DomainError(f"{name} must be a positive finite number, got {_shown(value)}")
    return value


def require_non_negative(name: str, value: float) -> float:
    """The value, if it is a non-negative finite number.

    Raises:
        DomainError: otherwise.

    Example:
        >>> require_non_negative("branch_variance", 0.0)
        0.0
    """
    if not (_is_finite(value) and value >= 0):
        raise DomainError(f"{name} must be a non-negative finite number, got {_shown(value)}")
    return value


def require_at_least(name: str, value: float, least: int) -> int:
    """The whole number, if it is not below the least allowed nor past float64.

    Raises:
        DomainError: otherwise.

    Example:
        >>> require_at_least("n_sublayers", 10**400, 1)
        Traceback (most recent call last):
        ...
        keel_theory.errors.DomainError: n_sublayers is past float64 (1.8e308); take a smaller number
    """
    if isinstance(value, int) and not _is_finite(value):
        raise DomainError(f"{name} is past float64 (1.8e308); take a smaller number")
    if not _is_finite(value) or value != int(value) or value < least:
        raise DomainError(f"{name} must be a whole number of at least {least}, got {value}")
    return int(value)


def _is_finite(value: float) -> bool:
    """Whether float64 can hold the value, which a whole number of many digits cannot be."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: float) -> str:
    return f"{value}" if not isinstance(value, int) or _is_finite(value) else "a number past float64"
