from __future__ import annotations

import itertools

import numpy as np
import pytest
import sympy as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel_theory.errors import DomainError
from keel_theory.layer_norm import Convention, FloatArray, Normalisation
from keel_theory.spec import NormKind

WIDTH = 7
KINDS = (NormKind.RMS, NormKind.LAYER)
VARIANTS = [
    pytest.param(
        kind, convention, eps, weighted, id=f"{kind.value}-{convention.value}-eps{eps}-{'weight' if weighted else 'plain'}"
    )
    for kind, convention, eps, weighted in itertools.product(KINDS, Convention, (0.0, 0.3), (False, True))
]


def _norm(kind: NormKind, convention: Convention, eps: float, weighted: bool) -> Normalisation:
    weight = np.random.default_rng(5).normal(size=WIDTH) if weighted else None
    return Normalisation(kind=kind, weight=weight, eps=eps, convention=convention)


def _vectors(*shape: int) -> FloatArray:
    return np.random.default_rng(3).normal(size=(*shape, WIDTH))


def _torch_norm(norm: Normalisation, x: torch.Tensor) -> torch.Tensor:
    """The definition, written independently of the closed form."""
    centred = x - x.mean() if norm.kind is NormKind.LAYER else x
    square = centred.square().mean() if norm.convention is Convention.RMS else centred.square().sum()
    weight = torch.ones_like(x) if norm.weight is None else torch.from_numpy(norm.weight)
    return weight * centred / (square + norm.eps).sqrt()


