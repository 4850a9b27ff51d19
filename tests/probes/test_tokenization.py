"""Tokenizers: of every kind of file that checkpoints bring, asked for by name, or missing and refused."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
import transformers

from probes import tokenization
from probes.checkpoint import load_checkpoint
from probes.errors import CheckpointError, KeelError, TextError
from probes.tokenization import FastTokenizer, Tokenizer, asked_tokenizer, folder_tokenizer
from tests._cli import run_keel
from tests.probes._gguf import gguf_model, write_gguf


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


VOCAB = 400
TEXT = "Deep models, été\n don't  count 12345 \U0001f600"


@pytest.fixture(scope="module")
def prose() -> list[str]:
    return (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()


def trained(prose: list[str], kind: str, **options: object) -> bytes:
    """A real, small sentencepiece model."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose), model_writer=written, vocab_size=VOCAB, model_type=kind, minloglevel=2, **options
    )
    return written.getvalue()


def folder_with(folder: Path, files: dict[str, bytes | str], family: str = "llama") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refusal(tokenizer: Tokenizer) -> str:
    with pytest.raises(TextError, match=r"--tokenizer bytes") as error:
        tokenizer.encode("text")
    assert len(str(error.value).splitlines()) <= 5
    return str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
@pytest.mark.parametrize("family", ["llama", "gemma", "mistral"])
@pytest.mark.parametrize(
    ("kind", "options"), [("bpe", {"byte_fallback": True}), ("unigram", {}), ("bpe", {"add_dummy_prefix": False})]
)
def test_a_sentencepiece_file_gives_the_ids_of_sentencepiece(kind, options, family, name, prose, tmp_path) -> None:
    stored = trained(prose, kind, **options)
    expected = sentencepiece.SentencePieceProcessor(model_proto=stored).encode(TEXT)
    tokenizer, noticed = folder_tokenizer(folder_with(tmp_path / "m", {name: stored}, family), VOCAB)
    assert tokenizer.encode(TEXT) == expected
    assert (tokenizer.vocab_size, tokenizer.start_token_id, noticed) == (VOCAB, 1, ())


@pytest.mark.parametrize(("settings", "first"), [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, None)])
def test_the_folder_says_whether_sequences_begin_with_a_first_token(settings, first, prose, tmp_path) -> None:
    files = {"tokenizer.model": trained(prose, "bpe"), "tokenizer_config.json": json.dumps(settings)}
    tokenizer, _ = folder_tokenizer(folder_with(tmp_path / "m", files), VOCAB)
    assert (tokenizer.start_token_id, tokenizer.bos_token_id) == (first, 1)


def test_families_that_shift_the_ids_of_sentencepiece_are_read_by_their_class(prose, tmp_path) -> None:
    stored = trained(prose, "unigram")
    plain = sentencepiece.SentencePieceProcessor(model_proto=stored).encode("deep models learn")
    folder = folder_with(tmp_path / "m", {"sentencepiece.bpe.model": stored}, "xlm-roberta")
    tokenizer, _ = folder_tokenizer(folder, VOCAB + 2)
    assert tokenizer.encode("deep models learn") == [i + 1 for i in plain]
    assert tokenizer.mask_token_id is not None


def test_a_sentencepiece_file_that_is_read_otherwise_is_refused(prose, tmp_path) -> None:
    folder = folder_with(tmp_path / "m", {"sentencepiece.bpe.model": trained(prose, "bpe", byte_fallback=True)}, "xlm-roberta")
    assert "transformers splits a text otherwise than sentencepiece" in refusal(folder_tokenizer(folder, VOCAB + 2)[0])


def test_a_text_beyond_the_models_vocabulary_is_refused(prose, tmp_path) -> None:
    folder = folder_with(tmp_path / "m", {"tokenizer.model": trained(prose, "bpe")})
    with pytest.raises(TextError, match=r"the text holds token \d+, the model knows 100"):
        folder_tokenizer(folder, 100)[0].encode(TEXT)


