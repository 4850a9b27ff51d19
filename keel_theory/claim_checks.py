r"""How each claim is checked by theory alone: the value that the statement gives, the value derived, and an independent number.

Each function returns :class:`Evidence` for one claim of :mod:`keel_theory.claims`. The independent number never uses the
formula it is compared with: Monte Carlo over random branches with exact vector-Jacobian products, central differences, root
finding, or the plain recursion at a depth where the limit is close.

Fixed cases: 64 sub-layers unless a claim is about depth, branches of variance one, width 512 for Monte Carlo.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np

from keel_theory.design import smallest_alpha, uniform_product
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.propagation import monte_carlo_product, propagate_shortcut, shortcut_log_product, uniform_log_product
from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind, ResidualSpec, Scheme
from keel_theory.sublayer import (
    Branch,
    NeglectedTerms,
    NormWeights,
    branch_gain,
    neglected_terms,
    shortcut_gain,
    sublayer_jacobian,
    sublayer_output,
)
from keel_theory.test_time_training import depthwise_step, symbolic_step
from keel_theory.variance import (
    admin_shortcut_product,
    highway_variance,
    pre_ln_update_share,
    pre_ln_variance,
    variance_profile,
)

__all__ = ["CASE", "Case", "Evidence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The numbers that are put into the formulas; measurements on models use the same.

    Attributes:
        n_sublayers: L of the claims about one depth.
        weight_before: norm weight of the sub-layer before, the paper's gamma of sub-layer l - 1.
        weight_out: norm weight of this sub-layer's output.
        weight_in: norm weight of this sub-layer's input.
        alpha: shortcut scale of the claims about one Keel sub-layer.
        min_gain: product wanted in the design question.
        gate_bias: of the Highway gate.
    """

    n_sublayers: int = 64
    weight_before: float = 0.8
    weight_out: float = 1.5
    weight_in: float = 1.2
    alpha: float = 8.0
    min_gain: float = 0.9
    gate_bias: float = -1.0

    @property
    def gate(self) -> float:
        """T of a Highway gate with zero weights."""
        return 1.0 / (1.0 + math.exp(-self.gate_bias))


CASE = Case()
_WIDTH = 512
_DEEP = 10**6
_LN_10 = math.log(10)
_POST_LN = ResidualSpec(norm_out=NormKind.RMS)
_PRE_LN = ResidualSpec(norm_in=NormKind.RMS)
_KEEL = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=CASE.alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What theory says about one claim.

    Attributes:
        quantity: what the numbers are, with the case that was put in.
        claimed: what the statement gives for it.
        formula: the derived form, as plain text.
        derived: its value.
        numeric: the same quantity by an independent calculation.
        numeric_error: standard error of the latter; 0 where nothing is random.
        numeric_tolerance: what the method itself allows (round-off, a finite depth), absolute.
    """

    quantity: str
    claimed: float
    formula: str
    derived: float
    numeric: float
    numeric_error: float = 0.0
    numeric_tolerance: float = 1e-9

    @property
    def consistent(self) -> bool:
        """Whether the independent number confirms the derived one: within three standard errors and the method's tolerance."""
        return abs(self.numeric - self.derived) <= 3 * self.numeric_error + self.numeric_tolerance


# --- Eq. 9: the norm -------------------------------------------------------------------------------------------------------


def scale_invariance() -> Evidence:
    """N(c x) = N(x)."""
    x, norm = _random(_WIDTH), Normalisation()
    deviation = max(float(np.abs(norm(c * x) - norm(x)).max()) for c in (1e-6, 0.3, 7.0, 1e6))
    return Evidence(
        quantity="largest |LN(c x) - LN(x)|, c = 1e-6 ... 1e6, eps = 0",
        claimed=0.0,
        formula="0",
        derived=0.0,
        numeric=deviation,
    )


def radial_null_direction() -> Evidence:
    """J x = 0."""
    x, norm = _random(_WIDTH), Normalisation()
    size = float(np.linalg.norm(norm.jvp(x, x)) / np.linalg.norm(x))
    return Evidence(quantity="|J x| / |x|, eps = 0", claimed=0.0, formula="0", derived=0.0, numeric=size)


# --- Eqs. 13-15: Post-LN ---------------------------------------------------------------------------------------------------


