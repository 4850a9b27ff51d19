r"""How each claim is checked by theory alone: what the statement gives, what is derived, and an independent number.

Each function returns :class:`Evidence` for one claim of :mod:`keel_theory.claims`. Where the numbers come from:

* **claimed**: the statement's own formula, written out here.
* **derived**: the library's closed form or recursion, a SymPy limit or proof, or for an identity the difference of two exact
  Jacobians.
* **numeric**: random stacks (:mod:`keel_theory.random_stacks`: specs, noise as large as each branch's actual input asks, exact
  vector-Jacobian products), random matrices, central differences, or a root of a random stack. None of it calls a gain, a
  product or a variance recursion; where it depends on the width, two widths are extrapolated, so no finite-width formula
  enters either. A limit is checked at a finite depth, and the tolerance is what the depth leaves.

Exceptions, where there is nothing to simulate: ``deepnorm_alpha`` and ``deepnorm_beta`` compare two published formulas, and
their independent number is the value in the scheme's spec.

Fixed cases: 64 sub-layers unless a claim is about depth, branches of variance one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from keel_theory.depthwise_training import depthwise_step, symbolic_step
from keel_theory.design import smallest_alpha, uniform_product
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.propagation import shortcut_log_product
from keel_theory.random_stacks import extrapolated, random_stack
from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind, ParameterValue, ResidualSpec, SublayerKind, alternating_kinds
from keel_theory.sublayer import (
    Branch,
    NormWeights,
    branch_gain,
    neglected_terms,
    shortcut_gain,
    sublayer_jacobian,
    sublayer_output,
)
from keel_theory.variance import (
    admin_shortcut_product,
    highway_variance,
    pre_ln_update_share,
    pre_ln_variance,
    variance_profile,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ATTEMPTS", "CASE", "Case", "Evidence", "unequal"]


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
        initial_embedding: variance of the paper's embeddings at initialisation.
        initial_branch: variance of a branch in the paper's shape at initialisation, for an input of variance 1: the mean of
            attention and gated FFN, as a model of it shows.
    """

    n_sublayers: int = 64
    weight_before: float = 0.8
    weight_out: float = 1.5
    weight_in: float = 1.2
    alpha: float = 8.0
    min_gain: float = 0.9
    gate_bias: float = -1.0
    initial_embedding: float = 0.02**2
    initial_branch: float = 0.04

    @property
    def gate(self) -> float:
        """T of a Highway gate with zero weights."""
        return 1.0 / (1.0 + math.exp(-self.gate_bias))


CASE = Case()
_WIDTH = 512
_DEEP = 1024
_DEEP_WIDTH = 128
_N_DRAWS = 128
_LN_10 = math.log(10)
_POST_LN = ResidualSpec(norm_out=NormKind.RMS)
_PRE_LN = ResidualSpec(norm_in=NormKind.RMS)
_KEEL = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=CASE.alpha)
_EQ_14 = CASE.weight_out / (math.sqrt(2) * CASE.weight_before)
_EQ_18 = CASE.weight_out * CASE.alpha / math.hypot(CASE.weight_before * CASE.alpha, CASE.weight_in)
"""The paper's forms, with a weight's largest entry for its size."""


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
        rival: what the nearest wrong statement gives, which the numbers have to exclude; None for an identity, whose number
            is exact, and for a claim that is itself the wrong statement.
    """

    quantity: str
    claimed: float
    formula: str
    derived: float
    numeric: float
    numeric_error: float = 0.0
    numeric_tolerance: float = 1e-9
    rival: float | None = None

    @property
    def consistent(self) -> bool:
        """Whether the independent number confirms the derived one: within three standard errors and the method's tolerance."""
        return abs(self.numeric - self.derived) <= 3 * self.numeric_error + self.numeric_tolerance

    def excludes(self, value: float) -> bool:
        """Whether the independent number contradicts a value: by more than five standard errors and the method's tolerance."""
        return abs(self.numeric - value) > 5 * self.numeric_error + self.numeric_tolerance

    def to_frame(self) -> pd.DataFrame:
        """One row per number."""
        import pandas as pd

        names = ("claimed", "derived", "numeric", "numeric_error", "numeric_tolerance", "rival")
        return pd.DataFrame({"quantity": self.quantity, "metric": names, "value": [getattr(self, name) for name in names]})


# --- Eq. 9: the norm -------------------------------------------------------------------------------------------------------


def scale_invariance() -> Evidence:
    """N(c x) = N(x)."""
    import sympy as sp

    x, norm = _random(_WIDTH), Normalisation()
    deviation = max(float(np.abs(norm(c * x) - norm(x)).max()) for c in (1e-6, 0.3, 7.0, 1e6))
    symbols, factor = sp.symbols("x1:4", real=True), sp.Symbol("c", positive=True)
    scaled = _symbolic_norm([factor * each for each in symbols])
    return Evidence(
        quantity="largest |LN(c x) - LN(x)|, c = 1e-6 ... 1e6, eps = 0",
        claimed=0.0,
        formula="0",
        derived=_largest(scaled - _symbolic_norm(symbols)),
        numeric=deviation,
    )


def radial_null_direction() -> Evidence:
    """J x = 0."""
    import sympy as sp

    x, norm = _random(_WIDTH), Normalisation()
    symbols = sp.Matrix(sp.symbols("x1:4", real=True))
    return Evidence(
        quantity="|J x| / |x|, eps = 0",
        claimed=0.0,
        formula="0",
        derived=_largest(_symbolic_norm(symbols).jacobian(symbols) * symbols),
        numeric=float(np.linalg.norm(norm.jvp(x, x)) / np.linalg.norm(x)),
    )


