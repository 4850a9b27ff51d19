"""Variance along depth: recursion, closed forms, and random stacks."""

from collections.abc import Callable

import numpy as np
import pytest

from keel_theory.errors import DomainError
from keel_theory.layer_norm import FloatArray
from keel_theory.propagation import propagate_shortcut
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import GateKind, NormKind, ProfileKind, ResidualSpec
from keel_theory.sublayer import shortcut_gain
from keel_theory.variance import (
    VarianceProfile,
    admin_omega,
    admin_shortcut_product,
    highway_variance,
    layernorm_scaling_variance,
    pre_ln_update_share,
    pre_ln_variance,
    variance_profile,
)

Q, V0 = 0.7, 2.5
DEPTHS = (1, 7, 64, 1024)


def _profile(scheme: str, n_sublayers: int, **parameters: float | str) -> VarianceProfile:
    specs = get_scheme(scheme).with_parameters(**parameters).specs(n_sublayers)
    return variance_profile(specs, branch_variance=Q, input_variance=V0)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_pre_ln_grows_linearly_and_its_deep_sublayers_fade(n_sublayers: int) -> None:
    profile, index = _profile("pre_ln", n_sublayers), np.arange(n_sublayers)
    np.testing.assert_allclose(profile.stream, pre_ln_variance(np.arange(n_sublayers + 1), Q, V0), rtol=1e-12)
    np.testing.assert_allclose(profile.update_share, pre_ln_update_share(index, Q, V0), rtol=1e-12)
    np.testing.assert_allclose(profile.output_share, Q / (V0 + Q * n_sublayers), rtol=1e-9)


