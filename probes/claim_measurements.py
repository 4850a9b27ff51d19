r"""What each claim of :mod:`keel_theory.claims` measures on a real model.

Two numbers per claim: one on a model of :mod:`probes.model` **under the claim's assumptions** (attentions and FFNs replaced by
independent noise of variance one, or by a linear map, norms without epsilon where the claim says so), which has to agree with
theory; and the same quantity on the model **as it is initialised**, with its own branches, which is reported and not judged.

What a measurement is held against is the derived form **at its width and depth**, to first order in 1/D, not the limit. So no
tolerance has to stand for what the width does: all that is allowed is three standard errors. Where the last sub-layer has an
output norm, the gradient starts orthogonal to the stream that leaves, as it does behind a final norm.

The models have width 128, the paper's FFN ratio and its initialisation carried over to that width (standard deviation
:math:`0.02 \sqrt{1024 / 128}`, so that branches have the size they have at the paper's width), and embeddings of unit RMS, so
that a product from the embedding on starts at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from scipy.special import digamma
from torch import Tensor, nn

from keel_theory.claim_checks import ATTEMPTS, CASE, unequal
from keel_theory.design import smallest_alpha
from keel_theory.layer_norm import Normalisation
from keel_theory.propagation import finite_width_product, shortcut_log_product
from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind, ParameterValue, ProfileKind, Scheme
from keel_theory.sublayer import NormWeights, branch_gain
from keel_theory.variance import layernorm_scaling_variance, pre_ln_update_share, pre_ln_variance
from probes.admin_profile import profile_admin
from probes.blocks import FeedForward, Gain, Gate, Linear, Norm, ResidualSublayer
from probes.config import ModelConfig, narrow
from probes.depthwise_alignment import SublayerAlignment, measure_depthwise_alignment
from probes.model import Transformer, residual_layout
from probes.stack_gains import StackGains, full_log_gain, noise_branches, noise_stack, own_stack

__all__ = ["MEASUREMENTS", "Measurement", "measure_claim"]

WIDTH = 128
_Parameters: TypeAlias = "Mapping[str, ParameterValue]"
_PUBLISHED: _Parameters = MappingProxyType({})
_LN_10 = math.log(10)
_ATTEMPT_3 = ATTEMPTS[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One claim on real models.

    Attributes:
        value: the quantity of the claim, measured where its assumptions hold.
        predicted: what the derived form gives for this measurement, at its width and depth.
        error: standard error of the value; 0 where nothing is random.
        tolerance: what the method itself allows (round-off, the interval of a bisection), absolute.
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

    def excludes(self, value: float) -> bool:
        """Whether the measurement contradicts a value: by more than five standard errors and the method's tolerance."""
        return abs(self.value - value) > 5 * self.error + self.tolerance


def measure_claim(claim_id: str) -> Measurement:
    """Measure one claim; models are built and dropped on the way.

    Status: each measurement's own, see its setting.   Assumes: what the claim assumes, built into the model.

    Args:
        claim_id: a key of :data:`MEASUREMENTS`, the same as of ``keel_theory.claims.CLAIMS``.

    Returns:
        The measurement.

    Example:
        >>> measure_claim("9-radial").agrees
        True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Variances of branches and of the stream that enters, and matrices that start smaller."""

    branch_variance: float = 1.0
    stream_variance: float = 1.0
    scaled_matrices: int = 0


_UNIT = _Question()


@dataclass(frozen=True, slots=True)
class _Products:
    """The natural log of a scheme's product: under the assumptions, as predicted at this width, and as initialised."""

    noise: float
    error: float
    predicted: float
    own: float


@cache
def _products(
    scheme: str,
    *,
    n_sublayers: int = CASE.n_sublayers,
    width: int = WIDTH,
    n_positions: int = 256,
    question: _Question = _UNIT,
    **parameters: ParameterValue,
) -> _Products:
    model = _model(scheme, parameters, n_sublayers=n_sublayers, width=width, norm_eps=1e-12)
    noise, error = _mean(_noise(model, n_positions, question).log_products)
    own = _model(scheme, parameters, n_sublayers=n_sublayers, width=width)
    if _is_profiled(own):
        profile_admin(own, [_ids()])
    predicted = _predicted(model.config.residual_scheme, n_sublayers, width, question)
    return _Products(noise, error, predicted, float(own_stack(own, _ids()).log_products.mean()))