RANKS = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
JSON_FILE = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": "none"}})
BROKEN: dict[str, tuple[dict[str, bytes | str], str]] = {
    "no file at all": ({}, r"has no tokenizer file"),
    "tiktoken under the name of sentencepiece": ({"tokenizer.model": RANKS}, r"is a tiktoken file, which states neither"),
    "tiktoken": ({"qwen.tiktoken": RANKS}, r"no file with a vocabulary"),
    "cut": ({"tokenizer.model": b"\n\x0e\n\x05<unk>\x15"}, r"is not a readable sentencepiece model"),
    "empty": ({"tokenizer.model": b""}, r"is not a readable sentencepiece model"),
    "another format": ({"spiece.model": b"PK\x03\x04" * 9}, r"is not a readable sentencepiece model"),
    "no JSON": ({"tokenizer.json": "{"}, r"its tokenizer cannot be read"),
    "JSON of another kind": ({"tokenizer.json": "[]"}, r"its tokenizer cannot be read"),
    "a broken vocabulary": ({"tokenizer.json": JSON_FILE}, r"its tokenizer cannot be read"),
    "settings alone": ({"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, r"no file with a vocabulary"),
    "settings of another family alone": ({"tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}'}, r"vocabulary"),
    "merges alone": ({"merges.txt": "#version\na b\n"}, r"vocabulary|cannot be read"),
}


@pytest.mark.parametrize(("files", "message"), BROKEN.values(), ids=BROKEN)
def test_a_text_is_refused_where_there_is_no_tokenizer_that_can_be_read(files, message, tmp_path) -> None:
    folder = folder_with(tmp_path / "m", files)
    tokenizer, _ = folder_tokenizer(folder, 512)
    said = refusal(tokenizer)
    assert tokenizer.name == "none"
    with pytest.raises(CheckpointError, match=message):
        asked_tokenizer(folder, 512)
    assert str(folder) in said


def test_without_sentencepiece_its_extra_is_named(prose, tmp_path, monkeypatch) -> None:
    folder = folder_with(tmp_path / "m", {"tokenizer.model": trained(prose, "bpe")})
    found = importlib.util.find_spec
    monkeypatch.setattr(tokenization, "find_spec", lambda name: None if name == "sentencepiece" else found(name))
    assert "pip install 'keel-dynamics[sentencepiece]'" in refusal(folder_tokenizer(folder, VOCAB)[0])


def test_a_byte_level_tokenizer_of_transformers_is_used(tmp_path) -> None:
    folder = folder_with(tmp_path / "m", {"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, "t5")
    tokenizer, _ = folder_tokenizer(folder, 400)
    assert tokenizer.encode("aé") == [97 + 3, 195 + 3, 169 + 3]


def words(folder: Path) -> Path:
    """A tokenizer of whole words, as a tokenizer.json."""
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[unk]": 0, "deep": 1, "models": 2}, unk_token="[unk]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_can_be_named(prose, tmp_path) -> None:
    there = words(tmp_path / "words")
    stored = trained(prose, "unigram")
    (tmp_path / "any.spm").write_bytes(stored)
    file = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    for asked in (there, str(there), there / "tokenizer.json"):
        assert asked_tokenizer(asked, 64)[0].encode("models deep x") == [2, 1, 0]
    expected = sentencepiece.SentencePieceProcessor(model_proto=stored).encode(TEXT)
    assert asked_tokenizer(tmp_path / "any.spm", VOCAB)[0].encode(TEXT) == expected
    assert asked_tokenizer(file, 64)[0].encode("AB") == [63]
    assert asked_tokenizer("bytes", 256)[0].encode("é") == [195, 169]


@pytest.mark.parametrize("asked", ["byte", "nowhere/tokenizer.json", ""])
def test_a_tokenizer_that_is_not_there_is_refused(asked, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeelError, match=r"there is no tokenizer|has no tokenizer file"):
        asked_tokenizer(asked, 256)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("command", ["grad-norm", "layer-removal", "alignment"])
def test_commands_refuse_and_name_the_cure_or_take_what_is_asked_for(
    command, checkpoint, prose, tmp_path, monkeypatch, capsys
) -> None:
    short = ("--tokens", "24", "--seq-len", "12", "--json")
    (checkpoint / "tokenizer.model").write_bytes(RANKS)
    code, out, err = run_keel(monkeypatch, capsys, command, checkpoint, *short)
    assert (code, out) == (2, "")
    assert "tiktoken" in err
    assert "--tokenizer bytes" in err
    code, out, err = run_keel(monkeypatch, capsys, command, checkpoint, "--tokenizer", "bytes", *short)
    assert (code, json.loads(out)["tokenizer"]) == (0, "bytes"), err
    (checkpoint / "tokenizer.model").write_bytes(trained(prose, "bpe"))
    code, out, err = run_keel(monkeypatch, capsys, command, checkpoint, *short)
    assert code == 0, err
    assert json.loads(out)["tokenizer"].startswith("sentencepiece")
    code, out, err = run_keel(monkeypatch, capsys, command, checkpoint, "--tokenizer", tmp_path / "none", *short)
    assert (code, out) == (2, "")
    assert "there is no tokenizer" in err


def test_a_pruned_model_keeps_its_sentencepiece_file(checkpoint, prose, tmp_path, monkeypatch, capsys) -> None:
    (checkpoint / "tokenizer.model").write_bytes(trained(prose, "bpe"))
    arguments = (
        "layer-removal",
        checkpoint,
        "--tokens",
        "24",
        "--seq-len",
        "12",
        "--remove",
        "0",
        "--save",
        tmp_path / "smaller",
    )
    code, _, err = run_keel(monkeypatch, capsys, *arguments)
    assert code == 0, err
    saved, original = (load_checkpoint(folder).tokenizer for folder in (tmp_path / "smaller", checkpoint))
    assert saved.encode(TEXT) == original.encode(TEXT)


def test_a_gguf_tokenizer_that_cannot_be_read_is_refused(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    content = path.read_bytes()
    kind = content.index(b"tokenizer.ggml.model") + len("tokenizer.ggml.model") + 12
    path.write_bytes(content[:kind] + b"gptX" + content[kind + 4 :])
    assert "its tokenizer cannot be read" in refusal(load_checkpoint(path).tokenizer)
