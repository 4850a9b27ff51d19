"""Random stacks against the closed forms that they know nothing of, and their own arithmetic."""

import math

import numpy as np
import pytest

from keel_theory.errors import TheoryError
from keel_theory.propagation import shortcut_log_product
from keel_theory.random_stacks import extrapolated, random_stack
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import NormKind, ResidualSpec
from keel_theory.variance import variance_profile


@pytest.mark.parametrize("n_sublayers", [16, 64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_s_product_is_the_closed_form(scheme: str, n_sublayers: int) -> None:
    """Within 3.5 standard errors at infinite width: beyond that by chance once in 80 runs of these 28 cases."""
    specs = get_scheme(scheme).specs(n_sublayers)

    def products(width: int, seed: int) -> np.ndarray:
        return random_stack(specs, width=width, n_draws=96, seed=seed).log_products

    mean, error = extrapolated(products, width=256, seed=5)
    assert abs(mean - shortcut_log_product(get_scheme(scheme), n_sublayers)) < 3.5 * error + 1e-9


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_s_stream_is_the_recursion_s(scheme: str) -> None:
    specs = get_scheme(scheme).specs(16)
    values = random_stack(specs, width=128, n_draws=256, seed=6).last_variances
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    assert abs(values.mean() - variance_profile(specs).stream[-1]) < 3.5 * error + 1e-9


def test_a_gradient_behind_a_norm_is_not_shortened_by_it() -> None:
    """Almost no branch: an isotropic gradient would lose 1/(2 D) in this norm."""
    spec = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=1e6)
    gains = random_stack([spec], width=16, n_draws=8).log_products
    np.testing.assert_allclose(gains, 0.0, atol=1e-5)


def test_what_the_branch_reads_counts() -> None:
    """A smaller input, a smaller branch; behind a branch norm no longer."""
    small = ResidualSpec(norm_in=NormKind.RMS, input_scale=0.1)
    normed = ResidualSpec(norm_in=NormKind.RMS, norm_branch=NormKind.RMS, input_scale=0.1)
    assert random_stack([small], width=512, n_draws=32).last_variances.mean() == pytest.approx(1.01, rel=0.01)
    assert random_stack([normed], width=512, n_draws=32).last_variances.mean() == pytest.approx(2.0, rel=0.03)


def test_smaller_initial_matrices_do_not_reach_normalised_values_but_once() -> None:
    plain = ResidualSpec(init_gain=0.5)
    normed = ResidualSpec(init_gain=0.5, qkv_norm=True)
    shares = [random_stack([s], width=256, n_draws=64, scaled_matrices=2).last_variances.mean() for s in (plain, normed)]
    assert shares == pytest.approx([1 + 0.5**4, 1 + 0.5**2], rel=0.02)


def test_extrapolation_removes_the_first_order_in_the_width_and_no_more() -> None:
    def measure(width: int, seed: int) -> list[float]:
        return [2 + 5 / width + 7 / width**2] * 3

    mean, error = extrapolated(measure, width=10)
    assert mean == pytest.approx(2 + 7 * (2 / 100 - 1 / 25))
    assert error < 1e-15


def test_error_of_an_extrapolation_adds_both_widths() -> None:
    mean, error = extrapolated(lambda width, seed: [0.0, 2.0 * width / 8], width=8)
    assert (mean, error) == pytest.approx((1.5, math.hypot(2 * 1.0, 0.5)))


def test_one_draw_has_no_spread() -> None:
    with pytest.raises(TheoryError, match="n_draws"):
        random_stack([ResidualSpec()], width=8, n_draws=1)