def _is_profiled(model: Transformer) -> bool:
    return any(sublayer.spec.profile is ProfileKind.ADMIN for sublayer in model.sublayers())


def _noise(model: Transformer, n_positions: int = 256, question: _Question = _UNIT) -> StackGains:
    """With Admin's scales profiled on the noise, and Highway's gate the constant that the claim assumes."""
    with torch.no_grad():
        for sublayer in model.sublayers():
            if isinstance(sublayer.gate, Gate):
                sublayer.gate.weight.zero_()
    if _is_profiled(model):
        with noise_branches(model, seed=1):
            profile_admin(model, [_ids()])
    return noise_stack(model, n_positions=n_positions, tangent=True, **asdict(question))


def _predicted(scheme: Scheme, n_sublayers: int, width: int = WIDTH, question: _Question = _UNIT) -> float:
    """The log product at a width, for a gradient that the last norm cannot shorten where there is one."""
    product = finite_width_product(scheme, n_sublayers, width=width, **asdict(question))
    last_is_normed = scheme.specs(n_sublayers)[-1].norm_out is not NormKind.NONE
    return product.mean - (_log_radial_share(width) if last_is_normed else 0.0)


def _log_radial_share(width: int) -> float:
    """What one norm takes of an isotropic gradient, E log sqrt(1 - t^2) for a coordinate t of a random unit vector."""
    return 0.5 * float(digamma((width - 1) / 2) - digamma(width / 2))


def _log(products: _Products, unit: float, setting: str) -> Measurement:
    """The log of a product, in nats over ``unit``."""
    return Measurement(
        value=products.noise / unit,
        error=products.error / abs(unit),
        predicted=products.predicted / unit,
        own=products.own / unit,
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
        setting=setting,
    )


_STACK = "64 sub-layers, noise branches; own: shortcut-only gradient"


def _post_ln_product() -> Measurement:
    return _log(_products("post_ln"), _LN_10, _STACK)


def _post_ln_full_gradient() -> Measurement:
    """Linear branches with matrices of their own in each of twelve passes.

    A gradient that has left a sub-layer is orthogonal to the stream there, so no norm but the last shortens it. Per sub-layer
    the mean log gain is +3/8 (the norm's scale) - 3/4 (the matrix and the lost direction), over D.
    """
    own = full_log_gain(_model("post_ln"), _ids()).mean() / _LN_10
    model = _model("post_ln", norm_eps=1e-12)
    generator = torch.Generator().manual_seed(2)
    gains = []
    for _ in range(12):
        _make_linear(model, generator)
        gains.append(full_log_gain(model, _ids(16, 1)).mean() / _LN_10)
    value, error = _mean(torch.stack(gains))
    return Measurement(
        value=value,
        error=error,
        predicted=-(0.375 * CASE.n_sublayers + 0.5) / WIDTH / _LN_10,
        own=float(own),
        setting="64 sub-layers, linear branches of variance 1; own: full gradient",
    )


def _make_linear(model: Transformer, generator: torch.Generator) -> None:
    for sublayer in model.sublayers():
        sublayer.branch.function = _linear(_gaussian(WIDTH, generator))


def _keel_product() -> Measurement:
    return _plain(_products(_ATTEMPT_3, n_positions=1024), _STACK)


def _keel_limit() -> Measurement:
    return _plain(
        _products(_ATTEMPT_3, n_sublayers=512, width=32, n_positions=1024),
        "512 sub-layers, width 32, noise branches; own: shortcut-only gradient",
    )


def _keel_rate() -> Measurement:
    products = _products(_ATTEMPT_3, n_positions=1024)
    depth = CASE.n_sublayers
    return Measurement(
        value=-depth * math.expm1(products.noise),
        error=depth * products.error,
        predicted=-depth * math.expm1(products.predicted),
        own=-depth * math.expm1(products.own),
        setting=_STACK,
    )


def _root_depth_product() -> Measurement:
    return _plain(_products(_ATTEMPT_3, alpha="sqrt(L)"), f"a = sqrt(L), {_STACK}")


def _keel_first_block() -> Measurement:
    return _plain(_products("keel"), _STACK)


