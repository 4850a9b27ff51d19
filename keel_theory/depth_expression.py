r"""Expressions in the depth L, such as ``L**0.25`` or ``2*sqrt(L)``, parsed without ``eval``.

L is the number of sub-layers (attention and FFN counted separately), the paper's footnote 1.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

__all__ = ["DepthExpression", "DepthExpressionError", "DepthRule"]

DepthRule: TypeAlias = "float | str"
"""A number, or an expression in L."""

_MAX_LENGTH = 200
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "log": math.log, "log2": math.log2, "exp": math.exp}


class DepthExpressionError(ValueError):
    """The text is not an arithmetic expression in L, or has no finite real value at the depth asked for."""


@dataclass(frozen=True, slots=True)
class DepthExpression:
    """An arithmetic expression in L: numbers, ``+ - * / **``, brackets, ``sqrt``, ``log``, ``log2``, ``exp``.

    Args:
        text: the expression; a number is accepted as well.

    Raises:
        DepthExpressionError: if the text holds anything else.

    Example:
        >>> DepthExpression("2*sqrt(L)")(64)
        16.0
        >>> DepthExpression("L.__class__")
        Traceback (most recent call last):
        ...
        keel_theory.depth_expression.DepthExpressionError: ...
    """

    text: str

    def __post_init__(self) -> None:
        """Refuse whatever is not arithmetic, before any value is asked for."""
        _check(_parse(self.text), self.text)

    @classmethod
    def of(cls, rule: DepthRule) -> DepthExpression:
        """The expression of a number or a text.

        Raises:
            DepthExpressionError: if it is neither, or not finite.
        """
        if isinstance(rule, str):
            return cls(rule)
        try:
            value = math.nan if isinstance(rule, bool) else float(rule)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise DepthExpressionError(f"a finite number or an expression in L is needed, got {rule!r}")
        return cls(repr(value))

    def __call__(self, n_sublayers: int) -> float:
        """The value at a depth.

        Args:
            n_sublayers: L, at least 1.

        Returns:
            A finite real number, dimensionless.

        Raises:
            DepthExpressionError: if the value is not a finite real number, or n_sublayers is below 1.
        """
        if n_sublayers < 1:
            raise DepthExpressionError(f"L is the number of sub-layers, at least 1; got {n_sublayers}")
        try:
            value = _evaluate(_parse(self.text), float(n_sublayers))
        except OverflowError as error:
            raise DepthExpressionError(f"'{self.text}' is too large for a float at L = {n_sublayers}") from error
        except (ArithmeticError, ValueError, TypeError) as error:
            raise DepthExpressionError(f"'{self.text}' has no value at L = {n_sublayers}: {error}") from error
        if isinstance(value, complex) or not math.isfinite(value):
            raise DepthExpressionError(f"'{self.text}' is {value} at L = {n_sublayers}; a finite real number is needed")
        return value

    def __str__(self) -> str:
        """The text as written."""
        return self.text


@lru_cache(maxsize=256)  # one scheme asks for the same text at every sub-layer
def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise DepthExpressionError(f"expression of {len(text)} characters; at most {_MAX_LENGTH} are accepted")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about odd literals; whatever is not arithmetic is refused below
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DepthExpressionError(f"cannot read '{text}' as an expression in L; try L, L**0.25 or 2*sqrt(L)") from error


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()) | ast.Name(id="L"):
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, text)
            _check(right, text)
            return
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            _check(operand, text)
            return
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            _check(argument, text)
            return
    raise DepthExpressionError(
        f"'{ast.unparse(node)}' in '{text}' is not allowed; use numbers, L, + - * / **, brackets and {', '.join(_FUNCTIONS)}"
    )


def _evaluate(node: ast.expr, depth: float) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name():
            return depth
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, depth), _evaluate(right, depth))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_evaluate(operand, depth))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _FUNCTIONS[name](_evaluate(argument, depth))
    raise AssertionError(f"unchecked node {ast.dump(node)}")  # _check has refused everything else
