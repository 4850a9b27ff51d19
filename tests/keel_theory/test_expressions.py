from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import sympy as sp
from matplotlib.mathtext import MathTextParser

from keel_theory.expressions import (
    BranchGain,
    NamedExpression,
    ShortcutGain,
    ShortcutProduct,
    SumVariance,
    WeightedShortcutGain,
)

A, Q, L, J, G1, G2, P = sp.symbols("a q L J g1 g2 p", positive=True)
CASES = [
    (SumVariance(A, P, Q), A**2 * P + Q),
    (ShortcutGain(A, Q), A / sp.sqrt(A**2 + Q)),
    (WeightedShortcutGain(G1, P, G2, A, Q), G1 * A / sp.sqrt(P**2 * A**2 + G2**2 * Q)),
    (BranchGain(G1, P, G2, A, Q, J), G1 * G2 * J / (P * sp.sqrt(P**2 * A**2 + G2**2 * Q))),
    (ShortcutProduct(A, Q, L), (A / sp.sqrt(A**2 + Q)) ** L),
]
each = pytest.mark.parametrize(("named", "formula"), CASES, ids=[type(named).__name__ for named, _ in CASES])


@each
def test_doit_gives_the_formula(named: NamedExpression, formula: sp.Expr) -> None:
    assert sp.simplify(sp.expand_log(sp.log(named.doit()) - sp.log(formula), force=True)) == 0


@each
def test_substitution_commutes_with_expansion(named: NamedExpression, formula: sp.Expr) -> None:
    values = {A: 2, Q: 3, L: 4, J: 5, G1: 7, G2: 11, P: 13}
    assert sp.simplify(named.subs(values).doit() - named.doit().subs(values)) == 0
    assert float(named.subs(values)) == pytest.approx(float(formula.subs(values)), rel=1e-14)


@each
def test_stays_unevaluated_and_prints_by_name(named: NamedExpression, formula: sp.Expr) -> None:
    assert (2 * named + 1).has(type(named))
    assert not (2 * named + 1).doit().has(type(named))
    assert named.latex_name in sp.latex(named)
    assert named._repr_latex_().startswith("$")


def test_the_base_has_no_formula() -> None:
    with pytest.raises(NotImplementedError, match="its own formula"):
        NamedExpression(A).doit()


SIGNS = ["positive", "negative", "zero", "nonnegative", "nonpositive", "real", "finite"]
R, J0 = sp.Symbol("r", real=True), sp.Symbol("J0", nonnegative=True)
SIGNED = [
    ShortcutGain(-1, 1),
    ShortcutGain(R, 1),
    ShortcutGain(0, 1),
    ShortcutProduct(A, Q, L),
    ShortcutProduct(sp.Symbol("z"), Q, L),
    BranchGain(1, 1, 1, 1, 1, J0),
    BranchGain(1, 1, 1, 1, 1, 0),
    SumVariance(1, 1, -2),
    WeightedShortcutGain(-1, 1, 1, 1, 1),
]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("named", SIGNED, ids=str)
def test_signs_are_those_of_the_formula(named: NamedExpression, sign: str) -> None:
    assert getattr(named, f"is_{sign}") is getattr(named.doit(), f"is_{sign}")


def test_a_gain_that_may_vanish_is_not_called_positive() -> None:
    assert ShortcutGain(-1, 1).is_negative
    assert sp.Eq(BranchGain(1, 1, 1, 1, 1, J0), 0) not in (sp.true, sp.false)


@each
def test_calculus_is_that_of_the_formula(named: NamedExpression, formula: sp.Expr) -> None:
    assert sp.simplify(named.diff(A) - named.doit().diff(A)) == 0
    point = named.subs(dict.fromkeys((Q, L, J, G1, G2, P), 2))
    assert point.series(A, 1, 3) == point.doit().series(A, 1, 3)
    for end in (0, sp.oo):
        assert sp.limit(point, A, end) == sp.limit(point.doit(), A, end)


@pytest.mark.parametrize(
    ("expression", "limit"),
    [
        (ShortcutProduct(L, 1, L), 1),
        (ShortcutProduct(sp.sqrt(L), 1, L), sp.exp(-sp.Rational(1, 2))),
        (L * (1 - ShortcutProduct(L, 1, L)), sp.Rational(1, 2)),
        (sp.log(ShortcutProduct(L ** sp.Rational(1, 4), 1, L)) / sp.sqrt(L), -sp.Rational(1, 2)),
    ],
    ids=str,
)
def test_limits_over_depth(expression: sp.Expr, limit: sp.Expr) -> None:
    assert sp.limit(expression, L, sp.oo) == limit


@pytest.mark.parametrize("library", ["math", "numpy", "scipy", "mpmath", "sympy"])
@each
def test_becomes_a_function_of_numbers(named: NamedExpression, formula: sp.Expr, library: str) -> None:
    symbols = sorted(formula.free_symbols, key=str)
    values = [1.5 + i for i in range(len(symbols))]
    squared = sp.lambdify(symbols, 3 * named**2, library)(*values)
    assert float(squared) == pytest.approx(float(3 * formula.subs(dict(zip(symbols, values, strict=True))) ** 2), rel=1e-12)


@each
@pytest.mark.parametrize("shape", [lambda e: e**2, lambda e: 1 / e, sp.sqrt, lambda e: 2 * e, lambda e: e**L, sp.log])
def test_latex_has_one_superscript_per_base(
    named: NamedExpression, formula: sp.Expr, shape: Callable[[sp.Expr], sp.Expr]
) -> None:
    """What a TeX engine refuses, and what Matplotlib's parser does."""
    latex = sp.latex(shape(named))
    assert not re.search(r"\^\{[^{}]*\}\s*\^", latex)
    MathTextParser("agg").parse(f"${latex}$")


@each
def test_a_wrong_number_of_arguments_is_refused(named: NamedExpression, formula: sp.Expr) -> None:
    fields = ", ".join(named.fields)
    for arguments in (named.args[:-1], (*named.args, A)):
        message = rf"{type(named).__name__} takes {len(named.args)} arguments \({fields}\), got {len(arguments)}"
        with pytest.raises(TypeError, match=message):
            type(named)(*arguments)