def post_ln_chain_rule() -> Evidence:
    """dx'/dx = J_LN (I + dF/dx), against central differences."""
    width = 12
    branch, x = _tanh_branch(width), _random(width, seed=3)
    exact = sublayer_jacobian(_POST_LN, x, branch)
    differences = _difference_jacobian(lambda v: sublayer_output(_POST_LN, v, branch), x)
    return Evidence(
        quantity="|J - J_LN (I + J_F)| / |J|, tanh branch",
        claimed=0.0,
        formula="0",
        derived=0.0,
        numeric=float(np.linalg.norm(differences - exact) / np.linalg.norm(exact)),
    )


def branch_path_size() -> Evidence:
    """The part of the Post-LN Jacobian that the shortcut argument drops."""
    values = [_linear_terms(_POST_LN, seed).branch_path for seed in range(8)]
    return Evidence(
        quantity="|J_LN J_F| / |J_LN|, linear branch of variance 1",
        claimed=0.0,
        formula="sqrt(q)",
        derived=1.0,
        **_mean(values),
        numeric_tolerance=2 / _MATRIX_WIDTH,
    )


def post_ln_gain() -> Evidence:
    """Eq. 14 with weights."""
    claimed = CASE.weight_out / (math.sqrt(2) * CASE.weight_before)
    weights = NormWeights(norm_out=CASE.weight_out)
    return Evidence(
        quantity="gain of one sub-layer, weights 0.8 before and 1.5 after",
        claimed=claimed,
        formula="g_l / (g_{l-1} sqrt(1 + q))",
        derived=shortcut_gain(_POST_LN, stream_variance=CASE.weight_before**2, weights=weights),
        **_sampled_gain(1.0, CASE.weight_before, CASE.weight_before, CASE.weight_out),
    )


def post_ln_product() -> Evidence:
    """Eq. 15: 2^(-L/2)."""
    return _product_evidence("post_ln", -0.5 * CASE.n_sublayers * math.log10(2), "(1 + q)^(-L/2) = 2^(-L/2)")


def post_ln_product_wrong_base() -> Evidence:
    """The form in circulation, 1 / L^(L/2)."""
    depth = CASE.n_sublayers
    return _product_evidence("post_ln", -0.5 * depth * math.log10(depth), "(1 + q)^(-L/2) = 2^(-L/2)")


def post_ln_full_gradient() -> Evidence:
    """The whole gradient of a Post-LN stack of linear branches, branch paths included."""
    values = [_full_log10_gain(seed) for seed in range(16)]
    return Evidence(
        quantity="log10 of the full gradient's gain, L = 64, linear branches",
        claimed=-0.5 * CASE.n_sublayers * math.log10(2),
        formula="(L/2) log10((1 + q)/(1 + q)) = 0",
        derived=0.0,
        **_mean(values),
        numeric_tolerance=CASE.n_sublayers / _FULL_WIDTH / _LN_10,  # terms of order L / D
    )


# --- Eqs. 8, 18, 19, 24-27: Keel -------------------------------------------------------------------------------------------


def keel_gain() -> Evidence:
    """Eq. 18 with weights."""
    before, out, inner, alpha = CASE.weight_before, CASE.weight_out, CASE.weight_in, CASE.alpha
    weights = NormWeights(norm_out=out, norm_in=inner)
    return Evidence(
        quantity="gain of one sub-layer, a = 8, weights 0.8, 1.5, 1.2",
        claimed=out * alpha / math.sqrt(before**2 * alpha**2 + inner**2),
        formula="g_{l,1} a / sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2 q)",
        derived=shortcut_gain(_KEEL, stream_variance=before**2, weights=weights),
        **_sampled_gain(alpha, before, inner, out),
    )


def keel_product() -> Evidence:
    """Eq. 19 at one depth."""
    depth = CASE.n_sublayers
    sampled = _sampled_log_product("scaled_shortcut_normed_input_gain", depth)
    return Evidence(
        quantity="product, L = 64, every sub-layer alike",
        claimed=(1 + 1 / depth**2) ** (-depth / 2),
        formula="(1 + q/L^2)^(-L/2)",
        derived=float(uniform_product(depth, depth)),
        numeric=math.exp(sampled["numeric"]),
        numeric_error=sampled["numeric_error"],
    )


