"""Byte-level BPE: exact round trips, equal training, refusals."""

import pytest
from tokenizers import Tokenizer

from probes.bpe import BpeEncoder, load_tokenizer, train_tokenizer
from probes.errors import TextError

TEXT = ["the cat sat on the mat, the cat sat", "naïve — the cat"]


def test_encoding_loses_nothing() -> None:
    content = train_tokenizer(TEXT, 280)
    ids = BpeEncoder(content).encode(TEXT)
    assert Tokenizer.from_str(content).decode(ids.tolist()) == "".join(f"{text}\n" for text in TEXT)
    assert len(ids) < len("\n".join(TEXT).encode()) / 1.5


def test_equal_texts_give_equal_tokenizers() -> None:
    assert train_tokenizer(TEXT, 280) == train_tokenizer(TEXT, 280)


@pytest.mark.parametrize("size", ["256", "many", "-5"])
def test_a_size_without_room_for_pairs_is_refused(size) -> None:
    with pytest.raises(TextError, match="needs a number of tokens above 256"):
        train_tokenizer(TEXT, size)


def test_a_stored_tokenizer_is_read_and_anything_else_refused(tmp_path) -> None:
    content = train_tokenizer(TEXT, 280)
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_tokenizer(tmp_path / "tokenizer.json") == content
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(TextError, match=r"other\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "other.json")
    with pytest.raises(TextError, match="give bytes, bpe:N"):
        load_tokenizer(tmp_path / "word-level")
