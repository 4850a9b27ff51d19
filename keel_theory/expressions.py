r"""Named SymPy expressions that stay unevaluated: a page of algebra prints as named factors, and ``.doit()`` expands them.

Importing this module loads SymPy.

Example:
    >>> import sympy as sp
    >>> L = sp.Symbol("L", positive=True)
    >>> sp.latex(ShortcutProduct(L, 1, L))
    '\\left[\\rho\\left(L, 1\\right)\\right]^{L}'
    >>> ShortcutProduct(1, 1, 4).doit()
    1/4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import sympy as sp
from sympy.printing.precedence import PRECEDENCE

__all__ = [
    "BranchGain",
    "NamedExpression",
    "ShortcutGain",
    "ShortcutProduct",
    "SumVariance",
    "WeightedShortcutGain",
]


def _asks_formula(assumption: str) -> Callable[[NamedExpression], bool | None]:
    return lambda self: getattr(self.doit(), f"is_{assumption}")


class NamedExpression(sp.Expr):  # type: ignore[misc]  # SymPy ships no types
    """A formula with a name: the arguments are its fields, ``formula`` is what ``doit`` gives.

    Signs, derivatives, series, limits and printed code are those of the formula; only the printed name stands for it.

    Attributes:
        fields: what the arguments are called, in order.
        latex_name: how the name is written.

    Raises:
        TypeError: if there are more or fewer arguments than fields.

    Example:
        >>> x = sp.Symbol("x", real=True)
        >>> ShortcutGain(x, 1).is_positive is None, ShortcutGain(x, 1).diff(x).subs(x, 0)
        (True, 1)
    """

    fields: ClassVar[tuple[str, ...]] = ()
    latex_name: ClassVar[str]
    is_commutative = True
    _eval_is_complex = _asks_formula("complex")
    _eval_is_extended_real = _asks_formula("extended_real")
    _eval_is_real = _asks_formula("real")
    _eval_is_finite = _asks_formula("finite")
    _eval_is_zero = _asks_formula("zero")
    _eval_is_positive = _asks_formula("positive")
    _eval_is_negative = _asks_formula("negative")
    _eval_is_nonnegative = _asks_formula("nonnegative")
    _eval_is_nonpositive = _asks_formula("nonpositive")
    _eval_is_extended_positive = _asks_formula("extended_positive")
    _eval_is_extended_negative = _asks_formula("extended_negative")

    def __new__(cls, *arguments: Any) -> NamedExpression:
        """Keep the arguments, evaluate nothing."""
        if cls.fields and len(arguments) != len(cls.fields):
            raise TypeError(f"{cls.__name__} takes {len(cls.fields)} arguments ({', '.join(cls.fields)}), got {len(arguments)}")
        named: NamedExpression = sp.Expr.__new__(cls, *(sp.sympify(argument) for argument in arguments))
        return named

    def doit(self, **hints: Any) -> Any:
        """The formula with its arguments filled in."""
        return type(self).formula(*(argument.doit(**hints) for argument in self.args))

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The formula behind the name."""
        raise NotImplementedError("each named expression has its own formula")

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        power = "" if exp is None else rf"^{{{exp}}}"
        return rf"{self.latex_name}\left({', '.join(printer._print(argument) for argument in self.args)}\right){power}"

    def _code(self, printer: Any, **_: Any) -> str:
        return f"({printer._print(self.doit())})"

    _pythoncode = _numpycode = _mpmathcode = _sympycode = _numexprcode = _cupycode = _jaxcode = _torchcode = _ccode = _code

    def _eval_evalf(self, precision: int) -> Any:
        return self.doit()._eval_evalf(precision)

    def _eval_derivative(self, variable: Any) -> Any:
        return self.doit().diff(variable)

    def _eval_nseries(self, x: Any, n: int, logx: Any, cdir: Any = 0) -> Any:
        return self.doit()._eval_nseries(x, n=n, logx=logx, cdir=cdir)

    def _eval_as_leading_term(self, x: Any, logx: Any = None, cdir: Any = 0) -> Any:
        return self.doit()._eval_as_leading_term(x, logx=logx, cdir=cdir)

    def _eval_rewrite_as_tractable(self, *arguments: Any, **_: Any) -> Any:
        """What SymPy's limits ask an unknown function for."""
        return self.doit().rewrite("tractable", deep=True)


