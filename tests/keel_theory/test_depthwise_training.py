"""The residual update as one gradient step: when it is, when it is not, and what scales and norms do."""

from collections.abc import Callable

import numpy as np
import pytest
import sympy as sp

from keel_theory.depthwise_training import DepthwiseStep, Target, depthwise_loss, depthwise_step, symbolic_step
from keel_theory.errors import DomainError
from keel_theory.layer_norm import FloatArray, Normalisation

WIDTH, HIDDEN = 12, 20


def _random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape)


def _tanh_target(norm: Normalisation | None = None) -> Target:
    weight = _random(WIDTH, HIDDEN, seed=2) / np.sqrt(WIDTH)
    return lambda x: np.tanh((norm(x) if norm else x) @ weight)


def _step(target: Target, stream: FloatArray | None = None) -> DepthwiseStep:
    x = _random(WIDTH, seed=1) if stream is None else stream
    return depthwise_step(x, target, _random(WIDTH, HIDDEN, seed=3) / np.sqrt(HIDDEN))


@pytest.mark.parametrize(("width", "n_hidden"), [(1, 1), (2, 2), (2, 3), (3, 2)])
def test_update_is_the_gradient_with_the_target_held_for_any_branch(width: int, n_hidden: int) -> None:
    step = symbolic_step(width, n_hidden)
    assert (step.update - step.held_gradient).is_zero_matrix


@pytest.mark.parametrize(("width", "n_hidden"), [(1, 1), (2, 3)])
def test_target_term_is_the_jacobian_of_the_branch_applied_to_the_stream(width: int, n_hidden: int) -> None:
    step = symbolic_step(width, n_hidden)
    expected = step.target.jacobian(step.stream).T * step.output_weight.T * step.stream
    assert (step.target_term - expected).applyfunc(sp.simplify).is_zero_matrix
    assert step.target_term.has(sp.Derivative)


@pytest.mark.parametrize("target", [_tanh_target(), _tanh_target(Normalisation())], ids=["plain", "inner norm"])
def test_numeric_twin_agrees_with_the_formulas(target: Target) -> None:
    stream, weight = _random(WIDTH, seed=1), _random(WIDTH, HIDDEN, seed=3) / np.sqrt(HIDDEN)
    step = _step(target)
    np.testing.assert_allclose(step.held_gradient, target(stream) @ weight.T, rtol=1e-9)
    jacobian = np.array([(target(stream + h) - target(stream - h)) / 2e-6 for h in 1e-6 * np.eye(WIDTH)])  # (D, H)
    np.testing.assert_allclose(step.target_term, jacobian @ (stream @ weight), rtol=1e-6, atol=1e-8)
    assert step.held_alignment == pytest.approx(1.0, abs=1e-12)


def test_symbols_and_numbers_agree_on_a_quadratic_branch() -> None:
    symbols = symbolic_step(2, 2)
    x, w = symbols.stream, symbols.output_weight
    branch = sp.Matrix([x[0] * x[1], x[0] ** 2])
    concrete = symbols.full_gradient.subs(dict(zip(symbols.target, branch, strict=True))).doit()
    point, weight = np.array([0.7, -1.3]), np.array([[0.2, 0.5], [-1.1, 0.4]])
    values = dict(zip([*x, *w], [*point, *weight.ravel()], strict=True))
    numeric = depthwise_step(point, lambda v: np.array([v[0] * v[1], v[0] ** 2]), weight)
    np.testing.assert_allclose(numeric.full_gradient, np.array(concrete.subs(values), dtype=float).ravel(), rtol=1e-9)


def test_a_random_branch_is_not_the_gradient_step_of_its_own_loss() -> None:
    step = _step(_tanh_target())
    assert step.alignment < 0.95
    assert step.target_ratio > 0.3


def test_a_symmetric_linear_branch_is_half_the_gradient_step() -> None:
    """With G Wo^T = x S, S symmetric, the target term equals the update: same direction, twice the length."""
    weight = _random(WIDTH, WIDTH)
    step = depthwise_step(_random(WIDTH, seed=1), lambda x: x @ weight, weight)
    np.testing.assert_allclose(step.full_gradient, 2 * step.update, rtol=1e-8)
    assert step.alignment == pytest.approx(1.0, abs=1e-12)


def test_an_inner_norm_makes_the_target_term_orthogonal_to_the_stream() -> None:
    stream = _random(WIDTH, seed=1)
    with_norm, without = _step(_tanh_target(Normalisation())), _step(_tanh_target())
    scale = np.linalg.norm(stream) * np.linalg.norm(with_norm.target_term)
    assert abs(stream @ with_norm.target_term) < 1e-9 * scale
    assert abs(stream @ without.target_term) > 1e-2 * scale


@pytest.mark.parametrize("alpha", [1.0, 8.0, 1024.0])
def test_shortcut_scale_is_the_inverse_step_size(alpha: float) -> None:
    stream, norm = _random(WIDTH, seed=1), Normalisation(weight=_random(WIDTH, seed=5))
    step = _step(_tanh_target())
    np.testing.assert_allclose(norm(alpha * stream + step.update), norm(step.stream_after(stream, 1 / alpha)), rtol=1e-9)


@pytest.mark.parametrize("step_size", [0.1, 1.0])
def test_a_step_lowers_the_held_loss_by_its_squared_length(step_size: float) -> None:
    stream, weight, target = _random(WIDTH, seed=1), _random(WIDTH, HIDDEN, seed=3) / np.sqrt(HIDDEN), _tanh_target()
    step = _step(target)
    after = depthwise_loss(step.stream_after(stream, step_size), target(stream), weight)
    assert after == pytest.approx(step.loss - step_size * float(step.update @ step.update), rel=1e-9)


def test_highway_s_carry_gate_is_weight_decay_on_the_stream() -> None:
    stream, gate = _random(WIDTH, seed=1), 0.25
    step = _step(_tanh_target())
    decayed = stream + gate * (step.held_gradient - stream)  # step of size T on loss + |x|^2 / 2
    np.testing.assert_allclose((1 - gate) * stream + gate * step.update, decayed, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: depthwise_loss(np.ones(2), np.ones(3), np.ones((3, 2))), r"shape \(width, hidden units\) = \(2, 3\)"),
        (lambda: depthwise_step(np.ones(2), np.tanh, np.ones((2, 2)), step=0.0), "step must be a positive"),
        (lambda: _step(_tanh_target()).stream_after(np.ones(WIDTH), -1.0), "step size must be a positive"),
        (lambda: symbolic_step(0, 2), "at least 1"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DomainError, match=message):
        call()
