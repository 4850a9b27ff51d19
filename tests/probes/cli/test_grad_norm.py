"""``keel grad-norm``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers

from probes.cli.grad_norm import _MEANINGS, _block_row, _table
from probes.config import tiny
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer
from probes.saving import save_model
from tests._cli import run_keel
from tests.probes._tiny import VOCAB, tiny_ids, tiny_model

FILES = ["grad_norm.json", "grad_norm.parquet", "grad_norm.png", "grad_norm.svg"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "keel-tiny"
    save_model(Transformer(tiny("keel")), folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Gradients live or die with depth. " * 20, encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, "grad-norm", *arguments)


def test_table_has_every_block_and_a_verdict(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32)
    assert code == 0, err
    n_blocks = tiny("keel").n_blocks
    assert f"{n_blocks} blocks / {2 * n_blocks} sub-layers" in out
    for place in ["embedding", *(f"block {i}" for i in range(n_blocks)), "final norm", "head"]:
        assert any(line.startswith(place) for line in out.splitlines())
    assert "that at the last block" in out
    assert "shortcut-only one" in out


@pytest.mark.parametrize(("tokens", "shown"), [(32, False), (64, True)], ids=["one batch", "two batches"])
def test_the_loss_has_a_standard_error_where_there_are_several_batches(
    tokens, shown, checkpoint, text, monkeypatch, capsys
) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", tokens, "--seq-len", 32)
    assert code == 0, err
    [line] = [line for line in out.splitlines() if "; loss " in line]
    assert ("±" in line) == shown
    assert line.endswith(" nats/token")
    assert "nan" not in line


def test_the_table_says_where_the_shortcut_is_not_known() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    result = measure_gradient_norms(transformers.OpenAIGPTLMHeadModel(config), [tiny_ids()])
    assert [_block_row(result, block)["shortcut_only"] for block in range(2)] == ["not known", "not known"]
    llama = measure_gradient_norms(tiny_model("llama"), [tiny_ids()])
    assert float(str(_block_row(llama, 0)["shortcut_only"])) > 0


OF_SUBLAYERS = {"attention", "FFN", "attn/stream", "FFN/stream"}


@pytest.mark.parametrize("known", [True, False], ids=["sub-layers", "blocks only"])
def test_the_legend_explains_what_the_table_shows_and_nothing_else(known: bool) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    model = tiny_model("llama") if known else transformers.OpenAIGPTLMHeadModel(config)
    lines = _table(measure_gradient_norms(model, [tiny_ids()]), SimpleNamespace(source="here"), "a text").splitlines()
    heading = next(line for line in lines if line.startswith("place"))
    explained = " ".join(lines[lines.index("", 4) :])
    shown = {name for name in _MEANINGS if name.replace("_", " ") in re.split("  +", heading)}
    assert shown == set(_MEANINGS) - (set() if known else OF_SUBLAYERS)
    assert {name for name in _MEANINGS if f" {name.replace('_', ' ')}: " in f" {explained}"} == shown


def test_json_on_stdout_is_the_whole_result(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, _ = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["n_batches"] == 2
    assert (
        record["provenance"]["versions"]["torch"] == torch.__version__.split("+")[0]
        or record["provenance"]["versions"]["torch"]
    )
    assert record["seed"] == 0
    assert {row["metric"] for row in record["rows"]} >= {
        "loss",
        "stream_grad_norm",
        "shortcut_grad_norm",
        "stream_rms",
        "token_cosine",
        "param_grad_norm",
        "weight_norm",
        "grad_to_weight",
        "branch_rms",
        "branch_ratio",
    }


def test_output_folder_holds_four_whole_files_and_nothing_else(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "new" / "out"
    code, _, err = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32, "-o", folder)
    assert code == 0, err
    assert sorted(path.name for path in folder.iterdir()) == FILES
    record = json.loads((folder / "grad_norm.json").read_text())
    frame = pd.read_parquet(folder / "grad_norm.parquet")
    assert len(frame) == len(record["rows"])
    assert (folder / "grad_norm.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "grad_norm.svg").read_text()


def test_text_can_come_from_standard_input(checkpoint, monkeypatch, capsys) -> None:
    import io
    from types import SimpleNamespace

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"some text to read, twice over")))
    code, out, _ = run(monkeypatch, capsys, checkpoint, "--text", "-", "--seq-len", 8)
    assert code == 0
    assert "standard input" in out


def test_a_transformers_folder_is_read(tmp_path, text, monkeypatch, capsys) -> None:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path / "llama")
    code, out, err = run(monkeypatch, capsys, tmp_path / "llama", "--text", text, "--tokens", 16, "--seq-len", 8)
    assert code == 2  # a vocabulary of 64 has no bytes, and the folder has no tokenizer
    assert "tokenizer" in err
    assert out == ""


def test_bfloat16_keeps_the_stream_of_a_keel_model_in_float32(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, err = run(
        monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32, "--dtype", "bfloat16", "--json"
    )
    assert code == 0
    assert json.loads(out)["dtype"] == "float32"
    assert "float32" in err
    assert "stream" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "must be at least 2, got 0"),
        (["--tokens", "-5"], "must be at least 2"),
        (["--seq-len", "1"], "must be at least 2"),
        (["--batch-size", "0"], "must be at least 1"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used: it holds shapes and no numbers; 'cpu' always works"),
        (["--text", "no-such-file.txt"], "No such file"),
        (["--text", "x" * 300], "File name too long"),
        (["--text", ""], "name of the text is empty"),
        (["--seed", str(2**64)], "should be less than or equal to 9223372036854775807"),
        (["--seed", "-1"], "should be greater than or equal to 0"),
        (["--tokens", "many"], "unable to parse"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_bad_options_exit_with_2_and_write_nothing(arguments, message, checkpoint, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    code, out, err = run(monkeypatch, capsys, checkpoint, "-o", folder, *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert out == ""
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "0 token(s)"), (b"x", "1 token(s)"), (b"\x00\x01binary", "NUL character"), (b"\xff\xfe\xfa", "not UTF-8")],
)
def test_bad_texts_exit_with_2_and_write_nothing(content, message, checkpoint, tmp_path, monkeypatch, capsys) -> None:
    path, folder = tmp_path / "bad.txt", tmp_path / "out"
    path.write_bytes(content)
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", path, "-o", folder)
    assert code == 2
    assert message in err
    assert out == ""
    assert not folder.exists()


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _unknown_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "hypothetical"}))


@pytest.mark.parametrize(
    ("damage", "message"), [(_truncated, "model.safetensors"), (_pickled, "pickle"), (_unknown_family, "hypothetical")]
)
def test_bad_checkpoints_exit_with_2_and_write_nothing(damage, message, checkpoint, tmp_path, monkeypatch, capsys) -> None:
    damage(checkpoint)
    folder = tmp_path / "out"
    code, out, err = run(monkeypatch, capsys, checkpoint, "-o", folder)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not folder.exists()


def test_an_unwritable_output_is_refused_before_any_work(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    code, out, err = run(monkeypatch, capsys, checkpoint, "-o", blocked)
    assert code == 2
    assert "cannot write into" in err
    assert out == ""
    assert blocked.read_text() == "in the way"


def test_a_failure_in_the_middle_keeps_what_was_there(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "grad_norm.json").write_text("earlier result")
    monkeypatch.setattr("figures.gradient_norms.draw", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, _, err = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 32, "--seq-len", 16, "-o", folder)
    assert code == 2
    assert "No space left" in err
    assert [path.name for path in folder.iterdir()] == ["grad_norm.json"]
    assert (folder / "grad_norm.json").read_text() == "earlier result"
