import math

import pytest

from keel_theory.depth_expression import DepthExpressionError
from keel_theory.parameters import choice, number, positive_at_depth
from keel_theory.spec import SchemeError


@pytest.mark.parametrize("value", [0.25, "0.25", " 2.5e-1 "])
def test_number_from_number_or_text(value):
    assert number("ratio", value, low=0.0, high=1.0) == 0.25


@pytest.mark.parametrize("value", [-0.1, 1.1, "1.1", "abc", "", math.nan, math.inf, "nan", True, None])
def test_number_outside_the_interval_is_refused_by_name(value):
    with pytest.raises(SchemeError, match="ratio must be a number from 0 to 1, got"):
        number("ratio", value, low=0.0, high=1.0)


def test_number_without_bounds_must_be_finite():
    assert number("bias", "-3") == -3.0
    with pytest.raises(SchemeError, match="bias must be a finite number, got 'inf'"):
        number("bias", "inf")


@pytest.mark.parametrize("value", ["Star", "", 1.0])
def test_choice_lists_the_known_words(value):
    with pytest.raises(SchemeError, match="variant must be one of plain, star, got"):
        choice("variant", value, ("plain", "star"))


@pytest.mark.parametrize("rule", [0, -1.0, "0", "-L", "L - 8"])
def test_scale_that_is_not_positive_at_the_depth_is_refused(rule):
    with pytest.raises(SchemeError, match=r"alpha must be positive, but .* at 8 sub-layers"):
        positive_at_depth("alpha", rule, 8)


def test_scale_may_be_positive_at_some_depths_only():
    assert positive_at_depth("alpha", "L - 8", 9) == 1.0


def test_unparsable_scale_keeps_its_own_error():
    with pytest.raises(DepthExpressionError, match="is not allowed"):
        positive_at_depth("alpha", "L.real", 8)
