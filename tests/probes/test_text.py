from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from probes.checkpoint import Checkpoint, load_checkpoint
from probes.errors import TextError
from probes.layout import Objective
from probes.text import IGNORED, causal_batches, checkpoint_batches, default_text, masked_batches, read_text, sequence_length
from probes.tokenization import ByteTokenizer
from tests.probes._all_families import tiny_of_kind
from tests.probes._tiny import tiny_model


def test_default_text_is_english_prose_of_some_length() -> None:
    text = default_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 2_000


def test_text_comes_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("naïve text", encoding="utf-8")
    assert read_text(str(path)) == ("naïve text", str(path))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("naïve".encode())))
    assert read_text("-") == ("naïve", "standard input")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00text", "not UTF-8 text"), (b"ab\x00cd", "NUL character at position 2")],
)
def test_binary_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(TextError, match=message):
        read_text(str(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="No such file"):
        read_text(str(tmp_path / "nothing.txt"))
    with pytest.raises(TextError, match="is a folder"):
        read_text(str(tmp_path))
    with pytest.raises(TextError, match=r"cannot read the text x+: File name too long"):
        read_text("x" * 300)
    with pytest.raises(TextError, match="name of the text is empty; --text takes a file"):
        read_text("")


def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(TextError, match="standard input is closed; pipe a text in"):
        read_text("-")
    closed = io.BytesIO()
    closed.close()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=closed))
    with pytest.raises(TextError, match=r"cannot read the text from standard input: .*closed"):
        read_text("-")


@pytest.mark.parametrize(("n_ids", "seq_len", "batch_size"), [(10, 4, 1), (10, 5, 2), (9, 2, 3), (4, 100, 1)])
def test_causal_batches_predict_each_following_token_once(n_ids: int, seq_len: int, batch_size: int) -> None:
    ids = list(range(100, 100 + n_ids))
    batches = causal_batches(ids, n_tokens=n_ids, seq_len=seq_len, batch_size=batch_size)
    rows = [row for batch in batches for row in batch.inputs.tolist()]
    targets = [row for batch in batches for row in batch.targets.tolist()]
    expected = [ids[i : i + seq_len] for i in range(0, n_ids, seq_len)]
    assert rows == [row for row in expected if len(row) > 1]
    assert targets == [[*row[1:], IGNORED] for row in rows]
    assert all(len(batch.inputs) <= batch_size for batch in batches)


def test_a_prefix_starts_every_sequence_and_counts_towards_its_length() -> None:
    batches = causal_batches(list(range(10, 16)), n_tokens=6, seq_len=4, prefix=1)
    assert [batch.inputs.tolist() for batch in batches] == [[[1, 10, 11, 12]], [[1, 13, 14, 15]]]


def test_no_more_tokens_than_asked_for_are_used() -> None:
    batches = causal_batches(list(range(50)), n_tokens=8, seq_len=4)
    assert sum(batch.inputs.numel() for batch in batches) == 8


@pytest.mark.parametrize("ids", [[], [5]])
def test_less_than_two_tokens_are_refused(ids: list[int]) -> None:
    with pytest.raises(TextError, match="at least two tokens"):
        causal_batches(ids, n_tokens=10, seq_len=4)


def test_masked_batches_mask_15_percent_and_predict_only_there() -> None:
    ids = list(range(200, 300))
    [batch] = masked_batches(ids, n_tokens=100, seq_len=100, mask_id=3)
    masked = batch.inputs == 3
    assert masked.sum() == 15
    assert torch.equal(batch.targets != IGNORED, masked)
    assert torch.equal(torch.where(masked, batch.targets, batch.inputs)[0], torch.tensor(ids))
    [again] = masked_batches(ids, n_tokens=100, seq_len=100, mask_id=3)
    [other] = masked_batches(ids, n_tokens=100, seq_len=100, mask_id=3, seed=1)
    assert torch.equal(batch.inputs, again.inputs)
    assert not torch.equal(batch.inputs, other.inputs)


def _checkpoint(**config: object) -> SimpleNamespace:
    layout = SimpleNamespace(objective=Objective.CAUSAL)
    model = SimpleNamespace(config=SimpleNamespace(**config))
    return SimpleNamespace(model=model, layout=layout, tokenizer=ByteTokenizer(256), source="a model")


