r"""What each claim of :mod:`keel_theory.claims` measures on a real model.

Two numbers per claim: one on a model of :mod:`probes.model` **under the claim's assumptions** (branches replaced by independent
noise of variance one, or by a linear map, norms without epsilon where the claim says so), which has to agree with theory; and
the same quantity on the model **as it is initialised**, with its own branches, which is reported and not judged.

The models have width 128, the paper's FFN ratio and its initialisation carried over to that width (standard deviation
:math:`0.02 \sqrt{1024 / 128}`, so that branches have the size they have at the paper's width), and embeddings of unit RMS, so
that a product from the embedding on starts at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keel_theory.claim_checks import CASE
from keel_theory.design import smallest_alpha
from keel_theory.layer_norm import Normalisation
from keel_theory.propagation import finite_width_product, propagate_shortcut
from keel_theory.spec import NormKind, ParameterValue, ProfileKind
from keel_theory.sublayer import NormWeights, branch_gain
from keel_theory.variance import pre_ln_update_share, pre_ln_variance
from probes.admin_profile import profile_admin
from probes.blocks import FeedForward, Gain, Gate, Linear, Norm, ResidualSublayer
from probes.config import ModelConfig
from probes.depthwise_alignment import measure_depthwise_alignment
from probes.model import Transformer, residual_layout
from probes.stack_gains import StackGains, full_log_gain, noise_stack, own_stack

__all__ = ["MEASUREMENTS", "Measurement", "measure_claim"]

WIDTH = 128
_Parameters: TypeAlias = "Mapping[str, ParameterValue]"
_PUBLISHED: _Parameters = MappingProxyType({})
_LN_10 = math.log(10)
_ATTEMPT_1, _ATTEMPT_3 = "scaled_shortcut", "scaled_shortcut_normed_input_gain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One claim on real models.

    Attributes:
        value: the quantity of the claim, measured where its assumptions hold.
        predicted: what the derived form gives for this measurement, at its width and depth.
        error: standard error of the value; 0 where nothing is random.
        tolerance: what the method itself allows, absolute.
        own: the quantity on the model as initialised, with its own branches.
        setting: how it was measured.
    """

    value: float
    predicted: float
    own: float
    setting: str
    error: float = 0.0
    tolerance: float = 1e-9

    @property
    def agrees(self) -> bool:
        """Whether value and prediction agree within three standard errors and the method's tolerance."""
        return abs(self.value - self.predicted) <= 3 * self.error + self.tolerance


def measure_claim(claim_id: str) -> Measurement:
    """Measure one claim; models are built and dropped on the way.

    Args:
        claim_id: a key of :data:`MEASUREMENTS`, the same as of ``keel_theory.claims.CLAIMS``.

    Returns:
        The measurement.
    """
    with _one_thread():
        return MEASUREMENTS[claim_id]()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices: waiting for other threads costs more than they bring, many times more on a busy machine."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


# --- models ----------------------------------------------------------------------------------------------------------------


def _model(
    scheme: str,
    parameters: _Parameters = _PUBLISHED,
    *,
    n_sublayers: int = CASE.n_sublayers,
    norm_eps: float = 1e-5,
    width: int = WIDTH,
) -> Transformer:
    """The paper's kind of model at a small width, its embeddings of unit RMS."""
    config = ModelConfig(
        scheme=scheme,
        scheme_parameters=parameters,
        n_blocks=n_sublayers // 2,
        width=width,
        ffn_width=3 * width,
        n_heads=8,
        n_kv_heads=4,
        norm_eps=norm_eps,
        init_std=0.02 * math.sqrt(1024 / width),
        compute_dtype="float64",
    )
    model = Transformer(config)
    with torch.no_grad():
        model.embedding.weight.div_(model.embedding.weight.square().mean(-1, keepdim=True).sqrt())
    return model


def _ids(batch: int = 4, tokens: int = 64) -> Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(1))


def _sublayer(model: Transformer, index: int) -> ResidualSublayer:
    return list(model.sublayers())[index]


