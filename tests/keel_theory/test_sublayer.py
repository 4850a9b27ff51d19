from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import sympy as sp
import torch

from keel_theory.errors import DomainError
from keel_theory.layer_norm import FloatArray, Normalisation
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
from probes.config import tiny
from probes.model import Transformer

WIDTH = 6
WEIGHTS = NormWeights(norm_in=1.3, norm_branch=0.7, norm_out=1.1)
VECTORS = NormWeights(  # a checkpoint's weights may be zero or negative in places
    norm_in=np.array([1.3, -0.2, 0.9, 2.0, 0.4, 1.0]),
    norm_branch=np.array([0.7, 0.1, 1.9, 0.0, 0.4, -1.0]),
    norm_out=np.array([0.3, 1.2, -0.9, 2.4, 0.0, 1.1]),
)
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


def _torch_norm(x: torch.Tensor, kind: NormKind, weight: float | FloatArray, eps: float) -> torch.Tensor:
    if kind is NormKind.NONE:
        return x
    centred = x - x.mean() if kind is NormKind.LAYER else x
    return torch.as_tensor(weight, dtype=torch.float64) * centred / (centred.square().mean() + eps).sqrt()


def _torch_update(
    spec: ResidualSpec,
    x: torch.Tensor,
    matrix: FloatArray,
    gate: FloatArray | None,
    eps: float,
    weights: NormWeights,
) -> torch.Tensor:
    """The update as its definition says, for autograd."""
    read = spec.input_scale * _torch_norm(x, spec.norm_in, weights.norm_in, eps)
    written = _torch_norm(torch.tanh(torch.from_numpy(matrix) @ read), spec.norm_branch, weights.norm_branch, eps)
    shortcut, branch = spec.shortcut_scale * x, spec.branch_scale * written
    if gate is not None:
        transform = torch.sigmoid(torch.from_numpy(gate) @ x + spec.gate_bias)
        shortcut, branch = shortcut * (1 - transform), branch * transform
    return _torch_norm(shortcut + branch, spec.norm_out, weights.norm_out, eps)


@pytest.mark.parametrize("weights", [WEIGHTS, VECTORS], ids=["equal entries", "a checkpoint's vectors"])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_full_jacobian_matches_autograd(scheme: Scheme, eps: float, kind: NormKind, weights: NormWeights) -> None:
    x, matrix = np.random.default_rng(0).normal(size=WIDTH), _matrix(1)
    for spec in set(scheme.with_norm(kind).specs(8)):
        gate = _matrix(2) if spec.gate is GateKind.HIGHWAY else None
        branch = _tanh_branch(matrix)
        tensor = torch.from_numpy(x)
        expected = torch.autograd.functional.jacobian(
            lambda t, s=spec, g=gate: _torch_update(s, t, matrix, g, eps, weights), tensor
        )
        output = sublayer_output(spec, x, branch, eps=eps, weights=weights, gate_weight=gate)
        jacobian = sublayer_jacobian(spec, x, branch, eps=eps, weights=weights, gate_weight=gate)
        np.testing.assert_allclose(output, _torch_update(spec, tensor, matrix, gate, eps, weights).numpy(), atol=1e-12)
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


@pytest.mark.parametrize("weights", [WEIGHTS, VECTORS], ids=["equal entries", "a checkpoint's vectors"])
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_neglected_terms_account_for_the_whole_difference(
    scheme: Scheme, kind: NormKind, eps: float, weights: NormWeights
) -> None:
    x, spec = np.random.default_rng(0).normal(size=WIDTH), scheme.with_norm(kind).specs(8)[2]
    terms = neglected_terms(spec, x, _tanh_branch(_matrix(1)), eps=eps, weights=weights)
    kept = (1 - terms.radial_share) * (1 - terms.eps_share) * (1 + terms.unequal_weights) / (1 - terms.mean_share)
    correction = kept / (1 + terms.correlation) if spec.norm_out is not NormKind.NONE else 1.0
    assert terms.exact_gain == pytest.approx(terms.scalar_gain * math.sqrt(correction), rel=1e-12)


def test_equal_weights_and_no_eps_leave_nothing_for_their_terms() -> None:
    terms = neglected_terms(POST_LN, np.arange(1.0, 7.0), _tanh_branch(_matrix(1)), weights=WEIGHTS)
    assert (terms.eps_share, terms.mean_share, terms.weight_peak) == (0.0, 0.0, 1.0)
    assert terms.unequal_weights == pytest.approx(0.0, abs=1e-14)