def test_sequences_end_at_the_context_of_the_model() -> None:
    batches = checkpoint_batches(_checkpoint(max_position_embeddings=8, vocab_size=256), "abcdefghijklmnop", n_tokens=16)
    assert [tuple(batch.inputs.shape) for batch in batches] == [(1, 8), (1, 8)]
    with pytest.raises(TextError, match="longer than the context of a model, 8 tokens"):
        checkpoint_batches(_checkpoint(max_position_embeddings=8, vocab_size=256), "abc", n_tokens=16, seq_len=9)


def test_a_shorter_rest_is_left_out_unless_it_is_all_there_is() -> None:
    whole = checkpoint_batches(_checkpoint(vocab_size=256), "abcdefghij", n_tokens=10, seq_len=4)
    assert [tuple(batch.inputs.shape) for batch in whole] == [(1, 4), (1, 4)]
    short = checkpoint_batches(_checkpoint(vocab_size=256), "abc", n_tokens=10, seq_len=4)
    assert [tuple(batch.inputs.shape) for batch in short] == [(1, 3)]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(TextError, match="outside the model's vocabulary of 100"):
        checkpoint_batches(_checkpoint(vocab_size=100), "zz", n_tokens=10)


WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | {f"w{i}": i for i in range(4, 64)}
AROUND = {
    "bert": ("[CLS] $A [SEP]", (1,), (2,)),
    "end only": ("$A [SEP]", (), (2,)),
    "two before": ("[CLS] [SEP] $A [SEP]", (1, 2), (2,)),
    "none": (None, (), ()),
}


def masked_checkpoint(template: str | None, folder: Path) -> Checkpoint:
    """A masked language model with a tokenizer of words that puts its special tokens as the template says."""
    tiny_model("bert", torch.float32).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        special = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", mask_token="[MASK]")
    fast.save_pretrained(folder)
    return load_checkpoint(folder)


@pytest.mark.parametrize(("template", "before", "after"), AROUND.values(), ids=AROUND)
def test_masked_sequences_stand_between_the_tokenizers_own_special_tokens(template, before, after, tmp_path) -> None:
    checkpoint = masked_checkpoint(template, tmp_path)
    text = " ".join(f"w{4 + i % 60}" for i in range(200))
    batches = checkpoint_batches(checkpoint, text, n_tokens=100, seq_len=20, batch_size=2, seed=5)
    n_around = len(before) + len(after)
    assert {batch.inputs.shape[1] for batch in batches} == {20}
    for batch in batches:
        body = batch.inputs[:, len(before) : 20 - len(after)]
        targets = batch.targets[:, len(before) : 20 - len(after)]
        assert batch.inputs[:, : len(before)].tolist() == [list(before)] * len(body)
        assert batch.inputs[:, 20 - len(after) :].tolist() == [list(after)] * len(body)
        assert batch.n_predictions == int((targets != IGNORED).sum()) == len(body) * round(0.15 * (20 - n_around))
        assert ((body == 3) == (targets != IGNORED)).all()
        assert not torch.isin(body, torch.tensor([0, 1, 2])).any()
    plain = masked_batches(
        checkpoint.tokenizer.encode(text), n_tokens=100, seq_len=20 - n_around, mask_id=3, batch_size=2, seed=5
    )
    assert all(torch.equal(a.inputs[:, len(before) : 20 - len(after)], b.inputs) for a, b in zip(batches, plain, strict=False))


def test_special_tokens_that_leave_no_room_are_refused(tmp_path) -> None:
    checkpoint = masked_checkpoint("[CLS] $A [SEP]", tmp_path)
    with pytest.raises(TextError, match=r"a sequence of 3 tokens holds 2 special ones .* a seq_len of at least 4 works"):
        checkpoint_batches(checkpoint, "w4 w5 w6 w7 w8", n_tokens=5, seq_len=3)


def test_a_table_of_positions_that_starts_after_the_padding_is_no_longer_than_it_is() -> None:
    model = tiny_of_kind("roberta-masked", torch.float32)
    checkpoint = SimpleNamespace(model=model, source="roberta")
    longest = sequence_length(checkpoint, None)
    assert longest == 64 - 1 - model.config.pad_token_id
    assert torch.isfinite(model(torch.full((1, longest), 5)).logits).all()
    with pytest.raises(TextError, match=f"context of roberta, {longest} tokens"):
        sequence_length(checkpoint, longest + 1)
