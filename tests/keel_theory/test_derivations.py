from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import sympy as sp
from matplotlib.mathtext import MathTextParser

from keel_theory.derivations import DERIVATIONS, derive, is_proved, verify_step
from keel_theory.errors import EquationError
from keel_theory.notation import LATEX_NAMES as NAMES
from keel_theory.notation import symbol
from keel_theory.paper_equations import EQUATIONS
from keel_theory.results import Derivation, Step, StepKind
from keel_theory.tex_text import tex_text

X = sp.Symbol("x", positive=True)
IN_SCOPE = [*map(str, [*range(1, 9), 13, 14, 15, 18, 19, *range(24, 35)])]


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
        (Step("order at the samples only", sp.Le(sp.sqrt(X), X + sp.Rational(1, 5), evaluate=False)), False),
        (Step("all that it follows from", _eq(X, X + 1), proof=(_eq(X, X), _eq(2 * X, X + X))), True),
        (Step("one of them wrong", _eq(X, X), proof=(_eq(X, X), _eq(X, X + 1))), False),
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
    assert all(step.text in text and tex_text(step.text) in latex for step in derivation.steps)
    assert latex.count(r"\[") == len(derivation.steps) + 1
    assert len(derivation.to_frame()) == len(derivation.steps)


def _shown(derivation: Derivation) -> list[sp.Basic]:
    return [*(step.expression for step in derivation.steps), derivation.result]


@pytest.mark.parametrize("equation", DERIVATIONS)
def test_latex_prints_names_as_names(equation: str) -> None:
    """Every path from an expression to LaTeX: a name of several letters never becomes a product of italics."""
    for expression in _shown(derive(equation)):
        for each in expression.atoms(sp.Symbol, sp.MatrixSymbol):
            latex = sp.latex(each)
            if each.name in "+-":
                continue  # the side from which a limit is taken
            assert latex == NAMES.get(each.name, latex)
            assert each.name in NAMES or re.fullmatch(r"\w\d?'?|gamma", each.name), each.name


@pytest.mark.parametrize("equation", DERIVATIONS)
def test_latex_is_ascii_and_balanced_with_no_formula_outside_dollars(equation: str) -> None:
    latex = derive(equation).to_latex()
    assert latex.isascii()
    assert latex.count("{") == latex.count("}")
    assert latex.count("$") % 2 == 0
    words = re.sub(r"\$[^$]*\$|\\\[.*?\\\]", "", latex, flags=re.DOTALL)
    assert not re.search(r"[\\^_<>|=]", words)
    for formula in re.findall(r"\$([^$]*)\$", latex):
        MathTextParser("agg").parse(f"${formula}$")


@pytest.mark.parametrize("equation", ["14", "18", "27"])
def test_latex_uses_the_notation(equation: str) -> None:
    derivation = derive(equation)
    assert r"\gamma_{l-1,1}" in derivation.to_latex()
    assert r"\gamma_{l-1,1}" in sp.latex(derivation.result)
    assert r"\gamma_{p1}" not in sp.latex(derivation.result)


@pytest.mark.parametrize("equation", [str(number) for number in range(29, 35)])
def test_the_six_numbers_of_one_argument_say_so(equation: str) -> None:
    derivation = derive(equation)
    assert derivation.id == equation
    assert "Eqs. (29)-(34)" in derivation.to_text()
    assert "Eqs. (29)-(34)" in derivation.to_latex()


@pytest.mark.parametrize(("name", "value"), [("limit-above", 1), ("limit-critical", None), ("limit-below", 0)])
def test_a_limit_states_the_product_itself(name: str, value: int | None) -> None:
    """The result is a limit of the product, not of a bound, and the steps bound minus its log."""
    derivation = derive(name)
    limit, result = derivation.result.lhs, derivation.result.rhs
    assert isinstance(limit, sp.Limit)
    log_product = sp.expand_log(sp.log(limit.args[0].doit()))
    at = dict.fromkeys(log_product.free_symbols - {limit.args[1]}, 2) | {symbol("excess"): sp.Rational(1, 4)}
    deep = float(log_product.subs(at).subs(limit.args[1], sp.Float("1e12", 60)))
    expected = {"limit-above": 0.0, "limit-critical": -0.25, "limit-below": -math.inf}[name]
    assert deep == pytest.approx(expected, abs=1e-3) if math.isfinite(expected) else deep < -100
    assert value is None or result == value
    bounds = [step.expression for step in derivation.steps if step.kind is StepKind.BOUND]
    assert value is None or any(bound.lhs == -sp.log(limit.args[0]) for bound in bounds)


@pytest.mark.parametrize("name", ["limit-above", "limit-below"])
def test_a_broken_bound_breaks_the_limit(name: str) -> None:
    derivation = derive(name)
    last = derivation.steps[-1]
    turned = {sp.Le: sp.Ge, sp.Ge: sp.Le}
    middle = next(each for each in last.proof if isinstance(each, (sp.Le, sp.Ge)) and each.rhs != 0)
    wrong = turned[type(middle)](middle.lhs, middle.rhs, evaluate=False)
    proof = tuple(wrong if each is middle else each for each in last.proof)
    broken = replace(derivation, steps=(*derivation.steps[:-1], replace(last, proof=proof)))
    assert is_proved(derivation)
    assert not is_proved(broken)