def test_gain_of_unequal_weights_is_that_of_their_root_mean_square() -> None:
    """Eq. (14) with a log-normal weight: its root mean square agrees with a measured gain, its largest entry does not."""
    width, n_draws, generator = 1024, 32, np.random.default_rng(1)
    out = np.exp(0.3 * generator.normal(size=width))
    weights, norm = NormWeights(norm_out=out), Normalisation(weight=out)
    z = generator.normal(size=(n_draws, width)) + generator.normal(size=(n_draws, width))
    gradients = generator.normal(size=(n_draws, width))
    gains = np.linalg.norm(norm.vjp(z, gradients), axis=-1) / np.linalg.norm(gradients, axis=-1)
    error = gains.std(ddof=1) / math.sqrt(n_draws)
    assert abs(gains.mean() - shortcut_gain(POST_LN, weights=weights)) < 3 * error
    assert gains.mean() < shortcut_gain(POST_LN, weights=weights.largest) - 100 * error


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_gain_of_the_largest_entry_is_the_spectral_norm(alpha: float) -> None:
    """Two entries share the largest value, so that one direction of theirs lies across the sum: exact at any sum."""
    generator = np.random.default_rng(2)
    out = np.exp(0.3 * generator.normal(size=64))
    out[np.argsort(out)[-2:]] = out.max()
    z = generator.normal(size=64)
    jacobian = alpha * Normalisation(weight=out).jacobian(alpha * z)
    spec, size = replace(KEEL, shortcut_scale=alpha), float(np.mean(z**2))
    largest = shortcut_gain(spec, branch_variance=0.0, stream_variance=size, weights=NormWeights(norm_out=out).largest)
    assert np.linalg.norm(jacobian, 2) == pytest.approx(largest, rel=1e-12)
    assert np.linalg.norm(jacobian) / 8 < largest, "a random gradient gains less"


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200, 1e308])
@pytest.mark.parametrize("branch_variance", [1e-300, 1.0, 1e300])
def test_gain_at_the_ends_of_float64(scale: float, branch_variance: float) -> None:
    spec = replace(KEEL, shortcut_scale=scale)
    exact = scale / sp.sqrt(sp.Float(scale, 50) ** 2 + sp.Float(branch_variance, 50))
    log_gain = scalar_update(spec, branch_variance=branch_variance).log_gain(1.0)
    assert log_gain == pytest.approx(float(sp.log(exact)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("bias", "log_carry"), [(800.0, -800.0), (40.0, -40.0), (-800.0, 0.0)])
def test_log_gain_of_a_gate_that_hardly_carries(bias: float, log_carry: float) -> None:
    update = scalar_update(ResidualSpec(gate=GateKind.HIGHWAY, gate_bias=bias))
    assert update.log_gain(1.0) == pytest.approx(log_carry, abs=1e-15)


STAR = get_scheme("hybrid_norm").with_parameters(variant="star")


@pytest.mark.parametrize("weight", [0.5, 3.0])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
def test_normalised_queries_keys_and_values_hide_the_input_norms_weight(kind: NormKind, weight: float) -> None:
    """The first attention of HybridNorm*, theory beside the model: the branch's variance does not follow the weight."""
    config = replace(tiny("hybrid_norm"), scheme_parameters=(("variant", "star"),), norm=kind.value, norm_eps=1e-18)
    branch = Transformer(config).double().blocks[0].attention.branch
    branch.compute_dtype = torch.float64
    x = torch.randn(2, 16, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spec = STAR.with_norm(kind).specs(8)[0]
    added = [scalar_update(spec, weights=NormWeights(norm_in=size)).added_variance(1.0) for size in (1.0, weight)]
    with torch.no_grad():
        plain = branch(x).square().mean()
        branch.norm_in.weight.fill_(weight)
        scaled = branch(x).square().mean()
    assert float(scaled / plain) == pytest.approx(added[1] / added[0], rel=1e-10)


@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_behind_normalised_values_only_the_output_matrix_counts(matrices: int) -> None:
    """Scaling value and output matrix by beta changes the branch's variance by beta^2, not beta^4."""
    config = replace(tiny("hybrid_norm"), norm_eps=1e-18)
    attention = Transformer(config).double().blocks[0].attention.branch.function
    x = torch.randn(1, 8, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spec = ResidualSpec(norm_out=NormKind.RMS, qkv_norm=True, init_gain=0.25)
    with torch.no_grad():
        plain = attention(x).square().mean()
        for matrix in (attention.output, attention.value)[:matrices]:
            matrix.weight.mul_(spec.init_gain)
        scaled = attention(x).square().mean()
    added = scalar_update(spec, scaled_matrices=matrices).added_variance(1.0)
    assert float(scaled / plain) == pytest.approx(added, rel=1e-10)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((2, 3)), r"weight of norm_out must be one finite vector that is not zero, got shape \(2, 3\)"),
        (np.array([1.0, math.nan]), "weight of norm_out must be one finite vector"),
        (np.zeros(3), "weight of norm_out must be one finite vector that is not zero"),
        (-1.0, "weight of norm_out must be a positive"),
    ],
)
def test_a_weight_that_is_none_is_refused(weight: float | FloatArray, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        NormWeights(norm_out=weight)


def test_variances_past_float64_are_refused() -> None:
    with pytest.raises(DomainError, match="variance of the branch is past float64"):
        scalar_update(ResidualSpec(branch_scale=1e200))
    with pytest.raises(DomainError, match="variance of the stream is past float64"):
        scalar_update(POST_LN).log_gain(math.inf)
    with pytest.raises(DomainError, match="weight has 6 entries, the vectors have width 3"):
        sublayer_output(POST_LN, np.ones(3), Branch.linear(np.eye(3)), weights=VECTORS)


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
