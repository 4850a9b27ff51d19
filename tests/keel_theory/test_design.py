"""Which shortcut scale a depth needs, and what it costs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel_theory.design import (
    ALIGNED_EXACT_DEPTH,
    aligned_branch_cosine,
    aligned_branch_cosine_law,
    aligned_branch_share,
    branch_share,
    log_uniform_product,
    phase_diagram,
    smallest_alpha,
    smallest_alpha_law,
    smallest_scheme_alpha,
    uniform_product,
)
from keel_theory.errors import DomainError
from keel_theory.propagation import shortcut_log_product
from keel_theory.schemes import get_scheme

DEPTHS = (1, 2, 16, 64, 1024, 10**6)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
@pytest.mark.parametrize("min_gain", [1e-300, 1e-6, 0.5, 0.9, 1 - 1e-12])
@pytest.mark.parametrize("branch_variance", [0.01, 1.0, 7.5])
def test_smallest_alpha_reaches_the_gain_and_less_does_not(n_sublayers: int, min_gain: float, branch_variance: float) -> None:
    alpha = smallest_alpha(min_gain, n_sublayers, branch_variance)
    log_gain = log_uniform_product(alpha, n_sublayers, branch_variance)
    assert float(log_gain) == pytest.approx(np.log(min_gain), rel=1e-11)
    assert log_uniform_product(0.99 * alpha, n_sublayers, branch_variance) < np.log(min_gain)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 10**7), st.floats(1e-6, 1e6))
def test_smallest_alpha_is_the_textbook_inverse(min_gain: float, n_sublayers: int, branch_variance: float) -> None:
    naive = np.sqrt(branch_variance / np.expm1(-2 * np.log(min_gain) / n_sublayers))
    assert float(smallest_alpha(min_gain, n_sublayers, branch_variance)) == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("branch_variance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("min_gain", [0.1, 0.9, 0.99])
def test_the_square_root_law_is_off_by_half_the_branch_variance(min_gain: float, branch_variance: float) -> None:
    exact = smallest_alpha(min_gain, 10**6, branch_variance) ** 2
    law = smallest_alpha_law(min_gain, 10**6, branch_variance) ** 2
    assert float(law - exact) == pytest.approx(branch_variance / 2, rel=1e-3)


@pytest.mark.parametrize("factor", [4, 100])
def test_alpha_grows_with_the_root_of_depth(factor: int) -> None:
    ratio = smallest_alpha(0.9, factor * 10**4) / smallest_alpha(0.9, 10**4)
    assert float(ratio) == pytest.approx(np.sqrt(factor), rel=1e-4)


@pytest.mark.parametrize(
    ("alpha", "n_sublayers", "expected"), [(512, 512, 0.99902), (1024, 1024, 0.99951), (512**0.25, 512, 1.556e-5)]
)
def test_published_values(alpha: float, n_sublayers: int, expected: float) -> None:
    assert float(uniform_product(alpha, n_sublayers)) == pytest.approx(expected, rel=5e-6 if alpha > 5 else 5e-4)


def test_depth_beyond_float64_stays_exact_in_the_log() -> None:
    assert float(uniform_product(1.0, 10**6)) == 0.0
    assert float(log_uniform_product(1.0, 10**6)) == pytest.approx(-5e5 * np.log(2), rel=1e-15)


@pytest.mark.parametrize("alpha", [1.0, 4.0, 30.0])
def test_product_is_the_cosine_and_the_share_is_what_is_left(alpha: float) -> None:
    """A stack of independent branches at width 4096, against the closed form within four standard errors."""
    rng = np.random.default_rng(1)
    width, n_sublayers, n_draws = 4096, 16, 24
    cosines = np.array([_cosine_of_a_random_stack(rng, alpha, n_sublayers, width) for _ in range(n_draws)])
    standard_error = cosines.std(ddof=1) / np.sqrt(n_draws)
    assert abs(cosines.mean() - uniform_product(alpha, n_sublayers)) < 4 * standard_error
    assert float(branch_share(alpha, n_sublayers)) == pytest.approx(
        1 - float(uniform_product(alpha, n_sublayers)) ** 2, rel=1e-9
    )


def _cosine_of_a_random_stack(rng: np.random.Generator, alpha: float, n_sublayers: int, width: int) -> float:
    first = rng.standard_normal(width)
    stream = first / np.sqrt(np.mean(first**2))
    for _ in range(n_sublayers):
        total = alpha * stream + rng.standard_normal(width)
        stream = total / np.sqrt(np.mean(total**2))
    return float(first @ stream / np.linalg.norm(first) / np.linalg.norm(stream))


@pytest.mark.parametrize("branch_variance", [0.5, 1.0, 2.0])
def test_branches_of_keel_carry_one_part_in_depth(branch_variance: float) -> None:
    depth = 10**5
    assert float(branch_share(depth, depth, branch_variance)) * depth == pytest.approx(branch_variance, rel=1e-4)


def _aligned(alpha: float, n_sublayers: int, q: float) -> tuple[float, float]:
    """Cosine and sine of a stack of branches (0, sqrt(q)) on a stream that enters as (1, 0), normalised in each sub-layer."""
    stream = np.array([1.0, 0.0])
    for _ in range(n_sublayers):
        stream = alpha * stream + np.array([0.0, np.sqrt(q)])
        stream /= np.linalg.norm(stream)
    return float(stream[0]), float(stream[1])


AGREEING = [(1.0, 1, 1.0), (1.0, 7, 0.25), (3.0, 20, 2.0), (30.0, 64, 0.1), (64.0, 64, 7.5), (0.2, 3, 1e-3), (1e3, 500, 1e-12)]


@pytest.mark.parametrize(("alpha", "n_sublayers", "branch_variance"), AGREEING)
def test_agreeing_branches_by_the_stack_itself(alpha: float, n_sublayers: int, branch_variance: float) -> None:
    cosine, sine = _aligned(alpha, n_sublayers, branch_variance)
    assert aligned_branch_cosine(alpha, n_sublayers, branch_variance) == pytest.approx(cosine, rel=1e-13)
    assert aligned_branch_share(alpha, n_sublayers, branch_variance) == pytest.approx(sine**2, rel=1e-12)


@given(st.floats(1e-3, 1e6), st.floats(0, 1e6))
def test_one_branch_has_none_to_agree_with(alpha: float, branch_variance: float) -> None:
    assert aligned_branch_share(alpha, 1, branch_variance) == pytest.approx(
        float(branch_share(alpha, 1, branch_variance)), rel=1e-12, abs=1e-300
    )


@pytest.mark.parametrize("branch_variance", [0.01, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("ratio", [1e-3, 0.1, 0.5, 1.0, 3.0, 100.0])
def test_the_two_laws_of_agreeing_branches_meet(ratio: float, branch_variance: float) -> None:
    """One sub-layer past the last that is walked: the law is off by less than it says, which a wrong q would not be."""
    alpha = ratio * ALIGNED_EXACT_DEPTH
    walked = aligned_branch_share(alpha, ALIGNED_EXACT_DEPTH, branch_variance)
    beyond = aligned_branch_share(alpha, ALIGNED_EXACT_DEPTH + 1, branch_variance)
    _, sine = _aligned(alpha, ALIGNED_EXACT_DEPTH + 1, branch_variance)
    assert beyond == pytest.approx(sine**2, abs=1e-9, rel=1e-9)
    assert walked <= beyond <= walked + 1e-4
    assert beyond == walked == 1.0 or walked < beyond


@pytest.mark.parametrize("alpha", [1e-300, 1.0, 1e5, 1e300])
@pytest.mark.parametrize("n_sublayers", [1, 10**5, 10**5 + 1, 10**18])
def test_shares_of_agreeing_branches_at_the_ends(alpha: float, n_sublayers: int) -> None:
    assert aligned_branch_share(alpha, n_sublayers, 0.0) == 0.0
    share = aligned_branch_share(alpha, n_sublayers)
    assert 0.0 <= share <= 1.0
    assert share >= float(branch_share(alpha, n_sublayers)) * (1 - 1e-9), "branches that agree carry no less"


@pytest.mark.parametrize("branch_variance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("n_sublayers", [1000, 4000])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_agreeing_branches_follow_the_sech_law(n_sublayers: int, ratio: float, branch_variance: float) -> None:
    """At any q, to the error that the law states: a quarter of q halves the angle."""
    alpha = ratio * n_sublayers
    exact = aligned_branch_share(alpha, n_sublayers, branch_variance)
    law = 1 - float(aligned_branch_cosine_law(alpha, n_sublayers, branch_variance)) ** 2
    assert 0 < law - exact < 0.16 * np.sqrt(branch_variance) / alpha
    assert law == pytest.approx(np.tanh(np.sqrt(branch_variance) / ratio) ** 2, rel=1e-12)


def test_agreeing_branches_follow_no_square_root() -> None:
    """With alpha = 10 sqrt(L) the independent product stays, the aligned one goes."""
    alpha = 10 * np.sqrt(10**4)
    assert float(uniform_product(alpha, 10**4)) == pytest.approx(np.exp(-0.005), rel=1e-4)
    assert aligned_branch_cosine(alpha, 10**4) < 1e-3


def test_the_sech_law_does_not_overflow() -> None:
    assert float(aligned_branch_cosine_law(1.0, 10**6)) == 0.0


def test_no_branch_needs_no_scale() -> None:
    assert float(smallest_alpha(0.9, 100, 0.0)) == 0.0
    assert float(uniform_product(1e-3, 10**6, 0.0)) == 1.0


def test_phase_diagram_frame_agrees_with_the_arrays() -> None:
    diagram = phase_diagram([16, 64], [1.0, 8.0, 64.0])
    frame = diagram.to_frame()
    assert len(frame) == 6
    row = frame[(frame["n_sublayers"] == 64) & (frame["alpha"] == 8.0)].iloc[0]
    assert row["product"] == pytest.approx(float(uniform_product(8.0, 64)))
    assert row["branch_share"] == pytest.approx(1 - row["product"] ** 2)
    assert diagram.product.shape == (2, 3)


def test_default_grid_holds_the_paper_s_depths_range() -> None:
    diagram = phase_diagram()
    assert (diagram.n_sublayers[0], diagram.n_sublayers[-1]) == (4, 4096)
    assert np.all(np.diff(diagram.product, axis=1) >= 0), "more shortcut never keeps less"
    assert np.all(np.diff(diagram.product, axis=0) <= 0), "more depth never keeps more"


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
def test_alpha_outside_its_domain(alpha: float) -> None:
    with pytest.raises(DomainError, match="alpha must be a finite number > 0"):
        uniform_product(alpha, 4)


@pytest.mark.parametrize("n_sublayers", [0, -3, 2.5, np.nan])
def test_depth_outside_its_domain(n_sublayers: float) -> None:
    with pytest.raises(DomainError, match="whole number >= 1"):
        smallest_alpha(0.9, n_sublayers)


@pytest.mark.parametrize("branch_variance", [-1e-9, np.nan])
def test_variance_outside_its_domain(branch_variance: float) -> None:
    with pytest.raises(DomainError, match="branch variance must be a finite number >= 0"):
        branch_share(1.0, 4, branch_variance)


@pytest.mark.parametrize("min_gain", [0.0, 1.0, -0.1, 1.5, np.nan])
def test_gain_outside_its_domain(min_gain: float) -> None:
    with pytest.raises(DomainError, match="between 0 and 1, both excluded"):
        smallest_alpha(min_gain, 4)


@pytest.mark.parametrize("gain", [1e-300, 0.1, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("n_sublayers", [1, 64, 10**6])
def test_alpha_of_a_uniform_scheme_is_the_closed_form(n_sublayers: int, gain: float) -> None:
    found = smallest_scheme_alpha(get_scheme("scaled_shortcut"), n_sublayers, gain, branch_variance=0.7)
    assert found == pytest.approx(float(smallest_alpha(gain, n_sublayers, 0.7)), rel=1e-9)


@pytest.mark.parametrize("variance", [0.3, 1.0, 4.0])
def test_keels_first_block_bounds_what_any_alpha_keeps(variance: float) -> None:
    best = (1 + 2 * variance) ** -0.5
    found = smallest_scheme_alpha(get_scheme("keel"), 64, 0.99 * best, branch_variance=variance)
    kept = shortcut_log_product(get_scheme("keel").with_parameters(alpha=found), 64, branch_variance=variance)
    assert kept == pytest.approx(math.log(0.99 * best), rel=1e-9)
    with pytest.raises(DomainError, match=f"keel keeps at most {best:.6g} of the gradient over 64 sub-layers"):
        smallest_scheme_alpha(get_scheme("keel"), 64, 1.001 * best, branch_variance=variance)


def test_schemes_without_a_choice() -> None:
    assert smallest_scheme_alpha(get_scheme("keel"), 2, 0.5) == 0.0
    with pytest.raises(DomainError, match="'pre_ln' has no parameter 'alpha'"):
        smallest_scheme_alpha(get_scheme("pre_ln"), 8, 0.5)
    with pytest.raises(DomainError, match="the number of sub-layers is past float64"):
        smallest_alpha(0.5, 10**400)
