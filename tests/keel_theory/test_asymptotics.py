from __future__ import annotations

import math

import pytest
import sympy as sp

from keel_theory.asymptotics import LIMITS, WRONG_FORMS, limits, power_law_limit, refute
from keel_theory.derivations import is_proved
from keel_theory.errors import DomainError, TheoryError
from keel_theory.propagation import uniform_log_product
from keel_theory.schemes import get_scheme

HALF = sp.Rational(1, 2)


@pytest.mark.parametrize("name", LIMITS)
def test_every_step_of_a_limit_is_proved(name: str) -> None:
    derivation = LIMITS[name]()
    assert derivation.id == name
    assert is_proved(derivation)


def test_limits_lists_all_in_order() -> None:
    assert [derivation.id for derivation in limits()] == list(LIMITS)


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(1, 1), (0.51, 1), (HALF, sp.exp(-sp.Rational(3, 8))), (0.5, sp.exp(-sp.Rational(3, 8))), (0.25, 0), (0, 0), (-1, 0)],
)
def test_power_law_limit(exponent: float, expected: object) -> None:
    assert power_law_limit(exponent, coefficient=2, branch_variance=3) == expected


@pytest.mark.parametrize("exponent", [1.0, 0.75, 0.5, 0.25, 0.0])
@pytest.mark.parametrize(("coefficient", "variance"), [(1.0, 1.0), (2.0, 0.5)])
def test_power_law_limit_is_where_the_product_goes(exponent: float, coefficient: float, variance: float) -> None:
    """At L = 10^12 the product is within its own rate of the limit."""
    n_sublayers = 10**12
    product = math.exp(uniform_log_product(coefficient * n_sublayers**exponent, n_sublayers, branch_variance=variance))
    limit = float(power_law_limit(exponent, coefficient=coefficient, branch_variance=variance))
    assert product == pytest.approx(limit, abs=1e-5)


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (0.5 + 1e-10, 1),
        (0.5 - 1e-10, 0),
        (math.nextafter(0.5, 1), 1),
        (math.nextafter(0.5, 0), 0),
        (sp.Float("0.5"), sp.exp(-HALF)),
        (sp.Float("0.50000000000000000001", 30), 1),
        (sp.sqrt(2) / 3, 0),
        (HALF + sp.Rational(1, 10**40), 1),
    ],
)
def test_an_exponent_beside_one_half_is_not_one_half(exponent: object, expected: object) -> None:
    assert power_law_limit(exponent, coefficient=1, branch_variance=1) == expected


@pytest.mark.parametrize(("exponent", "name"), [(1, "limit-above"), (HALF, "limit-critical"), (0, "limit-below")])
def test_power_law_limit_is_what_the_derivation_proves(exponent: object, name: str) -> None:
    assert power_law_limit(exponent) == LIMITS[name]().result.rhs


def test_without_a_branch_nothing_is_lost() -> None:
    assert power_law_limit(0, branch_variance=0) == 1


def test_keel_rate_to_second_order() -> None:
    product = math.exp(uniform_log_product(1000.0, 1000))
    assert product == pytest.approx(1 - 1 / 2000 + 1 / 8e6, abs=2e-9)  # the next order is 1/L³
    assert product != pytest.approx(1 - 1 / 2000, abs=1e-8)


def test_drifted_deepnorm_keeps_a_constant_factor_over_the_leading_law() -> None:
    n_sublayers = 10**8
    log = uniform_log_product(n_sublayers**0.25, n_sublayers)
    assert log + math.sqrt(n_sublayers) / 2 == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_wrong_forms_are_refuted_by_numbers_and_measurement(name: str) -> None:
    refutation = refute(name, 64)
    assert refutation.is_refuted
    assert abs(refutation.claimed_deviation) > 100
    assert abs(refutation.derived_deviation) < 3
    assert refutation.claimed_log != pytest.approx(refutation.derived_log, rel=0.5)
    scheme = get_scheme(refutation.form.scheme).with_parameters(**refutation.form.parameters)
    assert refutation.measured.scheme == scheme.name
    assert refutation.derived_log == pytest.approx(refutation.measured.closed_form, rel=1e-12)


def test_a_right_form_would_not_be_refuted() -> None:
    """At L = 2 depth and base coincide: 1/L^(L/2) is right there, and the verdict says so."""
    assert not refute("depth-as-base", 2).is_refuted


def test_refutation_frame() -> None:
    frame = refute("depth-as-base", 8, width=32, n_draws=8).to_frame()
    assert frame["metric"].str.startswith("log product, ").all()
    assert frame.loc[frame["metric"] == "log product, claimed", "value"].item() == pytest.approx(-4 * math.log(8))


def test_bad_input_is_refused() -> None:
    with pytest.raises(TheoryError, match="no wrong form 'x'; known: depth-as-base"):
        refute("x")
    with pytest.raises(DomainError, match="n_sublayers must be a whole number of at least 2"):
        refute("depth-as-base", 1)
    with pytest.raises(TheoryError, match="the exponent must be a real number"):
        power_law_limit(sp.oo)
    with pytest.raises(DomainError, match="coefficient must be a positive"):
        power_law_limit(1, coefficient=0.0)
    with pytest.raises(DomainError, match="branch_variance must be a non-negative"):
        power_law_limit(1, branch_variance=-1.0)
