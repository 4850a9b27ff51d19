from __future__ import annotations

import math

import numpy as np
import pytest

from keel_theory.results import FiniteWidthProduct, MonteCarloProduct


def _measured(*log_products: float) -> MonteCarloProduct:
    return MonteCarloProduct(
        scheme="made_up",
        n_sublayers=4,
        width=8,
        branch_variance=1.0,
        seed=0,
        log_products=np.array(log_products),
        predicted=FiniteWidthProduct(mean=0.0, standard_deviation=1.0),
        closed_form=0.0,
    )


def test_standard_error_and_deviation() -> None:
    measured = _measured(1.0, 2.0, 3.0, 4.0)
    assert measured.n_draws == 4
    assert measured.standard_deviation == pytest.approx(math.sqrt(5 / 3))
    assert measured.standard_error == pytest.approx(math.sqrt(5 / 12))
    assert measured.deviation(2.5) == 0.0
    assert measured.deviation(3.5) == pytest.approx(-math.sqrt(12 / 5))


@pytest.mark.parametrize(("claim", "deviation"), [(-1.0, 0.0), (-1.0 + 1e-9, -math.inf), (-1.0 - 1e-9, math.inf)])
def test_draws_that_agree_to_round_off_decide_at_once(claim: float, deviation: float) -> None:
    assert _measured(-1.0, -1.0, -1.0).deviation(claim) == deviation
