from __future__ import annotations

import numpy as np
import pytest
import sympy as sp

from keel_theory import sublayer, symbolic_sublayer
from keel_theory.notation import symbol
from keel_theory.schemes import SCHEMES
from keel_theory.spec import NormKind, ResidualSpec, Scheme
from keel_theory.sublayer import Branch, NormWeights

WEIGHTS = NormWeights(norm_in=1.3, norm_branch=0.7, norm_out=1.1)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_symbolic_gains_equal_the_numeric_ones(scheme: Scheme) -> None:
    for spec in scheme.specs(8):
        values = symbolic_sublayer.numeric_values(
            spec, branch_variance=0.4, stream_variance=1.7, branch_jacobian_norm=2.5, weights=WEIGHTS
        )
        shortcut = sublayer.shortcut_gain(spec, branch_variance=0.4, stream_variance=1.7, weights=WEIGHTS)
        branch = sublayer.branch_gain(spec, branch_variance=0.4, stream_variance=1.7, branch_jacobian_norm=2.5, weights=WEIGHTS)
        assert float(symbolic_sublayer.shortcut_gain(spec).subs(values)) == pytest.approx(shortcut, rel=1e-13)
        assert float(symbolic_sublayer.branch_gain(spec).subs(values)) == pytest.approx(branch, rel=1e-13)


def test_equation_18_is_the_symbolic_gain_of_keel() -> None:
    gain = symbolic_sublayer.shortcut_gain(ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS))
    alpha, out, inner, previous = (symbol(name) for name in ("alpha", "weight_out", "weight_in", "weight_previous"))
    paper = out * alpha / sp.sqrt(previous**2 * alpha**2 + inner**2)
    ours = gain.subs(
        {
            symbol("branch_scale"): 1,
            symbol("input_scale"): 1,
            symbol("branch_variance"): 1,
            symbol("stream_variance"): previous**2,
        }
    )
    assert sp.simplify(ours - paper) == 0


@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_symbolic_jacobian_equals_the_numeric_one(scheme: Scheme, kind: NormKind) -> None:
    width = 3  # a LayerNorm of two entries is a sign
    generator = np.random.default_rng(8)
    x, constant, matrix = generator.normal(size=width), generator.normal(size=width), generator.normal(size=(width, width))
    spec = scheme.with_norm(kind).specs(8)[3]
    symbolic = symbolic_sublayer.sublayer_jacobian(spec, width)
    symbols = [*symbolic.stream, *symbolic.constant, *symbolic.matrix]
    function = sp.lambdify(symbols, symbolic.jacobian)
    numeric = sublayer.sublayer_jacobian(spec, x, Branch(value=lambda y: constant + matrix @ y, jacobian=lambda _: matrix))
    np.testing.assert_allclose(function(*x, *constant, *matrix.ravel()), numeric, rtol=1e-10, atol=1e-12)