# --- Eqs. 13-15: Post-LN ---------------------------------------------------------------------------------------------------


def post_ln_chain_rule() -> Evidence:
    """dx'/dx = J_LN (I + dF/dx), against central differences."""
    width = 12
    branch, x = _tanh_branch(width), _random(width, seed=3)
    stated = Normalisation().jacobian(x + branch.value(x)) @ (np.eye(width) + branch.jacobian(x))
    differences = _difference_jacobian(lambda v: sublayer_output(_POST_LN, v, branch), x)
    return Evidence(
        quantity="|J - J_LN (I + J_F)| / |J|, tanh branch",
        claimed=0.0,
        formula="0",
        derived=_relative(sublayer_jacobian(_POST_LN, x, branch), stated),
        numeric=_relative(differences, stated),
    )


def branch_path_size() -> Evidence:
    """The part of the Post-LN Jacobian that the shortcut argument drops, for a fresh random matrix in each draw."""
    numeric, error = extrapolated(_branch_paths, width=_MATRIX_WIDTH)
    return Evidence(
        quantity="|J_LN J_F| / |J_LN|, linear branch of variance 1",
        claimed=0.0,
        formula="sqrt(q)",
        derived=branch_gain(_POST_LN) / shortcut_gain(_POST_LN),
        numeric=numeric,
        numeric_error=error,
    )


def post_ln_gain() -> Evidence:
    """Eq. 14 with equal entries in each weight."""
    case = _OneSublayer(spec=_POST_LN, before=_equal(CASE.weight_before), out=_equal(CASE.weight_out))
    return Evidence(
        quantity="gain of one sub-layer, weights 0.8 before and 1.5 after",
        claimed=_EQ_14,
        formula="g_l / (g_{l-1} sqrt(1 + q))",
        derived=case.mean_gain,
        **case.sampled_gain(),
        rival=CASE.weight_out / CASE.weight_before,
    )


def post_ln_gain_rms() -> Evidence:
    """Eq. 14 with unequal entries, by the root mean square of each weight: of w and w/3 it is w sqrt(5)/3."""
    case = _OneSublayer(spec=_POST_LN, before=_equal(CASE.weight_before), out=_unequal(CASE.weight_out))
    return Evidence(
        quantity="mean gain of a random gradient, weights 0.8 before, 1.5 and 0.5 in turn after",
        claimed=_EQ_14 * math.sqrt(5) / 3,
        formula="rms(g_l) / (rms(g_{l-1}) sqrt(1 + q))",
        derived=case.mean_gain,
        **case.sampled_gain(),
        rival=_EQ_14,
    )


def post_ln_gain_largest() -> Evidence:
    """Eq. 14 with unequal entries after the norm, by the largest entry: what the direction that is kept best keeps."""
    case = _OneSublayer(spec=_POST_LN, before=_equal(CASE.weight_before), out=_unequal(CASE.weight_out))
    return Evidence(
        quantity="spectral norm of one sub-layer's shortcut, weights 0.8 before, 1.5 and 0.5 in turn after",
        claimed=_EQ_14,
        formula="max(g_l) / (rms(g_{l-1}) sqrt(1 + q))",
        derived=case.largest_gain,
        **case.sampled_spectral_norm(),
        rival=case.mean_gain,
    )


def post_ln_gain_bound() -> Evidence:
    """Eq. 14 as a strict bound, with unequal entries before the norm as well."""
    case = _OneSublayer(spec=_POST_LN, before=_unequal(CASE.weight_before), out=_unequal(CASE.weight_out))
    return Evidence(
        quantity="spectral norm of one sub-layer's shortcut, weights 0.8 and 0.27 in turn before, 1.5 and 0.5 after",
        claimed=_EQ_14,
        formula="max(g_l) / (rms(g_{l-1}) sqrt(1 + q))",
        derived=case.largest_gain,
        **case.sampled_spectral_norm(),
    )


def post_ln_product() -> Evidence:
    """Eq. 15: 2^(-L/2)."""
    claimed = -0.5 * CASE.n_sublayers * math.log10(2)
    return replace(_post_ln_product(claimed), rival=-0.25 * CASE.n_sublayers * math.log10(2))


def post_ln_product_wrong_base() -> Evidence:
    """The form in circulation, 1 / L^(L/2)."""
    return _post_ln_product(-0.5 * CASE.n_sublayers * math.log10(CASE.n_sublayers))


def _post_ln_product(claimed: float) -> Evidence:
    numeric, error = _log_product("post_ln", CASE.n_sublayers)
    return Evidence(
        quantity="log10 product, L = 64",
        claimed=claimed,
        formula="(1 + q)^(-L/2) = 2^(-L/2)",
        derived=shortcut_log_product(get_scheme("post_ln"), CASE.n_sublayers) / _LN_10,
        numeric=numeric / _LN_10,
        numeric_error=error / _LN_10,
    )


def post_ln_full_gradient() -> Evidence:
    """The whole gradient of a Post-LN stack of linear branches, branch paths included."""
    numeric, error = extrapolated(_full_log10_gains, width=_MATRIX_WIDTH)
    growth = math.log10(math.hypot(shortcut_gain(_POST_LN), branch_gain(_POST_LN)))
    return Evidence(
        quantity="log10 of the full gradient's gain, L = 64, linear branches",
        claimed=-0.5 * CASE.n_sublayers * math.log10(2),
        formula="(L/2) log10((1 + q)/(1 + q)) = 0",
        derived=CASE.n_sublayers * growth,
        numeric=numeric,
        numeric_error=error,
    )


# --- Eqs. 8, 18, 19, 24-27: Keel -------------------------------------------------------------------------------------------