@torch.no_grad()
def _streams(model: Transformer) -> list[tuple[ResidualSublayer, Tensor]]:
    """Each sub-layer with the stream that enters it."""
    pairs, stream = [], model.embedding(_ids())
    for sublayer in model.sublayers():
        pairs.append((sublayer, stream))
        stream = sublayer(stream)
    return pairs


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean and standard error."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


# --- products over depth ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Products:
    """The natural log of a scheme's product: under the assumptions, as predicted at this width, and as initialised."""

    noise: float
    error: float
    predicted: float
    own: float


def _products(
    scheme: str,
    parameters: _Parameters = _PUBLISHED,
    *,
    n_sublayers: int = CASE.n_sublayers,
    width: int = WIDTH,
    scaled_matrices: int = 0,
) -> _Products:
    model = _model(scheme, parameters, n_sublayers=n_sublayers, width=width, norm_eps=1e-12)
    noise, error = _mean(_noise(model, scaled_matrices).log_products)
    predicted = finite_width_product(model.config.residual_scheme, n_sublayers, width=width, scaled_matrices=scaled_matrices)
    own = _model(scheme, parameters, n_sublayers=n_sublayers, width=width)
    if any(sublayer.spec.profile is ProfileKind.ADMIN for sublayer in own.sublayers()):
        profile_admin(own, [_ids()])
    return _Products(noise, error, predicted.mean, float(own_stack(own, _ids()).log_products.mean()))


def _noise(model: Transformer, scaled_matrices: int = 0) -> StackGains:
    """With Admin's scales profiled for the noise, and Highway's gate the constant that the claim assumes."""
    trace = propagate_shortcut(model.config.residual_scheme, model.config.n_sublayers)
    with torch.no_grad():
        for sublayer, scale in zip(model.sublayers(), trace.shortcut_scales, strict=True):
            if isinstance(sublayer.gate, Gate):
                sublayer.gate.weight.zero_()
            if sublayer.spec.profile is ProfileKind.ADMIN and isinstance(sublayer.shortcut_scale, Tensor):
                sublayer.shortcut_scale.fill_(float(scale))
    return noise_stack(model, scaled_matrices=scaled_matrices)


def _log(products: _Products, unit: float, setting: str) -> Measurement:
    """The log of a product, in nats over ``unit``."""
    return Measurement(
        value=products.noise / unit,
        error=products.error / abs(unit),
        predicted=products.predicted / unit,
        own=products.own / unit,
        tolerance=1e-3 / abs(unit),
        setting=setting,
    )


def _plain(products: _Products, setting: str) -> Measurement:
    """The product itself."""
    predicted = math.exp(products.predicted)
    return Measurement(
        value=math.exp(products.noise),
        error=products.error * predicted,
        predicted=predicted,
        own=math.exp(products.own),
        tolerance=1e-3 * predicted,
        setting=setting,
    )


_STACK = "64 sub-layers, noise branches; own: shortcut-only gradient"


def _post_ln_product() -> Measurement:
    return _log(_products("post_ln"), _LN_10, _STACK)


def _post_ln_full_gradient() -> Measurement:
    own = full_log_gain(_model("post_ln"), _ids()).mean() / _LN_10
    model = _model("post_ln", norm_eps=1e-12)
    generator = torch.Generator().manual_seed(2)
    gains = []
    for _ in range(8):
        for sublayer in model.sublayers():
            sublayer.branch.function = _linear(_gaussian(WIDTH, generator))
        gains.append(full_log_gain(model, _ids(16, 1)).mean() / _LN_10)
    value, error = _mean(torch.stack(gains))
    return Measurement(
        value=value,
        error=error,
        predicted=0.0,
        own=float(own),
        tolerance=CASE.n_sublayers / WIDTH / _LN_10,
        setting="64 sub-layers, linear branches of variance 1; own: full gradient",
    )


def _keel_product() -> Measurement:
    return _plain(_products(_ATTEMPT_3), _STACK)


def _keel_limit() -> Measurement:
    return _plain(
        _products(_ATTEMPT_3, n_sublayers=512, width=32),
        "512 sub-layers, width 32, noise branches; own: shortcut-only gradient",
    )


