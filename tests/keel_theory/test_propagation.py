from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel_theory.errors import DomainError
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.propagation import (
    _log_projection_variance,
    _mean_log_projection,
    _NormalisedSum,
    finite_width_product,
    monte_carlo_product,
    propagate_shortcut,
    shortcut_log_product,
    shortcut_product,
    uniform_log_product,
)
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SchemeError, SpecRule, SublayerKind, no_switches

MILLION = 1_000_000
SETTINGS = (
    {},
    {"branch_variance": 0.3, "stream_variance": 2.5},
    {"branch_variance": 4.0, "scaled_matrices": 2},
    {"branch_variance": 0.0},
)
VARIANTS = [
    *SCHEMES.values(),
    get_scheme("mix_ln").with_parameters(ratio=0.6),
    get_scheme("hybrid_norm").with_parameters(variant="star"),
    get_scheme("highway").with_parameters(norm="input", gate_bias=1.0),
    get_scheme("keel").with_parameters(alpha="2*sqrt(L)"),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
every_variant = pytest.mark.parametrize(
    "scheme", VARIANTS, ids=lambda scheme: "-".join([scheme.name, *map(str, scheme.parameters.values())])
)


def _scheme(rule: SpecRule, **changes: Any) -> Scheme:
    values = {"name": "made_up", "label": "Made up", "equation": "x' = x", "latex": "x' = x", "source": "none", "rule": rule}
    return Scheme(**(values | changes))


@every_variant
@pytest.mark.parametrize("n_sublayers", [1, 2, 3, 4, 5, 8, 11, 64, 257])
def test_runs_hold_the_specs_of_the_rule(scheme: Scheme, n_sublayers: int) -> None:
    expanded = [
        run.period[(i - run.start) % len(run.period)] for run in scheme.runs(n_sublayers) for i in range(run.start, run.stop)
    ]
    specs = scheme.specs(n_sublayers)
    neutral = dict.fromkeys(scheme.varying, 1.0)
    assert [replace(spec, **neutral) for spec in expanded] == [replace(spec, **neutral) for spec in specs]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("n_sublayers", [1, 2, 3, 5, 16, 33, 257, 1000])
@every_variant
def test_closed_form_equals_the_recursion(scheme: Scheme, n_sublayers: int, settings: dict[str, float]) -> None:
    closed = shortcut_log_product(scheme, n_sublayers, **settings)  # type: ignore[arg-type]
    recursion = propagate_shortcut(scheme, n_sublayers, **settings).log_product  # type: ignore[arg-type]
    assert closed == pytest.approx(recursion, rel=1e-11, abs=1e-11)


@every_variant
def test_a_million_sublayers_take_a_handful_of_rule_evaluations(scheme: Scheme) -> None:
    calls = 0

    @functools.wraps(scheme.rule)
    def counted(*arguments: object, **parameters: object) -> ResidualSpec:
        nonlocal calls
        calls += 1
        return scheme.rule(*arguments, **parameters)

    value = shortcut_log_product(replace(scheme, rule=counted), MILLION)
    assert value == shortcut_log_product(scheme, MILLION)
    assert calls <= 8


@every_scheme
def test_undeclared_switches_change_nothing(scheme: Scheme) -> None:
    undeclared = replace(scheme, switches=None)
    assert shortcut_log_product(undeclared, 50) == pytest.approx(shortcut_log_product(scheme, 50), rel=1e-12)


@pytest.mark.parametrize("n_sublayers", [2, 512, 4096, MILLION])
def test_post_ln_is_a_power_of_two_not_of_depth(n_sublayers: int) -> None:
    value = shortcut_log_product(get_scheme("post_ln"), n_sublayers)
    assert value == pytest.approx(-n_sublayers / 2 * math.log(2), rel=1e-13)
    if n_sublayers > 2:
        assert value > 0.5 * (-n_sublayers / 2 * math.log(n_sublayers))


def test_the_log_survives_where_the_product_underflows() -> None:
    post_ln = get_scheme("post_ln")
    assert shortcut_product(post_ln, 4096) == 0.0
    assert math.isfinite(shortcut_log_product(post_ln, 4096))


@pytest.mark.parametrize(("alpha", "expected"), [("L", 0.99902), ("L**0.25", 1.56e-5), (1.0, 8.6e-78)])
def test_paper_values_at_512_sublayers(alpha: str | float, expected: float) -> None:
    scheme = get_scheme("scaled_shortcut").with_parameters(alpha=alpha)
    assert shortcut_product(scheme, 512) == pytest.approx(expected, rel=5e-3)


def test_keel_with_its_first_block_rules() -> None:
    """The first FFN normalises a stream of variance 1 + q with a = 1; the other 510 sub-layers have a = L."""
    expected = 3**-0.5 * (1 + 512.0**-2) ** -255
    assert shortcut_product(get_scheme("keel"), 512) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("branch_variance", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("n_sublayers", [1, 64, MILLION])
def test_admin_telescopes(n_sublayers: int, branch_variance: float) -> None:
    value = shortcut_log_product(get_scheme("admin"), n_sublayers, branch_variance=branch_variance)
    assert value == pytest.approx(-0.5 * math.log1p(n_sublayers * branch_variance), rel=1e-12)


@pytest.mark.parametrize("n_sublayers", [64, 1024])
def test_mix_ln_loses_only_in_its_post_ln_quarter(n_sublayers: int) -> None:
    value = shortcut_log_product(get_scheme("mix_ln"), n_sublayers)
    assert value == pytest.approx(-n_sublayers / 8 * math.log(2), rel=1e-12)


def test_hybrid_norm_normalises_the_sum_of_two_branches() -> None:
    value = shortcut_log_product(get_scheme("hybrid_norm"), 8, branch_variance=0.5)
    assert value == pytest.approx(-0.5 * (math.log(1.5) + 3 * math.log(2.0)), rel=1e-12)


def test_deepnorm_before_and_after_its_initial_scaling_drifts_away() -> None:
    deepnorm = get_scheme("deepnorm")
    initial, drifted = (shortcut_product(deepnorm, 4096, scaled_matrices=k) for k in (2, 0))
    assert initial == pytest.approx((1 + 4096**-1.5) ** -2048, rel=1e-12)
    assert drifted == pytest.approx(math.exp(0.25 - 32), rel=1e-2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (get_scheme("deepnorm").with_parameters(alpha=1.0, beta=1.0), get_scheme("post_ln")),
        (get_scheme("scaled_shortcut").with_parameters(alpha=1.0), get_scheme("post_ln")),
        (get_scheme("mix_ln").with_parameters(ratio=1.0), get_scheme("post_ln")),
        (get_scheme("mix_ln").with_parameters(ratio=0.0), get_scheme("pre_ln")),
    ],
    ids=["deepnorm", "scaled_shortcut", "mix_ln-1", "mix_ln-0"],
)
def test_limit_cases(one: Scheme, other: Scheme) -> None:
    assert shortcut_log_product(one, 64, scaled_matrices=2) == shortcut_log_product(other, 64, scaled_matrices=2)


def test_keel_without_its_scale_is_post_ln_past_the_first_sublayer() -> None:
    keel = propagate_shortcut(get_scheme("keel").with_parameters(alpha=1.0), 64)
    post_ln = propagate_shortcut(get_scheme("post_ln"), 64)
    np.testing.assert_allclose(keel.log_gains[2:], post_ln.log_gains[2:])


@given(alpha=st.floats(1e-3, 1e6), n_sublayers=st.integers(1, MILLION), branch_variance=st.floats(0, 100))
def test_uniform_product_is_the_scheme_with_one_scale(alpha: float, n_sublayers: int, branch_variance: float) -> None:
    scheme = get_scheme("scaled_shortcut").with_parameters(alpha=alpha)
    value = shortcut_log_product(scheme, n_sublayers, branch_variance=branch_variance)
    assert value == pytest.approx(
        uniform_log_product(alpha, n_sublayers, branch_variance=branch_variance), rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize("scale", [0.9, 1.0, 1.1])
def test_a_norm_after_a_long_stretch_without_one(scale: float) -> None:
    """The variance of a stretch in closed form, shrinking, constant or growing, enters the norm that ends it."""

    def rule(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
        if sublayer_index == n_sublayers - 1:
            return ResidualSpec(norm_out=NormKind.RMS)
        return ResidualSpec(norm_in=NormKind.RMS, shortcut_scale=scale)

    scheme = _scheme(rule, switches=lambda n, parameters: (n - 1,))
    recursion = propagate_shortcut(scheme, 60, branch_variance=0.7).log_product
    assert shortcut_log_product(scheme, 60, branch_variance=0.7) == pytest.approx(recursion, rel=1e-12)


def test_varying_branches_before_a_norm_are_walked_one_by_one() -> None:
    """LayerNorm Scaling with an output norm at the end: the closed form may not use the first period's branch."""

    def rule(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
        last = sublayer_index == n_sublayers - 1
        norm_out = NormKind.RMS if last else NormKind.NONE
        return ResidualSpec(norm_in=NormKind.RMS, norm_out=norm_out, input_scale=(sublayer_index + 1) ** -0.5)

    scheme = _scheme(rule, switches=lambda n, parameters: (n - 1,), varying=frozenset({"input_scale"}))
    harmonic = sum(1 / i for i in range(1, 101))
    assert shortcut_log_product(scheme, 100) == pytest.approx(-0.5 * math.log(1 + harmonic), rel=1e-12)


def test_propagation_frame_is_tidy() -> None:
    result = propagate_shortcut(get_scheme("keel"), 6)
    frame = result.to_frame()
    assert list(frame.columns) == ["scheme", "n_sublayers", "branch_variance", "sublayer", "metric", "value", "unit"]
    gains = frame.loc[frame["metric"] == "log gain", "value"].to_numpy()
    np.testing.assert_array_equal(gains, result.log_gains)
    assert result.backward_log_gains[0] == pytest.approx(result.log_product, rel=1e-14)


@pytest.mark.parametrize("n_sublayers", [16, 64, 256, 1024])
@every_scheme
def test_monte_carlo_agrees_within_three_standard_errors(scheme: Scheme, n_sublayers: int) -> None:
    measured = monte_carlo_product(scheme, n_sublayers, width=512, n_draws=64, seed=1)
    assert abs(measured.deviation(measured.predicted.mean)) < 3
    assert measured.closed_form == pytest.approx(shortcut_log_product(scheme, n_sublayers), rel=1e-11, abs=1e-12)
    one_percent = n_sublayers * math.log(0.99)  # a gain wrong by 1 % would be seen
    assert abs(measured.deviation(measured.predicted.mean + one_percent)) > 8


def test_monte_carlo_rejects_depth_as_the_base() -> None:
    measured = monte_carlo_product(get_scheme("post_ln"), 64, width=512, n_draws=64)
    assert abs(measured.deviation(-64 / 2 * math.log(64))) > 1000


@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize("name", ["post_ln", "deepnorm", "hybrid_norm", "keel", "mix_ln"])
def test_finite_width_prediction_is_needed_and_enough(name: str, kind: NormKind) -> None:
    scheme = get_scheme(name).with_norm(kind)
    measured = monte_carlo_product(scheme, 64, width=64, branch_variance=0.5, stream_variance=1.7, n_draws=4000, seed=3)
    assert abs(measured.deviation(measured.predicted.mean)) < 3
    ratio = measured.standard_deviation / measured.predicted.standard_deviation
    assert ratio == pytest.approx(1.0, abs=4 / math.sqrt(2 * measured.n_draws) + 2 / measured.width)
    if name in {"post_ln", "hybrid_norm"}:
        assert abs(measured.deviation(measured.closed_form)) > 3


@pytest.mark.parametrize("free", [64, 256, 1024])
@pytest.mark.parametrize("sine_squared", [0.1, 0.5, 0.9])
def test_projection_of_a_random_direction_by_its_beta_distribution(sine_squared: float, free: int) -> None:
    """A coordinate of a random unit vector, squared, is Beta(1/2, (free - 1)/2): mean and variance of ln sqrt(1 - s² t²)."""
    above = _NormalisedSum(log_signal=0.0, log_ratio=math.log(sine_squared / (1 - sine_squared)), free_share=1.0)
    angle = np.linspace(0.0, np.pi, 100_001)  # t = cos(angle), whose density is sin^(free - 2)
    density = np.sin(angle) ** (free - 2)
    logs = 0.5 * np.log1p(-sine_squared * np.cos(angle) ** 2)
    mean = np.average(logs, weights=density)
    variance = np.average((logs - mean) ** 2, weights=density)
    assert _log_projection_variance(above, free, free) == pytest.approx(variance, rel=8 / free)
    # above the last norm the gradient is already orthogonal to the direction below: one dimension less
    angle_density = np.sin(angle) ** (free - 3)
    expected = np.average(logs, weights=angle_density)
    assert _mean_log_projection(above, free, free) == pytest.approx(expected, rel=12 / free**2)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
def test_spread_of_the_one_norm_that_meets_an_isotropic_gradient(kind: NormKind, width: int) -> None:
    """Without branches nothing else is random: the whole spread is of second order in 1/width."""
    scheme = get_scheme("post_ln").with_norm(kind)
    measured = monte_carlo_product(scheme, 3, width=width, branch_variance=0.0, n_draws=20_000, seed=5)
    ratio = measured.standard_deviation / measured.predicted.standard_deviation
    assert ratio == pytest.approx(1.0, abs=0.05 + 3 / width)
    assert abs(measured.deviation(measured.predicted.mean)) < 3


def test_monte_carlo_multiplies_the_exact_jacobians() -> None:
    """The slow twin: the same draws, with dense Jacobian matrices."""
    scheme, width, n_sublayers, n_draws = get_scheme("keel"), 8, 5, 3
    measured = monte_carlo_product(scheme, n_sublayers, width=width, n_draws=n_draws, seed=7)
    generator, norm = np.random.default_rng(7), Normalisation()
    streams: FloatArray = norm(generator.standard_normal((n_draws, width)))
    noises = generator.standard_normal((n_sublayers, n_draws, width))
    gradients = generator.standard_normal((n_draws, width))
    expected = []
    for x, noise, gradient in zip(streams, noises.swapaxes(0, 1), gradients, strict=True):
        total = np.eye(width)
        for spec, f in zip(scheme.specs(n_sublayers), noise, strict=True):
            z = spec.shortcut_scale * x + f
            normalised = spec.norm_out is not NormKind.NONE
            total = (norm.jacobian(z) if normalised else np.eye(width)) * spec.shortcut_scale @ total
            x = norm(z) if normalised else z
        expected.append(math.log(np.linalg.norm(total.T @ gradient) / np.linalg.norm(gradient)))
    np.testing.assert_allclose(measured.log_products, expected, rtol=1e-10)


def test_monte_carlo_is_reproducible_and_framed() -> None:
    one, again = (monte_carlo_product(get_scheme("post_ln"), 8, width=16, n_draws=4, seed=5) for _ in range(2))
    other = monte_carlo_product(get_scheme("post_ln"), 8, width=16, n_draws=4, seed=6)
    np.testing.assert_array_equal(one.log_products, again.log_products)
    assert not np.array_equal(one.log_products, other.log_products)
    assert one.to_frame()["value"].tolist() == one.log_products.tolist()


def test_draws_that_do_not_differ_have_no_standard_error_but_still_a_verdict() -> None:
    measured = monte_carlo_product(get_scheme("pre_ln"), 16, width=16, n_draws=4)
    assert measured.deviation(0.0) == 0.0
    assert measured.deviation(1e-6) == -math.inf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_sublayers": 0}, "n_sublayers must be a whole number of at least 1, got 0"),
        ({"branch_variance": -0.5}, "branch_variance must be a non-negative finite number, got -0.5"),
        ({"stream_variance": 0.0}, "stream_variance must be a positive finite number, got 0.0"),
        ({"scaled_matrices": -1}, "scaled_matrices must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, float], message: str) -> None:
    for function in (shortcut_log_product, shortcut_product, propagate_shortcut):
        with pytest.raises(DomainError, match=message):
            function(get_scheme("keel"), **({"n_sublayers": 4} | settings))  # type: ignore[operator]


def test_bad_uniform_and_sampling_input_is_refused() -> None:
    with pytest.raises(DomainError, match="alpha must be a positive finite number, got 0"):
        uniform_log_product(0.0, 4)
    with pytest.raises(DomainError, match="n_sublayers must be a whole number of at least 1, got 0"):
        uniform_log_product(1.0, 0)
    with pytest.raises(DomainError, match="branch_variance must be a non-negative finite number, got -1"):
        uniform_log_product(1.0, 4, branch_variance=-1.0)
    with pytest.raises(DomainError, match="width must be a whole number of at least 8, got 4"):
        finite_width_product(get_scheme("keel"), 4, width=4)
    with pytest.raises(DomainError, match="n_draws must be a whole number of at least 2, got 1"):
        monte_carlo_product(get_scheme("keel"), 4, n_draws=1)


def test_a_model_without_sublayers_has_no_runs() -> None:
    with pytest.raises(SchemeError, match="at least 1 sub-layer, got 0"):
        get_scheme("keel").runs(0)


def test_runs_start_where_the_rule_switches() -> None:
    assert [(run.start, run.stop, len(run.period)) for run in get_scheme("keel").runs(9)] == [(0, 1, 1), (1, 2, 1), (2, 9, 2)]
    assert [(run.start, run.stop) for run in replace(get_scheme("keel"), switches=no_switches).runs(9)] == [(0, 9)]


EXTREMES = [
    ("scaled_shortcut", {"alpha": "1e200"}, 1.0),
    ("scaled_shortcut", {"alpha": "1e-200"}, 1.0),
    ("keel", {"alpha": "1e308"}, 1.0),
    ("keel", {"alpha": "1e-200"}, 1e-300),
    ("highway", {"gate_bias": 800}, 1.0),
    ("highway", {"gate_bias": 800, "norm": "input"}, 0.0),
    ("highway", {"gate_bias": -800}, 1e300),
    ("pre_ln", {}, 1e308),
]
extremes = pytest.mark.parametrize(("name", "parameters", "variance"), EXTREMES, ids=[f"{n} {p} q={q}" for n, p, q in EXTREMES])


@extremes
def test_products_at_the_ends_of_float64(name: str, parameters: dict[str, float | str], variance: float) -> None:
    """Closed form, plain recursion and measurement agree, without a warning."""
    scheme = get_scheme(name).with_parameters(**parameters)
    log_product = shortcut_log_product(scheme, 8, branch_variance=variance)
    assert propagate_shortcut(scheme, 8, branch_variance=variance).log_product == pytest.approx(log_product, rel=1e-12)
    if variance <= 1.0:
        measured = monte_carlo_product(scheme, 8, width=64, branch_variance=variance, n_draws=16)
        assert abs(measured.deviation(measured.predicted.mean)) < 3.5
        assert measured.predicted.mean == pytest.approx(log_product, abs=8 / 64)


def test_a_gate_that_carries_nothing_keeps_its_log() -> None:
    highway = get_scheme("highway").with_parameters(gate_bias=800)
    assert shortcut_log_product(highway, 64) == pytest.approx(-64 * 800)


@pytest.mark.parametrize(
    ("name", "n_sublayers", "variance", "message"),
    [
        ("admin", 64, 1.7e308, "past float64"),
        ("post_ln", 10**400, 1.0, "n_sublayers is past float64"),
        ("scaled_shortcut", 10**308, 1e300, "the log of the product over 1"),
    ],
)
def test_what_float64_cannot_hold_is_refused(name: str, n_sublayers: int, variance: float, message: str) -> None:
    parameters = {"alpha": "1e-200"} if name == "scaled_shortcut" else {}
    with pytest.raises(DomainError, match=message):
        shortcut_log_product(get_scheme(name).with_parameters(**parameters), n_sublayers, branch_variance=variance)


@pytest.mark.parametrize("alpha", [1e-200, 1e200])
def test_uniform_product_at_the_ends_of_float64(alpha: float) -> None:
    expected = 0.0 if alpha > 1 else 8 * math.log(alpha)
    assert uniform_log_product(alpha, 8) == pytest.approx(expected, rel=1e-12, abs=1e-300)