@pytest.mark.parametrize(("kind", "convention", "eps", "weighted"), VARIANTS)
def test_value_and_jacobian_match_autograd(kind: NormKind, convention: Convention, eps: float, weighted: bool) -> None:
    norm, x = _norm(kind, convention, eps, weighted), _vectors()
    tensor = torch.from_numpy(x)
    expected = torch.autograd.functional.jacobian(lambda t: _torch_norm(norm, t), tensor).numpy()
    np.testing.assert_allclose(norm(x), _torch_norm(norm, tensor).numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(norm.jacobian(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "convention", "eps", "weighted"), VARIANTS)
def test_products_match_the_matrix_in_batches(kind: NormKind, convention: Convention, eps: float, weighted: bool) -> None:
    norm, x, vector = _norm(kind, convention, eps, weighted), _vectors(4, 2), _vectors(4, 2)[::-1]
    matrix = norm.jacobian(x)
    np.testing.assert_allclose(norm.jvp(x, vector), np.einsum("...ij,...j->...i", matrix, vector), atol=1e-13)
    np.testing.assert_allclose(norm.vjp(x, vector), np.einsum("...ij,...i->...j", matrix, vector), atol=1e-13)


@pytest.mark.parametrize(("kind", "convention", "eps", "weighted"), VARIANTS)
def test_spectrum_and_its_mean_square_match_a_numerical_decomposition(
    kind: NormKind, convention: Convention, eps: float, weighted: bool
) -> None:
    norm, x = _norm(kind, convention, eps, weighted), _vectors(3)
    values = np.linalg.svd(norm.jacobian(x), compute_uv=False)
    np.testing.assert_allclose(norm.singular_values(x), values, atol=1e-13)
    np.testing.assert_allclose(norm.rms_gain(x), np.sqrt(np.mean(values**2, axis=-1)), rtol=1e-13)


@pytest.mark.parametrize(
    ("kind", "eps", "dimension"),
    [(NormKind.RMS, 0.0, 1), (NormKind.LAYER, 0.0, 2), (NormKind.RMS, 1e-3, 0), (NormKind.LAYER, 1e-3, 1)],
)
def test_null_space(kind: NormKind, eps: float, dimension: int) -> None:
    assert Normalisation(kind=kind, eps=eps).null_dimension(_vectors()) == dimension


@pytest.mark.parametrize(("zeros", "dimension"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_zero_weights_and_the_radial_direction_share_one_null_direction(zeros: int, dimension: int) -> None:
    weight = np.ones(WIDTH)
    weight[:zeros] = 0.0
    assert Normalisation(kind=NormKind.RMS, weight=weight).null_dimension(_vectors()) == dimension


@pytest.mark.parametrize("kind", KINDS)
def test_radial_direction_is_annihilated_without_eps_and_damped_with_it(kind: NormKind) -> None:
    x = _vectors()
    centred = x - x.mean() if kind is NormKind.LAYER else x
    size = float(np.mean(centred**2))
    np.testing.assert_allclose(Normalisation(kind=kind).jvp(x, x), 0.0, atol=1e-14)
    damped = Normalisation(kind=kind, eps=0.5).jvp(x, centred)
    np.testing.assert_allclose(damped, 0.5 / (size + 0.5) ** 1.5 * centred, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(factor=st.floats(1e-150, 1e150))
def test_output_is_scale_invariant_and_the_jacobian_scales_inversely(kind: NormKind, factor: float) -> None:
    norm, x, tangent = Normalisation(kind=kind), _vectors(), _vectors()[::-1].copy()
    np.testing.assert_allclose(norm(factor * x), norm(x), rtol=1e-9)
    np.testing.assert_allclose(norm.jvp(factor * x, tangent) * factor, norm.jvp(x, tangent), rtol=1e-7, atol=1e-9)


def test_conventions_differ_by_the_root_of_the_width() -> None:
    x = _vectors()
    unit = Normalisation(eps=WIDTH * 0.2, convention=Convention.UNIT)
    rms = Normalisation(eps=0.2)
    np.testing.assert_allclose(rms(x), np.sqrt(WIDTH) * unit(x), rtol=1e-14)
    np.testing.assert_allclose(rms.jacobian(x), np.sqrt(WIDTH) * unit.jacobian(x), atol=1e-14)


def test_zero_vector_is_fine_with_eps() -> None:
    np.testing.assert_allclose(Normalisation(eps=0.25).jacobian(np.zeros(3)), 2.0 * np.eye(3))


@pytest.mark.parametrize(
    ("kind", "x"),
    [
        pytest.param(NormKind.RMS, np.zeros(3), id="zero"),
        pytest.param(NormKind.LAYER, np.full(3, 0.1), id="constant"),
    ],
)
def test_a_vector_without_direction_is_refused(kind: NormKind, x: FloatArray) -> None:
    with pytest.raises(DomainError, match="without direction"):
        Normalisation(kind=kind)(x)


@pytest.mark.parametrize("entry", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_that_is_not_finite_is_refused(kind: NormKind, entry: float) -> None:
    with pytest.raises(DomainError, match="NaN or infinite entry"):
        Normalisation(kind=kind)(np.array([1.0, entry, 0.0]))


EDGES = [1e-320, 5e-324, 1e-300, 1e300, 1e308, 1.7e308]


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_at_the_ends_of_float64(kind: NormKind, size: float, eps: float) -> None:
    """No warning, and what the definition gives in exact numbers."""
    x = size * np.array([1.0, -1.0, 1.0, 0.0])
    exact = [sp.Rational(float(each)) for each in x]
    mean = sum(exact) / len(exact) if kind is NormKind.LAYER else 0
    centred = [each - mean for each in exact]
    scale = sp.sqrt(sum(each**2 for each in centred) / len(exact) + sp.Rational(eps))
    expected = [float((each / scale).evalf(30)) for each in centred]
    np.testing.assert_allclose(Normalisation(kind=kind, eps=eps)(x), expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_past_float64_are_refused(kind: NormKind) -> None:
    x, norm = 1e-320 * np.array([1.0, -1.0, 1.0, 0.0]), Normalisation(kind=kind)
    tangent = np.array([1.0, 0.0, 0.0, 0.0])
    for call in (
        norm.jacobian,
        norm.singular_values,
        norm.rms_gain,
        lambda v: norm.jvp(v, tangent),
        lambda v: norm.vjp(v, tangent),
    ):
        with pytest.raises(DomainError, match="derivative at so small a vector is past float64"):
            call(x)
    assert np.isfinite(Normalisation(kind=kind, eps=1e-5).jacobian(x)).all()
    with pytest.raises(DomainError, match="length of a vector is past float64"):
        Normalisation(kind=kind, convention=Convention.UNIT)(1.7e308 * np.array([1.0, -1.0, 1.0, -1.0]))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DomainError, match="must be rms or layer"):
        Normalisation(kind=NormKind.NONE)
    with pytest.raises(DomainError, match="eps must be a non-negative"):
        Normalisation(eps=-1e-5)
    with pytest.raises(DomainError, match="one finite vector"):
        Normalisation(weight=np.ones((2, 2)))
    with pytest.raises(DomainError, match="weight has 2 entries, the vectors have width 3"):
        Normalisation(weight=np.ones(2))(np.ones(3))
