"""The contract of a scheme, over every registered one."""

import copy
import dataclasses
import importlib
import pickle
import pkgutil
import re

import pytest

import keel_theory.schemes
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import GateKind, NormKind, ResidualSpec, SchemeError, SublayerKind, alternating_kinds
from tests._asserts import assert_runs_match_specs

every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
DEPTHS = (1, 2, 3, 4, 12, 129, 1024)


SOURCE = r"arXiv:\d{4}\.\d{5}|unpublished"
"""A paper, or the plain word that there is none."""


def _modules():
    return [module.name for module in pkgutil.iter_modules(keel_theory.schemes.__path__)]


def test_every_module_is_registered_and_every_entry_has_its_module():
    assert sorted(_modules()) == sorted(SCHEMES)


@pytest.mark.parametrize("name", _modules())
def test_module_registers_its_own_scheme_under_its_own_name(name):
    module = importlib.import_module(f"keel_theory.schemes.{name}")
    assert module.__all__ == ["SCHEME"]
    assert SCHEMES[name] is module.SCHEME
    assert module.SCHEME.name == name


@pytest.mark.parametrize("name", _modules())
def test_module_docstring_gives_equation_and_source(name):
    documentation = importlib.import_module(f"keel_theory.schemes.{name}").__doc__
    assert ".. math::" in documentation
    assert re.search(SOURCE, documentation)


@every_scheme
def test_words_are_there(scheme):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", scheme.name)
    assert scheme.label.strip()
    assert "x'" in scheme.equation
    assert "x'" in scheme.latex
    assert re.search(SOURCE, scheme.source)
    assert scheme.latex.count("{") == scheme.latex.count("}")
    assert scheme.latex.count(r"\left") == scheme.latex.count(r"\right")


def test_labels_are_distinct():
    assert len({scheme.label for scheme in SCHEMES.values()}) == len(SCHEMES)


@every_scheme
def test_every_parameter_is_documented(scheme):
    assert set(scheme.parameter_docs) == set(scheme.parameters)
    assert all(text.strip() for text in scheme.parameter_docs.values())


@every_scheme
@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_one_spec_per_sublayer(scheme, n_sublayers):
    specs = scheme.specs(n_sublayers)
    assert len(specs) == n_sublayers
    assert all(isinstance(spec, ResidualSpec) for spec in specs)


@every_scheme
@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_specs_depend_on_position_depth_and_kind_alone(scheme, n_sublayers):
    backwards = [scheme.spec(i, n_sublayers, kind) for i, kind in reversed(list(enumerate(alternating_kinds(n_sublayers))))]
    assert scheme.specs(n_sublayers) == scheme.specs(n_sublayers) == tuple(reversed(backwards))


@every_scheme
def test_scheme_and_specs_are_frozen_and_hashable(scheme):
    specs = scheme.specs(12)
    assert hash(specs) == hash(scheme.specs(12))
    assert hash(scheme) == hash(copy.copy(scheme))
    for value, name in ((scheme, "name"), (specs[0], "norm_in")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(value, name, "other")


@every_scheme
def test_survives_copy_and_pickle(scheme):
    for twin in (copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert twin == scheme
        assert twin.specs(12) == scheme.specs(12)


@every_scheme
def test_present_parameter_values_are_accepted_as_numbers_and_as_text(scheme):
    values = dict(scheme.parameters)
    as_text = {name: str(value) for name, value in values.items()}
    assert scheme.with_parameters(**values).specs(12) == scheme.specs(12)
    assert scheme.with_parameters(**as_text).specs(12) == scheme.specs(12)


@every_scheme
def test_absurd_values_of_every_parameter_are_refused(scheme):
    for name in scheme.parameters:
        with pytest.raises(ValueError, match=rf"{name}|is not allowed"):
            scheme.with_parameters(**{name: "L.__class__"})


@every_scheme
def test_unknown_parameter_is_refused(scheme):
    with pytest.raises(SchemeError, match=f"scheme '{scheme.name}' has no parameter 'no_such'"):
        scheme.with_parameters(no_such=1.0)


@every_scheme
def test_norm_kind_is_the_schemes_own(scheme):
    for spec in scheme.with_norm(NormKind.LAYER).specs(12):
        assert NormKind.RMS not in {spec.norm_in, spec.norm_branch, spec.norm_out}


@every_scheme
def test_queries_keys_and_values_exist_in_attention_only(scheme):
    assert not any(spec.qkv_norm for spec in scheme.specs(12)[1::2])


@every_scheme
def test_gate_bias_belongs_to_a_gate(scheme):
    assert all(spec.gate is GateKind.HIGHWAY or spec.gate_bias == 0.0 for spec in scheme.specs(12))


@every_scheme
def test_kind_is_taken_from_the_argument_and_not_from_the_index(scheme):
    as_attention = scheme.spec(6, 12, SublayerKind.ATTENTION)
    assert scheme.spec(7, 12, SublayerKind.ATTENTION).norm_out == as_attention.norm_out


@every_scheme
@pytest.mark.parametrize("n_sublayers", DEPTHS)
def test_runs_say_the_same_as_the_specs(scheme, n_sublayers):
    assert_runs_match_specs(scheme, n_sublayers)


@pytest.mark.parametrize("n_sublayers", DEPTHS)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("hybrid_norm", {"variant": "star"}), ("mix_ln", {"ratio": 0}), ("mix_ln", {"ratio": "0.4"}), ("mix_ln", {"ratio": 1})],
)
def test_runs_follow_the_parameters(name, parameters, n_sublayers):
    assert_runs_match_specs(get_scheme(name).with_parameters(**parameters), n_sublayers)


def test_unknown_name_lists_the_known():
    with pytest.raises(SchemeError, match=r"unknown scheme 'rezero'; known: highway, post_ln, .*, keel"):
        get_scheme("rezero")


def test_mapping_cannot_be_changed():
    with pytest.raises(TypeError, match="does not support item assignment"):
        SCHEMES["other"] = SCHEMES["keel"]
