"""Shortcut products of the real modules against the theory, for every scheme."""

import math

import pytest
import torch

from keel_theory.propagation import finite_width_product, propagate_shortcut
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import ProfileKind, Scheme
from probes.admin_profile import profile_admin
from probes.config import ModelConfig
from probes.model import Transformer
from probes.stack_gains import full_log_gain, noise_branches, noise_stack, own_stack

WIDTH = 64


def _model(scheme: str, n_sublayers: int, **values: object) -> Transformer:
    """A model whose gate is the constant that theory assumes, and whose profiled scales are profiled on noise."""
    config = ModelConfig(
        scheme=scheme, n_blocks=n_sublayers // 2, width=WIDTH, ffn_width=32, compute_dtype="float64", norm_eps=1e-12, **values
    )
    model = Transformer(config)
    with torch.no_grad():
        model.embedding.weight.div_(model.embedding.weight.square().mean(-1, keepdim=True).sqrt())
        for sublayer in model.sublayers():
            if sublayer.gate is not None:
                sublayer.gate.weight.zero_()
    if any(sublayer.spec.profile is ProfileKind.ADMIN for sublayer in model.sublayers()):
        with noise_branches(model, seed=3):
            profile_admin(model, [torch.arange(256).reshape(4, 64)])
    return model


def _second_order(scheme: Scheme, n_sublayers: int) -> float:
    """What the first-order prediction leaves out: sin^4 of the angle by which each norm's sum turns the stream, over D^2.

    It vanishes with the branch's share, so that a deep stack of small branches is held to its standard error alone.
    """
    trace = propagate_shortcut(scheme, n_sublayers)
    shares = trace.added_variances / (trace.shortcut_scales**2 * trace.stream_variances[:-1] + trace.added_variances)
    return float((shares[trace.normalised] ** 2).sum()) / WIDTH**2


@pytest.mark.parametrize("n_sublayers", [16, 64, 256, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_branches_give_the_predicted_product(scheme: str, n_sublayers: int) -> None:
    """Within 3.5 standard errors of the finite-width prediction: in 56 cases, beyond that by chance once in 40 runs."""
    model = _model(scheme, n_sublayers)
    products = noise_stack(model, n_positions=256).log_products
    predicted = finite_width_product(model.config.residual_scheme, n_sublayers, width=WIDTH)
    error = float(products.std()) / math.sqrt(len(products))
    second_order = _second_order(model.config.residual_scheme, n_sublayers)
    assert abs(float(products.mean()) - predicted.mean) < 3.5 * error + second_order + 1e-9
    assert float(products.std()) == pytest.approx(predicted.standard_deviation, rel=0.2, abs=1e-9)


@pytest.mark.parametrize(
    ("n_sublayers", "alpha"), [(64, "L/2"), (256, "L/4"), pytest.param(1024, "L/10", marks=pytest.mark.slow)]
)
def test_keel_with_a_smaller_scale_is_noticed(n_sublayers: int, alpha: str) -> None:
    model = _model("keel", n_sublayers, scheme_parameters={"alpha": alpha})
    later = noise_stack(model, n_positions=1024, tangent=True).log_gains[2:].sum(0)
    error = float(later.std()) / math.sqrt(len(later))
    published = propagate_shortcut(get_scheme("keel"), n_sublayers)
    allowed = 3.5 * error + _second_order(get_scheme("keel"), n_sublayers)
    assert abs(float(later.mean()) - float(published.log_gains[2:].sum())) > allowed


def test_noise_is_as_large_as_its_input_asks() -> None:
    """LayerNorm Scaling's smaller input and Peri-LN's branch norm both come out of the model's own modules."""
    scaled = noise_stack(_model("layernorm_scaling", 16)).branch_variance
    torch.testing.assert_close(scaled, 1 / torch.arange(1, 9).repeat_interleave(2).double(), rtol=0.03, atol=0)
    model = _model("peri_ln", 4)
    with torch.no_grad():
        for sublayer in model.sublayers():
            sublayer.branch.norm_branch.weight.fill_(2.0)
    torch.testing.assert_close(noise_stack(model).branch_variance, torch.full((4,), 4.0, dtype=torch.float64))


def test_branches_are_put_back_after_an_exception() -> None:
    model = _model("keel", 4)
    before = [sublayer.branch.function for sublayer in model.sublayers()]

    def fail() -> None:
        with noise_branches(model):
            assert all(now.branch.function is not own for now, own in zip(model.sublayers(), before, strict=True))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(now.branch.function is own for now, own in zip(model.sublayers(), before, strict=True))


def test_a_tangent_gradient_loses_nothing_in_the_last_norm() -> None:
    model = _model("scaled_shortcut", 2, scheme_parameters={"alpha": 1e8})
    gains = noise_stack(model, n_positions=16, tangent=True).log_products
    torch.testing.assert_close(gains, torch.zeros(16, dtype=torch.float64), rtol=0, atol=1e-6)
    isotropic = noise_stack(model, n_positions=16).log_products
    assert float(isotropic.max()) < 0


def test_post_ln_is_two_and_not_depth_to_the_power() -> None:
    products = noise_stack(_model("post_ln", 64)).log_products
    assert float(products.mean()) == pytest.approx(-32 * math.log(2), rel=0.02)
    assert float(products.mean()) > -32 * math.log(64) / 5


@pytest.mark.parametrize("scheme", ["post_ln", "keel", "pre_ln", "highway", "peri_ln"])
@torch.no_grad()
def test_own_branches_follow_the_model(scheme: str) -> None:
    """The stream that leaves is the model's hidden state, and streams and branches on the way are its own."""
    model = _model(scheme, 6, final_norm=False)
    ids = torch.randint(256, (2, 5))
    gains = own_stack(model, ids)
    torch.testing.assert_close(gains.last, model.hidden(ids))
    sublayer = list(model.sublayers())[3]
    stream = model.embedding(ids)
    for earlier in list(model.sublayers())[:3]:
        stream = earlier(stream)
    assert float(gains.stream_variance[3]) == pytest.approx(float(stream.square().mean()))
    gate = None if sublayer.gate is None else sublayer.gate(stream)
    assert float(gains.branch_variance[3]) == pytest.approx(float(sublayer.branch(stream, None, gate).square().mean()))


def test_full_gain_is_that_of_the_gradient_at_the_embedding() -> None:
    model = _model("post_ln", 4, final_norm=False, init_std=0.1)
    ids = torch.randint(256, (3, 4))
    hidden = model.embedding(ids).detach().requires_grad_()
    out = hidden
    for sublayer in model.sublayers():
        out = sublayer(out)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    out.backward(gradient)
    expected = torch.log(hidden.grad.flatten(1).norm(dim=1) / gradient.flatten(1).norm(dim=1))
    torch.testing.assert_close(full_log_gain(model, ids), expected)


def test_without_branches_the_shortcut_is_the_whole_gradient() -> None:
    """One position, branches of weight zero: shortcut-only and full gain are the same number."""
    model = _model("keel", 8)
    with torch.no_grad():
        for sublayer in model.sublayers():
            for parameter in sublayer.branch.function.parameters():
                parameter.zero_()
    ids = torch.randint(256, (1, 1))
    torch.testing.assert_close(own_stack(model, ids).log_products, full_log_gain(model, ids))
