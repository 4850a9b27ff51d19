"""Every definition of the paper is what the model of its scheme computes, and no other scheme's."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from probes import printed_equations
from probes.printed_equations import PRINTED, largest_difference


@pytest.mark.parametrize("equation", PRINTED)
def test_model_is_the_printed_definition(equation: str) -> None:
    assert largest_difference(equation) < 1e-13


@pytest.mark.parametrize(
    ("equation", "other"),
    [
        ("3", "deepnorm"),
        ("5", "scaled_shortcut"),
        ("24", "deepnorm"),
        ("8", "scaled_shortcut_normed_input_gain"),
        ("25", "scaled_shortcut_normed_input_gain"),
    ],
)
def test_model_of_another_scheme_is_told_apart(equation: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**PRINTED, equation: replace(PRINTED[equation], scheme=other)}
    monkeypatch.setattr(printed_equations, "PRINTED", MappingProxyType(changed))
    assert largest_difference(equation) > 1e-3


def test_scale_is_the_number_of_sublayers_at_every_depth() -> None:
    assert largest_difference("8", n_blocks=2) < 1e-13
    assert largest_difference("5", n_blocks=7) < 1e-13
