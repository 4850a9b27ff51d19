"""``keel layer-removal``: what it prints, what it writes, what it saves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from probes.checkpoint import load_checkpoint
from probes.config import tiny
from probes.model import Transformer
from probes.removal_estimates import ESTIMATES
from probes.saving import save_model
from tests._cli import run_keel
from tests.probes._models import perturbed
from tests.probes._tiny import tiny_model

FILES = ["layer_removal.json", "layer_removal.parquet", "layer_removal.png", "layer_removal.svg"]
SHORT = ("--tokens", 288, "--seq-len", 32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "keel-tiny"
    save_model(perturbed(Transformer(tiny("pre_ln"))), folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Gradients live or die with depth. " * 20, encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, "layer-removal", *arguments)


def test_table_has_every_block_its_modules_and_a_verdict(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT)
    assert code == 0, err
    assert "4 blocks / 8 sub-layers" in out
    for block in range(4):
        assert any(line.startswith(f"block {block} ") and " ± " in line for line in out.splitlines())
    assert "± over 9 sequences (bootstrap)" in out
    assert "modules of block 0: blocks.0; of block 3: blocks.3" in out
    assert "Most costly (nats/token): block" in out
    assert "Rank correlation of the cheap numbers" in out


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--unit", "attn"), [f"block {i} attention" for i in range(4)]),
        (("--span", "3"), ["blocks [0, 3)", "blocks [1, 4)"]),
    ],
)
def test_units_and_spans(options, names, checkpoint, text, monkeypatch, capsys) -> None:
    _, out, _ = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, "--json", *options)
    rows = json.loads(out)["rows"]
    assert [row["place"] for row in rows if row["kind"] == "unit" and row["metric"] == "delta_loss"] == names


def test_json_is_the_whole_result_and_files_hold_the_same(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, "--json", "-o", tmp_path / "out")
    assert code == 0
    record = json.loads(out)
    assert record["samples"] == "9 sequences"
    assert record["modules"]["block 1"] == ["blocks.1"]
    assert record["provenance"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert json.loads((tmp_path / "out" / "layer_removal.json").read_text()) == record
    frame = pd.read_parquet(tmp_path / "out" / "layer_removal.parquet")
    assert len(frame) == len(record["rows"])
    assert "wrote layer_removal.parquet" in err


def test_no_estimates(checkpoint, text, monkeypatch, capsys) -> None:
    _, out, _ = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, "--json", "--no-estimates")
    assert {row["metric"] for row in json.loads(out)["rows"]} == {
        "loss",
        "perplexity",
        "loss_without",
        "delta_loss",
        "delta_perplexity",
    }


@pytest.mark.parametrize(
    ("options", "hidden"),
    [((), ()), (("--stream",), ("taylor",)), (("--stream", "--estimates"), ()), (("--no-estimates",), ESTIMATES)],
    ids=["all", "streamed", "streamed with all", "none"],
)
def test_the_legend_explains_the_estimates_that_are_shown_and_no_other(
    options, hidden, checkpoint, text, monkeypatch, capsys
) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, *options)
    assert code == 0, err
    heading = next(line for line in out.splitlines() if line.startswith("removed"))
    for name in ESTIMATES:
        words = name.replace("_", " ")
        assert (words in heading, f"{words}: " in out) == (name not in hidden, name not in hidden)


def test_a_folder_of_documents(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text("Depth. " * (i + 2), encoding="utf-8")
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", folder, "--tokens", 400, "--json", "--batch-size", 4)
    assert code == 0, err
    record = json.loads(out)
    assert record["samples"] == "9 documents"
    n_bytes = sum(7 * (i + 2) for i in range(9))
    assert (record["n_tokens"], record["n_predictions"]) == (n_bytes, n_bytes - 9)


def test_named_blocks_are_saved_and_reload_with_the_measured_loss(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("--text", text, *SHORT, "--json", "--remove", "1:3", "--save", tmp_path / "smaller")
    code, out, err = run(monkeypatch, capsys, checkpoint, *arguments)
    assert code == 0, err
    assert "saved the model without blocks [1, 3) (blocks.1, blocks.2)" in err
    rows = json.loads(out)["rows"]
    full = next(row["value"] for row in rows if row["metric"] == "loss")
    delta = next(row["value"] for row in rows if row["kind"] == "named" and row["metric"] == "delta_loss")
    assert load_checkpoint(tmp_path / "smaller").layout.n_blocks == 2
    _, out, _ = run(monkeypatch, capsys, tmp_path / "smaller", "--text", text, *SHORT, "--json")
    again = next(row["value"] for row in json.loads(out)["rows"] if row["metric"] == "loss")
    assert again == pytest.approx(full + delta, abs=1e-5)


def test_what_is_cheap_together_is_saved_by_threshold(text, tmp_path, monkeypatch, capsys) -> None:
    model = perturbed(Transformer(tiny("pre_ln")))
    with torch.no_grad():
        model.blocks[2].attention.branch.function.output.weight.zero_()
        model.blocks[2].ffn.branch.function.down.weight.zero_()
    save_model(model, tmp_path / "idle")
    arguments = ("--text", text, *SHORT, "--threshold", "1e-6", "--json", "--save", tmp_path / "smaller")
    code, out, err = run(monkeypatch, capsys, tmp_path / "idle", *arguments)
    assert code == 0, err
    removable = json.loads(out)["removable"]
    assert "blocks.2" in removable["modules"]
    assert removable["delta_loss"] < 1e-6
    assert f"saved the model without {removable['name']} ({', '.join(removable['modules'])})" in err
    smaller = load_checkpoint(tmp_path / "smaller")
    assert smaller.layout.n_blocks == json.loads(out)["effective_depth"] == 4 - len(removable["modules"])


def test_models_of_transformers_are_saved_too(text, tmp_path, monkeypatch, capsys) -> None:
    model = tiny_model("qwen2", torch.float32)
    model.resize_token_embeddings(256)
    model.save_pretrained(tmp_path / "qwen")
    arguments = (tmp_path / "qwen", "--text", text, "--tokenizer", "bytes", *SHORT, "--remove", "0")
    code, _, err = run(monkeypatch, capsys, *arguments, "--save", tmp_path / "smaller")
    assert code == 0, err
    assert "saved the model without block 0 (model.layers.0)" in err
    assert json.loads((tmp_path / "smaller" / "config.json").read_text())["layer_types"] == model.config.layer_types[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--span", "5"), "a span of 5 does not fit: the model has 4 blocks"),
        (("--unit", "head"), "unknown unit 'head'; known: block, sublayer, attn, ffn"),
        (("--remove", "4"), "there is no block 4: the model has 4, counted from 0 to 3"),
        (("--remove", "0:100000000000"), "there is no block 99999999999: the model has 4, counted from 0 to 3"),
        (("--remove", "7:9,1"), "there is no block 7: the model has 4, counted from 0 to 3"),
        (("--remove", "1" * 5000), "is no index or range; write 3,5 or 4:8"),
        (("--no-together", "--save", "x"), "leave out --no-together, or name blocks with --remove"),
        (("--span", "4", "--save", "x"), "all 4 blocks would be removed; at least one must stay"),
        (("--save", "text.txt/x"), "cannot write a model to 'text.txt/x': Not a directory"),
        (("--remove", "one"), "'one' is no index or range; write 3,5 or 4:8"),
        (("--remove", "3:3"), "names nothing: ranges are half-open"),
        (("--threshold", "nan"), "a finite number of nats per token, 0 or more; got nan"),
        (("--threshold", "inf"), "a finite number of nats per token, 0 or more; got inf"),
        (("--threshold", "-0.1"), "a finite number of nats per token, 0 or more; got -0.1"),
        (("--max-memory", "lots"), "'lots' is no amount of memory"),
        (("--tokens", "1"), "must be at least 2"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used"),
        (("--unit", "attn", "--save", "x"), "without --remove it needs --unit block"),
        (("--unit", "attn", "--remove", "1", "--save", "x"), "only whole blocks can be saved without"),
        (("--remove", "0:4", "--save", "x"), "all 4 blocks would be removed"),
        (("--text", "nowhere.txt"), "cannot read the text nowhere.txt"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(options, message, checkpoint, text, monkeypatch, capsys) -> None:
    monkeypatch.chdir(text.parent)
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, *options)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_text_of_one_token(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "short.txt").write_text("a", encoding="utf-8")
    code, _, err = run(monkeypatch, capsys, checkpoint, "--text", tmp_path / "short.txt")
    assert code == 2
    assert "has 1 token(s); at least two are needed" in err


def test_a_full_folder_is_refused_before_anything_runs(checkpoint, text, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, checkpoint, "--text", text, *SHORT, "--save", checkpoint)
    assert (code, out) == (2, "")
    assert "exists and is not empty; name a new folder" in err


@pytest.mark.parametrize("options", [(), ("--span", "2")], ids=["blocks", "spans"])
def test_where_everything_is_cheap_one_block_is_left(options, checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("--text", text, *SHORT, "--threshold", "1e9", "--json", "--save", tmp_path / "smaller", *options)
    code, out, err = run(monkeypatch, capsys, checkpoint, *arguments)
    assert code == 0, err
    kept = json.loads(out)["effective_depth"]
    assert 1 <= kept <= 2
    assert load_checkpoint(tmp_path / "smaller").layout.n_blocks == kept


def test_a_removal_that_a_scheme_forbids_is_refused_before_anything_runs(text, tmp_path, monkeypatch, capsys) -> None:
    save_model(Transformer(tiny("keel")), tmp_path / "keel")
    arguments = ("--text", text, *SHORT, "--remove", "0", "--save", tmp_path / "smaller")
    code, out, err = run(monkeypatch, capsys, tmp_path / "keel", *arguments)
    assert (code, out) == (2, "")
    assert "scheme 'keel' cannot be saved without these blocks: block 1 would become block 0" in err


@pytest.mark.parametrize(("scheme", "stays"), [("keel", {0}), ("mix_ln", set()), ("layernorm_scaling", {0}), ("pre_ln", set())])
@pytest.mark.parametrize("span", [1, 2])
def test_only_sets_that_can_be_saved_are_removed_together(scheme, stays, span, text, tmp_path, monkeypatch, capsys) -> None:
    save_model(Transformer(tiny(scheme)), tmp_path / "model")
    arguments = ("--text", text, *SHORT, "--threshold", "1e9", "--json", "--save", tmp_path / "smaller", "--span", span)
    code, out, err = run(monkeypatch, capsys, tmp_path / "model", *arguments)
    assert code == 0, err
    record = json.loads(out)
    gone = {int(name.rpartition(".")[2]) for name in record["removable"]["modules"]}
    assert gone
    assert not gone & stays
    assert load_checkpoint(tmp_path / "smaller").layout.n_blocks == record["effective_depth"] == 4 - len(gone)
    alone = [warning for warning in record["warnings"] if "cannot go alone" in warning]
    assert len(alone) == (scheme != "pre_ln")
    if scheme == "keel":
        first = "block 0" if span == 1 else "blocks [0, 2)"
        assert alone[0].startswith(f"--save: {first} cannot go alone: scheme 'keel' cannot be saved without these blocks")


def test_without_save_every_cheap_set_is_measured(text, tmp_path, monkeypatch, capsys) -> None:
    save_model(Transformer(tiny("keel")), tmp_path / "model")
    _, out, _ = run(monkeypatch, capsys, tmp_path / "model", "--text", text, *SHORT, "--threshold", "1e9", "--json")
    assert json.loads(out)["effective_depth"] == 1
    assert not any("cannot go alone" in warning for warning in json.loads(out)["warnings"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--span", "4"), "all 4 blocks would be removed; at least one must stay"),
        (("--remove", "0"), "scheme 'keel' cannot be saved without these blocks: block 1 would become block 0"),
        (("--remove", "0,2"), "scheme 'keel' cannot be saved without these blocks: block 1 would become block 0"),
        (("--remove", "0", "--together"), "scheme 'keel' cannot be saved without these blocks: block 1 would become block 0"),
        (("--unit", "attn", "--remove", "1"), "only whole blocks can be saved without"),
    ],
)
def test_what_can_never_be_saved_is_refused_before_any_work(options, message, text, tmp_path, monkeypatch, capsys) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    save_model(Transformer(tiny("keel")), tmp_path / "model")
    monkeypatch.setattr("probes.layer_removal.measure_layer_removal", work)
    monkeypatch.setattr("probes.text.read_text", work)
    arguments = ("--text", text, *SHORT, "--threshold", "1e9", "--save", tmp_path / "smaller", *options)
    code, out, err = run(monkeypatch, capsys, tmp_path / "model", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_nothing_cheap_leaves_nothing_to_save(checkpoint, text, tmp_path, monkeypatch, capsys) -> None:
    one_sample = ("--tokens", 20, "--seq-len", 20)  # without an interval nothing is cheap with confidence
    arguments = ("--text", text, *one_sample, "--threshold", "0.5", "--save", tmp_path / "smaller")
    code, out, err = run(monkeypatch, capsys, checkpoint, *arguments)
    assert code == 2
    assert "Most costly" in out  # the measurement itself is printed
    assert "nothing to save: no removal costs less than 0.5 nats/token with confidence" in err
    assert not (tmp_path / "smaller").exists()


@pytest.mark.parametrize(("size", "n_bytes"), [("500MB", 500_000_000), ("2 gb", 2_000_000_000), ("1.5K", 1500), ("0", 0)])
def test_amounts_of_memory(size: str, n_bytes: int) -> None:
    from probes.cli._streaming import n_bytes as parsed

    assert parsed(size) == n_bytes


def test_spilling_to_disk_changes_no_number(checkpoint, text, monkeypatch, capsys) -> None:
    arguments = (checkpoint, "--text", text, *SHORT, "--json")
    _, here, _ = run(monkeypatch, capsys, *arguments)
    _, there, _ = run(monkeypatch, capsys, *arguments, "--max-memory", "0", "--no-stream")
    assert json.loads(here)["rows"] == json.loads(there)["rows"]