def _keel_first_block_initial() -> Measurement:
    """Own: the paper's shape with its initialisation, whose q is another in attention and FFN."""
    question = _Question(branch_variance=CASE.initial_branch, stream_variance=CASE.initial_embedding)
    measured = _plain(_products("keel", question=question), "")
    own = own_stack(Transformer(narrow(4, "keel")), _ids(16))
    q_attention, q_ffn = own.branch_variance[:2].tolist()
    return replace(
        measured,
        own=float(own.log_gains[:2].sum(0).mean().exp()),
        setting="64 sub-layers, noise branches; own: first block of the paper's width 1024 and initialisation, 64 tokens, "
        f"q = {q_attention:.3f} in its attention, {q_ffn:.3f} in its FFN",
    )


def _keel_later_blocks() -> Measurement:
    """From the second block on Keel is attempt 3 with two sub-layers less and the same scale."""
    depth = CASE.n_sublayers
    noise, error = _mean(_noise(_model("keel", norm_eps=1e-12), n_positions=1024).log_gains[2:].sum(0))
    later = get_scheme(_ATTEMPT_3).with_parameters(alpha=float(depth))
    own = float(own_stack(_model("keel"), _ids()).log_gains[2:].sum(0).mean())
    return _plain(_Products(noise, error, _predicted(later, depth - 2), own), _STACK)


def _attempts() -> Measurement:
    """Branches are called, on what each attempt gives them to read; every pass has matrices of its own."""
    generator = torch.Generator().manual_seed(8)

    def log_products(scheme: str) -> Tensor:
        model, values = _model(scheme, norm_eps=1e-12), []
        for _ in range(8):
            _make_linear(model, generator)
            values.append(own_stack(model, _ids(16, 1)).log_products.mean())
        return torch.stack(values)

    (one, error_1), (two, error_2), (three, error_3) = (_mean(log_products(scheme)) for scheme in ATTEMPTS)
    own = [float(own_stack(_model(scheme), _ids()).log_products.mean()) for scheme in ATTEMPTS]
    return Measurement(
        value=one - (two + three) / 2,
        error=math.hypot(error_1, error_2 / 2, error_3 / 2),
        predicted=0.0,
        own=own[0] - (own[1] + own[2]) / 2,
        setting="64 sub-layers, linear branches of variance 1; own: shortcut-only gradients",
    )


def _highway_product() -> Measurement:
    return _log(_products("highway", gate_bias=CASE.gate_bias), _LN_10, f"{_STACK}, own gate")


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
    return _plain(_products("deepnorm", question=_Question(scaled_matrices=2)), _STACK)


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
        scheme = model.config.residual_scheme
        shift = _predicted(scheme, CASE.n_sublayers) - shortcut_log_product(scheme, CASE.n_sublayers)
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
        predicted=_mean_step_cosine(CASE.alpha**2, 1.0) ** CASE.n_sublayers,
        own=float(own),
        setting="64 sub-layers, noise branches; own branches",
    )


def _mean_step_cosine(signal: float, noise: float) -> float:
    """Mean cosine between a vector of fixed length and its sum with noise, to first order in 1/D.

    From E[(a + s)(1 + d)^(-1/2)] with s the noise along the vector and d the fluctuation of the sum's mean square:
    3/8 Var d - E[s d]/2.
    """
    total = signal + noise
    first_order = 0.375 * (4 * signal * noise + 2 * noise**2) / total**2 - noise / total
    return math.sqrt(signal / total) * (1 + first_order / WIDTH)


def _pre_ln_cosine() -> Measurement:
    value, error = _mean(noise_stack(_model("pre_ln")).input_cosines)
    return Measurement(
        value=value,
        error=error,
        predicted=_mean_step_cosine(1.0, float(CASE.n_sublayers)),
        own=float(own_stack(_model("pre_ln"), _ids()).input_cosines.mean()),
        setting="64 sub-layers, noise branches; own branches",
    )


