"""``keel sweep``: run, status and results, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from probes.sweep_folder import SweepFolder
from tests._cli import run_keel

FILE = """
schemes = ["keel", "post_ln"]
blocks = [2]
widths = [16]

[training]
steps = 60
batch_size = 2
seq_len = 16

[corpus]
max_bytes = 60000
"""
FLAGS = [
    "--schemes",
    "keel,post_ln",
    "--blocks",
    "1",
    "--widths",
    "16",
    "--steps",
    "60",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_keel(monkeypatch, capsys, "sweep", *arguments)


def test_it_runs_tells_and_skips_what_is_finished(file, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "sweep"
    code, out, err = run(monkeypatch, capsys, "run", file, "-o", folder, "--executor", "debug")
    assert code == 0, err
    assert out.strip() == "2 finished, 0 running, 0 failed, 0 waiting"
    started = [line.partition("  ")[2] for line in err.splitlines() if "started" in line]
    assert started == [
        f"{name}, 4 sub-layers of width 16, peak 0.05 in 60 steps, seed 0  started" for name in ("keel", "post_ln")
    ]
    code, _, err = run(monkeypatch, capsys, "run", file, "-o", folder, "--executor", "debug")
    assert code == 0
    assert "started" not in err

    code, out, _ = run(monkeypatch, capsys, "status", folder)
    assert code == 0
    assert out.rstrip().endswith("small: 2 finished, 0 running, 0 failed, 0 waiting")
    code, out, _ = run(monkeypatch, capsys, "status", folder, "--json")
    assert json.loads(out)["counts"] == {"finished": 2}
    assert [trial["scheme"] for trial in json.loads(out)["trials"]] == ["keel", "post_ln"]

    code, out, _ = run(monkeypatch, capsys, "results", folder)
    assert code == 0
    assert {line.split()[4] for line in out.splitlines()[1:]} == {"keel", "post_ln"}
    code, printed, _ = run(monkeypatch, capsys, "results", folder, "--json")
    assert code == 0
    run(monkeypatch, capsys, "results", folder, "--rejudge", "-o", tmp_path / "a.csv")
    run(monkeypatch, capsys, "results", folder, "-o", tmp_path / "a.parquet")
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert len(frame) == 10
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "a.csv"), pd.read_csv(io.StringIO(frame.to_csv(index=False))))
    beside = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert (beside["sweep"], beside["finished"], beside["judged_again"]) == ("small", 2, False)
    assert beside["origins"]["threads"] == [1]
    assert len(beside["origins"]["text content_hash"]) == 1
    assert [row["trial"] for row in json.loads(printed)] == frame["trial"].tolist()


def test_options_alone_make_a_sweep(tmp_path, monkeypatch, capsys) -> None:
    options = [*FLAGS, "--seeds", "0,1", "--peaks", "0.02,0.1", "--to-end", "-o", tmp_path, "--executor", "cloud"]
    code, _, err = run(monkeypatch, capsys, "run", *options)
    assert code == 2
    assert "8 trial(s)" in err
    assert "unknown executor 'cloud'; known: local, slurm, debug" in err


def test_by_default_it_is_kept_under_its_name(file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, "run", file, "--executor", "debug")
    assert code == 0, err
    assert len(list(Path("runs", "small", "trials").iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = [1]", r"small.toml: unknown key 'seed'; known:"),
        ("seeds = 1", r"small.toml: seeds must be a list of integers, got 1"),
        ("schemes = ]", r"small.toml' is not TOML"),
        ('schemes = ["keeel"]', "keeel"),
        ("[training]\nsteps = 10", "steps of a ramp must be at least 50, got 10"),
    ],
)
def test_a_bad_file_is_one_message_and_code_2(file, monkeypatch, capsys, text, message) -> None:
    file.write_text(text, encoding="utf-8")
    code, out, err = run(monkeypatch, capsys, "run", file)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a TOML file, or --schemes"),
        (["run", "FILE", "--seeds", "1", "--steps", "60"], "--seeds, --steps cannot be given beside a file"),
        (["run", "--schemes", "keel", "--blocks", "many"], "'many' is not a list of numbers"),
        (["run", "nowhere.toml"], "cannot read the sweep 'nowhere.toml': No such file"),
        (["run", "FILE", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["run", "FILE", "--threads", "0"], "threads must be at least 1, got 0"),
        (["run", "FILE", "--memory", "nan"], "must be a finite number of GB, got nan"),
        (
            ["run", "FILE", "--executor", "debug", "--partition", "gpu", "--gpus", "3", "--time", "5"],
            "gpus, time, partition cannot be given",
        ),
        (["run", "FILE", "--time", "0"], "time must be at least 1 minute, got 0"),
        (["status", "nowhere"], "nowhere holds no sweep"),
        (["results", "nowhere"], "nowhere holds no sweep"),
    ],
)
def test_bad_usage_is_one_message_and_code_2(file, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *[str(file) if a == "FILE" else a for a in arguments])
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_results_of_nothing_finished_are_refused(tmp_path, monkeypatch, capsys) -> None:
    from tests.probes._sweeps import small_sweep

    SweepFolder(tmp_path).write("small", small_sweep().trials())
    code, _, err = run(monkeypatch, capsys, "results", tmp_path)
    assert code == 2
    assert "no trial of small" in err


def test_a_failed_trial_is_exit_code_1_and_status_says_why(file, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    text = file.read_text(encoding="utf-8").replace("max_bytes = 60000", f'sources = ["{tmp_path / "short.txt"}"]')
    file.write_text(text, encoding="utf-8")
    folder = tmp_path / "sweep"
    code, out, err = run(monkeypatch, capsys, "run", file, "-o", folder, "--executor", "debug")
    assert code == 1
    assert out.strip() == "0 finished, 0 running, 2 failed, 0 waiting"
    assert f"keel sweep status {folder} says why" in err
    code, out, _ = run(monkeypatch, capsys, "status", folder)
    assert "attempt 1: TextError" in out


def test_without_submitit_it_says_how_to_install(file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    code, _, err = run(monkeypatch, capsys, "run", file, "-o", tmp_path / "sweep")
    assert code == 2
    assert "pip install 'keel-dynamics[sweep]'" in err


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(file, tmp_path) -> None:
    text = (
        file.read_text(encoding="utf-8").replace("steps = 60", "steps = 3000").replace("widths", "early_stop = false\nwidths")
    )
    file.write_text(text.replace('["keel", "post_ln"]', '["keel"]'), encoding="utf-8")
    folder = tmp_path / "sweep"
    command = [sys.executable, "-c", "from probes.cli.main import main; main()", "sweep", "run", str(file), "-o", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (folder.exists() and (folder / "sweep.json").exists() and SweepFolder(folder).read()[1][0].steps_done > 20):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the scheduler and to all that it started
        _, err = process.communicate(timeout=60)
    (place,) = SweepFolder(folder).read()[1]
    assert process.returncode == 130
    assert f"stopped; the same command goes on from {folder}" in err
    assert "Traceback" not in err
    assert place.interrupted
    assert not place.running
    assert (place.run_path / "state" / "latest.safetensors").exists()
