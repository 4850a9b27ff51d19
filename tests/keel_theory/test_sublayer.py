from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from keel_theory.errors import DomainError
from keel_theory.layer_norm import FloatArray
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import GateKind, NormKind, ResidualSpec, Scheme
from keel_theory.sublayer import (
    Branch,
    NormWeights,
    branch_gain,
    neglected_terms,
    scalar_update,
    shortcut_gain,
    sublayer_jacobian,
    sublayer_output,
)

WIDTH = 6
WEIGHTS = NormWeights(norm_in=1.3, norm_branch=0.7, norm_out=1.1)
KEEL = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=16.0)
POST_LN = ResidualSpec(norm_out=NormKind.RMS)
PRE_LN = ResidualSpec(norm_in=NormKind.RMS)


def _matrix(seed: int, width: int = WIDTH) -> FloatArray:
    return np.random.default_rng(seed).normal(size=(width, width)) / math.sqrt(width)


def _tanh_branch(matrix: FloatArray) -> Branch:
    return Branch(
        value=lambda x: np.tanh(matrix @ x),
        jacobian=lambda x: (1 - np.tanh(matrix @ x) ** 2)[:, None] * matrix,
    )


def _torch_norm(x: torch.Tensor, kind: NormKind, weight: float, eps: float) -> torch.Tensor:
    if kind is NormKind.NONE:
        return x
    centred = x - x.mean() if kind is NormKind.LAYER else x
    return weight * centred / (centred.square().mean() + eps).sqrt()


def _torch_update(spec: ResidualSpec, x: torch.Tensor, matrix: FloatArray, gate: FloatArray | None, eps: float) -> torch.Tensor:
    """The update as its definition says, for autograd."""
    read = spec.input_scale * _torch_norm(x, spec.norm_in, WEIGHTS.norm_in, eps)
    written = _torch_norm(torch.tanh(torch.from_numpy(matrix) @ read), spec.norm_branch, WEIGHTS.norm_branch, eps)
    shortcut, branch = spec.shortcut_scale * x, spec.branch_scale * written
    if gate is not None:
        transform = torch.sigmoid(torch.from_numpy(gate) @ x + spec.gate_bias)
        shortcut, branch = shortcut * (1 - transform), branch * transform
    return _torch_norm(shortcut + branch, spec.norm_out, WEIGHTS.norm_out, eps)


@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_full_jacobian_matches_autograd(scheme: Scheme, eps: float, kind: NormKind) -> None:
    x, matrix = np.random.default_rng(0).normal(size=WIDTH), _matrix(1)
    for spec in set(scheme.with_norm(kind).specs(8)):
        gate = _matrix(2) if spec.gate is GateKind.HIGHWAY else None
        branch = _tanh_branch(matrix)
        tensor = torch.from_numpy(x)
        expected = torch.autograd.functional.jacobian(lambda t, s=spec, g=gate: _torch_update(s, t, matrix, g, eps), tensor)
        output = sublayer_output(spec, x, branch, eps=eps, weights=WEIGHTS, gate_weight=gate)
        jacobian = sublayer_jacobian(spec, x, branch, eps=eps, weights=WEIGHTS, gate_weight=gate)
        np.testing.assert_allclose(output, _torch_update(spec, tensor, matrix, gate, eps).numpy(), atol=1e-12)
        np.testing.assert_allclose(jacobian, expected.numpy(), rtol=0, atol=1e-10)


def test_equation_4_and_13_post_ln_jacobian() -> None:
    x, matrix = np.random.default_rng(0).normal(size=WIDTH), _matrix(1)
    z = x + matrix @ x
    radial = np.eye(WIDTH) - np.outer(z, z) / (z @ z)
    expected = radial @ (np.eye(WIDTH) + matrix) * math.sqrt(WIDTH / (z @ z))
    np.testing.assert_allclose(sublayer_jacobian(POST_LN, x, Branch.linear(matrix)), expected, atol=1e-13)


def test_equation_7_pre_ln_jacobian() -> None:
    x, matrix = np.random.default_rng(0).normal(size=WIDTH), _matrix(1)
    radial = np.eye(WIDTH) - np.outer(x, x) / (x @ x)
    expected = np.eye(WIDTH) + matrix @ radial * math.sqrt(WIDTH / (x @ x))
    np.testing.assert_allclose(sublayer_jacobian(PRE_LN, x, Branch.linear(matrix)), expected, atol=1e-13)


def test_equation_14_post_ln_gain_with_weights() -> None:
    gain = shortcut_gain(POST_LN, stream_variance=0.8**2, weights=NormWeights(norm_out=1.2))
    assert gain == pytest.approx(1.2 / (math.sqrt(2) * 0.8), rel=1e-14)


def test_equation_18_keel_gain_with_weights() -> None:
    gain = shortcut_gain(KEEL, stream_variance=0.8**2, weights=NormWeights(norm_out=1.2, norm_in=0.9))
    assert gain == pytest.approx(1.2 * 16 / math.sqrt(0.8**2 * 16**2 + 0.9**2), rel=1e-14)


