import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SchemeError, SublayerKind, alternating_kinds

SCALES = ("shortcut_scale", "branch_scale", "input_scale", "init_gain")


def _scheme(rule, **changes):
    values = {"name": "x", "label": "X", "equation": "x' = x", "latex": "x' = x", "source": "none", "rule": rule} | changes
    return Scheme(**values)


def _with_scale(sublayer_index, n_sublayers, kind, *, scale=1.0):
    return ResidualSpec(norm_in=NormKind.RMS, shortcut_scale=float(scale))


def test_default_spec_is_the_plain_residual():
    spec = ResidualSpec()
    assert {spec.norm_in, spec.norm_branch, spec.norm_out} == {NormKind.NONE}
    assert {getattr(spec, name) for name in SCALES} == {1.0}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_must_be_positive_and_finite(name, value):
    with pytest.raises(SchemeError, match=f"{name} must be a positive finite number"):
        ResidualSpec(**{name: value})


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_gate_bias_must_be_finite(value):
    with pytest.raises(SchemeError, match="gate_bias must be finite"):
        ResidualSpec(gate_bias=value)


def test_spec_is_frozen_and_hashable():
    spec = ResidualSpec()
    assert hash(spec) == hash(ResidualSpec())
    with pytest.raises(dataclasses.FrozenInstanceError, match="shortcut_scale"):
        spec.shortcut_scale = 2.0


@given(st.integers(0, 300))
def test_kinds_alternate_from_attention(n_sublayers):
    kinds = alternating_kinds(n_sublayers)
    assert len(kinds) == n_sublayers
    assert all(kind is (SublayerKind.FFN if i % 2 else SublayerKind.ATTENTION) for i, kind in enumerate(kinds))


@pytest.mark.parametrize("docs", [{}, {"other": "x"}, {"scale": "x", "other": "x"}])
def test_every_parameter_must_be_documented(docs):
    with pytest.raises(SchemeError, match="scheme 'x': parameter_docs and the rule's keyword arguments differ"):
        _scheme(_with_scale, parameter_docs=docs)


def test_norm_of_a_scheme_is_a_norm():
    with pytest.raises(SchemeError, match="norm must be rms or layer"):
        _scheme(_with_scale, parameter_docs={"scale": "x"}, norm=NormKind.NONE)


def test_parameters_show_present_values():
    scheme = _scheme(_with_scale, parameter_docs={"scale": "x"})
    changed = scheme.with_parameters(scale="3")
    assert dict(scheme.parameters) == {"scale": 1.0}
    assert dict(changed.parameters) == {"scale": "3"}
    assert dict(changed.with_parameters(scale=4.0).parameters) == {"scale": 4.0}
    assert changed.specs(2)[0].shortcut_scale == 3.0


def test_unknown_parameter_lists_the_known():
    with pytest.raises(SchemeError, match="'keel' has no parameter 'beta'; its parameters: alpha"):
        get_scheme("keel").with_parameters(beta=1.0)
    with pytest.raises(SchemeError, match="'pre_ln' has no parameter 'alpha'; its parameters: none"):
        get_scheme("pre_ln").with_parameters(alpha=1.0)


def test_value_that_no_depth_accepts_is_refused_at_once():
    with pytest.raises(SchemeError, match="alpha must be positive, but '-1'"):
        get_scheme("keel").with_parameters(alpha="-1")


def test_value_that_some_depths_accept_is_refused_where_it_fails():
    scheme = get_scheme("keel").with_parameters(alpha="L - 8")
    assert scheme.specs(10)[-1].shortcut_scale == 2.0
    with pytest.raises(SchemeError, match="'L - 8' is 0 at 8 sub-layers"):
        scheme.specs(8)


@pytest.mark.parametrize("index", [-1, 4, 5])
def test_index_outside_the_model_is_refused(index):
    with pytest.raises(SchemeError, match=rf"sub-layer index {index} is not in 0..3 \(4 sub-layers\)"):
        get_scheme("pre_ln").spec(index, 4, SublayerKind.FFN)


@pytest.mark.parametrize("n_sublayers", [0, -2])
def test_model_without_sublayers_is_refused(n_sublayers):
    with pytest.raises(SchemeError, match=f"at least 1 sub-layer, got {n_sublayers}"):
        get_scheme("pre_ln").specs(n_sublayers)


def test_with_norm_changes_only_the_norms_that_are_there():
    rms, layer = get_scheme("keel").specs(4), get_scheme("keel").with_norm(NormKind.LAYER).specs(4)
    assert [spec.norm_out for spec in layer] == [NormKind.NONE, *[NormKind.LAYER] * 3]
    for a, b in zip(rms, layer, strict=True):
        assert dataclasses.replace(b, norm_in=a.norm_in, norm_out=a.norm_out) == a
