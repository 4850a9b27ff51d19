from __future__ import annotations

import pytest
import sympy as sp

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