def keel_gain() -> Evidence:
    """Eq. 18 with equal entries in each weight."""
    before, out, inner, alpha = CASE.weight_before, CASE.weight_out, CASE.weight_in, CASE.alpha
    case = _OneSublayer(spec=_KEEL, before=_equal(before), inside=_equal(inner), out=_equal(out))
    return Evidence(
        quantity="gain of one sub-layer, a = 8, weights 0.8, 1.5, 1.2",
        claimed=_EQ_18,
        formula="g_{l,1} a / sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2 q)",
        derived=case.mean_gain,
        **case.sampled_gain(),
        rival=out * alpha / (before * alpha + inner),
    )


def keel_gain_rms() -> Evidence:
    """Eq. 18 with unequal entries, by the root mean square of each weight."""
    before, out, inner, alpha = CASE.weight_before, CASE.weight_out, CASE.weight_in, CASE.alpha
    case = _OneSublayer(spec=_KEEL, before=_equal(before), inside=_unequal(inner), out=_unequal(out))
    return Evidence(
        quantity="mean gain of a random gradient, a = 8, weights 0.8; 1.5 and 0.5, 1.2 and 0.4 in turn",
        claimed=out * math.sqrt(5) / 3 * alpha / math.sqrt(before**2 * alpha**2 + inner**2 * 5 / 9),
        formula="rms(g_{l,1}) a / sqrt(rms(g_{l-1,1})^2 a^2 + rms(g_{l,2})^2 q)",
        derived=case.mean_gain,
        **case.sampled_gain(),
        rival=_EQ_18,
    )


def keel_gain_largest() -> Evidence:
    """Eq. 18 with unequal entries after the norm, by the largest entry."""
    case = _OneSublayer(
        spec=_KEEL, before=_equal(CASE.weight_before), inside=_equal(CASE.weight_in), out=_unequal(CASE.weight_out)
    )
    return Evidence(
        quantity="spectral norm of one sub-layer's shortcut, a = 8, weights 0.8, 1.2; 1.5 and 0.5 in turn",
        claimed=_EQ_18,
        formula="max(g_{l,1}) a / sqrt(rms(g_{l-1,1})^2 a^2 + rms(g_{l,2})^2 q)",
        derived=case.largest_gain,
        **case.sampled_spectral_norm(),
        rival=case.mean_gain,
    )


def keel_gain_bound() -> Evidence:
    """Eq. 18 as a strict bound, with unequal entries in every weight."""
    case = _OneSublayer(
        spec=_KEEL, before=_unequal(CASE.weight_before), inside=_unequal(CASE.weight_in), out=_unequal(CASE.weight_out)
    )
    return Evidence(
        quantity="spectral norm of one sub-layer's shortcut, a = 8, weights 0.8 and 0.27, 1.2 and 0.4, 1.5 and 0.5 in turn",
        claimed=_EQ_18,
        formula="max(g_{l,1}) a / sqrt(rms(g_{l-1,1})^2 a^2 + rms(g_{l,2})^2 q)",
        derived=case.largest_gain,
        **case.sampled_spectral_norm(),
    )


def keel_product() -> Evidence:
    """Eq. 19 at one depth."""
    depth = CASE.n_sublayers
    numeric, error = _log_product(_ATTEMPT_3, depth, n_draws=2 * _N_DRAWS)
    return Evidence(
        quantity="product, L = 64, every sub-layer alike",
        claimed=(1 + 1 / depth**2) ** (-depth / 2),
        formula="(1 + q/L^2)^(-L/2)",
        derived=float(uniform_product(depth, depth)),
        numeric=math.exp(numeric),
        numeric_error=error,
        rival=1.0,
    )


def keel_limit() -> Evidence:
    """Eq. 19 in the limit."""
    numeric, error = _deep_log_product(_ATTEMPT_3)
    return Evidence(
        quantity="product as L grows, a = L (numeric: L = 1024)",
        claimed=1.0,
        formula="lim (1 + q/L^2)^(-L/2) = 1",
        derived=_limit_of_product("L"),
        numeric=math.exp(numeric),
        numeric_error=error,
        numeric_tolerance=1 / _DEEP,
        rival=float(uniform_product(CASE.n_sublayers, CASE.n_sublayers)),
    )


def keel_rate() -> Evidence:
    """How fast the product tends to one."""
    import sympy as sp

    depth, finite = sp.Symbol("L", positive=True), CASE.n_sublayers
    numeric, error = _log_product(_ATTEMPT_3, finite, n_draws=2 * _N_DRAWS)
    return Evidence(
        quantity="L (1 - product) as L grows, a = L (numeric: L = 64)",
        claimed=0.5,
        formula="lim L (1 - (1 + 1/L^2)^(-L/2)) = 1/2",
        derived=float(sp.limit(depth * (1 - (1 + depth**-2) ** (-depth / 2)), depth, sp.oo)),
        numeric=-finite * math.expm1(numeric),
        numeric_error=finite * error,
        numeric_tolerance=1 / (8 * finite),  # the next term of the expansion
        rival=1.0,
    )


def keel_limit_without_power() -> Evidence:
    """The form in circulation: the limit of a single factor, used for the product. Any a that grows would do."""
    numeric, error = _deep_log_product(_ATTEMPT_3, alpha="sqrt(L)")
    return Evidence(
        quantity="product as L grows, a = sqrt(L), whose factor a/sqrt(a^2 + 1) tends to 1 (numeric: L = 1024)",
        claimed=1.0,
        formula="lim (1 + q/L)^(-L/2) = exp(-q/2)",
        derived=_limit_of_product("sqrt(L)"),
        numeric=math.exp(numeric),
        numeric_error=math.exp(numeric) * error,
        numeric_tolerance=1 / _DEEP,
    )


