r"""Depth-wise test-time training, derived step by step: Eqs. (29)-(34).

The paper's argument runs over six numbers; it is proved here as one, and every number leads to it. Proved at width 2 with two
hidden units that are arbitrary functions of the stream, see :func:`keel_theory.depthwise_training.symbolic_step`.
The paper's rows are columns here.

Importing this module loads SymPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import sympy as sp

from keel_theory.depthwise_training import symbolic_step
from keel_theory.named_symbols import NamedMatrix, NamedSymbol
from keel_theory.notation import symbol
from keel_theory.results import Derivation, Step, StepKind

__all__ = ["EQUATIONS"]


def _depthwise(equation: str) -> Derivation:
    proof = symbolic_step()
    width, hidden = symbol("width"), NamedSymbol("H", positive=True, integer=True)
    x, new_x, held, whole = (NamedMatrix(name, width, 1) for name in ("x", "x'", "g_held", "g"))
    weight, target, jacobian = (
        NamedMatrix(name, *shape) for name, shape in (("Wo", (width, hidden)), ("G", (hidden, 1)), ("J_G", (hidden, width)))
    )
    held_result = sp.Eq(held, weight * target, evaluate=False)
    target_term = proof.target.jacobian(proof.stream).T * proof.output_weight.T * proof.stream
    return Derivation(
        id=equation,
        title="A residual update is one gradient step of depth-wise test-time training",
        note="Eqs. (29)-(34) of the paper are one argument: update, loss, gradient, step. It is derived here as a whole under "
        "each of the six numbers; which of its lines carries which number is not told apart.",
        assumptions=("The branch ends in a linear map.", "G(x) is held constant when the gradient is taken."),
        steps=(
            Step("The branch.", sp.Eq(new_x, x + weight * target, evaluate=False), StepKind.DEFINITION),
            Step(
                "The depth-wise loss.",
                sp.Eq(NamedSymbol("loss"), -(x.T * weight * target), evaluate=False),
                StepKind.DEFINITION,
            ),
            Step(
                "The negative gradient with respect to x, with G held constant, is what the branch writes, for every G.",
                held_result,
                proof=sp.Eq(proof.held_gradient, proof.update, evaluate=False),
            ),
            Step(
                "So the update is one step of size one.",
                sp.Eq(new_x, x + held, evaluate=False),
                proof=sp.Eq(proof.stream + proof.update, proof.stream + proof.held_gradient, evaluate=False),
            ),
            Step(
                "Without the assumption the gradient has a second term, which the update does not follow.",
                sp.Eq(whole, weight * target + jacobian.T * weight.T * x, evaluate=False),
                proof=sp.Eq(proof.full_gradient, proof.update + target_term, evaluate=False),
            ),
        ),
        result=held_result,
    )


EQUATIONS: Mapping[str, Callable[[], Derivation]] = MappingProxyType(
    {number: partial(_depthwise, number) for number in ("29", "30", "31", "32", "33", "34")}
)
