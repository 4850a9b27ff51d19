"""Checked values of scheme parameters. A command line passes text, so every number is accepted as text as well."""

from __future__ import annotations

import math
from collections.abc import Collection

from keel_theory.depth_expression import DepthExpression, DepthRule
from keel_theory.spec import ParameterValue, SchemeError

__all__ = ["choice", "number", "positive_at_depth"]


def number(name: str, value: ParameterValue, *, low: float = -math.inf, high: float = math.inf) -> float:
    """The value as a finite float within ``[low, high]``.

    Args:
        name: the parameter, for the message.
        value: a number or its text.
        low: smallest accepted value.
        high: largest accepted value.

    Returns:
        The number.

    Raises:
        SchemeError: if the value is no finite number or lies outside the interval.

    Example:
        >>> number("ratio", "0.25", low=0, high=1)
        0.25
    """
    accepted = "a finite number" if math.isinf(low) and math.isinf(high) else f"a number from {low:g} to {high:g}"
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not (math.isfinite(result) and low <= result <= high):
        raise SchemeError(f"{name} must be {accepted}, got {value!r}")
    return result


def choice(name: str, value: ParameterValue, known: Collection[str]) -> str:
    """The value, one of the known words.

    Raises:
        SchemeError: if it is none of them; the message lists them.

    Example:
        >>> choice("variant", "star", ("plain", "star"))
        'star'
    """
    if not isinstance(value, str) or value not in known:
        raise SchemeError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def positive_at_depth(name: str, rule: DepthRule, n_sublayers: int) -> float:
    """The value of a number or an expression in L at a depth.

    Args:
        name: the parameter, for the message.
        rule: a number or an expression in L.
        n_sublayers: L, the number of sub-layers.

    Returns:
        A positive finite number, dimensionless.

    Raises:
        SchemeError: if the value is not positive at this depth.

    Example:
        >>> positive_at_depth("alpha", "L**0.5", 16)
        4.0
    """
    value = DepthExpression.of(rule)(n_sublayers)
    if value <= 0:
        raise SchemeError(
            f"{name} must be positive, but '{rule}' is {value:g} at {n_sublayers} sub-layers; try 1, L**0.25 or L"
        )
    return value