def _layernorm_scaling() -> Measurement:
    model = _model("layernorm_scaling")
    value, error = _mean(noise_stack(model).last.square().mean(-1).flatten())
    return Measurement(
        value=value,
        error=error,
        predicted=layernorm_scaling_variance(CASE.n_sublayers // 2),
        own=float(own_stack(model, _ids()).stream_variance[-1]),
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
        error=predicted * 2 / math.sqrt(256 * WIDTH),  # of two mean squares over 256 draws
        setting="64 sub-layers, noise branches; own branches",
    )


# --- one sub-layer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighted:
    """The last FFN sub-layer of a small model, with weights; draws of the stream that the norm before would give it, and noise.

    Attributes:
        scheme: of the model.
        before: weight of the norm before, (D,).
        inside: weight of the inner norm; without one the branch is as large as the stream, (D,).
        out: weight of the output norm, (D,).
        alpha: shortcut scale.
    """

    scheme: str
    before: Tensor
    inside: Tensor
    out: Tensor
    alpha: float = 1.0

    def draws(self, n: int) -> tuple[ResidualSublayer, Tensor, Tensor, Tensor]:
        """The sub-layer, streams, noise of the branch and gradients, each (n, D)."""
        parameters = {"alpha": self.alpha} if "alpha" in get_scheme(self.scheme).parameters else {}
        sublayer = _sublayer(_model(self.scheme, parameters, n_sublayers=4, norm_eps=1e-12), 3)
        _set_weights(sublayer, self.inside, self.out)
        draw = torch.randn((3, n, WIDTH), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        stream = self.before * draw[0] / draw[0].square().mean(-1, keepdim=True).sqrt()
        return sublayer, stream, self.noise_variance**0.5 * draw[1], draw[2]

    @property
    def noise_variance(self) -> float:
        """Of the branch."""
        return float(self.inside.square().mean())

    @property
    def total(self) -> float:
        """Mean of the sum's mean square."""
        return self.alpha**2 * float(self.before.square().mean()) + self.noise_variance

    @property
    def fluctuation(self) -> float:
        """D times the relative variance of the sum's mean square: 4PQ + 2Q^2, and what unequal weights make of the stream's."""
        noise, squares = self.noise_variance, self.alpha**2 * self.before.square()
        signal = float(squares.mean())
        return (2 * float(squares.var(correction=0)) + 4 * signal * noise + 2 * noise**2) / self.total**2


def _mean_gain(case: _Weighted) -> Measurement:
    """Gain of one sub-layer's shortcut, as a root mean square over gradients.

    At width D the last norm takes a share 1/D of an isotropic gradient's square, and the sum's fluctuation adds its own.
    """
    sublayer, stream, noise, gradient = case.draws(4096)
    square, error = _mean(_shortcut_gains(sublayer, stream, noise, gradient).square())
    own = _shortcut_gains(sublayer, stream[:64], _own_branch(sublayer, stream[:64]), gradient[:64]).square().mean().sqrt()
    gain = float(case.out.square().mean()) * case.alpha**2 / case.total
    return Measurement(
        value=math.sqrt(square),
        error=error / (2 * math.sqrt(square)),
        predicted=math.sqrt(gain * (1 - 1 / WIDTH) * (1 + case.fluctuation / WIDTH)),
        own=float(own),
        setting="one FFN sub-layer with weights set, noise branch, random gradients; own FFN",
    )


def _spectral_norm(case: _Weighted) -> Measurement:
    """Largest singular value of the shortcut's Jacobian, which autograd gives row by row; mean over draws.

    Several entries of the weight are its largest, so some direction of theirs is not the one that the norm removes: the norm is
    that entry over the sum's RMS, whose mean inverse is larger by 3/8 of the fluctuation.
    """
    sublayer, stream, noise, _ = case.draws(256)
    value, error = _mean(_spectral_norms(sublayer, stream, noise))
    own = _spectral_norms(sublayer, stream[:64], _own_branch(sublayer, stream[:64])).mean()
    return Measurement(
        value=value,
        error=error,
        predicted=float(case.out.max()) * case.alpha / math.sqrt(case.total) * (1 + 0.375 * case.fluctuation / WIDTH),
        own=float(own),
        setting="one FFN sub-layer with weights set, noise branch, singular values of the shortcut's Jacobian; own FFN",
    )


@torch.no_grad()
def _own_branch(sublayer: ResidualSublayer, stream: Tensor) -> Tensor:
    written: Tensor = sublayer.branch(stream[None])[0]
    return written


def _spectral_norms(sublayer: ResidualSublayer, streams: Tensor, branches: Tensor) -> Tensor:
    jacobians = torch.func.vmap(torch.func.jacrev(sublayer.shortcut))(streams, branches)
    norms: Tensor = torch.linalg.matrix_norm(jacobians.detach(), 2)
    return norms


def _set_weights(sublayer: ResidualSublayer, inside: Tensor, out: Tensor) -> None:
    with torch.no_grad():
        if sublayer.norm_out is not None:
            _norm(sublayer.norm_out).weight.copy_(out)
        if sublayer.branch.norm_in is not None:
            _norm(sublayer.branch.norm_in).weight.copy_(inside)


def _equal(size: float) -> Tensor:
    return torch.full((WIDTH,), size, dtype=torch.float64)


def _unequal(largest: float) -> Tensor:
    return torch.from_numpy(unequal(largest, WIDTH))


def _norm(module: nn.Module) -> Norm:
    assert isinstance(module, Norm)
    return module


def _shortcut_gains(sublayer: ResidualSublayer, stream: Tensor, branch: Tensor, gradient: Tensor) -> Tensor:
    leaf = stream.detach().requires_grad_()
    (below,) = torch.autograd.grad(sublayer.shortcut(leaf, branch), leaf, gradient)
    gains: Tensor = below.norm(dim=-1) / gradient.norm(dim=-1)
    return gains


def _post_ln_weighted(before: Tensor, out: Tensor) -> _Weighted:
    return _Weighted(scheme="post_ln", before=before, inside=before, out=out)


def _keel_weighted(before: Tensor, inside: Tensor, out: Tensor) -> _Weighted:
    return _Weighted(scheme="keel", alpha=CASE.alpha, before=before, inside=inside, out=out)


def _post_ln_gain() -> Measurement:
    return _mean_gain(_post_ln_weighted(_equal(CASE.weight_before), _equal(CASE.weight_out)))


def _post_ln_rms() -> Measurement:
    return _mean_gain(_post_ln_weighted(_equal(CASE.weight_before), _unequal(CASE.weight_out)))


def _post_ln_largest() -> Measurement:
    return _spectral_norm(_post_ln_weighted(_equal(CASE.weight_before), _unequal(CASE.weight_out)))


def _post_ln_bound() -> Measurement:
    return _spectral_norm(_post_ln_weighted(_unequal(CASE.weight_before), _unequal(CASE.weight_out)))


def _keel_gain() -> Measurement:
    return _mean_gain(_keel_weighted(_equal(CASE.weight_before), _equal(CASE.weight_in), _equal(CASE.weight_out)))


def _keel_rms() -> Measurement:
    return _mean_gain(_keel_weighted(_equal(CASE.weight_before), _unequal(CASE.weight_in), _unequal(CASE.weight_out)))


def _keel_largest() -> Measurement:
    return _spectral_norm(_keel_weighted(_equal(CASE.weight_before), _equal(CASE.weight_in), _unequal(CASE.weight_out)))


def _keel_bound() -> Measurement:
    return _spectral_norm(_keel_weighted(_unequal(CASE.weight_before), _unequal(CASE.weight_in), _unequal(CASE.weight_out)))


def _gaussian(width: int, generator: torch.Generator) -> Tensor:
    return torch.randn((width, width), generator=generator, dtype=torch.float64) / math.sqrt(width)


def _orthogonal(width: int, generator: torch.Generator) -> Tensor:
    """Uniform over rotations and reflections; Q alone is not, since its signs depend on how it is computed."""
    q, r = torch.linalg.qr(_gaussian(width, generator))
    uniform: Tensor = q * torch.diagonal(r).sign()
    return uniform


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
    """A fresh matrix in each draw.

    Of its D unit rows in the Frobenius sense the norm removes the one along the sum: 1 for a random direction, 1/2 more because
    the sum itself holds the matrix's image of the stream; of the identity it removes 1.
    """

    def ratio(sublayer: ResidualSublayer, seed: int) -> float:
        whole, shortcut = _jacobians(sublayer, _unit_stream(seed))
        return float((whole - shortcut).norm() / shortcut.norm())

    sublayer = _sublayer(_model("post_ln", n_sublayers=2, norm_eps=1e-12), 1)
    own, generator, ratios = ratio(sublayer, 1), torch.Generator().manual_seed(4), []
    for seed in range(8):
        sublayer.branch.function = _linear(_gaussian(WIDTH, generator))
        ratios.append(ratio(sublayer, seed))
    value, error = _mean(torch.tensor(ratios, dtype=torch.float64))
    return Measurement(
        value=value,
        error=error,
        predicted=math.sqrt((WIDTH - 1.5) / (WIDTH - 1)),
        own=own,
        setting="one Post-LN sub-layer, linear branch of variance 1; own FFN",
    )


def _branch_gains(
    alpha: float, *, inside: float = 1.0, out: float = 1.0, stream_rms: float = 1.0, scale: float = 1.0, setting: str
) -> Measurement:
    """``scale`` times the gain through one Keel branch: orthogonal ones, a fresh one in each draw, and the model's own FFN.

    The two norms remove the radial directions of their inputs, which share the squared cosine of sum and branch.
    """
    sublayer = _sublayer(_model("keel", {"alpha": alpha}, n_sublayers=4, norm_eps=1e-12), 3)
    _set_weights(sublayer, _equal(inside), _equal(out))

    def squared_gain(seed: int) -> float:
        whole, shortcut = _jacobians(sublayer, _unit_stream(seed, stream_rms))
        return scale**2 * float((whole - shortcut).square().sum()) / WIDTH

    own, generator, squares = math.sqrt(squared_gain(1)), torch.Generator().manual_seed(5), []
    for seed in range(8):
        sublayer.branch.function = _linear(_orthogonal(WIDTH, generator))
        squares.append(squared_gain(seed))
    square, error = _mean(torch.tensor(squares, dtype=torch.float64))
    signal, noise = alpha**2 * stream_rms**2, inside**2
    total = signal + noise
    shares = (WIDTH - 2 + noise / total) / WIDTH * (1 + 4 * signal * noise / total**2 / WIDTH)
    weights = NormWeights(norm_in=inside, norm_out=out)
    return Measurement(
        value=math.sqrt(square),
        error=error / (2 * math.sqrt(square)),
        predicted=scale * branch_gain(sublayer.spec, stream_variance=stream_rms**2, weights=weights) * math.sqrt(shares),
        own=own,
        setting=setting,
    )


def _branch_gain() -> Measurement:
    return _branch_gains(
        CASE.alpha,
        inside=CASE.weight_in,
        out=CASE.weight_out,
        stream_rms=CASE.weight_before,
        setting="one Keel sub-layer with weights set, orthogonal branch; own FFN",
    )


def _branch_gain_depth() -> Measurement:
    depth = float(CASE.n_sublayers)
    return _branch_gains(depth, scale=depth, setting="one Keel sub-layer, a = L = 64, orthogonal branch; own FFN")


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
    _make_linear(model, torch.Generator().manual_seed(7))
    linear = measure_depthwise_alignment(model, residual_layout(model), _ids())
    value, error = _mean(torch.tensor([_aligned(row) for row in linear.sublayers], dtype=torch.float64))
    return Measurement(
        value=value,
        error=error,
        predicted=(1 + 1 / (4 * WIDTH)) / math.sqrt(2),
        own=float(np.mean([_aligned(row) for row in own.sublayers])),
        setting="16 Post-LN sub-layers, random linear branches; own branches",
    )


def _aligned(row: SublayerAlignment) -> float:
    assert row.alignment is not None  # no branch of these models is zero
    return row.alignment


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
        "14-rms": _post_ln_rms,
        "14-largest": _post_ln_largest,
        "14-bound": _post_ln_bound,
        "15-product": _post_ln_product,
        "15-wrong-base": _post_ln_product,
        "15-full-gradient": _post_ln_full_gradient,
        "18-gain": _keel_gain,
        "18-rms": _keel_rms,
        "18-largest": _keel_largest,
        "18-bound": _keel_bound,
        "19-product": _keel_product,
        "19-limit": _keel_limit,
        "19-rate": _keel_rate,
        "19-wrong-no-power": _keel_product,
        "19-wrong-limit": _root_depth_product,
        "19-first-block": _keel_first_block,
        "19-first-block-initial": _keel_first_block_initial,
        "19-later-blocks": _keel_later_blocks,
        "24-26-shortcut": _attempts,
        "26-merge": _merge,
        "27-branch-gain": _branch_gain,
        "27-depth": _branch_gain_depth,
        "34-held-target": _held_gradient,
        "34-full-gradient": _full_gradient,
        "admin-product": _admin_product,
        "layernorm-scaling": _layernorm_scaling,
        "cosine": _cosine,
        "cosine-pre-ln": _pre_ln_cosine,
        "alpha-needed": _alpha_needed,
    }
)