def test_equation_27_keel_branch_gain_with_weights() -> None:
    weights = NormWeights(norm_out=1.2, norm_in=0.9)
    gain = branch_gain(KEEL, branch_jacobian_norm=3.0, stream_variance=0.8**2, weights=weights)
    assert gain == pytest.approx(1.2 * 0.9 / (0.8 * math.sqrt(0.8**2 * 16**2 + 0.9**2)) * 3.0, rel=1e-14)


def test_branch_gain_is_what_a_random_orthogonal_branch_does_at_large_width() -> None:
    width = 600
    generator = np.random.default_rng(4)
    x = generator.normal(size=width)
    rotation, _ = np.linalg.qr(generator.normal(size=(width, width)))
    terms = neglected_terms(KEEL, x, Branch.linear(rotation))
    gain = branch_gain(KEEL, stream_variance=float(np.mean(x**2))) / shortcut_gain(KEEL, stream_variance=float(np.mean(x**2)))
    assert terms.branch_path == pytest.approx(gain, rel=2 / width)  # two radial shares of 1/width, halved by the root


def test_highway_shortcut_carries_one_minus_the_gate() -> None:
    spec = get_scheme("highway").with_parameters(gate_bias=-2.0).specs(2)[0]
    assert shortcut_gain(spec) == pytest.approx(1 - 1 / (1 + math.exp(2.0)), rel=1e-14)


@pytest.mark.parametrize("bias", [-800.0, 0.0, 800.0])
def test_highway_gate_does_not_overflow(bias: float) -> None:
    update = scalar_update(ResidualSpec(gate=GateKind.HIGHWAY, gate_bias=bias))
    assert 0.0 <= update.shortcut <= 1.0
    assert math.isfinite(update.branch_relative)


@pytest.mark.parametrize("branch_variance", [0.0, 0.3, 7.0])
def test_a_branch_norm_makes_the_branch_variance_irrelevant(branch_variance: float) -> None:
    spec = ResidualSpec(norm_in=NormKind.RMS, norm_branch=NormKind.RMS, norm_out=NormKind.RMS)
    assert shortcut_gain(spec, branch_variance=branch_variance) == pytest.approx(2**-0.5)


@pytest.mark.parametrize("matrices", [0, 1, 2, 3])
def test_scaled_initial_weights_shrink_the_branch_variance(matrices: int) -> None:
    spec = ResidualSpec(norm_out=NormKind.RMS, init_gain=0.5)
    gain = shortcut_gain(spec, branch_variance=2.0, scaled_matrices=matrices)
    assert gain == pytest.approx((1 + 2.0 * 0.25**matrices) ** -0.5, rel=1e-14)


@pytest.mark.parametrize("width", [4, 16, 64])
def test_neglected_radial_share_is_one_over_the_width(width: int) -> None:
    x = np.random.default_rng(0).normal(size=width)
    terms = neglected_terms(POST_LN, x, Branch.linear(_matrix(1, width)))
    assert terms.radial_share == pytest.approx(1 / width, rel=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_neglected_terms_account_for_the_whole_difference(scheme: Scheme) -> None:
    x, spec = np.random.default_rng(0).normal(size=WIDTH), scheme.specs(8)[2]
    terms = neglected_terms(spec, x, _tanh_branch(_matrix(1)))
    correction = (1 - terms.radial_share) / (1 + terms.correlation) if spec.norm_out is not NormKind.NONE else 1.0
    assert terms.exact_gain == pytest.approx(terms.scalar_gain * math.sqrt(correction), rel=1e-12)


def test_bad_arguments_are_refused() -> None:
    x, branch = np.ones(3), Branch.linear(np.eye(3))
    with pytest.raises(DomainError, match="branch_variance must be a non-negative"):
        shortcut_gain(POST_LN, branch_variance=-1.0)
    with pytest.raises(DomainError, match="stream_variance must be a positive"):
        shortcut_gain(POST_LN, stream_variance=0.0)
    with pytest.raises(DomainError, match="weight of norm_out must be a positive"):
        NormWeights(norm_out=0.0)
    with pytest.raises(DomainError, match="scaled_matrices must be a whole number of at least 0"):
        shortcut_gain(POST_LN, scaled_matrices=-1)
    with pytest.raises(DomainError, match="branch_jacobian_norm must be a non-negative"):
        branch_gain(POST_LN, branch_jacobian_norm=math.nan)
    with pytest.raises(DomainError, match="branch_variance before a branch norm must be a positive"):
        branch_gain(ResidualSpec(norm_branch=NormKind.RMS), branch_variance=0.0)
    with pytest.raises(DomainError, match="one vector of shape"):
        sublayer_output(POST_LN, np.ones((2, 3)), branch)
    with pytest.raises(DomainError, match="belongs to a Highway gate"):
        sublayer_output(POST_LN, x, branch, gate_weight=np.eye(3))
