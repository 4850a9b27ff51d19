"""Schemes that a user adds while the process runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from figures._style import scheme_style
from keel_theory import schemes
from keel_theory.propagation import shortcut_log_product
from keel_theory.schemes import SCHEMES, get_scheme, register_scheme
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SchemeError, SublayerKind
from probes.config import tiny
from probes.model import Transformer


def _rule(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, share: float = 2.0) -> ResidualSpec:
    return ResidualSpec(norm_out=NormKind.RMS, shortcut_scale=share)


MINE = Scheme(
    name="my_scheme",
    label="Mine",
    equation="x' = LN(2*x + F(x))",
    latex="x' = LN(2x + F(x))",
    source="unpublished",
    rule=_rule,
    parameter_docs={"share": "shortcut scale"},
)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(SCHEMES)
    yield
    schemes._REGISTERED.clear()
    schemes._REGISTERED.update(before)


def test_theory_and_models_know_a_registered_scheme() -> None:
    assert register_scheme(MINE) is MINE
    assert get_scheme("my_scheme") is SCHEMES["my_scheme"] is MINE
    assert shortcut_log_product(get_scheme("my_scheme"), 6) == pytest.approx(6 * shortcut_log_product(MINE, 1))
    model = Transformer(tiny("my_scheme"))
    assert {sublayer.spec.shortcut_scale for sublayer in model.sublayers()} == {2.0}
    assert scheme_style("my_scheme").color not in {scheme_style("keel").color, scheme_style("post_ln").color}


def test_registering_again_replaces() -> None:
    register_scheme(MINE)
    other = replace(MINE, label="Mine, mended")
    register_scheme(other)
    assert get_scheme("my_scheme") is other


@pytest.mark.parametrize("name", ["keel", "post_ln"])
def test_the_toolkit_s_own_schemes_stay(name: str) -> None:
    own = get_scheme(name)
    with pytest.raises(SchemeError, match=f"'{name}' is a scheme of the toolkit; give yours another name"):
        register_scheme(replace(MINE, name=name))
    assert get_scheme(name) is own


@pytest.mark.parametrize("name", ["", "My Scheme", "2fast", "a-b"])
def test_a_name_is_an_identifier(name: str) -> None:
    with pytest.raises(SchemeError, match="must be lower-case letters"):
        register_scheme(replace(MINE, name=name))
    assert name not in SCHEMES


def _hopeless(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    return ResidualSpec(shortcut_scale=-1.0)


def test_a_rule_without_a_value_is_refused() -> None:
    with pytest.raises(SchemeError, match="shortcut_scale must be a positive finite number"):
        register_scheme(replace(MINE, rule=_hopeless, parameter_docs={}))
    assert "my_scheme" not in SCHEMES