def keel_limit() -> Evidence:
    """Eq. 19 in the limit."""
    return Evidence(
        quantity="product as L grows, a = L",
        claimed=1.0,
        formula="lim (1 + q/L^2)^(-L/2) = 1",
        derived=_limit_of_product("L"),
        numeric=_deep_product(float(_DEEP)),
        numeric_tolerance=1 / _DEEP,
    )


def keel_rate() -> Evidence:
    """How fast the product tends to one."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    rate = sp.limit(depth * (1 - (1 + depth**-2) ** (-depth / 2)), depth, sp.oo)
    return Evidence(
        quantity="L (1 - product) as L grows, a = L",
        claimed=0.5,
        formula="lim L (1 - (1 + 1/L^2)^(-L/2)) = 1/2",
        derived=float(rate),
        numeric=-_DEEP * math.expm1(uniform_log_product(float(_DEEP), _DEEP)),
        numeric_tolerance=1 / _DEEP,
    )


def keel_limit_without_power() -> Evidence:
    """The form in circulation: the limit of a single factor, used for the product. Any a that grows would do."""
    return Evidence(
        quantity="product as L grows, a = sqrt(L), whose factor a/sqrt(a^2 + 1) tends to 1",
        claimed=1.0,
        formula="lim (1 + q/L)^(-L/2) = exp(-q/2)",
        derived=_limit_of_product("sqrt(L)"),
        numeric=_deep_product(math.sqrt(_DEEP)),
        numeric_tolerance=1 / _DEEP,
    )


def keel_factor_for_product() -> Evidence:
    """The form in circulation at one depth: a / sqrt(a^2 + 1) without the power."""
    exact = keel_product()
    return replace(exact, claimed=CASE.n_sublayers / math.sqrt(CASE.n_sublayers**2 + 1))


def keel_first_block() -> Evidence:
    """Keel as it is implemented: the first block has no scale."""
    scheme, deep = get_scheme("keel"), 10**5
    trace = propagate_shortcut(scheme, deep)
    return Evidence(
        quantity="product from the embedding on as L grows, first block by the paper's rules",
        claimed=1.0,
        formula="1 / sqrt(v_0 + 2 q) = 1 / sqrt(3)",
        derived=1 / math.sqrt(3),
        numeric=math.exp(trace.log_product),
        numeric_tolerance=1 / deep,
    )


def keel_after_first_block() -> Evidence:
    """Keel as it is implemented, from the second block on."""
    deep = 10**5
    trace = propagate_shortcut(get_scheme("keel"), deep)
    return Evidence(
        quantity="product from the second block on as L grows",
        claimed=1.0,
        formula="lim (1 + q/L^2)^(-(L - 2)/2) = 1",
        derived=1.0,
        numeric=math.exp(math.fsum(trace.log_gains[2:])),
        numeric_tolerance=1 / deep,
    )


def keel_reduces_to_post_ln() -> Evidence:
    """Eq. 8 with a = 1 and without its inner norm is Eq. 3."""
    spec = replace(_KEEL, shortcut_scale=1.0, norm_in=NormKind.NONE)
    branch, x = _tanh_branch(16), _random(16, seed=4)
    by_hand = Normalisation()(x + branch.value(x))
    return _identity("largest difference of outputs", sublayer_output(spec, x, branch), by_hand)


def input_gain_merges() -> Evidence:
    """Eq. 26: F(b * LN(x)) is F(LN(x)) with b in the norm's weight."""
    gain, x = _random(16, seed=5), _random(16, seed=4)
    branch, norm_out = _tanh_branch(16), Normalisation()
    separate = norm_out(CASE.alpha * x + branch.value(gain * Normalisation()(x)))
    merged = norm_out(CASE.alpha * x + branch.value(Normalisation(weight=gain)(x)))
    return _identity("largest difference of outputs", separate, merged)


def attempts_share_the_shortcut() -> Evidence:
    """Eqs. 24-26 differ in what the branch reads, not in the shortcut."""
    first, third = (
        shortcut_log_product(get_scheme(f"scaled_shortcut{suffix}"), CASE.n_sublayers) for suffix in ("", "_normed_input_gain")
    )
    sampled = _sampled_log_product("scaled_shortcut", CASE.n_sublayers)
    return Evidence(
        quantity="ln product of attempt 1 minus that of attempt 3, L = 64",
        claimed=0.0,
        formula="0",
        derived=first - third,
        numeric=sampled["numeric"] - third,
        numeric_error=sampled["numeric_error"],
    )