def keel_factor_for_product() -> Evidence:
    """The form in circulation at one depth: a / sqrt(a^2 + 1) without the power."""
    exact = keel_product()
    return replace(exact, claimed=CASE.n_sublayers / math.sqrt(CASE.n_sublayers**2 + 1), rival=None)


def keel_first_block() -> Evidence:
    """Keel as it is implemented: the first block has no scale; the convention of unit variances."""
    numeric, error = _deep_log_product("keel")
    return Evidence(
        quantity="product from the embedding on as L grows, v_0 = q = 1 (numeric: L = 1024)",
        claimed=1 / math.sqrt(3),
        formula="1 / sqrt(v_0 + 2 q) = 1 / sqrt(3)",
        derived=math.exp(shortcut_log_product(get_scheme("keel"), 10**12)),
        numeric=math.exp(numeric),
        numeric_error=math.exp(numeric) * error,
        numeric_tolerance=1 / _DEEP,
        rival=1.0,
    )


def keel_first_block_initial() -> Evidence:
    """The same at the paper's initialisation, where embedding and branches are small."""
    v, q = CASE.initial_embedding, CASE.initial_branch
    numeric, error = _deep_log_product("keel", branch_variance=q, stream_variance=v)
    return Evidence(
        quantity="product from the embedding on as L grows, v_0 = 4e-4, q = 0.04 (numeric: L = 1024)",
        claimed=1 / math.sqrt(v + 2 * q),
        formula="1 / sqrt(v_0 + 2 q)",
        derived=math.exp(shortcut_log_product(get_scheme("keel"), 10**12, branch_variance=q, stream_variance=v)),
        numeric=math.exp(numeric),
        numeric_error=math.exp(numeric) * error,
        numeric_tolerance=1 / _DEEP,
        rival=1.0,
    )


def keel_after_first_block() -> Evidence:
    """Keel as it is implemented, from the second block on."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    numeric, error = _deep_log_product("keel", first=2)
    return Evidence(
        quantity="product from the second block on as L grows (numeric: L = 1024)",
        claimed=1.0,
        formula="lim (1 + q/L^2)^(-(L - 2)/2) = 1",
        derived=float(sp.limit((1 + depth**-2) ** (-(depth - 2) / 2), depth, sp.oo)),
        numeric=math.exp(numeric),
        numeric_error=error,
        numeric_tolerance=1 / _DEEP,
        rival=float(uniform_product(CASE.n_sublayers, CASE.n_sublayers)),
    )


def keel_reduces_to_post_ln() -> Evidence:
    """Eq. 8 with a = 1 and without its inner norm is Eq. 3: Jacobians derived, outputs calculated."""
    spec = replace(_KEEL, shortcut_scale=1.0, norm_in=NormKind.NONE)
    branch, x = _tanh_branch(16), _random(16, seed=4)
    jacobian = Normalisation().jacobian(x + branch.value(x)) @ (np.eye(16) + branch.jacobian(x))
    return Evidence(
        quantity="largest difference (derived: of Jacobians; numeric: of outputs)",
        claimed=0.0,
        formula="0",
        derived=float(np.abs(sublayer_jacobian(spec, x, branch) - jacobian).max()),
        numeric=float(np.abs(sublayer_output(spec, x, branch) - Normalisation()(x + branch.value(x))).max()),
    )


def input_gain_merges() -> Evidence:
    """Eq. 26: F(b * LN(x)) is F(LN(x)) with b in the norm's weight: Jacobians derived, outputs calculated."""
    gain, x, inner = _random(16, seed=5), _random(16, seed=4), _tanh_branch(16)
    behind_gain = Branch(value=lambda y: inner.value(gain * y), jacobian=lambda y: inner.jacobian(gain * y) * gain)
    merged = Normalisation(weight=gain)
    total = CASE.alpha * x + inner.value(merged(x))
    jacobian = Normalisation().jacobian(total) @ (CASE.alpha * np.eye(16) + inner.jacobian(merged(x)) @ merged.jacobian(x))
    return Evidence(
        quantity="largest difference (derived: of Jacobians; numeric: of outputs)",
        claimed=0.0,
        formula="0",
        derived=float(np.abs(sublayer_jacobian(_KEEL, x, behind_gain) - jacobian).max()),
        numeric=float(np.abs(sublayer_output(_KEEL, x, behind_gain) - Normalisation()(total)).max()),
    )


def attempts_share_the_shortcut() -> Evidence:
    """Eqs. 24-26 differ in what the branch reads, not in the shortcut; each attempt has draws of its own."""
    depth = CASE.n_sublayers
    first, second, third = (shortcut_log_product(get_scheme(name), depth) for name in ATTEMPTS)
    (one, error_1), (two, error_2), (three, error_3) = (_log_product(name, depth) for name in ATTEMPTS)
    return Evidence(
        quantity="ln product of attempt 1 minus the mean of attempts 2 and 3, L = 64",
        claimed=0.0,
        formula="0",
        derived=first - (second + third) / 2,
        numeric=one - (two + three) / 2,
        numeric_error=math.hypot(error_1, error_2 / 2, error_3 / 2),
        rival=shortcut_log_product(get_scheme("post_ln"), depth) - third,  # an attempt without its scale
    )


def keel_branch_gain() -> Evidence:
    """Eq. 27 with equal entries in each weight, for a branch that keeps lengths."""
    before, out, inner, alpha = CASE.weight_before, CASE.weight_out, CASE.weight_in, CASE.alpha
    weights = NormWeights(norm_out=out, norm_in=inner)
    numeric, error = extrapolated(partial(_branch_gains, _KEEL, before, weights), width=_MATRIX_WIDTH)
    return Evidence(
        quantity="gain through the branch, a = 8, weights 0.8, 1.5, 1.2, orthogonal dF",
        claimed=out * inner / (before * math.sqrt(before**2 * alpha**2 + inner**2)),
        formula="g_{l,1} g_{l,2} |dF| / (g_{l-1,1} sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2 q))",
        derived=branch_gain(_KEEL, stream_variance=before**2, weights=weights),
        numeric=numeric,
        numeric_error=error,
        rival=out * inner / math.sqrt(before**2 * alpha**2 + inner**2),
    )


def keel_branch_gain_depth() -> Evidence:
    """Eq. 27 at a = L: the branch's gain falls like 1/L."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    deep = replace(_KEEL, shortcut_scale=float(_DEEP))
    numeric, error = extrapolated(partial(_branch_gains, deep, 1.0, NormWeights()), width=_MATRIX_WIDTH)
    return Evidence(
        quantity="L times the gain through the branch as L grows, a = L, unit weights (numeric: L = 1024)",
        claimed=1.0,
        formula="lim L / sqrt(L^2 + q) = 1",
        derived=float(sp.limit(depth / sp.sqrt(depth**2 + 1), depth, sp.oo)),
        numeric=_DEEP * numeric,
        numeric_error=_DEEP * error,
        numeric_tolerance=2 / _MATRIX_WIDTH**2,  # what two widths leave of two radial directions
        rival=math.sqrt(_DEEP),
    )


# --- Eqs. 1, 2, 5, 6: the neighbours ---------------------------------------------------------------------------------------


def highway_product() -> Evidence:
    """Eq. 1: what the carry gate keeps."""
    numeric, error = _log_product("highway", CASE.n_sublayers, gate_bias=CASE.gate_bias)
    scheme = get_scheme("highway").with_parameters(gate_bias=CASE.gate_bias)
    return Evidence(
        quantity="log10 product, L = 64, gate bias -1",
        claimed=CASE.n_sublayers * math.log10(1 - CASE.gate),
        formula="(1 - T)^L",
        derived=shortcut_log_product(scheme, CASE.n_sublayers) / _LN_10,
        numeric=numeric / _LN_10,
        numeric_error=error / _LN_10,
        rival=0.0,
    )


def highway_variance_decay() -> Evidence:
    """Eq. 1 mixes convexly, so a variance-keeping branch lets the stream fade."""
    depth = CASE.n_sublayers
    mean, error = _last_variance("highway", gate_bias=CASE.gate_bias)
    return Evidence(
        quantity="log10 of the stream's variance after L = 64, gate bias -1",
        claimed=depth * math.log10((1 - CASE.gate) ** 2 + CASE.gate**2),
        formula="L log10(C^2 + T^2 q)",
        derived=math.log10(float(highway_variance(CASE.gate, depth))),
        numeric=math.log10(mean),
        numeric_error=error / mean / _LN_10,
        rival=0.0,
    )


def deepnorm_drifted() -> Evidence:
    """DeepNorm once its small initial branches have grown to variance one; two depths are extrapolated in 1/sqrt(L)."""
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    (shallow, error_1), (deep, error_2) = (_log_product("deepnorm", n, n_draws=64) for n in (_DEEP // 4, _DEEP))
    unit_1, unit_2 = (-0.5 * math.sqrt(n) for n in (_DEEP // 4, _DEEP))
    return Evidence(
        quantity="ln product / (-sqrt(L)/2) as L grows, a = L^(1/4), q = 1 (numeric: from L = 256 and 1024)",
        claimed=1.0,
        formula="lim sqrt(L) ln(1 + 1/sqrt(L)) = 1",
        derived=float(sp.limit(sp.sqrt(depth) * sp.log(1 + 1 / sp.sqrt(depth)), depth, sp.oo)),
        numeric=2 * deep / unit_2 - shallow / unit_1,
        numeric_error=math.hypot(2 * error_2 / unit_2, error_1 / unit_1),
        numeric_tolerance=1 / _DEEP,
        rival=2.0,
    )


def deepnorm_at_initialisation() -> Evidence:
    """DeepNorm as initialised: two matrices of each branch are L^(-1/4) times smaller, so q = 1/L."""
    scheme, depth = get_scheme("deepnorm"), CASE.n_sublayers
    numeric, error = _log_product("deepnorm", depth, scaled_matrices=2)
    return Evidence(
        quantity="product, L = 64, two matrices of each branch scaled by L^(-1/4)",
        claimed=(1 + depth**-1.5) ** (-depth / 2),
        formula="(1 + b^4/a^2)^(-L/2) = (1 + L^(-3/2))^(-L/2)",
        derived=math.exp(shortcut_log_product(scheme, depth, scaled_matrices=2)),
        numeric=math.exp(numeric),
        numeric_error=error,
        rival=1.0,
    )


def deepnorm_alpha() -> Evidence:
    """Eq. 5's a is DeepNet's (2M)^(1/4)."""
    depth = CASE.n_sublayers
    return Evidence(
        quantity="a, L = 64 sub-layers, M = 32 blocks",
        claimed=depth**0.25,
        formula="(2M)^(1/4) = L^(1/4)",
        derived=(2 * _n_blocks(depth)) ** 0.25,
        rival=(8 * _n_blocks(depth)) ** 0.25,
        numeric=get_scheme("deepnorm").specs(depth)[-1].shortcut_scale,
    )


def deepnorm_beta() -> Evidence:
    """Eq. 5's b is not DeepNet's (8M)^(-1/4)."""
    depth = CASE.n_sublayers
    return Evidence(
        quantity="b, L = 64 sub-layers, M = 32 blocks",
        claimed=depth**-0.25,
        formula="(8M)^(-1/4) = L^(-1/4) / sqrt(2)",
        derived=(8 * _n_blocks(depth)) ** -0.25,
        numeric=get_scheme("deepnorm").with_parameters(beta="deepnet").specs(depth)[-1].init_gain,
    )


def pre_ln_product() -> Evidence:
    """Eq. 6: nothing is lost."""
    numeric, error = _log_product("pre_ln", CASE.n_sublayers)
    return Evidence(
        quantity="ln product, L = 64",
        claimed=0.0,
        formula="0",
        derived=shortcut_log_product(get_scheme("pre_ln"), CASE.n_sublayers),
        numeric=numeric,
        numeric_error=error,
        rival=-0.5 * math.log1p(CASE.n_sublayers),  # what is left behind a final norm
    )


def pre_ln_growth() -> Evidence:
    """Eq. 6: the stream's variance grows linearly."""
    depth = CASE.n_sublayers
    mean, error = _last_variance("pre_ln")
    return Evidence(
        quantity="variance of the stream after L = 64",
        claimed=1.0 + depth,
        formula="v_0 + q L",
        derived=float(pre_ln_variance(depth)),
        numeric=mean,
        numeric_error=error,
        rival=1.0 + depth / 2,
    )


def pre_ln_fading() -> Evidence:
    """Eq. 6: what the last sub-layer adds to its own output."""
    depth = CASE.n_sublayers
    specs = get_scheme("pre_ln").specs(depth)
    numeric, error = extrapolated(
        lambda width, seed: random_stack(specs, width=width, n_draws=_N_DRAWS, seed=seed).last_shares, width=_WIDTH, seed=21
    )
    return Evidence(
        quantity="share of its output's variance that the last of L = 64 sub-layers writes",
        claimed=1 / (1 + depth),
        formula="q / (v_0 + q (l + 1)), l = L - 1",
        derived=float(pre_ln_update_share(depth - 1)),
        numeric=numeric,
        numeric_error=error,
        rival=1 / (1 + depth / 2),
    )


def layernorm_scaling_growth() -> Evidence:
    """LayerNorm Scaling's cure: what block l reads is smaller by 1/sqrt(l), so the stream grows like a logarithm."""
    depth = CASE.n_sublayers
    mean, error = _last_variance("layernorm_scaling")
    return Evidence(
        quantity="variance of the stream after L = 64",
        claimed=1 + 2 * math.fsum(1 / block for block in range(1, depth // 2 + 1)),
        formula="v_0 + 2 q (1 + 1/2 + ... + 1/M), M = 32 blocks",
        derived=float(variance_profile(get_scheme("layernorm_scaling").specs(depth)).stream[-1]),
        numeric=mean,
        numeric_error=error,
        rival=1.0 + depth,  # Pre-LN's
    )


def admin_product() -> Evidence:
    """Admin at initialisation: the gains telescope."""
    numeric, error = _log_product("admin", CASE.n_sublayers)
    return Evidence(
        quantity="product, L = 64, profiled scales",
        claimed=1 / math.sqrt(1 + CASE.n_sublayers),
        formula="1 / sqrt(1 + q L)",
        derived=float(admin_shortcut_product(CASE.n_sublayers)),
        numeric=math.exp(numeric),
        numeric_error=math.exp(numeric) * error,
        rival=1 / math.sqrt(1 + CASE.n_sublayers / 2),
    )


# --- the design question and its price -------------------------------------------------------------------------------------


def alpha_needed() -> Evidence:
    """Whether a = L is what the shortcut needs: a root of the product of random stacks that share their draws."""
    depth = CASE.n_sublayers
    derived = float(smallest_alpha(CASE.min_gain, depth))
    numeric, error = extrapolated(_roots, width=_MATRIX_WIDTH)
    return Evidence(
        quantity="smallest a whose product over L = 64 is 0.9",
        claimed=float(depth),
        formula="sqrt(q / (g^(-2/L) - 1)) ~ sqrt(q L / (2 ln(1/g)))",
        derived=derived,
        numeric=numeric,
        numeric_error=error,
    )


def product_is_cosine() -> Evidence:
    """The shortcut product is the cosine between input and output of a stack whose sub-layers all have an output norm."""
    alpha, depth = CASE.alpha, CASE.n_sublayers
    specs = [replace(_KEEL, shortcut_scale=alpha)] * depth
    numeric, error = _cosines(specs, seed=31)
    return Evidence(
        quantity="cosine between input and output, L = 64, a = 8",
        claimed=float(uniform_product(alpha, depth)),
        formula="(1 + q/a^2)^(-L/2)",
        derived=variance_profile(specs).input_cosine,
        numeric=numeric,
        numeric_error=error,
        rival=float(uniform_product(alpha, depth / 2)),
    )


def pre_ln_cosine() -> Evidence:
    """The same for a stack without output norms."""
    depth = CASE.n_sublayers
    scheme = get_scheme("pre_ln")
    numeric, error = _cosines(scheme.specs(depth), seed=32)
    return Evidence(
        quantity="cosine between input and output of Pre-LN, L = 64",
        claimed=math.exp(shortcut_log_product(scheme, depth)),
        formula="1 / sqrt(1 + q L)",
        derived=variance_profile(scheme.specs(depth)).input_cosine,
        numeric=numeric,
        numeric_error=error,
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
    numeric, error = extrapolated(_linear_alignments, width=_MATRIX_WIDTH)
    return Evidence(
        quantity="cosine of the update with the negative gradient, G differentiated, random linear branch",
        claimed=1.0,
        formula="|u| / |u + J^T x| = 1 / sqrt(2)",
        derived=1 / math.sqrt(2),
        numeric=numeric,
        numeric_error=error,
    )


# --- tools -----------------------------------------------------------------------------------------------------------------

_MATRIX_WIDTH = 256
_ATTEMPT_3 = "scaled_shortcut_normed_input_gain"
ATTEMPTS = ("scaled_shortcut", "scaled_shortcut_input_gain", _ATTEMPT_3)


def unequal(largest: float, width: int) -> FloatArray:
    """A weight with unequal entries, its largest and a third of it in turn, shape (width,)."""
    return np.where(np.arange(width) % 2 == 0, largest, largest / 3)


def _equal(size: float) -> Callable[[int], FloatArray]:
    return lambda width: np.full(width, size)


def _unequal(largest: float) -> Callable[[int], FloatArray]:
    return partial(unequal, largest)


def _random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape)


def _relative(a: FloatArray, b: FloatArray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _n_blocks(n_sublayers: int) -> int:
    return alternating_kinds(n_sublayers).count(SublayerKind.ATTENTION)


def _symbolic_norm(entries: Any) -> Any:
    import sympy as sp

    return sp.Matrix(entries) / sp.sqrt(sum(entry**2 for entry in entries) / len(entries))


def _largest(matrix: Any) -> float:
    """Largest entry of a matrix that simplifies to numbers; NaN, which confirms nothing, if it does not."""
    import sympy as sp

    entries = [sp.simplify(entry) for entry in matrix]
    return max(abs(float(entry)) for entry in entries) if all(entry.is_number for entry in entries) else math.nan


@cache
def _log_product(
    name: str,
    n_sublayers: int,
    *,
    width: int = _WIDTH,
    n_draws: int = _N_DRAWS,
    scaled_matrices: int = 0,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    first: int = 0,
    **parameters: ParameterValue,
) -> tuple[float, float]:
    """Mean log product at infinite width and its error, from sub-layer ``first`` on; each scheme has draws of its own."""
    scheme = get_scheme(name)
    specs = (scheme.with_parameters(**parameters) if parameters else scheme).specs(n_sublayers)

    def measure(width: int, seed: int) -> FloatArray:
        stack = random_stack(
            specs,
            width=width,
            n_draws=n_draws,
            branch_variance=branch_variance,
            stream_variance=stream_variance,
            scaled_matrices=scaled_matrices,
            seed=seed,
        )
        products: FloatArray = stack.log_gains[first:].sum(axis=0)
        return products

    return extrapolated(measure, width=width, seed=zlib.crc32(name.encode()))


_deep_log_product = partial(_log_product, n_sublayers=_DEEP, width=_DEEP_WIDTH)


def _last_variance(name: str, **parameters: ParameterValue) -> tuple[float, float]:
    """Mean square of the last stream and its error; its mean has no finite-width term."""
    scheme = get_scheme(name)
    specs = (scheme.with_parameters(**parameters) if parameters else scheme).specs(CASE.n_sublayers)
    stack = random_stack(specs, width=_WIDTH, n_draws=_N_DRAWS, seed=zlib.crc32(name.encode()))
    return float(stack.last_variances.mean()), float(stack.last_variances.std(ddof=1)) / math.sqrt(_N_DRAWS)


def _cosines(specs: Sequence[ResidualSpec], seed: int) -> tuple[float, float]:
    return extrapolated(
        lambda width, seed: random_stack(specs, width=width, n_draws=_N_DRAWS, seed=seed).input_cosines, width=_WIDTH, seed=seed
    )


def _roots(width: int, seed: int) -> list[float]:
    """The scale at which the product of random stacks is the gain wanted, from four sets of draws."""
    from scipy.optimize import brentq

    def excess(alpha: float, draws: int) -> float:
        specs = [replace(_KEEL, shortcut_scale=alpha)] * CASE.n_sublayers
        products = random_stack(specs, width=width, n_draws=_N_DRAWS // 4, seed=100 * seed + draws).log_products
        return float(products.mean()) - math.log(CASE.min_gain)

    return [float(brentq(excess, 8.0, 40.0, args=(draws,), xtol=1e-3)) for draws in range(6)]


def _limit_of_product(alpha: str) -> float:
    import sympy as sp

    depth = sp.Symbol("L", positive=True)
    scale = {"L": depth, "sqrt(L)": sp.sqrt(depth)}[alpha]
    return float(sp.limit((1 + scale**-2) ** (-depth / 2), depth, sp.oo))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneSublayer:
    """A sub-layer with weights; the branch is noise whose entries are as large as those of what it reads.

    Attributes:
        spec: its update.
        before: weight of the norm below, by width.
        inside: weight of its inner norm, by width; without one the branch reads the stream.
        out: weight of its output norm, by width.
    """

    spec: ResidualSpec
    before: Callable[[int], FloatArray]
    out: Callable[[int], FloatArray]
    inside: Callable[[int], FloatArray] | None = None

    @property
    def mean_gain(self) -> float:
        """The library's gain of a random gradient."""
        return shortcut_gain(self.spec, stream_variance=self._stream_variance, weights=self._weights)

    @property
    def largest_gain(self) -> float:
        """The library's gain with the largest entry of the output weight: the spectral norm, see ``NormWeights.largest``."""
        weights = replace(self._weights, norm_out=self._weights.largest.norm_out)
        return shortcut_gain(self.spec, stream_variance=self._stream_variance, weights=weights)

    def sampled_gain(self) -> dict[str, float]:
        """Gain of a random gradient through the norm."""

        def gains(width: int, seed: int) -> FloatArray:
            rng = np.random.default_rng(seed)
            z, norm = self._sums(width, rng, 512), Normalisation(weight=self.out(width))
            gradient = rng.standard_normal(z.shape)
            below = self.spec.shortcut_scale * norm.vjp(z, gradient)
            through: FloatArray = np.linalg.norm(below, axis=1) / np.linalg.norm(gradient, axis=1)
            return through

        numeric, error = extrapolated(gains, width=_WIDTH, seed=11)
        return {"numeric": numeric, "numeric_error": error}

    def sampled_spectral_norm(self) -> dict[str, float]:
        """Largest singular value of the shortcut's exact Jacobian."""

        def norms(width: int, seed: int) -> list[float]:
            z, norm = self._sums(width, np.random.default_rng(seed), 64), Normalisation(weight=self.out(width))
            return [self.spec.shortcut_scale * float(np.linalg.norm(norm.jacobian(each), 2)) for each in z]

        numeric, error = extrapolated(norms, width=_MATRIX_WIDTH, seed=12)
        return {"numeric": numeric, "numeric_error": error}

    def _sums(self, width: int, rng: np.random.Generator, n_draws: int) -> FloatArray:
        """Sums a x + F for random x."""
        x = Normalisation(weight=self.before(width))(rng.standard_normal((n_draws, width)))
        read = rng.standard_normal(x.shape) * (self.inside or self.before)(width)
        size = np.sqrt(np.mean(read**2, axis=1, keepdims=True))
        return np.asarray(self.spec.shortcut_scale * x + size * rng.standard_normal(x.shape))  # F mixes the entries

    @property
    def _stream_variance(self) -> float:
        return float(np.mean(self.before(_WIDTH) ** 2))

    @property
    def _weights(self) -> NormWeights:
        inside = {} if self.inside is None else {"norm_in": self.inside(_WIDTH)}
        return NormWeights(norm_out=self.out(_WIDTH), **inside)


def _tanh_branch(width: int) -> Branch:
    matrix = _random(width, width, seed=2) / math.sqrt(width)
    return Branch(value=lambda x: np.tanh(matrix @ x), jacobian=lambda x: (1 - np.tanh(matrix @ x) ** 2)[:, None] * matrix)


def _difference_jacobian(function: Callable[[FloatArray], FloatArray], x: FloatArray, step: float = 1e-3) -> FloatArray:
    """Fourth-order central differences, column by column."""
    shifts = step * np.eye(len(x))
    columns = [
        (8 * (function(x + h) - function(x - h)) - (function(x + 2 * h) - function(x - 2 * h))) / (12 * step) for h in shifts
    ]
    return np.array(columns).T


def _gaussian_matrix(width: int, rng: np.random.Generator) -> FloatArray:
    return rng.standard_normal((width, width)) / math.sqrt(width)


def _orthogonal_matrix(width: int, rng: np.random.Generator) -> FloatArray:
    """Uniform over rotations and reflections; Q alone is not, since its signs depend on how it is computed."""
    q, r = np.linalg.qr(rng.standard_normal((width, width)))
    return np.asarray(q * np.sign(np.diag(r)))


def _branch_paths(width: int, seed: int) -> list[float]:
    """The neglected term for eight linear branches, each with a matrix of its own."""
    rng = np.random.default_rng(seed)
    return [
        neglected_terms(_POST_LN, rng.standard_normal(width), Branch.linear(_gaussian_matrix(width, rng))).branch_path
        for _ in range(8)
    ]


def _full_log10_gains(width: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [_full_log10_gain(width, rng) for _ in range(12)]


def _full_log10_gain(width: int, rng: np.random.Generator) -> float:
    """Backpropagate a random gradient through Post-LN sub-layers with linear branches, shortcut and branch together."""
    norm = Normalisation()
    x = norm(rng.standard_normal(width))
    tape = []
    for _ in range(CASE.n_sublayers):
        matrix = _gaussian_matrix(width, rng)
        z = x + matrix @ x
        tape.append((matrix, z))
        x = norm(z)
    gradient = rng.standard_normal(width)
    start = np.linalg.norm(gradient)
    for matrix, z in reversed(tape):
        through_norm = norm.vjp(z, gradient)
        gradient = through_norm + matrix.T @ through_norm
    return float(np.log10(np.linalg.norm(gradient) / start))


def _branch_gains(spec: ResidualSpec, before: float, weights: NormWeights, width: int, seed: int) -> list[float]:
    """Gain through the branch alone, for six orthogonal branches."""
    rng = np.random.default_rng(seed)
    return [_exact_branch_gain(spec, before, weights, width, rng) for _ in range(6)]


def _exact_branch_gain(spec: ResidualSpec, before: float, weights: NormWeights, width: int, rng: np.random.Generator) -> float:
    orthogonal = _orthogonal_matrix(width, rng)
    x = before * Normalisation()(rng.standard_normal(width))
    inner, outer = (Normalisation(weight=np.full(width, size)) for size in (weights.norm_in, weights.norm_out))
    z = spec.shortcut_scale * x + orthogonal @ inner(x)
    through_branch = outer.jacobian(z) @ orthogonal @ inner.jacobian(x)
    return float(np.linalg.norm(through_branch) / math.sqrt(width))


def _linear_alignments(width: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [_linear_alignment(width, rng) for _ in range(16)]


def _linear_alignment(width: int, rng: np.random.Generator) -> float:
    """Cosine for u = M x, by the formula of the full gradient of <x, M x>: (M + M^T) x."""
    matrix, x = _gaussian_matrix(width, rng), rng.standard_normal(width)
    update, full = matrix @ x, matrix @ x + matrix.T @ x
    return float(update @ full / np.linalg.norm(update) / np.linalg.norm(full))
