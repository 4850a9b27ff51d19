"""``keel train``: what it leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from probes.run_folder import read_log
from tests._cli import run_keel
from tests.probes._runs import numbers

QUICK = ["--blocks", "2", "--width", "16", "--steps", "60", "--seq-len", "16", "--batch-size", "2", "--threads", "1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {i} of a text to learn: {i * i % 97}.\n" for i in range(400)), encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, *arguments)


def test_it_leaves_a_model_that_the_probes_read(text, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "run"
    arguments = ("train", *QUICK, "--text", text, "--profiles", 3, "-o", folder, "--json")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["outcome"], summary["steps_done"]) == ("finished", 60)
    assert summary["final_loss"] < read_log(folder / "log.jsonl")[0].loss
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "log.jsonl",
        "training.json",
        "result.json",
        "dynamics.parquet",
        "heat_maps.png",
    }
    code, out, err = run(monkeypatch, capsys, "grad-norm", folder, "--text", text, "--tokens", 32, "--seq-len", 16)
    assert code == 0, err
    assert "2 blocks / 4 sub-layers" in out


def test_the_same_command_again_reads_the_result(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("train", *QUICK, "--text", text, "-o", tmp_path / "run")
    _, first, _ = run(monkeypatch, capsys, *arguments)
    code, second, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert second == first
    assert "finished after 60 steps" in first


def test_a_bpe_model_keeps_its_tokenizer(text, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "run"
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", text, "--tokenizer", "bpe:300", "-o", folder)
    assert code == 0, err
    assert json.loads((folder / "config.json").read_text())["tokenizer"] == "tokenizer.json"
    code, out, err = run(monkeypatch, capsys, "grad-norm", folder, "--text", text, "--tokens", 32, "--seq-len", 16, "--json")
    assert code == 0, err
    assert "TokenizersBackend" in json.loads(out)["tokenizer"] or "Fast" in json.loads(out)["tokenizer"]


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(text, tmp_path, monkeypatch, capsys) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    arguments = ["train", *QUICK, "--steps", "150", "--text", str(text)]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", "from probes.cli.main import main; main()", *arguments, "-o", str(folder)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    ) as child:
        while child.poll() is None and not ((folder / "log.jsonl").exists() and len(read_log(folder / "log.jsonl")) > 5):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"its state is saved; the same command with -o {folder} goes on from there" in err
    assert run(monkeypatch, capsys, *arguments, "-o", folder)[0] == 0
    assert run(monkeypatch, capsys, *arguments, "-o", whole)[0] == 0
    assert numbers(read_log(folder / "log.jsonl")) == numbers(read_log(whole / "log.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "post_nl"], "unknown scheme 'post_nl'; known: highway"),
        (["--schedule", "ramp", "--steps", "40"], "steps of a ramp must be at least 50, got 40"),
        (["--peak", "0"], "peak_lr must be above 0, got 0.0"),
        (["--text", "nowhere.txt"], "there is no text file or folder nowhere.txt"),
        (["--seq-len", "100000"], "a window of seq_len 100000 needs 100001"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--width", "21"], "width 21 does not split into 1 head(s) of an even width"),
        (["--width", "50"], "the nearest that do: 48, 54"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--schedule", "ramp", "--warmup", "20"], "warmup belongs to schedule 'cosine'"),
        (["--column", "content"], "column 'content' belongs to data sets"),
        (["--tokenizer", "words"], "give bytes, bpe:N"),
        (["--set", "alpha=L.x"], "'L.x' in 'L.x' is not allowed"),
        (["--threads", "0"], "at least 1 thread is needed, got 0"),
        (["--profiles", "-1"], "Invalid value for --profiles: must be at least 0, got -1"),
        (["--save-seconds", "nan"], "Invalid value for --save-seconds: must be at least 0, got nan"),
        (["--accumulation", "3"], "batch_size 2 is not divisible by accumulation 3"),
        (["--tokenizer", "bpe:100"], "needs a number of tokens above 256"),
        (["--warmup", "60"], "warmup must end before the last of 60 steps, got 60"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(options, message, text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ["train", *QUICK, "--text", text, "-o", tmp_path / "run", *options]
    if "--text" in options:
        arguments.remove("--text")
        arguments.remove(text)
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder_is_told(text, tmp_path, monkeypatch, capsys) -> None:
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", text, "-o", text)
    assert code == 2
    assert "a file is in the way; name a folder" in err


@pytest.mark.parametrize(("profiles", "peak"), [(1, 3e-3), (2, 1e30), (3, 1e30)])
def test_a_single_profile_is_drawn_and_the_summary_comes_first(profiles, peak, text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("train", *QUICK, "--text", text, "--profiles", profiles, "--peak", peak, "-o", tmp_path / "run")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "tokens of" in out
    steps = pd.read_parquet(tmp_path / "run" / "dynamics.parquet")["step"].nunique()
    assert steps == 1
    assert (tmp_path / "run" / "heat_maps.png").stat().st_size > 1000


def test_a_run_that_ends_before_its_first_profile_says_so(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("train", *QUICK, "--text", text, "--profiles", 1, "--peak", 1e30, "-o", tmp_path / "run")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "non-finite" in out
    assert "ended before the first profile" in err


def test_an_empty_text_is_refused(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "empty.txt").write_text("")
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", tmp_path / "empty.txt", "-o", tmp_path / "run")
    assert (code, "is empty" in err) == (2, True)


def test_a_changed_configuration_is_refused_by_its_field(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("train", *QUICK, "--text", text, "-o", tmp_path / "run")
    run(monkeypatch, capsys, *arguments)
    code, _, err = run(monkeypatch, capsys, *arguments, "--peak", "0.5")
    assert code == 2
    assert "peak_lr is 0.003 there, 0.5 here" in err


def test_a_changed_text_is_refused(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("train", *QUICK, "--text", text, "-o", tmp_path / "run")
    run(monkeypatch, capsys, *arguments)
    text.write_text(text.read_text().replace("learn", "teach"))
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "holds a run on another text" in err


def test_tensorboard_that_is_not_there_is_named(text, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", text, "--tensorboard", "-o", tmp_path / "run")
    assert code == 2
    assert "pip install 'keel-dynamics[logs]', or pip install tensorboard" in err


def test_events_of_an_interrupted_run_read_back_as_its_log(text, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("tensorboard")
    from probes.logs import read_loss_log
    from probes.training import Trainer

    advance, folder = Trainer.advance, tmp_path / "run"

    def interrupted(self):
        if self.step == 24:
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    arguments = ("train", *QUICK, "--schedule", "ramp", "--text", text, "--tensorboard", "-o", folder)
    monkeypatch.setattr(Trainer, "advance", interrupted)
    assert run(monkeypatch, capsys, *arguments)[0] == 130
    monkeypatch.setattr(Trainer, "advance", advance)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    events, log = read_loss_log(folder / "tensorboard"), read_loss_log(folder)
    assert len(list((folder / "tensorboard").iterdir())) == 2  # one of each process
    assert events.steps.tolist() == log.steps.tolist() == list(range(1, 61))
    assert events.losses == pytest.approx(log.losses, rel=1e-6)  # events are float32
    assert events.learning_rates == pytest.approx(log.learning_rates, rel=1e-6)
    assert events.grad_norms == pytest.approx(log.grad_norms, rel=1e-6)
    assert events.batch_losses == pytest.approx(log.batch_losses, rel=1e-6)
    assert log.batch_losses.shape == (60, 2)


@pytest.mark.parametrize(
    ("option", "blocked", "message"),
    [
        (("--profiles", 2), "heat_maps.png", "cannot write heat_maps.png in"),
        (("--tensorboard",), "tensorboard", "cannot write TensorBoard events to"),
    ],
)
def test_what_is_written_besides_the_run_fails_with_one_message(
    option, blocked, message, text, tmp_path, monkeypatch, capsys
) -> None:
    if "--tensorboard" in option:
        pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    folder.mkdir()
    if blocked == "tensorboard":
        (folder / blocked).write_text("a file in the place of the folder")
    else:
        (folder / blocked).mkdir()
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", text, *option, "-o", folder)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_folder_that_is_refused_gets_no_events(text, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(monkeypatch, capsys, "train", *QUICK, "--text", text, "--tensorboard", "-o", tmp_path)
    assert (code, "not a run of this command" in err) == (2, True)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("splits", [None, ("train", "test")])
def test_a_data_set_on_this_disk_is_a_text(splits, tmp_path, monkeypatch, capsys) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"content": [f"Document {i} says {i * i % 97}.\n" * 5 for i in range(60)]})
    saved = rows if splits is None else datasets.DatasetDict(dict.fromkeys(splits, rows))
    saved.save_to_disk(str(tmp_path / "set"))
    folder = tmp_path / "run"
    arguments = ("train", *QUICK, "--text", tmp_path / "set", "--column", "content", "-o", folder, "--json")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    corpus = json.loads(out)["corpus"]
    assert (corpus["n_documents"], corpus["column"]) == (60, "content")
