"""Tokenizers that are read but fail at their work."""

from __future__ import annotations

import pytest

from probes.errors import TextError
from probes.tokenization import FastTokenizer


class _Backend:
    """Encodes the letter a alone."""

    def __len__(self) -> int:
        return 1

    def encode(self, text: str, **_: object) -> list[int]:
        if text != "a":
            raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")
        return [0]


def test_a_text_that_the_tokenizer_cannot_encode_is_refused() -> None:
    tokenizer = FastTokenizer(_Backend(), "there", 4)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TextError, match=r"_Backend from there cannot encode the text: WordLevel error: Missing \[UNK\]"):
        tokenizer.encode("b")
