"""Eqs. 29-34 as a derivation: every step proved, and the assumption needed."""

from dataclasses import replace

import pytest
import sympy as sp

from keel_theory.depthwise_equations import EQUATIONS
from keel_theory.derivations import derive, is_proved, verify_step


@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_step_is_proved(equation: str) -> None:
    derivation = derive(f"({equation})")
    assert derivation.id == equation
    assert is_proved(derivation)
    assert "held constant" in derivation.to_text()
    assert "J_G" in derivation.to_latex()


def test_the_update_is_not_the_whole_gradient() -> None:
    held, *_, whole = [step for step in derive("34").steps if step.proof is not None]
    assert not verify_step(replace(held, proof=sp.Eq(whole.proof.lhs, held.proof.rhs, evaluate=False)))
