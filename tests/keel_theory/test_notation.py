from __future__ import annotations

import pytest

from keel_theory.errors import TheoryError
from keel_theory.notation import NOTATION, Notation, symbol


def test_every_quantity_is_there_once() -> None:
    texts = [each.text for each in NOTATION.values()]
    assert len(set(texts)) == len(texts)
    assert all(key == each.name for key, each in NOTATION.items())


@pytest.mark.parametrize("notation", NOTATION.values(), ids=lambda notation: notation.name)
def test_symbols_carry_their_assumptions_and_their_meaning(notation: Notation) -> None:
    assert symbol(notation.name) is notation.symbol
    assert notation.symbol.assumptions0.items() >= dict(notation.assumptions).items()
    assert notation.symbol.is_real
    assert notation.meaning
    assert notation.unit


def test_an_unknown_quantity_is_refused() -> None:
    with pytest.raises(TheoryError, match="no quantity 'x' in the notation; known: n_sublayers"):
        symbol("x")