def _keel_rate() -> Measurement:
    products = _products(_ATTEMPT_3)
    depth = CASE.n_sublayers
    return Measurement(
        value=-depth * math.expm1(products.noise),
        error=depth * products.error,
        predicted=-depth * math.expm1(products.predicted),
        own=-depth * math.expm1(products.own),
        tolerance=1e-2,
        setting=_STACK,
    )


def _root_depth_product() -> Measurement:
    return _plain(_products(_ATTEMPT_3, {"alpha": "sqrt(L)"}), f"a = sqrt(L), {_STACK}")


def _keel_first_block() -> Measurement:
    return _plain(_products("keel"), _STACK)


def _keel_later_blocks() -> Measurement:
    gains = noise_stack(_model("keel", norm_eps=1e-12)).log_gains[2:].sum(0).exp()
    value, error = _mean(gains)
    trace = propagate_shortcut(_model("keel").config.residual_scheme, CASE.n_sublayers)
    return Measurement(
        value=value,
        error=error,
        predicted=math.exp(float(trace.log_gains[2:].sum())),
        own=float(own_stack(_model("keel"), _ids()).log_gains[2:].sum(0).exp().mean()),
        tolerance=1 / WIDTH,
        setting=_STACK,
    )


def _attempts() -> Measurement:
    first, third = _products(_ATTEMPT_1), _products(_ATTEMPT_3)
    return Measurement(
        value=first.noise - third.noise,
        predicted=0.0,
        own=first.own - third.own,
        setting="64 sub-layers, the same noise for both; own: shortcut-only gradients",
    )


def _highway_product() -> Measurement:
    return _log(_products("highway", {"gate_bias": CASE.gate_bias}), _LN_10, f"{_STACK}, own gate")


def _highway_variance() -> Measurement:
    model = _model("highway", {"gate_bias": CASE.gate_bias})
    own = own_stack(model, _ids()).stream_variance[-1]
    gains = _noise(model)
    final = gains.last.square().mean(-1).flatten()
    value, error = _mean(final)
    return Measurement(
        value=math.log10(value),
        error=error / value / _LN_10,
        predicted=CASE.n_sublayers * math.log10((1 - CASE.gate) ** 2 + CASE.gate**2),
        own=math.log10(float(own)),
        setting="64 sub-layers, noise branches; own branches and gate",
    )


def _deepnorm_initial() -> Measurement:
    return _plain(_products("deepnorm", scaled_matrices=2), _STACK)


def _deepnorm_drifted() -> Measurement:
    return _log(_products("deepnorm"), -0.5 * math.sqrt(CASE.n_sublayers), f"{_STACK} at initialisation")


def _pre_ln_product() -> Measurement:
    return _log(_products("pre_ln"), 1.0, _STACK)


def _admin_product() -> Measurement:
    return _plain(_products("admin"), f"{_STACK}, profiled on tokens")


def _alpha_needed() -> Measurement:
    """Bisection on models that share their noise, so that the product is a smooth function of the scale."""

    def excess(alpha: float) -> tuple[float, float]:
        model = _model(_ATTEMPT_3, {"alpha": alpha}, norm_eps=1e-12)
        products = _noise(model).log_products
        predicted = finite_width_product(model.config.residual_scheme, CASE.n_sublayers, width=WIDTH)
        shift = predicted.mean - propagate_shortcut(model.config.residual_scheme, CASE.n_sublayers).log_product
        return float(products.mean()) - shift - math.log(CASE.min_gain), float(products.std()) / math.sqrt(len(products))

    low, high = 8.0, 32.0
    for _ in range(8):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(middle)[0] > 0 else (middle, high)
    alpha = math.sqrt(low * high)
    own = own_stack(_model(_ATTEMPT_3, {"alpha": alpha}), _ids()).branch_variance[2:].mean()
    return Measurement(
        value=alpha,
        error=excess(alpha)[1] * alpha**3 / CASE.n_sublayers,
        predicted=float(smallest_alpha(CASE.min_gain, CASE.n_sublayers)),
        own=float(smallest_alpha(CASE.min_gain, CASE.n_sublayers, float(own))),
        tolerance=high - low,
        setting="64 sub-layers, noise branches, bisection; own: from the branches' measured variance",
    )


