"""Tokenizers in GGUF files split texts as the file states, or are refused by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from probes.errors import TextError
from probes.tokenization import gguf_tokenizer

TEXTS = ("In 1234567 days, it's 12.50", "DON'T  two\n\n\nlines\t x=42", "a  1!\n", " naïve ٣٤", "a")
ALONE = ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = ByteLevel(add_prefix_space=False)
DIGITS = Sequence([Digits(individual_digits=True), GPT2])
QWEN2 = Sequence([Split(Regex(PRETOKENIZE_REGEX), "isolated"), ALONE])
STATED = {
    "gpt-2": GPT2, "olmo": GPT2, "mpt": GPT2, "starcoder": DIGITS, "refact": DIGITS, "smollm": DIGITS, "command-r": DIGITS,
    "stablelm2": QWEN2, "qwen2": QWEN2, "default": GPT2, None: GPT2,
}  # fmt: skip


def written(path: Path, kind: str, tokens: list[str], pre: str | None, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    for name, value in more.items():
        getattr(writer, name)(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def joined_tokens() -> tuple[list[str], list[str]]:
    """A vocabulary in which every piece of every split is one token."""
    spelled = bytes_to_unicode()
    pieces = {piece for way in (GPT2, QWEN2, DIGITS) for text in TEXTS for piece, _ in way.pre_tokenize_str(text)}
    tokens, merges = list(spelled.values()), []
    for piece in sorted(pieces, key=len):
        for end in range(2, len(piece) + 1):
            if piece[:end] not in tokens:
                tokens.append(piece[:end])
                merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
    return tokens, merges


@pytest.mark.parametrize(("stated", "split"), STATED.items(), ids=map(str, STATED))
def test_a_text_is_split_as_the_file_states(stated: str | None, split: Any, tmp_path: Path) -> None:
    tokens, merges = joined_tokens()
    path = written(tmp_path / "m.gguf", "gpt2", tokens, stated, add_token_types=[1] * len(tokens), add_token_merges=merges)
    tokenizer, warnings = gguf_tokenizer(path, len(tokens))
    for text in TEXTS:
        starts = {start for _, (start, _) in split.pre_tokenize_str(text)}
        found = tokenizer._backend(text, add_special_tokens=False, return_offsets_mapping=True)  # type: ignore[attr-defined]
        assert starts <= {start for start, _ in found["offset_mapping"]}, text
        assert all(not any(first < start < stop for start in starts) for first, stop in found["offset_mapping"])
    assert any("tokenizer.ggml.pre" in warning for warning in warnings) == (stated in (None, "default"))


@pytest.mark.parametrize("stated", ["falcon", "deepseek-llm", "bloom", "nonsense"])
def test_a_split_that_is_not_known_is_refused_by_name(stated: str, tmp_path: Path) -> None:
    tokens = [*bytes_to_unicode().values(), "ab"]
    path = written(tmp_path / "m.gguf", "gpt2", tokens, stated, add_token_types=[1] * 257, add_token_merges=["a b"])
    with pytest.raises(TextError, match=rf"splits texts as '{stated}' .*\n.*--tokenizer"):
        gguf_tokenizer(path, 257)[0].encode("text")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_first_space_is_added_as_the_file_states(prefix: bool, tmp_path: Path) -> None:
    model = io.BytesIO()
    lines = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=600, model_type="bpe", byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix,
    )  # fmt: skip
    known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(known.get_piece_size())
    path = written(
        tmp_path / "m.gguf", "llama", [known.id_to_piece(i) for i in ids], "default",
        add_token_scores=[known.get_score(i) for i in ids],
        add_token_types=[6 if known.is_byte(i) else 3 if known.is_control(i) else 2 if known.is_unknown(i) else 1 for i in ids],
        add_unk_token_id=known.unk_id(), add_bos_token_id=known.bos_id(), add_add_space_prefix=prefix,
    )  # fmt: skip
    tokenizer, _ = gguf_tokenizer(path, len(ids))
    for text in ("the stream of a model", "two  spaces, 12\n\nlines", "a"):
        assert tokenizer.encode(text) == known.encode(text)


def test_a_tokenizer_beside_the_file_is_not_taken_for_its_own(tmp_path: Path) -> None:
    tokens, merges = joined_tokens()
    (tmp_path / "alone").mkdir()
    path = written(tmp_path / "alone" / "m.gguf", "gpt2", tokens, "gpt-2", add_token_merges=merges)
    alone, _ = gguf_tokenizer(path, len(tokens))
    expected = [alone.encode(text) for text in TEXTS]
    other = Tokenizer(models.WordLevel({"a": 0, "In": 1, "[UNK]": 2}, unk_token="[UNK]"))
    other.save(str(path.with_name("tokenizer.json")))
    path.with_name("tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    beside, _ = gguf_tokenizer(path, len(tokens))
    assert [beside.encode(text) for text in TEXTS] == expected
