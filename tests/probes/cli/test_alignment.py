"""``keel alignment``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from probes.config import tiny
from probes.model import Transformer
from probes.saving import save_model
from tests._cli import run_keel


def _silent_second_sublayer() -> Transformer:
    model = Transformer(tiny("keel"))
    with torch.no_grad():
        for parameter in list(model.sublayers())[1].branch.function.parameters():
            parameter.zero_()
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "keel-tiny"
    save_model(_silent_second_sublayer(), folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Gradients live or die with depth. " * 20, encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, "alignment", *arguments)


def test_table_has_every_sublayer_and_names_the_one_without_an_update(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32)
    assert code == 0, err
    lines = {line[:18].strip(): line for line in out.splitlines() if line.startswith("block ")}
    assert len(lines) == 2 * tiny("keel").n_blocks
    assert [name for name, line in lines.items() if "no update" in line] == ["block 0 ffn"]
    assert f"1 of {len(lines)} sub-layers have no update" in out
    assert "Mean alignment: attention " in out


def test_json_and_files_hold_the_same_numbers(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "out"
    code, out, _ = run(monkeypatch, capsys, checkpoint, "--text", text, "--tokens", 64, "--seq-len", 32, "--json", "-o", folder)
    record = json.loads(out)
    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["alignment.json", "alignment.parquet"]
    assert json.loads((folder / "alignment.json").read_text(encoding="utf-8")) == record
    assert record["sublayers"][1]["alignment"] is None
    frame = pd.read_parquet(folder / "alignment.parquet")
    first = frame[(frame["sublayer"] == 0) & (frame["metric"] == "alignment")]["value"].item()
    assert first == record["sublayers"][0]["alignment"]
    assert set(frame.loc[frame["status"] == "no update", "sublayer"]) == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere"),
        (("smollm2", "--tokens", "1"), "must be at least 2, got 1"),
        (("smollm2", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("smollm2", "--device", "abacus"), "cannot be used"),
        (("smollm2", "--text", "absent.txt"), "absent.txt"),
    ],
)
def test_bad_input_exits_with_2_and_leaves_no_file(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run(monkeypatch, capsys, *arguments, "-o", "out")
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []
