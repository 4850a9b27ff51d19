"""Products at depths up to 10^18, in many digits: the closed forms may not lose by cancellation what depth multiplies."""

from __future__ import annotations

import math

import mpmath
import pytest

from keel_theory.propagation import shortcut_log_product, uniform_log_product
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import GateKind, NormKind, ProfileKind, ResidualSpec, Scheme, SpecRun, SublayerKind

_DIGITS = 120  # an L of 10^18 and a q of 1e-13 make gains of 1 - 1e-49
DEPTHS = (7, 10**6, 10**6 + 1, 10**12, 10**14, 10**16, 10**18)
VARIANTS = [
    *SCHEMES.values(),
    *(get_scheme("keel").with_parameters(alpha=alpha) for alpha in ("sqrt(L)", "2*L**0.25", "3", "L**1.5")),
    get_scheme("scaled_shortcut").with_parameters(alpha="sqrt(L)"),
    get_scheme("mix_ln").with_parameters(ratio=0.29),
    get_scheme("hybrid_norm").with_parameters(variant="star"),
    get_scheme("highway").with_parameters(norm="input", gate_bias=-40.0),
]
SETTINGS = ((1.0, 1.0, 0), (1e-13, 1.0, 0), (0.3, 2.5, 0), (2.0, 4e-4, 2))
"""Branch variance, variance of the stream that enters, scaled matrices."""


def _log_product(scheme: Scheme, n_sublayers: int, q: float, v: float, matrices: int) -> mpmath.mpf:
    """The log of the product: the recursion in many digits, periods of alike sub-layers counted."""
    with mpmath.workdps(_DIGITS):
        if scheme.name == "admin":  # profiled scales telescope
            profile = mpmath.mpf(v) * (1 + mpmath.mpf(q)) + mpmath.mpf(q) * (n_sublayers - 1)
            return -mpmath.log(profile) / 2
        total, variance = mpmath.mpf(0), mpmath.mpf(v)
        for run in scheme.runs(n_sublayers):
            log_gain, variance = _through_run(run, variance, q, matrices)
            total += log_gain
        return +total


def _through_run(run: SpecRun, variance: mpmath.mpf, q: float, matrices: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    period = run.period
    periods, rest = divmod(run.stop - run.start, len(period))
    first, variance = _through(period, variance, q, matrices)
    each, variance = _through(period, variance, q, matrices) if periods > 1 else (mpmath.mpf(0), variance)
    last, variance = _through(period[:rest], variance, q, matrices)
    return first + (periods - 1) * each + last, variance


def _through(specs: tuple[ResidualSpec, ...], variance: mpmath.mpf, q: float, matrices: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Log gain of some sub-layers, and the variance behind them."""
    total = mpmath.mpf(0)
    for spec in specs:
        assert spec.profile is ProfileKind.NONE
        gate = 1 / (1 + mpmath.exp(-mpmath.mpf(spec.gate_bias)))
        carry, transform = (1, 1) if spec.gate is GateKind.NONE else (1 - gate, gate)
        shortcut = mpmath.mpf(spec.shortcut_scale) * carry
        read = mpmath.mpf(spec.input_scale) ** 2 * (variance if spec.norm_in is NormKind.NONE else 1)
        written = q * mpmath.mpf(spec.init_gain) ** (2 * min(matrices, 1)) if spec.qkv_norm else None
        if written is None:
            written = q * read * mpmath.mpf(spec.init_gain) ** (2 * matrices)
        if spec.norm_branch is not NormKind.NONE:
            written = mpmath.mpf(1)
        size = shortcut**2 * variance + (spec.branch_scale * transform) ** 2 * written
        normed = spec.norm_out is not NormKind.NONE
        total += mpmath.log(shortcut) - (mpmath.log(size) / 2 if normed else 0)
        variance = mpmath.mpf(1) if normed else size
    return total, variance


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("n_sublayers", DEPTHS, ids="{:g}".format)
@pytest.mark.parametrize("scheme", VARIANTS, ids=lambda s: "-".join([s.name, *map(str, s.parameters.values())]))
def test_every_scheme_at_every_depth(scheme: Scheme, n_sublayers: int, settings: tuple[float, float, int]) -> None:
    q, v, matrices = settings
    exact = _log_product(scheme, n_sublayers, q, v, matrices)
    value = shortcut_log_product(scheme, n_sublayers, branch_variance=q, stream_variance=v, scaled_matrices=matrices)
    assert value == pytest.approx(float(exact), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize(
    ("n_sublayers", "product"), [(10**6, 0.35018108), *((10**power, 0.35018064) for power in (12, 14, 16, 18))]
)
def test_keel_with_a_scale_of_the_root_of_the_depth(n_sublayers: int, product: float) -> None:
    """The first block keeps 1/sqrt(3), the others (1 + 1/L)^(-(L - 2)/2), which tends to exp(-1/2)."""
    scheme = get_scheme("keel").with_parameters(alpha="sqrt(L)")
    assert math.exp(shortcut_log_product(scheme, n_sublayers)) == pytest.approx(product, abs=5e-9)


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e3, 1e9])
@pytest.mark.parametrize("n_sublayers", DEPTHS, ids="{:g}".format)
def test_uniform_stacks(n_sublayers: int, alpha: float) -> None:
    with mpmath.workdps(_DIGITS):
        exact = -mpmath.mpf(n_sublayers) / 2 * mpmath.log(1 + mpmath.mpf(0.7) / mpmath.mpf(alpha) ** 2)
    assert uniform_log_product(alpha, n_sublayers, branch_variance=0.7) == pytest.approx(float(exact), rel=1e-13)


@pytest.mark.parametrize("slope", [0.5, 1 - 1e-9, 1.0, 1 + 1e-12])
@pytest.mark.parametrize("n_sublayers", [10**6, 10**9])
def test_a_norm_behind_a_long_stretch_without_one(n_sublayers: int, slope: float) -> None:
    """The stretch's variance, v -> slope² v + q, whose gains multiply and whose last sum is normalised."""

    def rule(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
        norm_out = NormKind.RMS if sublayer_index == n_sublayers - 1 else NormKind.NONE
        return ResidualSpec(norm_in=NormKind.RMS, norm_out=norm_out, shortcut_scale=slope)

    scheme = Scheme(
        name="made_up", label="", equation="", latex="", source="", rule=rule, switches=lambda n, parameters: (n - 1,)
    )
    with mpmath.workdps(_DIGITS):
        square, times = mpmath.mpf(slope) ** 2, n_sublayers
        grown = square**times + 1e-9 * (times if square == 1 else (square**times - 1) / (square - 1))
        exact = times * mpmath.log(slope) - mpmath.log(grown) / 2
    assert shortcut_log_product(scheme, n_sublayers, branch_variance=1e-9) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(
    ("ratio", "n_blocks", "post_ln"), [(0.29, 100, 29), (0.29, 10**8, 29 * 10**6), (1 / 3, 3, 1), (0.25, 6, 1)]
)
def test_mix_ln_counts_its_post_ln_blocks_exactly(ratio: float, n_blocks: int, post_ln: int) -> None:
    scheme = get_scheme("mix_ln").with_parameters(ratio=ratio)
    assert shortcut_log_product(scheme, 2 * n_blocks) == pytest.approx(-post_ln * math.log(2), rel=1e-13)
