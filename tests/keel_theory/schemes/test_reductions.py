"""Schemes that are the same at certain parameter values."""

import dataclasses

import pytest

from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind
from tests._asserts import assert_reduces_to

DEPTHS = (2, 3, 12, 129)


def _without_inner_norm(scheme):
    def rule(sublayer_index, n_sublayers, kind):
        return dataclasses.replace(scheme.rule(sublayer_index, n_sublayers, kind), norm_in=NormKind.NONE)

    return dataclasses.replace(scheme, rule=rule, parameter_docs={})


@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_keel_without_inner_norm_at_alpha_one_is_post_ln_after_the_first_attention(n_sublayers):
    keel = _without_inner_norm(get_scheme("keel").with_parameters(alpha=1))
    assert_reduces_to(keel, get_scheme("post_ln"), n_sublayers, first=1)
    assert keel.specs(n_sublayers)[0] != get_scheme("post_ln").specs(n_sublayers)[0]


@pytest.mark.parametrize("n_sublayers", DEPTHS)
@pytest.mark.parametrize("parameters", [{"alpha": 1, "beta": 1}, {"alpha": "1", "beta": "1"}, {"alpha": "L/L", "beta": "L**0"}])
def test_deepnorm_at_one_is_post_ln(n_sublayers, parameters):
    assert_reduces_to(get_scheme("deepnorm").with_parameters(**parameters), get_scheme("post_ln"), n_sublayers)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
@pytest.mark.parametrize(("ratio", "other"), [(0, "pre_ln"), ("0", "pre_ln"), (1, "post_ln"), ("1.0", "post_ln")])
def test_mix_ln_at_its_ends(n_sublayers, ratio, other):
    assert_reduces_to(get_scheme("mix_ln").with_parameters(ratio=ratio), get_scheme(other), n_sublayers)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_scaled_shortcut_is_deepnorm_with_alpha_l_and_ordinary_initialisation(n_sublayers):
    deepnorm = get_scheme("deepnorm").with_parameters(alpha="L", beta=1)
    assert_reduces_to(get_scheme("scaled_shortcut"), deepnorm, n_sublayers)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_scaled_shortcut_at_one_is_post_ln(n_sublayers):
    assert_reduces_to(get_scheme("scaled_shortcut").with_parameters(alpha=1), get_scheme("post_ln"), n_sublayers)


@pytest.mark.parametrize("n_sublayers", [3, 12, 129])
def test_third_attempt_without_its_gain_is_keel_after_the_first_block(n_sublayers):
    attempt = get_scheme("scaled_shortcut_normed_input_gain")

    def rule(sublayer_index, n_sublayers, kind):
        return dataclasses.replace(attempt.rule(sublayer_index, n_sublayers, kind), input_gain=False)

    merged = dataclasses.replace(attempt, rule=rule, parameter_docs={})
    assert_reduces_to(merged, get_scheme("keel"), n_sublayers, first=2)


def test_star_differs_from_plain_in_block_0_alone():
    plain, star = get_scheme("hybrid_norm"), get_scheme("hybrid_norm").with_parameters(variant="star")
    assert_reduces_to(star, plain, 12, first=2)
    assert all(a != b for a, b in zip(star.specs(12)[:2], plain.specs(12)[:2], strict=True))


def test_layernorm_scaling_leaves_the_first_block_pre_ln():
    scaled, pre = get_scheme("layernorm_scaling").specs(4), get_scheme("pre_ln").specs(4)
    assert scaled[:2] == pre[:2]
    assert scaled[2] != pre[2]


def test_a_difference_is_noticed():
    with pytest.raises(AssertionError, match=r"keel and post_ln differ at sub-layers \[0, 1, 2, 3\]"):
        assert_reduces_to(get_scheme("keel"), get_scheme("post_ln"), 4)
