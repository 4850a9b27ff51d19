"""``keel max-lr`` on live runs: the verdict it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.probes.cli.test_train import run

QUICK = ["--blocks", "2", "--width", "16", "--steps", "60", "--seq-len", "16", "--batch-size", "2", "--threads", "1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {i} of a text to learn: {i * i % 97}.\n" for i in range(400)), encoding="utf-8")
    return path


def test_the_verdict_has_kind_onset_rate_and_resolution(text, monkeypatch, capsys) -> None:
    arguments = ("max-lr", "--scheme", "post_ln", *QUICK, "--text", text, "--peak", "200", "--steps", "100")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "2 blocks / 4 sub-layers" in out
    assert "ramp 0 -> 200 over 100 steps of 32 tokens" in out
    lines = out.splitlines()
    verdict = lines[next(i for i, line in enumerate(lines) if line.startswith("seed 0 ")) + 1]
    assert any(kind in verdict for kind in ("stagnation", "irrecoverable spike", "non-finite"))
    assert "from step " in verdict
    assert "Max LR " in verdict
    assert "resolution 2)" in verdict
    assert "unigram" in out


def test_json_holds_every_seed_and_the_folder_every_run(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("max-lr", "--scheme", "keel", *QUICK, "--text", text, "--seeds", "2", "--json", "-o", tmp_path / "runs")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    (test,) = json.loads(out)
    assert [r["seed"] for r in test["runs"]] == [0, 1]
    assert test["n_sublayers"] == 4
    assert test["summary"]["n_seeds"] == 2
    assert test["summary"]["low"] <= test["summary"]["median"]
    assert {path.name for path in (tmp_path / "runs" / "keel_4").iterdir()} == {"seed_0", "seed_1"}
    again = run(monkeypatch, capsys, *arguments)[1]
    assert json.loads(again) == json.loads(out)


def test_a_reference_run_is_read_from_its_folder(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("max-lr", "--scheme", "keel", *QUICK, "--text", text)
    assert run(monkeypatch, capsys, *arguments, "-o", tmp_path / "runs")[0] == 0
    reference = tmp_path / "runs" / "keel_4" / "seed_0" / "log.jsonl"
    code, out, err = run(monkeypatch, capsys, *arguments, "--reference", reference)
    assert code == 0, err
    assert "cannot judge" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "post_nl"], "unknown scheme 'post_nl'"),
        (["--scheme", "keel", "--peak", "-1"], "peak_lr must be above 0, got -1.0"),
        (["--scheme", "keel", "--steps", "49"], "steps of a ramp must be at least 50, got 49"),
        (["--scheme", "keel", "--preset", "tpu"], "unknown preset 'tpu'; known: cpu, gpu"),
        (["--scheme", "keel", "--seeds", "0"], "at least 1 seed, got 0"),
        (["--scheme", "keel", "--reference", "nowhere"], "no file 'nowhere'"),
        ([], "or a scheme to train (--scheme post_ln), one of them"),
        (["--scheme", "keel", "--from-log", "loss.csv"], "one of them"),
        (["--scheme", "keel", "--ramp-steps", "60"], "belongs to --from-log"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(options, message, text, monkeypatch, capsys) -> None:
    code, out, err = run(monkeypatch, capsys, "max-lr", *QUICK, "--text", text, *options)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "place", [lambda runs: runs / "post_ln_4" / "seed_0", lambda runs: runs / "post_ln_4" / "seed_0" / "log.jsonl"]
)
def test_the_log_of_a_run_is_judged_as_the_run_was(place, text, tmp_path, monkeypatch, capsys) -> None:
    arguments = ("max-lr", "--scheme", "post_ln", *QUICK, "--text", text, "--peak", "200", "--steps", "100", "--json")
    code, out, err = run(monkeypatch, capsys, *arguments, "-o", tmp_path / "runs")
    assert code == 0, err
    (live,) = json.loads(out)[0]["runs"]
    code, out, err = run(monkeypatch, capsys, "max-lr", "--from-log", place(tmp_path / "runs"), "--json")
    assert code == 0, err
    replayed = json.loads(out)
    for name in ("outcome", "onset_step", "max_lr", "lower_bound", "resolution", "last_step"):
        assert replayed[name] == live["judgement"][name]
    assert replayed["reasons"] == live["judgement"]["reasons"]
    assert any("taken from the run's folder: a ramp of 100 steps, the unigram entropy" in note for note in replayed["notes"])
    code, out, err = run(
        monkeypatch,
        capsys,
        "max-lr",
        "--from-log",
        place(tmp_path / "runs"),
        "--ramp-steps",
        "200",
        "--unigram-entropy",
        "1",
        "--json",
    )
    assert code == 0, err
    assert json.loads(out)["ramp_steps"] == 200
    assert not any("ramp of" in note or "unigram" in note for note in json.loads(out)["notes"]), "options override"


def test_a_run_stopped_early_is_not_gone_on_with_to_the_end(text, tmp_path, monkeypatch, capsys) -> None:
    arguments = (
        "max-lr",
        "--scheme",
        "post_ln",
        *QUICK,
        "--text",
        text,
        "--peak",
        "200",
        "--steps",
        "100",
        "-o",
        tmp_path / "runs",
    )
    assert run(monkeypatch, capsys, *arguments)[0] == 0
    code, out, err = run(monkeypatch, capsys, *arguments, "--to-end")
    assert code == 2
    assert out == ""
    assert "was stopped early there, at step" in " ".join(err.split())


def test_a_reference_that_diverges_is_refused_before_training(text, tmp_path, monkeypatch, capsys) -> None:
    reference = tmp_path / "reference.csv"
    reference.write_text("step,loss\n" + "".join(f"{k},{5.5 - 0.1 * k if k < 30 else 9}\n" for k in range(1, 61)))
    arguments = ("max-lr", "--scheme", "keel", *QUICK, "--text", text, "-o", tmp_path / "runs", "--reference", reference)
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert "diverges itself (irrecoverable spike from step 30 of 60)" in " ".join(err.split())
    assert not (tmp_path / "runs" / "keel_4").exists()
