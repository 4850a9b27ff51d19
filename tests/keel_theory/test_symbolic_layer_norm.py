from __future__ import annotations

import itertools

import numpy as np
import pytest
import sympy as sp

from keel_theory.errors import DomainError
from keel_theory.layer_norm import Convention, Normalisation
from keel_theory.notation import symbol
from keel_theory.spec import NormKind
from keel_theory.symbolic_layer_norm import (
    closed_form_jacobian,
    coordinates,
    differentiated_jacobian,
    jacobian_difference,
    spectrum_residuals,
    weights,
)

CASES = [*itertools.product((2, 3, 4), (NormKind.RMS, NormKind.LAYER), Convention)]


@pytest.mark.parametrize(("width", "kind", "convention"), CASES)
def test_differentiation_gives_the_closed_form(width: int, kind: NormKind, convention: Convention) -> None:
    assert jacobian_difference(width, kind, convention) == sp.zeros(width, width)


@pytest.mark.parametrize(("width", "kind"), [*itertools.product((2, 3), (NormKind.RMS, NormKind.LAYER))])
def test_spectrum_is_proved(width: int, kind: NormKind) -> None:
    residuals = spectrum_residuals(width, kind)
    assert set(residuals) == {"tangential", "radial", *(["mean"] if kind is NormKind.LAYER else [])}
    assert all(residual == sp.zeros(width, 1) for residual in residuals.values())


def test_the_two_kinds_are_not_the_same() -> None:
    difference = differentiated_jacobian(2, NormKind.RMS) - closed_form_jacobian(2, NormKind.LAYER)
    assert difference.applyfunc(sp.simplify) != sp.zeros(2, 2)


@pytest.mark.parametrize(("kind", "convention"), [*itertools.product((NormKind.RMS, NormKind.LAYER), Convention)])
def test_symbolic_equals_numeric(kind: NormKind, convention: Convention) -> None:
    x, weight, eps = np.array([0.3, -1.2, 2.0]), np.array([1.5, 0.5, -1.0]), 0.7
    values = {**dict(zip(coordinates(3), x, strict=True)), **dict(zip(weights(3), weight, strict=True)), symbol("eps"): eps}
    symbolic = np.array(differentiated_jacobian(3, kind, convention).subs(values).evalf(), dtype=float)
    numeric = Normalisation(kind=kind, weight=weight, eps=eps, convention=convention).jacobian(x)
    np.testing.assert_allclose(symbolic, numeric, atol=1e-13)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DomainError, match="width must be a whole number of at least 2"):
        jacobian_difference(1, NormKind.RMS)
    with pytest.raises(DomainError, match="must be rms or layer"):
        closed_form_jacobian(2, NormKind.NONE)
