from __future__ import annotations

import pytest
import sympy as sp

from keel_theory.derivations import DERIVATIONS, derive, is_proved, verify_step
from keel_theory.errors import EquationError
from keel_theory.notation import symbol
from keel_theory.paper_equations import EQUATIONS
from keel_theory.results import Derivation, Step, StepKind

X = sp.Symbol("x", positive=True)
IN_SCOPE = [*map(str, [*range(1, 9), 13, 14, 15, 18, 19, *range(24, 29)])]


def _eq(left: object, right: object) -> sp.Eq:
    return sp.Eq(left, right, evaluate=False)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_step_of_an_equation_is_proved(equation: str) -> None:
    derivation = derive(equation)
    assert derivation.id == equation
    assert is_proved(derivation)


@pytest.mark.parametrize("equation", DERIVATIONS)
def test_every_derivation_proves_something(equation: str) -> None:
    kinds = {step.kind for step in derive(equation).steps}
    assert kinds & {StepKind.EXACT, StepKind.LIMIT}


@pytest.mark.parametrize("equation", IN_SCOPE)
def test_the_equations_on_residual_schemes_are_there(equation: str) -> None:
    assert equation in DERIVATIONS


@pytest.mark.parametrize(
    ("step", "holds"),
    [
        (Step("identity", _eq((X + 1) ** 2, X**2 + 2 * X + 1)), True),
        (Step("wrong", _eq((X + 1) ** 2, X**2 + 1)), False),
        (Step("nearly", _eq(X, X * (1 + sp.Float("1e-20", 30)))), False),
        (Step("matrix", _eq(sp.Matrix([X, X]), sp.Matrix([X, 2 * X]))), False),
        (Step("limit", _eq(sp.Limit(1 / X, X, sp.oo), 0), StepKind.LIMIT), True),
        (Step("wrong limit", _eq(sp.Limit((1 + 1 / X) ** X, X, sp.oo), 1), StepKind.LIMIT), False),
        (Step("order", sp.Le(sp.log(1 + X), X, evaluate=False)), True),
        (Step("wrong order", sp.Ge(sp.log(1 + X), X, evaluate=False)), False),
        (Step("definition", _eq(X, X**2), StepKind.DEFINITION), True),
        (Step("proof decides", _eq(X, X), proof=_eq(X, X + 1)), False),
    ],
    ids=lambda value: value.text if isinstance(value, Step) else str(value),
)
def test_verification_tells_right_from_wrong(step: Step, holds: bool) -> None:
    assert verify_step(step) is holds


def test_a_wrong_result_is_not_proved() -> None:
    step = Step("identity", _eq((X + 1) ** 2, X**2 + 2 * X + 1))
    right = Derivation(id="0", title="", assumptions=(), steps=(step,), result=step.expression)
    wrong = Derivation(id="0", title="", assumptions=(), steps=(step,), result=_eq(X, X + 1))
    assert is_proved(right)
    assert not is_proved(wrong)


def test_equation_15_is_a_power_of_two() -> None:
    result = derive("15").result
    n_sublayers = symbol("n_sublayers")
    assert result.lhs.doit().subs(n_sublayers, 10) == sp.Rational(1, 32)
    assert result.rhs != n_sublayers ** (-n_sublayers / 2)


@pytest.mark.parametrize("spelling", ["18", "(18)", "Eq. (18)", " eq.18 "])
def test_an_equation_is_found_however_it_is_written(spelling: str) -> None:
    assert derive(spelling).id == "18"


@pytest.mark.parametrize("equation", ["99", "", "__class__"])
def test_an_unknown_equation_is_named_with_the_known_ones(equation: str) -> None:
    with pytest.raises(EquationError, match=rf"no equation '{equation}'; known: 1, 2, 3.*keel-rate"):
        derive(equation)


@pytest.mark.parametrize("equation", DERIVATIONS)
def test_text_and_latex_show_every_step(equation: str) -> None:
    derivation = derive(equation)
    text, latex = derivation.to_text(), derivation.to_latex()
    assert all(step.text in text and step.text in latex for step in derivation.steps)
    assert latex.count(r"\[") == len(derivation.steps) + 1
    assert len(derivation.to_frame()) == len(derivation.steps)


def test_latex_uses_the_notation() -> None:
    assert r"\gamma_{l-1,1}" in derive("18").to_latex()