def _cosine() -> Measurement:
    model = _model(_ATTEMPT_3, {"alpha": CASE.alpha}, norm_eps=1e-12)
    value, error = _mean(_noise(model).input_cosines)
    own = own_stack(_model(_ATTEMPT_3, {"alpha": CASE.alpha}), _ids()).input_cosines.mean()
    return Measurement(
        value=value,
        error=error,
        predicted=(1 + CASE.alpha**-2) ** (-CASE.n_sublayers / 2),
        own=float(own),
        tolerance=CASE.n_sublayers / (WIDTH * CASE.alpha**2),
        setting="64 sub-layers, noise branches; own branches",
    )


def _pre_ln_growth() -> Measurement:
    final = noise_stack(_model("pre_ln")).last.square().mean(-1).flatten()
    value, error = _mean(final)
    return Measurement(
        value=value,
        error=error,
        predicted=float(pre_ln_variance(CASE.n_sublayers)),
        own=float(own_stack(_model("pre_ln"), _ids()).stream_variance[-1]),
        setting="64 sub-layers, noise branches; own branches",
    )


def _pre_ln_fading() -> Measurement:
    def share(gains: StackGains) -> float:
        return float(gains.branch_variance[-1] / (gains.branch_variance[-1] + gains.stream_variance[-2]))

    model = _model("pre_ln")
    predicted = float(pre_ln_update_share(CASE.n_sublayers - 1))
    return Measurement(
        value=share(noise_stack(model)),
        predicted=predicted,
        own=share(own_stack(model, _ids())),
        error=predicted * math.sqrt(2 / 256),  # the stream's mean square over 256 draws
        setting="64 sub-layers, noise branches; own branches",
    )


# --- one sub-layer ---------------------------------------------------------------------------------------------------------


def _one_gain(scheme: str, branch_rms: float, alpha: float, parameters: _Parameters = _PUBLISHED) -> Measurement:
    """Gain of one sub-layer's shortcut with weights; the stream has the RMS that the norm before would give it."""
    model = _model(scheme, parameters, n_sublayers=4, norm_eps=1e-12)
    sublayer = _sublayer(model, 3)
    _set_weights(sublayer)
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn((3, 4096, WIDTH), generator=generator, dtype=torch.float64)
    stream = CASE.weight_before * draw[0] / draw[0].square().mean(-1, keepdim=True).sqrt()
    noise = _shortcut_gains(sublayer, stream, branch_rms * draw[1], draw[2])
    with torch.no_grad():
        own_branch = sublayer.branch(stream[None, :64])[0]
    own = _shortcut_gains(sublayer, stream[:64], own_branch, draw[2, :64])
    value, error = _mean(noise)
    predicted = CASE.weight_out * alpha / math.sqrt(CASE.weight_before**2 * alpha**2 + branch_rms**2)
    return Measurement(
        value=value,
        error=error,
        predicted=predicted,
        own=float(own.mean()),
        tolerance=2 * predicted / WIDTH,
        setting="one FFN sub-layer with weights set, noise branch; own FFN",
    )


def _set_weights(sublayer: ResidualSublayer) -> None:
    with torch.no_grad():
        if sublayer.norm_out is not None:
            _norm(sublayer.norm_out).weight.fill_(CASE.weight_out)
        if sublayer.branch.norm_in is not None:
            _norm(sublayer.branch.norm_in).weight.fill_(CASE.weight_in)


def _norm(module: nn.Module) -> Norm:
    assert isinstance(module, Norm)
    return module


def _shortcut_gains(sublayer: ResidualSublayer, stream: Tensor, branch: Tensor, gradient: Tensor) -> Tensor:
    leaf = stream.detach().requires_grad_()
    (below,) = torch.autograd.grad(sublayer.shortcut(leaf, branch), leaf, gradient)
    gains: Tensor = below.norm(dim=-1) / gradient.norm(dim=-1)
    return gains


