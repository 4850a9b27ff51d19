"""What the commands say of checkpoints whose weights are not numbers, vanish or overflow: valid JSON, and words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from probes.config import tiny
from probes.model import Transformer
from probes.saving import save_model
from tests._cli import run_keel
from tests.probes._all_families import save_tiny

COMMANDS = ("grad-norm", "layer-removal", "alignment")


def _one(value: float) -> Callable[[nn.Module], None]:
    """One entry of the second block's first matrix."""

    def spoil(block: nn.Module) -> None:
        next(p for p in block.parameters() if p.ndim == 2)[0, 0] = value

    return spoil


def _all(value: float) -> Callable[[nn.Module], None]:
    def spoil(block: nn.Module) -> None:
        for parameter in block.parameters():
            parameter.fill_(value)

    return spoil


BAD = {
    "nan": _one(math.nan),
    "inf": _one(math.inf),
    "minus inf": _one(-math.inf),
    "overflow": _one(1e38),
    "block of nan": _all(math.nan),
    "block of zeros": _all(0.0),
    "block of huge values": _all(1e30),
}


def spoiled_own(bad: str, folder: Path) -> None:
    model = Transformer(tiny("pre_ln"))
    with torch.no_grad():
        BAD[bad](model.blocks[1])
    save_model(model, folder)


def spoiled_family(kind: str, bad: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(kind, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    block = nn.ParameterList([nn.Parameter(t) for name, t in tensors.items() if ".1." in name])
    with torch.no_grad():
        BAD[bad](block)
    save_file(tensors, path, metadata={"format": "pt"})


def spoiled(model: str, bad: str, folder: Path) -> Path:
    checkpoint = folder / model
    spoiled_own(bad, checkpoint) if model == "own" else spoiled_family(model, bad, checkpoint)
    (folder / "text.txt").write_text("Gradientsliveordiewithdepth" * 3, encoding="utf-8")
    return checkpoint


def refuse_constant(name: str) -> None:
    raise AssertionError(f"JSON has no word {name}")


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("model", ["own", "distilbert-masked", "falcon"])
@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_valid_and_the_page_says_it(command, model, bad, tmp_path, monkeypatch, capsys) -> None:
    checkpoint = spoiled(model, bad, tmp_path)
    options = (checkpoint, "--text", tmp_path / "text.txt", "--tokens", 48, "--seq-len", 16)
    code, out, err = run_keel(monkeypatch, capsys, command, *options, "--json")
    assert "Traceback" not in err
    if code == 2:  # alignment of a family whose branches are not visible, or a proof that overflows
        assert model.removesuffix("-masked") in err
        return
    assert code == 0, err
    record = json.loads(out, parse_constant=refuse_constant)
    assert all(math.isfinite(number) for number in numbers(record))
    code, page, _ = run_keel(monkeypatch, capsys, command, *options)
    assert code == 0
    assert not re.findall(r"(?<![\w/])[+-]?(nan|inf)%?(?!\w)", page.replace(str(tmp_path), ""))
    assert "NaN" in page or "nan" not in bad


@pytest.mark.parametrize("bad", ["nan", "overflow", "block of zeros"])
@pytest.mark.parametrize("command", COMMANDS)
def test_files_hold_a_status_for_what_is_no_number(command, bad, tmp_path, monkeypatch, capsys) -> None:
    checkpoint = spoiled("own", bad, tmp_path)
    options = (checkpoint, "--text", tmp_path / "text.txt", "--tokens", 48, "--seq-len", 16)
    code, _, err = run_keel(monkeypatch, capsys, command, *options, "-o", tmp_path / "out")
    assert code == 0, err
    stored = next((tmp_path / "out").glob("*.json")).read_text(encoding="utf-8")
    json.loads(stored, parse_constant=refuse_constant)
    frame = pd.read_parquet(next((tmp_path / "out").glob("*.parquet")))
    said = frame.loc[~frame["value"].map(math.isfinite), "status"]
    assert not set(said) & {"ok", "measured", "zero"}


def test_alignment_of_nan_is_not_called_no_update(tmp_path, monkeypatch, capsys) -> None:
    checkpoint = spoiled("own", "nan", tmp_path)
    options = (checkpoint, "--text", tmp_path / "text.txt", "--tokens", 48, "--seq-len", 16)
    _, page, _ = run_keel(monkeypatch, capsys, "alignment", *options)
    assert "no update" not in page
    assert "not a number (NaN)" in page
    _, out, _ = run_keel(monkeypatch, capsys, "alignment", *options, "--json")
    rows = json.loads(out)["sublayers"]
    first = next(i for i, row in enumerate(rows) if row["status"]["alignment"] != "measured")
    assert rows[first]["alignment"] is None
    assert {row["status"]["alignment"] for row in rows[first:]} == {"nan"}
    assert all(row["status"]["alignment"] == "measured" for row in rows[:first])


def test_a_huge_loss_keeps_its_differences_in_nats(tmp_path, monkeypatch, capsys) -> None:
    model = Transformer(tiny("pre_ln"))
    with torch.no_grad():
        model.final_norm.weight.mul_(1e5)
    save_model(model, tmp_path / "own")
    (tmp_path / "text.txt").write_text("Gradients live or die with depth. " * 9, encoding="utf-8")
    options = (tmp_path / "own", "--text", tmp_path / "text.txt", "--tokens", 256, "--seq-len", 16)
    code, out, err = run_keel(monkeypatch, capsys, "layer-removal", *options, "--json", "-o", tmp_path / "out")
    assert code == 0, err
    rows = json.loads(out, parse_constant=refuse_constant)["rows"]
    loss = next(row["value"] for row in rows if row["metric"] == "loss")
    assert 710 < loss < math.inf
    nats = [row for row in rows if row["metric"] == "delta_loss"]
    assert all(row["status"] == "ok" and math.isfinite(row["value"]) for row in nats)
    perplexities = [row for row in rows if row["metric"] == "delta_perplexity"]
    assert {(row["value"], row["status"]) for row in perplexities} <= {(None, "inf"), (0.0, "zero")}
    frame = pd.read_parquet(tmp_path / "out" / "layer_removal.parquet").set_index(["kind", "index", "metric"])["value"]
    for kind, index, metric in frame.index:
        if metric == "delta_perplexity":
            assert math.copysign(1, frame[kind, index, metric]) == math.copysign(1, frame[kind, index, "delta_loss"])
    _, page, _ = run_keel(monkeypatch, capsys, "layer-removal", *options)
    assert "NaN" not in page
    assert "perplexity > 1e308" in page
    assert "> 1e308" in page or "< -1e308" in page
