"""``--seq-len`` of every command that reads a checkpoint: never beyond the model's context, never shortened in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probes.config import tiny
from probes.model import Transformer
from probes.saving import save_model
from tests._cli import run_keel

CONTEXT = tiny("keel").context_length
COMMANDS = {
    "grad-norm": ["grad-norm"],
    "grad-norm streamed": ["grad-norm", "--stream"],
    "grad-norm forecast": ["grad-norm", "--dry-run"],
    "alignment": ["alignment"],
    "layer-removal": ["layer-removal"],
    "layer-removal streamed": ["layer-removal", "--stream"],
    "layer-removal forecast": ["layer-removal", "--dry-run"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "keel-tiny"
    save_model(Transformer(tiny("keel")), folder)
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for i in range(2):
        (folder / f"{i}.txt").write_text("Gradients live or die with depth. " * 40, encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
@pytest.mark.parametrize("of_documents", [False, True], ids=["text", "documents"])
def test_more_than_the_context_is_refused(command, of_documents, checkpoint, documents, monkeypatch, capsys) -> None:
    if of_documents and command[0] != "layer-removal":
        command = [*command, "--text", str(documents / "0.txt")]
    elif of_documents:
        command = [*command, "--text", str(documents)]
    name, *options = command
    arguments = (name, checkpoint, "--tokens", 2 * CONTEXT, "--seq-len", CONTEXT + 1, *options)
    code, out, err = run_keel(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    told = f"sequences of {CONTEXT + 1} tokens are longer than the context of {checkpoint}, {CONTEXT} tokens; "
    assert f"{told}a seq_len of at most {CONTEXT} works" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["grad-norm", "alignment", "layer-removal"])
def test_the_context_itself_is_used_in_full(name, checkpoint, documents, monkeypatch, capsys) -> None:
    arguments = (name, checkpoint, "--text", documents / "0.txt", "--tokens", CONTEXT, "--seq-len", CONTEXT, "--json")
    code, out, err = run_keel(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert json.loads(out)["n_tokens"] == CONTEXT


def test_a_model_is_trained_at_the_length_asked_for_and_has_it_as_its_context(tmp_path, monkeypatch, capsys) -> None:
    size = ("--blocks", 1, "--width", 16, "--batch-size", 1, "--steps", 60, "--threads", 1)
    arguments = ("train", "--scheme", "pre_ln", *size, "--seq-len", CONTEXT + 1, "-o", tmp_path / "run")
    code, _, err = run_keel(monkeypatch, capsys, *arguments)
    assert code == 0, err
    told = json.loads((tmp_path / "run" / "training.json").read_text(encoding="utf-8"))["config"]
    assert (told["seq_len"], told["model"]["context_length"]) == (CONTEXT + 1, CONTEXT + 1)