def _post_ln_gain() -> Measurement:
    return _one_gain("post_ln", CASE.weight_before, 1.0)


def _keel_gain() -> Measurement:
    return _one_gain("keel", CASE.weight_in, CASE.alpha, {"alpha": CASE.alpha})


def _gaussian(width: int, generator: torch.Generator) -> Tensor:
    return torch.randn((width, width), generator=generator, dtype=torch.float64) / math.sqrt(width)


def _linear(matrix: Tensor) -> nn.Module:
    """A branch that is one linear map; it is called as every branch is."""
    layer = _LinearBranch(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    layer.weight = nn.Parameter(matrix)
    return layer


class _LinearBranch(nn.Linear):
    def forward(self, x_BTD: Tensor, rotary: object = None) -> Tensor:
        return super().forward(x_BTD)


def _jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.autograd.functional.jacobian(function, x)  # type: ignore[no-untyped-call]
    return result


def _jacobians(sublayer: ResidualSublayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole Jacobian and shortcut-only Jacobian of one sub-layer at one position, each (D, D)."""
    with torch.no_grad():
        branch = sublayer.branch(x[None, None])
    whole = _jacobian(lambda v: sublayer(v[None, None])[0, 0], x)
    shortcut = _jacobian(lambda v: sublayer.shortcut(v[None, None], branch)[0, 0], x)
    return whole, shortcut


def _unit_stream(seed: int, rms: float = 1.0) -> Tensor:
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rms * x / x.square().mean().sqrt()


def _chain_rule() -> Measurement:
    sublayer = _sublayer(_model("post_ln", n_sublayers=2), 1)
    assert sublayer.norm_out is not None
    x = _unit_stream(1)
    whole, _ = _jacobians(sublayer, x)
    branch = _jacobian(lambda v: sublayer.branch(v[None, None])[0, 0], x)
    with torch.no_grad():
        total = (x + sublayer.branch(x[None, None])[0, 0]).numpy()
    norm = _norm(sublayer.norm_out)
    by_hand = Normalisation(kind=NormKind.RMS, weight=norm.weight.detach().numpy(), eps=norm.eps).jacobian(total)
    by_hand = by_hand @ (np.eye(WIDTH) + branch.numpy())
    difference = float(np.linalg.norm(whole.numpy() - by_hand) / np.linalg.norm(by_hand))
    return Measurement(
        value=difference, predicted=0.0, own=difference, setting="one Post-LN FFN sub-layer, autograd, eps included"
    )


def _branch_path() -> Measurement:
    def ratio(sublayer: ResidualSublayer, seed: int) -> float:
        whole, shortcut = _jacobians(sublayer, _unit_stream(seed))
        return float((whole - shortcut).norm() / shortcut.norm())

    sublayer = _sublayer(_model("post_ln", n_sublayers=2, norm_eps=1e-12), 1)
    own = ratio(sublayer, 1)
    sublayer.branch.function = _linear(_gaussian(WIDTH, torch.Generator().manual_seed(4)))
    value, error = _mean(torch.tensor([ratio(sublayer, seed) for seed in range(4)]))
    return Measurement(
        value=value,
        error=error,
        predicted=1.0,
        own=own,
        tolerance=2 / WIDTH,
        setting="one Post-LN sub-layer, linear branch of variance 1; own FFN",
    )


def _branch_gains(alpha: float, weights: NormWeights, stream_rms: float, scale: float, setting: str) -> Measurement:
    """``scale`` times the gain through one Keel branch: an orthogonal one, and the model's own FFN."""
    sublayer = _sublayer(_model("keel", {"alpha": alpha}, n_sublayers=4, norm_eps=1e-12), 3)
    with torch.no_grad():
        assert sublayer.norm_out is not None
        assert sublayer.branch.norm_in is not None
        _norm(sublayer.norm_out).weight.fill_(weights.norm_out)
        _norm(sublayer.branch.norm_in).weight.fill_(weights.norm_in)

    def gain(seed: int) -> float:
        whole, shortcut = _jacobians(sublayer, _unit_stream(seed, stream_rms))
        return scale * float((whole - shortcut).norm()) / math.sqrt(WIDTH)

    own = gain(1)
    sublayer.branch.function = _linear(torch.linalg.qr(_gaussian(WIDTH, torch.Generator().manual_seed(5)))[0])
    value, error = _mean(torch.tensor([gain(seed) for seed in range(4)]))
    predicted = scale * branch_gain(sublayer.spec, stream_variance=stream_rms**2, weights=weights)
    return Measurement(value=value, error=error, predicted=predicted, own=own, tolerance=2 * predicted / WIDTH, setting=setting)


def _branch_gain() -> Measurement:
    weights = NormWeights(norm_out=CASE.weight_out, norm_in=CASE.weight_in)
    return _branch_gains(
        CASE.alpha, weights, CASE.weight_before, 1.0, "one Keel sub-layer with weights set, orthogonal branch; own FFN"
    )


def _branch_gain_depth() -> Measurement:
    depth = float(CASE.n_sublayers)
    return _branch_gains(depth, NormWeights(), 1.0, depth, "one Keel sub-layer, a = L = 64, orthogonal branch; own FFN")


def _scale_invariance() -> Measurement:
    def deviation(eps: float) -> float:
        norm, x = Norm(NormKind.RMS, WIDTH, eps, torch.float64), _unit_stream(1)
        with torch.no_grad():
            return max(float((norm(c * x) - norm(x)).abs().max()) for c in (0.01, 0.1, 10.0, 100.0))

    return Measurement(
        value=deviation(0.0), predicted=0.0, own=deviation(1e-5), setting="a model's norm, c = 0.01 ... 100; own: eps = 1e-5"
    )


def _radial() -> Measurement:
    def size(eps: float) -> float:
        norm, x = Norm(NormKind.RMS, WIDTH, eps, torch.float64), _unit_stream(1)
        jacobian = _jacobian(norm, x)
        return float((jacobian @ x).norm() / x.norm())

    return Measurement(value=size(0.0), predicted=0.0, own=size(1e-5), setting="a model's norm, autograd; own: eps = 1e-5")


# --- identities and initial values -----------------------------------------------------------------------------------------


def _deepnorm_alpha() -> Measurement:
    value = _sublayer(_model("deepnorm"), -1).shortcut_scale
    assert isinstance(value, float)
    return Measurement(
        value=value, predicted=CASE.n_sublayers**0.25, own=value, setting="scale of the last sub-layer of a model"
    )


def _deepnorm_beta() -> Measurement:
    def ratio(beta: str) -> Tensor:
        model = _model("deepnorm", {"beta": beta})
        outputs = [module.down.weight for module in model.modules() if isinstance(module, FeedForward)]
        return torch.cat([weight.detach().flatten() for weight in outputs]) / model.config.init_std

    deepnet = ratio("deepnet")
    value = float(deepnet.std())
    return Measurement(
        value=value,
        error=value / math.sqrt(2 * deepnet.numel()),
        predicted=(8 * CASE.n_sublayers // 2) ** -0.25,
        own=float(ratio("paper").std()),
        setting="initial FFN weights over init_std, beta = deepnet; own: beta = paper",
    )


def _reduces() -> Measurement:
    keel, post_ln = _model("keel", {"alpha": 1.0}, n_sublayers=8), _model("post_ln", n_sublayers=8)
    differences = []
    for i, (sublayer, stream) in enumerate(_streams(post_ln)):
        if i >= 2:  # the first block has its own rule
            twin = _sublayer(keel, i)
            twin.branch.norm_in = None
            with torch.no_grad():
                differences.append(float((twin(stream) - sublayer(stream)).abs().max()))
    value = max(differences)
    return Measurement(
        value=value, predicted=0.0, own=value, setting="two models with the same branches, blocks 1 to 3", tolerance=1e-12
    )


def _merge() -> Measurement:
    attempt, keel = _model(_ATTEMPT_3, n_sublayers=8), _model("keel", n_sublayers=8)
    generator = torch.Generator().manual_seed(6)
    differences = []
    for i, (sublayer, stream) in enumerate(_streams(attempt)):
        if i < 2:
            continue
        twin = _sublayer(keel, i)
        assert isinstance(sublayer.branch.input_gain, Gain)
        assert twin.branch.norm_in is not None
        with torch.no_grad():
            gain = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
            sublayer.branch.input_gain.weight.copy_(gain)
            _norm(twin.branch.norm_in).weight.copy_(gain)
            differences.append(float((twin(stream) - sublayer(stream)).abs().max()))
    value = max(differences)
    return Measurement(
        value=value,
        predicted=0.0,
        own=value,
        setting="two models with the same branches, random b, blocks 1 to 3",
        tolerance=1e-12,
    )


# --- test-time training along depth ----------------------------------------------------------------------------------------


def _held_gradient() -> Measurement:
    """The loss from the hidden units and the output matrix of each FFN, the hidden units held constant."""
    model = _model("keel", n_sublayers=8)
    cosines = []
    for sublayer, stream in _streams(model):
        output = getattr(sublayer.branch.function, "down", None)
        if not isinstance(output, Linear):
            continue
        hidden: list[Tensor] = []
        handle = output.register_forward_pre_hook(lambda _, args, hidden=hidden: hidden.append(args[0]))
        try:
            with torch.no_grad():
                update = sublayer.branch(stream)
        finally:
            handle.remove()
        x = stream.detach().requires_grad_()
        loss = -((x @ output.weight.detach()) * hidden[0]).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        cosines.append(torch.nn.functional.cosine_similarity(update, -gradient, dim=-1).mean())
    value = float(torch.stack(cosines).mean())
    return Measurement(value=value, predicted=1.0, own=value, setting="4 FFN sub-layers of a Keel model, autograd with G held")


def _full_gradient() -> Measurement:
    model = _model("post_ln", n_sublayers=16)
    own = measure_depthwise_alignment(model, residual_layout(model), _ids())
    generator = torch.Generator().manual_seed(7)
    for sublayer in model.sublayers():
        sublayer.branch.function = _linear(_gaussian(WIDTH, generator))
    linear = measure_depthwise_alignment(model, residual_layout(model), _ids())
    value, error = _mean(torch.tensor([row.alignment for row in linear.sublayers]))
    return Measurement(
        value=value,
        error=error,
        predicted=1 / math.sqrt(2),
        own=float(np.mean([row.alignment for row in own.sublayers])),
        tolerance=1 / WIDTH,
        setting="16 Post-LN sub-layers, random linear branches; own branches",
    )


MEASUREMENTS: Mapping[str, Callable[[], Measurement]] = MappingProxyType(
    {
        "1-carry": _highway_product,
        "1-fading-stream": _highway_variance,
        "5-alpha": _deepnorm_alpha,
        "5-beta": _deepnorm_beta,
        "5-initialised": _deepnorm_initial,
        "5-drifted": _deepnorm_drifted,
        "6-shortcut": _pre_ln_product,
        "6-growth": _pre_ln_growth,
        "6-fading": _pre_ln_fading,
        "8-reduces": _reduces,
        "9-scale": _scale_invariance,
        "9-radial": _radial,
        "13-chain": _chain_rule,
        "13-neglect": _branch_path,
        "14-gain": _post_ln_gain,
        "15-product": _post_ln_product,
        "15-wrong-base": _post_ln_product,
        "15-full-gradient": _post_ln_full_gradient,
        "18-gain": _keel_gain,
        "19-product": _keel_product,
        "19-limit": _keel_limit,
        "19-rate": _keel_rate,
        "19-wrong-no-power": _keel_product,
        "19-wrong-limit": _root_depth_product,
        "19-first-block": _keel_first_block,
        "19-later-blocks": _keel_later_blocks,
        "24-26-shortcut": _attempts,
        "26-merge": _merge,
        "27-branch-gain": _branch_gain,
        "27-depth": _branch_gain_depth,
        "34-held-target": _held_gradient,
        "34-full-gradient": _full_gradient,
        "admin-product": _admin_product,
        "cosine": _cosine,
        "alpha-needed": _alpha_needed,
    }
)