class SumVariance(NamedExpression):
    r"""Variance of :math:`\alpha x + F` for uncorrelated x (variance v) and F (variance q): arguments (alpha, v, q).

    Status: exact under the assumption.

    Example:
        >>> SumVariance(2, 1, 3).doit()
        7
    """

    fields = ("alpha", "v", "q")
    latex_name = r"\sigma_z^2"

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The variance: alpha² v + q."""
        alpha, stream_variance, branch_variance = arguments
        return alpha**2 * stream_variance + branch_variance


class ShortcutGain(NamedExpression):
    r"""Shortcut gain of one normalised sub-layer with unit weights: arguments (alpha, q).

    .. math:: \rho(\alpha, q) = \alpha / \sqrt{\alpha^2 + q}

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (14), (18) with unit weights.   Status: exact as D grows.

    Example:
        >>> ShortcutGain(1, 1).doit()
        sqrt(2)/2
    """

    fields = ("alpha", "q")
    latex_name = r"\rho"

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The gain: alpha / sqrt(alpha² + q)."""
        alpha, branch_variance = arguments
        return alpha / sp.sqrt(alpha**2 + branch_variance)


class WeightedShortcutGain(NamedExpression):
    r"""Shortcut gain with weights: arguments (weight_out, weight_previous, weight_in, alpha, q).

    .. math:: \gamma_{l,1}\,\alpha / \sqrt{\gamma_{l-1,1}^2 \alpha^2 + \gamma_{l,2}^2 q}

    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (18).   Status: exact as D grows, for equal entries in each weight.

    Example:
        >>> WeightedShortcutGain(1, 1, 1, 1, 1).doit()
        sqrt(2)/2
    """

    fields = ("weight_out", "weight_previous", "weight_in", "alpha", "q")
    latex_name = r"\rho_\gamma"

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The gain with weights."""
        out, previous, inner, alpha, branch_variance = arguments
        return out * alpha / sp.sqrt(previous**2 * alpha**2 + inner**2 * branch_variance)


class BranchGain(NamedExpression):
    r"""Gain through Keel's branch: arguments (weight_out, weight_previous, weight_in, alpha, q, jacobian_norm).

    .. math:: \frac{\gamma_{l,1}\gamma_{l,2}}{\gamma_{l-1,1}\sqrt{\gamma_{l-1,1}^2\alpha^2 + \gamma_{l,2}^2 q}}\,\|J_F\|

    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (27).   Status: order of magnitude.

    Example:
        >>> BranchGain(1, 1, 1, 1, 3, 1).doit()
        1/2
    """

    fields = ("weight_out", "weight_previous", "weight_in", "alpha", "q", "jacobian_norm")
    latex_name = r"\rho_F"

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The gain through the branch."""
        out, previous, inner, alpha, branch_variance, jacobian_norm = arguments
        return out * inner * jacobian_norm / (previous * sp.sqrt(previous**2 * alpha**2 + inner**2 * branch_variance))


class ShortcutProduct(NamedExpression):
    r"""Product of the shortcut gains of L equal sub-layers: arguments (alpha, q, L).

    .. math:: \left(\frac{\alpha}{\sqrt{\alpha^2 + q}}\right)^{L} = (1 + q/\alpha^2)^{-L/2}

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (15), (19).   Status: exact as D grows.

    Example:
        >>> ShortcutProduct(1, 1, 2).doit()
        1/2
    """

    fields = ("alpha", "q", "L")
    latex_name = r"\rho"
    precedence = PRECEDENCE["Pow"]  # it prints as a power, so a power of it needs brackets

    @staticmethod
    def formula(*arguments: Any) -> Any:
        """The product: (1 + q/alpha²)^(-L/2)."""
        alpha, branch_variance, n_sublayers = arguments
        return (1 + branch_variance / alpha**2) ** (-n_sublayers / 2)

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        alpha, branch_variance, n_sublayers = (printer._print(argument) for argument in self.args)
        power = n_sublayers if exp is None else rf"\left({n_sublayers}\right) \cdot {exp}"
        return rf"\left[\rho\left({alpha}, {branch_variance}\right)\right]^{{{power}}}"
