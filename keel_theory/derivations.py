"""Every derived equation by its number, and the machine check of a derivation's steps.

Importing this module loads SymPy. An unknown number raises an error that lists the known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import sympy as sp

from keel_theory import asymptotics, depthwise_equations, paper_equations
from keel_theory.errors import EquationError
from keel_theory.results import Derivation, Step, StepKind

__all__ = ["DERIVATIONS", "derive", "is_proved", "verify_step"]

DERIVATIONS: Mapping[str, Callable[[], Derivation]] = MappingProxyType(
    {
        **paper_equations.EQUATIONS,
        **depthwise_equations.EQUATIONS,
        **asymptotics.LIMITS,
    }
)

_DIGITS = 40
_SAMPLES = (("0.731", "1.137"), ("1.913", "0.471"), ("0.377", "1.629"))


def derive(equation: str) -> Derivation:
    """The derivation of one equation or limit.

    Args:
        equation: the paper's number, with or without brackets, or the name of a limit.

    Returns:
        Title, assumptions, steps and result.

    Raises:
        EquationError: if it is not in :data:`DERIVATIONS`.

    Example:
        >>> derive("19").result.doit()
        True
        >>> derive("99")
        Traceback (most recent call last):
        ...
        keel_theory.errors.EquationError: no equation '99'; known: 1, 2, ...
    """
    key = equation.strip().lower().removeprefix("eq.").strip(" ()")
    if key not in DERIVATIONS:
        raise EquationError(f"no equation '{equation}'; known: {', '.join(DERIVATIONS)}")
    return DERIVATIONS[key]()


def is_proved(derivation: Derivation) -> bool:
    """Whether every step that claims an identity or a limit holds, and the result as well.

    Example:
        >>> is_proved(derive("18"))
        True
    """
    proved = [step.expression for step in derivation.steps if step.kind is not StepKind.ASSUMPTION]
    return all(map(verify_step, derivation.steps)) and (
        derivation.result in proved or verify_step(Step("result", derivation.result))
    )


def verify_step(step: Step) -> bool:
    """Whether a step's two sides are equal or ordered, or the relations that it follows from hold.

    Equality is decided by SymPy or, where it cannot decide, by numbers of 40 digits. An order is decided by SymPy or by
    monotony: the difference vanishes where a non-negative symbol does, and its derivative there on is not negative. Samples
    never prove an order. Definitions and assumptions claim no identity and pass.

    Example:
        >>> x = sp.Symbol("x", nonnegative=True)
        >>> verify_step(Step("upper bound", sp.Le(sp.log(1 + x), x, evaluate=False)))
        True
        >>> verify_step(Step("not a bound", sp.Le(sp.sqrt(x), x, evaluate=False)))
        False
    """
    if step.kind in {StepKind.DEFINITION, StepKind.ASSUMPTION}:
        return True
    return all(map(_holds, step.checkable))


def _holds(relation: Any) -> bool:
    left, right = relation.lhs.doit(), relation.rhs.doit()
    if isinstance(relation, sp.Eq):
        return _vanishes(left - right)
    return _is_non_negative(left - right if isinstance(relation, sp.Ge) else right - left)


def _vanishes(difference: Any) -> bool:
    entries = list(difference) if isinstance(difference, sp.MatrixBase) else [difference]
    return all(sp.simplify(entry) == 0 or _vanishes_in_numbers(entry) for entry in entries)


def _vanishes_in_numbers(entry: Any) -> bool:
    values = [_at(entry, sample) for sample in _SAMPLES]
    return all(value.is_number and abs(value) < sp.Float(10) ** (10 - _DIGITS) for value in values)


def _is_non_negative(difference: Any) -> bool:
    expanded = sp.expand_log(difference)
    if difference.is_nonnegative or expanded.is_nonnegative:
        return True
    return any(_grows_from_zero(expanded, each) for each in sorted(expanded.free_symbols, key=str) if each.is_nonnegative)


def _grows_from_zero(difference: Any, variable: Any) -> bool:
    """Whether the difference is 0 where the non-negative variable is, and does not fall as it grows."""
    if sp.simplify(difference.subs(variable, 0)) != 0:
        return False
    slope = difference.diff(variable)
    return any(form.is_nonnegative for form in (sp.factor(slope), sp.simplify(slope)))


def _at(entry: Any, sample: tuple[str, str]) -> Any:
    """The entry with distinct positive numbers in place of its symbols."""
    first, ratio = (sp.Float(text, _DIGITS) for text in sample)
    symbols = sorted(entry.free_symbols, key=str)
    return entry.subs({each: first * ratio**i for i, each in enumerate(symbols)}).evalf(_DIGITS)