def keel_branch_gain() -> Evidence:
    """Eq. 27 with weights, for a branch that keeps lengths."""
    before, out, inner, alpha = CASE.weight_before, CASE.weight_out, CASE.weight_in, CASE.alpha
    weights = NormWeights(norm_out=out, norm_in=inner)
    values = [_exact_branch_gain(seed, weights) for seed in range(6)]
    return Evidence(
        quantity="gain through the branch, a = 8, weights 0.8, 1.5, 1.2, orthogonal dF",
        claimed=out * inner / (before * math.sqrt(before**2 * alpha**2 + inner**2)),
        formula="g_{l,1} g_{l,2} |dF| / (g_{l-1,1} sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2 q))",
        derived=branch_gain(_KEEL, stream_variance=before**2, weights=weights),
        **_mean(values),
        numeric_tolerance=2 / _MATRIX_WIDTH,  # two radial directions, a share 1/D each
    )


def keel_branch_gain_depth() -> Evidence:
    """Eq. 27 at a = L: the branch's gain falls like 1/L."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    deep = replace(_KEEL, shortcut_scale=float(_DEEP))
    return Evidence(
        quantity="L times the gain through the branch as L grows, a = L, unit weights",
        claimed=1.0,
        formula="lim L / sqrt(L^2 + q) = 1",
        derived=float(sp.limit(depth / sp.sqrt(depth**2 + 1), depth, sp.oo)),
        numeric=_DEEP * branch_gain(deep),
    )


# --- Eqs. 1, 2, 5, 6: the neighbours ---------------------------------------------------------------------------------------


def highway_product() -> Evidence:
    """Eq. 1: what the carry gate keeps."""
    scheme = get_scheme("highway").with_parameters(gate_bias=CASE.gate_bias)
    sampled = _sampled_log_product(scheme, CASE.n_sublayers)
    return Evidence(
        quantity="log10 product, L = 64, gate bias -1",
        claimed=CASE.n_sublayers * math.log10(1 - CASE.gate),
        formula="(1 - T)^L",
        derived=shortcut_log_product(scheme, CASE.n_sublayers) / _LN_10,
        numeric=sampled["numeric"] / _LN_10,
        numeric_error=sampled["numeric_error"] / _LN_10,
    )


def highway_variance_decay() -> Evidence:
    """Eq. 1 mixes convexly, so a variance-keeping branch lets the stream fade."""
    scheme = get_scheme("highway").with_parameters(gate_bias=CASE.gate_bias)
    depth = CASE.n_sublayers
    recursion = variance_profile(scheme.specs(depth)).stream[-1]
    return Evidence(
        quantity="log10 of the stream's variance after L = 64, gate bias -1",
        claimed=depth * math.log10((1 - CASE.gate) ** 2 + CASE.gate**2),
        formula="L log10(C^2 + T^2 q)",
        derived=math.log10(float(highway_variance(CASE.gate, depth))),
        numeric=math.log10(recursion),
    )


def deepnorm_drifted() -> Evidence:
    """DeepNorm once its small initial branches have grown to variance one."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    ratio = sp.limit(sp.sqrt(depth) * sp.log(1 + 1 / sp.sqrt(depth)), depth, sp.oo)
    numeric = uniform_log_product(_DEEP**0.25, _DEEP) / (-0.5 * math.sqrt(_DEEP))
    return Evidence(
        quantity="ln product / (-sqrt(L)/2) as L grows, a = L^(1/4), q = 1",
        claimed=1.0,
        formula="lim sqrt(L) ln(1 + 1/sqrt(L)) = 1",
        derived=float(ratio),
        numeric=numeric,
        numeric_tolerance=1 / math.sqrt(_DEEP),
    )


def deepnorm_at_initialisation() -> Evidence:
    """DeepNorm as initialised: two matrices of each branch are L^(-1/4) times smaller, so q = 1/L."""
    scheme, depth = get_scheme("deepnorm"), CASE.n_sublayers
    sampled = _sampled_log_product(scheme, depth, scaled_matrices=2)
    return Evidence(
        quantity="product, L = 64, two matrices of each branch scaled by L^(-1/4)",
        claimed=(1 + depth**-1.5) ** (-depth / 2),
        formula="(1 + b^4/a^2)^(-L/2) = (1 + L^(-3/2))^(-L/2)",
        derived=math.exp(shortcut_log_product(scheme, depth, scaled_matrices=2)),
        numeric=math.exp(sampled["numeric"]),
        numeric_error=sampled["numeric_error"],
    )


