"""Answers as frames: the same numbers as the functions behind them."""

import math

import pytest

from keel_theory.answers import design_answer, limit_table
from keel_theory.asymptotics import LIMITS
from keel_theory.design import branch_share, smallest_alpha, uniform_product
from keel_theory.errors import DomainError


@pytest.mark.parametrize("branch_variance", [0.25, 1.0, 9.0])
def test_design_frame_holds_the_smallest_scale_and_its_price(branch_variance: float) -> None:
    answer = design_answer(256, 0.5, branch_variance)
    frame = answer.to_frame().set_index("scale")
    assert answer.alpha == smallest_alpha(0.5, 256, branch_variance)
    assert answer.alpha_law == pytest.approx(math.sqrt(256 * branch_variance / (2 * math.log(2))))
    assert frame.index.tolist() == ["smallest", "L"]
    assert frame.loc["smallest", "product"] == pytest.approx(0.5)
    assert frame.loc["L", "alpha"] == 256
    assert frame.loc["L", "product"] == uniform_product(256, 256, branch_variance)
    assert frame.loc["L", "branch_share"] == branch_share(256, 256, branch_variance)
    assert frame.loc["L", "branch_share"] < frame.loc["L", "aligned_branch_share"] < 1


def test_without_branches_every_scale_will_do() -> None:
    answer = design_answer(64, 0.9, 0.0)
    assert answer.alpha == 0.0
    assert answer.to_frame()["scale"].tolist() == ["L"]


def test_a_gain_out_of_range_is_refused() -> None:
    with pytest.raises(DomainError, match="between 0 and 1"):
        design_answer(64, 1.0)


def test_limit_frame_has_every_limit_with_its_value() -> None:
    frame = limit_table().to_frame().set_index("name")
    assert set(frame.index) == {derivation().id for derivation in LIMITS.values()}
    assert frame.loc["limit-above", "value"] == "1"
    assert frame.loc["limit-below", "value"] == "0"
    assert (frame["n_steps"] > 1).all()
    assert frame["assumptions"].str.contains("uncorrelated").all()
