"""Shortcut products of the real modules against the theory, for every scheme."""

import math

import pytest
import torch

from keel_theory.propagation import finite_width_product, propagate_shortcut
from keel_theory.schemes import SCHEMES
from keel_theory.spec import ProfileKind
from probes.config import ModelConfig
from probes.model import Transformer
from probes.stack_gains import full_log_gain, noise_stack, own_stack

WIDTH = 64


def _model(scheme: str, n_sublayers: int, **values: object) -> Transformer:
    """A model whose gate is the constant, and whose profiled scales are the values, that theory assumes."""
    config = ModelConfig(
        scheme=scheme, n_blocks=n_sublayers // 2, width=WIDTH, ffn_width=32, compute_dtype="float64", norm_eps=1e-12, **values
    )
    model = Transformer(config)
    trace = propagate_shortcut(config.residual_scheme, n_sublayers)
    with torch.no_grad():
        for sublayer, scale in zip(model.sublayers(), trace.shortcut_scales, strict=True):
            if sublayer.gate is not None:
                sublayer.gate.weight.zero_()
            if sublayer.spec.profile is ProfileKind.ADMIN:
                sublayer.shortcut_scale.fill_(float(scale))
    return model


@pytest.mark.parametrize("n_sublayers", [16, 64, 256, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_branches_give_the_predicted_product(scheme: str, n_sublayers: int) -> None:
    """Within 3.5 standard errors of the finite-width prediction: in 56 cases, beyond that by chance once in 40 runs."""
    model = _model(scheme, n_sublayers)
    products = noise_stack(model, n_positions=256).log_products
    predicted = finite_width_product(model.config.residual_scheme, n_sublayers, width=WIDTH)
    error = float(products.std()) / math.sqrt(len(products))
    second_order = n_sublayers / WIDTH**2  # what the first-order prediction leaves out
    assert abs(float(products.mean()) - predicted.mean) < 3.5 * error + second_order + 1e-9
    assert float(products.std()) == pytest.approx(predicted.standard_deviation, rel=0.2, abs=1e-9)


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