def deepnorm_alpha() -> Evidence:
    """Eq. 5's a is DeepNet's (2M)^(1/4)."""
    depth = CASE.n_sublayers
    return Evidence(
        quantity="a, L = 64 sub-layers, M = 32 blocks",
        claimed=depth**0.25,
        formula="(2M)^(1/4) = L^(1/4)",
        derived=(2 * (depth // 2)) ** 0.25,
        numeric=get_scheme("deepnorm").specs(depth)[-1].shortcut_scale,
    )


def deepnorm_beta() -> Evidence:
    """Eq. 5's b is not DeepNet's (8M)^(-1/4)."""
    depth = CASE.n_sublayers
    return Evidence(
        quantity="b, L = 64 sub-layers, M = 32 blocks",
        claimed=depth**-0.25,
        formula="(8M)^(-1/4) = L^(-1/4) / sqrt(2)",
        derived=(8 * (depth // 2)) ** -0.25,
        numeric=get_scheme("deepnorm").with_parameters(beta="deepnet").specs(depth)[-1].init_gain,
    )


def pre_ln_product() -> Evidence:
    """Eq. 6: nothing is lost."""
    sampled = _sampled_log_product("pre_ln", CASE.n_sublayers)
    return Evidence(
        quantity="ln product, L = 64",
        claimed=0.0,
        formula="0",
        derived=shortcut_log_product(get_scheme("pre_ln"), CASE.n_sublayers),
        numeric=sampled["numeric"],
        numeric_error=sampled["numeric_error"],
    )


def pre_ln_growth() -> Evidence:
    """Eq. 6: the stream's variance grows linearly."""
    depth = CASE.n_sublayers
    values = [float(np.mean(_pre_ln_stream(seed, depth) ** 2)) for seed in range(32)]
    return Evidence(
        quantity="variance of the stream after L = 64",
        claimed=1.0 + depth,
        formula="v_0 + q L",
        derived=float(pre_ln_variance(depth)),
        **_mean(values),
    )


def pre_ln_fading() -> Evidence:
    """Eq. 6: what the last sub-layer adds to its own output."""
    depth = CASE.n_sublayers
    return Evidence(
        quantity="share of its output's variance that the last of L = 64 sub-layers writes",
        claimed=1 / (1 + depth),
        formula="q / (v_0 + q (l + 1)), l = L - 1",
        derived=float(pre_ln_update_share(depth - 1)),
        numeric=float(variance_profile(get_scheme("pre_ln").specs(depth)).update_share[-1]),
    )


def admin_product() -> Evidence:
    """Admin at initialisation: the gains telescope."""
    sampled = _sampled_log_product("admin", CASE.n_sublayers)
    return Evidence(
        quantity="product, L = 64, profiled scales",
        claimed=1 / math.sqrt(1 + CASE.n_sublayers),
        formula="1 / sqrt(1 + q L)",
        derived=float(admin_shortcut_product(CASE.n_sublayers)),
        numeric=math.exp(sampled["numeric"]),
        numeric_error=math.exp(sampled["numeric"]) * sampled["numeric_error"],
    )


# --- the design question and its price -------------------------------------------------------------------------------------


def alpha_needed() -> Evidence:
    """Whether a = L is what the shortcut needs."""
    from scipy.optimize import brentq

    depth, gain = CASE.n_sublayers, CASE.min_gain
    root = brentq(lambda a: uniform_log_product(a, depth) - math.log(gain), 1e-3, 1e6, xtol=1e-12, rtol=1e-14)
    return Evidence(
        quantity="smallest a whose product over L = 64 is 0.9",
        claimed=float(depth),
        formula="sqrt(q / (g^(-2/L) - 1)) ~ sqrt(q L / (2 ln(1/g)))",
        derived=float(smallest_alpha(gain, depth)),
        numeric=float(root),
    )


def product_is_cosine() -> Evidence:
    """The shortcut product is the cosine between input and output of the stack."""
    alpha, depth = CASE.alpha, CASE.n_sublayers
    values = [_stack_cosine(seed, alpha, depth) for seed in range(32)]
    return Evidence(
        quantity="cosine between input and output, L = 64, a = 8",
        claimed=float(uniform_product(alpha, depth)),
        formula="(1 + q/a^2)^(-L/2)",
        derived=float(variance_profile([replace(_KEEL, shortcut_scale=alpha)] * depth).input_cosine),
        **_mean(values),
        numeric_tolerance=depth / (_WIDTH * alpha**2),
    )


# --- Eqs. 31-34: test-time training along depth ----------------------------------------------------------------------------


def update_is_held_gradient() -> Evidence:
    """With the target held constant, for every branch."""
    step = symbolic_step(3, 3)
    width, rng = 24, np.random.default_rng(1)
    weight = rng.standard_normal((width, width)) / math.sqrt(width)
    numeric = depthwise_step(rng.standard_normal(width), np.tanh, weight)
    return Evidence(
        quantity="cosine of the update with the negative gradient, G held constant",
        claimed=1.0,
        formula="-d/dx (-<x Wo, G>) - G Wo^T = 0, G any function",
        derived=1.0 if (step.update - step.held_gradient).is_zero_matrix else math.nan,
        numeric=numeric.held_alignment,
    )


def update_is_full_gradient() -> Evidence:
    """With the target differentiated as well, for a random linear branch."""
    values = [_linear_alignment(seed) for seed in range(16)]
    return Evidence(
        quantity="cosine of the update with the negative gradient, G differentiated, random linear branch",
        claimed=1.0,
        formula="|u| / |u + J^T x| = 1 / sqrt(2)",
        derived=1 / math.sqrt(2),
        **_mean(values),
        numeric_tolerance=1 / _MATRIX_WIDTH,
    )


# --- tools -----------------------------------------------------------------------------------------------------------------

_MATRIX_WIDTH = 256
_FULL_WIDTH = 128


def _random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape)


def _mean(values: list[float]) -> dict[str, float]:
    """Mean and standard error as keyword arguments of the evidence."""
    return {"numeric": float(np.mean(values)), "numeric_error": float(np.std(values, ddof=1) / math.sqrt(len(values)))}


def _identity(quantity: str, a: FloatArray, b: FloatArray) -> Evidence:
    return Evidence(quantity=quantity, claimed=0.0, formula="0", derived=0.0, numeric=float(np.abs(a - b).max()))


def _sampled_log_product(scheme: Scheme | str, n_sublayers: int, *, scaled_matrices: int = 0) -> dict[str, float]:
    """Monte Carlo over random branches, moved from width 512 to infinite width by the predicted difference.

    Each scheme has draws of its own, so that the claims do not share one lucky or unlucky noise.
    """
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    drawn = monte_carlo_product(
        scheme,
        n_sublayers,
        width=_WIDTH,
        n_draws=128,
        scaled_matrices=scaled_matrices,
        seed=zlib.crc32(scheme.name.encode()),
    )
    return {"numeric": drawn.mean - (drawn.predicted.mean - drawn.closed_form), "numeric_error": drawn.standard_error}


def _product_evidence(scheme: str, claimed: float, formula: str) -> Evidence:
    sampled = _sampled_log_product(scheme, CASE.n_sublayers)
    return Evidence(
        quantity="log10 product, L = 64",
        claimed=claimed,
        formula=formula,
        derived=shortcut_log_product(get_scheme(scheme), CASE.n_sublayers) / _LN_10,
        numeric=sampled["numeric"] / _LN_10,
        numeric_error=sampled["numeric_error"] / _LN_10,
    )


def _limit_of_product(alpha: str) -> float:
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    scale = {"L": depth, "sqrt(L)": sp.sqrt(depth)}[alpha]
    return float(sp.limit((1 + scale**-2) ** (-depth / 2), depth, sp.oo))


def _deep_product(alpha: float) -> float:
    return math.exp(uniform_log_product(alpha, _DEEP))


def _sampled_gain(alpha: float, stream_rms: float, branch_rms: float, weight_out: float) -> dict[str, float]:
    """Gain of a random gradient through one norm, for a noise branch of the given RMS."""
    rng, norm = np.random.default_rng(11), Normalisation(weight=np.full(_WIDTH, weight_out))
    x = stream_rms * Normalisation()(rng.standard_normal((64, _WIDTH)))
    z = alpha * x + branch_rms * rng.standard_normal(x.shape)
    gradient = rng.standard_normal(x.shape)
    gains = np.linalg.norm(alpha * norm.vjp(z, gradient), axis=1) / np.linalg.norm(gradient, axis=1)
    return {**_mean(list(gains)), "numeric_tolerance": 2.0 / _WIDTH}


def _tanh_branch(width: int) -> Branch:
    matrix = _random(width, width, seed=2) / math.sqrt(width)
    return Branch(value=lambda x: np.tanh(matrix @ x), jacobian=lambda x: (1 - np.tanh(matrix @ x) ** 2)[:, None] * matrix)


def _difference_jacobian(function: object, x: FloatArray, step: float = 1e-3) -> FloatArray:
    """Fourth-order central differences, column by column."""
    assert callable(function)
    shifts = step * np.eye(len(x))
    columns = [
        (8 * (function(x + h) - function(x - h)) - (function(x + 2 * h) - function(x - 2 * h))) / (12 * step) for h in shifts
    ]
    return np.array(columns).T


def _gaussian_matrix(width: int, rng: np.random.Generator) -> FloatArray:
    return rng.standard_normal((width, width)) / math.sqrt(width)


def _linear_terms(spec: ResidualSpec, seed: int) -> NeglectedTerms:
    rng = np.random.default_rng(seed)
    return neglected_terms(spec, rng.standard_normal(_MATRIX_WIDTH), Branch.linear(_gaussian_matrix(_MATRIX_WIDTH, rng)))


def _full_log10_gain(seed: int) -> float:
    """Backpropagate a random gradient through Post-LN sub-layers with linear branches, shortcut and branch together."""
    rng, norm = np.random.default_rng(seed), Normalisation()
    x = norm(rng.standard_normal(_FULL_WIDTH))
    tape = []
    for _ in range(CASE.n_sublayers):
        matrix = _gaussian_matrix(_FULL_WIDTH, rng)
        z = x + matrix @ x
        tape.append((matrix, z))
        x = norm(z)
    gradient = rng.standard_normal(_FULL_WIDTH)
    start = np.linalg.norm(gradient)
    for matrix, z in reversed(tape):
        through_norm = norm.vjp(z, gradient)
        gradient = through_norm + matrix.T @ through_norm
    return float(np.log10(np.linalg.norm(gradient) / start))


def _exact_branch_gain(seed: int, weights: NormWeights) -> float:
    rng = np.random.default_rng(seed)
    orthogonal = np.linalg.qr(rng.standard_normal((_MATRIX_WIDTH, _MATRIX_WIDTH)))[0]
    x = CASE.weight_before * Normalisation()(rng.standard_normal(_MATRIX_WIDTH))
    branch = Branch.linear(orthogonal)
    whole = sublayer_jacobian(_KEEL, x, branch, weights=weights)
    norm = Normalisation(weight=np.full(_MATRIX_WIDTH, weights.norm_out))
    z = CASE.alpha * x + orthogonal @ (weights.norm_in * Normalisation()(x))
    through_branch = whole - CASE.alpha * norm.jacobian(z)
    return float(np.linalg.norm(through_branch) / math.sqrt(_MATRIX_WIDTH))


def _pre_ln_stream(seed: int, n_sublayers: int) -> FloatArray:
    rng = np.random.default_rng(seed)
    stream = Normalisation()(rng.standard_normal(_WIDTH))
    for _ in range(n_sublayers):
        stream = stream + rng.standard_normal(_WIDTH)
    return stream


def _stack_cosine(seed: int, alpha: float, n_sublayers: int) -> float:
    rng, norm = np.random.default_rng(seed), Normalisation()
    first = stream = norm(rng.standard_normal(_WIDTH))
    for _ in range(n_sublayers):
        stream = norm(alpha * stream + rng.standard_normal(_WIDTH))
    return float(first @ stream / _WIDTH)


def _linear_alignment(seed: int) -> float:
    """Cosine for u = M x, by the formula of the full gradient of <x, M x>: (M + M^T) x."""
    rng = np.random.default_rng(seed)
    matrix, x = _gaussian_matrix(_MATRIX_WIDTH, rng), rng.standard_normal(_MATRIX_WIDTH)
    update, full = matrix @ x, matrix @ x + matrix.T @ x
    return float(update @ full / np.linalg.norm(update) / np.linalg.norm(full))