@pytest.mark.parametrize("n_sublayers", [2, 64, 1024])
def test_layernorm_scaling_grows_with_the_harmonic_sum(n_sublayers: int) -> None:
    profile = _profile("layernorm_scaling", n_sublayers)
    assert profile.stream[-1] == pytest.approx(layernorm_scaling_variance(n_sublayers // 2, Q, V0), rel=1e-12)


def test_layernorm_scaling_laws() -> None:
    n_blocks = 10**6
    logarithm = V0 + 2 * Q * (np.log(n_blocks) + np.euler_gamma)
    assert layernorm_scaling_variance(n_blocks, Q, V0) == pytest.approx(logarithm, rel=1e-6)
    assert layernorm_scaling_variance(n_blocks, Q, V0, degree=2) == pytest.approx(V0 + Q * np.pi**2 / 3, rel=1e-5)
    assert layernorm_scaling_variance(512, Q, V0, degree=0) == pytest.approx(float(pre_ln_variance(1024, Q, V0)))


@pytest.mark.parametrize("bias", [-3.0, 0.0, 1.0])
@pytest.mark.parametrize(("norm", "normalised"), [("none", False), ("input", True)])
def test_highway_closed_forms(bias: float, norm: str, normalised: bool) -> None:
    gate = 1 / (1 + np.exp(-bias))
    profile = _profile("highway", 64, gate_bias=bias, norm=norm)
    np.testing.assert_allclose(
        profile.stream, highway_variance(gate, np.arange(65), Q, V0, normalised_input=normalised), rtol=1e-10
    )


@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_admin_telescopes_to_pre_ln_behind_its_final_norm(n_sublayers: int) -> None:
    specs = get_scheme("admin").with_parameters(branch_variance=Q).specs(n_sublayers)
    np.testing.assert_allclose([s.shortcut_scale for s in specs], admin_omega(np.arange(n_sublayers), Q), rtol=1e-12)
    product = np.prod([shortcut_gain(s, branch_variance=Q) for s in specs])
    assert product == pytest.approx(float(admin_shortcut_product(n_sublayers, Q)), rel=1e-11)
    pre_ln = variance_profile(get_scheme("pre_ln").specs(n_sublayers), branch_variance=Q)
    assert product == pytest.approx(pre_ln.input_cosine, rel=1e-11)


@pytest.mark.parametrize("name", SCHEMES)
def test_shares_of_the_output_add_up(name: str) -> None:
    profile = _profile(name, 40)
    assert profile.output_share.sum() + profile.input_cosine**2 == pytest.approx(1.0, abs=1e-12)
    assert len(profile.to_frame()) == 40


@pytest.mark.parametrize("name", SCHEMES)
def test_recursion_agrees_with_a_random_stack(name: str) -> None:
    """Independent branches of the right variance at width 512, 64 draws, within four standard errors."""
    n_sublayers, width, n_draws = 16, 512, 64
    specs = get_scheme(name).specs(n_sublayers)
    profile = variance_profile(specs, branch_variance=Q, input_variance=V0)
    rng = np.random.default_rng(7)
    first = np.sqrt(V0) * rng.standard_normal((n_draws, width))
    stream = first
    omega = None
    for spec in specs:
        stream, omega = _random_update(rng, spec, stream, omega)
    per_draw = np.mean(stream**2, axis=1)
    cosine = np.sum(first * stream, axis=1) / np.linalg.norm(first, axis=1) / np.linalg.norm(stream, axis=1)
    for values, expected in ((per_draw, profile.stream[-1]), (cosine, profile.input_cosine)):
        error = values.std(ddof=1) / np.sqrt(n_draws)
        assert abs(values.mean() - expected) < 4 * error + 4 / width * expected


def _random_update(
    rng: np.random.Generator, spec: ResidualSpec, stream: FloatArray, omega: float | None
) -> tuple[FloatArray, float]:
    """One sub-layer with F replaced by noise, and the scale that the next would be profiled to; written from the definition."""
    noise = rng.standard_normal(stream.shape)
    size = spec.input_scale * np.sqrt(Q)
    if spec.norm_branch is not NormKind.NONE:
        branch = noise / np.sqrt(np.mean(noise**2, axis=1, keepdims=True))
    elif spec.norm_in is not NormKind.NONE or spec.qkv_norm:
        branch = size * noise
    else:
        branch = size * noise * np.sqrt(np.mean(stream**2, axis=1, keepdims=True))
    gate = 1 / (1 + np.exp(-spec.gate_bias)) if spec.gate is GateKind.HIGHWAY else None
    scale = spec.shortcut_scale if spec.profile is ProfileKind.NONE or omega is None else omega
    kept = scale * (stream if gate is None else (1 - gate) * stream)
    written = spec.branch_scale * (branch if gate is None else gate * branch)
    total = kept + written
    profiled = float(np.sqrt(np.mean(kept**2) + np.mean(written**2)))
    if spec.norm_out is NormKind.NONE:
        return total, profiled
    return total / np.sqrt(np.mean(total**2, axis=1, keepdims=True)), profiled


@pytest.mark.parametrize(("v0", "q", "matrices"), [(1.0, 0.5, 0), (2.5, 0.7, 0), (0.2, 3.0, 2)])
@pytest.mark.parametrize("name", SCHEMES)
def test_profile_and_gains_are_one_recursion(name: str, v0: float, q: float, matrices: int) -> None:
    """The stream's variances, the branches' and the cosine, here and where the gains come from."""
    scheme = get_scheme(name)
    profile = variance_profile(scheme.specs(64), branch_variance=q, input_variance=v0, scaled_matrices=matrices)
    trace = propagate_shortcut(scheme, 64, branch_variance=q, stream_variance=v0, scaled_matrices=matrices)
    np.testing.assert_allclose(profile.stream, trace.stream_variances, rtol=1e-13)
    np.testing.assert_allclose(profile.added, trace.added_variances, rtol=1e-13)
    cosine = np.sqrt(np.prod(profile.kept / (profile.kept + trace.added_variances)))
    assert profile.input_cosine == pytest.approx(float(cosine), rel=1e-12)


@pytest.mark.parametrize("v0", [1.0, 2.5, 0.2])
@pytest.mark.parametrize("n_sublayers", [1, 7, 64])
def test_admin_closed_forms_are_the_recursion(n_sublayers: int, v0: float) -> None:
    trace = propagate_shortcut(get_scheme("admin"), n_sublayers, branch_variance=Q, stream_variance=v0)
    np.testing.assert_allclose(trace.shortcut_scales, admin_omega(np.arange(n_sublayers), Q, v0), rtol=1e-12)
    assert np.exp(trace.log_product) == pytest.approx(float(admin_shortcut_product(n_sublayers, Q, v0)), rel=1e-12)


def test_branch_variances_may_differ() -> None:
    """A branch of degree two under LayerNorm Scaling, given as its variances."""
    specs = get_scheme("layernorm_scaling").specs(20)
    variances = [Q * spec.input_scale**2 for spec in specs]  # one more factor s^2 than a branch of degree one
    profile = variance_profile(specs, branch_variance=variances, input_variance=V0)
    assert profile.stream[-1] == pytest.approx(layernorm_scaling_variance(10, Q, V0, degree=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: variance_profile([]), "at least 1 sub-layer"),
        (lambda: variance_profile([ResidualSpec()] * 3, branch_variance=[1.0, 2.0]), "one number or 3 numbers"),
        (lambda: variance_profile([ResidualSpec()], branch_variance=-1.0), "branch_variance must be a non-negative"),
        (lambda: variance_profile([ResidualSpec()], input_variance=0.0), "input_variance must be a positive"),
        (lambda: highway_variance(1.0, 3), "gate T must lie between 0 and 1"),
        (lambda: pre_ln_variance(-1), "whole number of at least 0"),
        (lambda: layernorm_scaling_variance(-1), "n_blocks must be a whole number of at least 0"),
        (lambda: admin_omega(1.5), "whole number of at least 0"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DomainError, match=message):
        call()
