"""``keel max-lr --from-log`` on logs as other programs write them."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests._cli import run_keel
from tests.probes.logs._logs import write_csv, write_lines

N = 600
RATES = [0.05 * k / N for k in range(1, N + 1)]
NOISE = np.random.default_rng(0).normal(0, 0.03, N)


def loss(k: int, break_at: int | None = None) -> float:
    """A healthy run from 6 to 2.5 nats; 3 nats higher from the step at which it breaks."""
    return 2.5 + 3.5 * math.exp(-k / 80) + NOISE[k - 1] + (3 if break_at is not None and k >= break_at else 0)


def table(break_at: int | None = None, *, first: int = 1) -> list[dict[str, float]]:
    return [{"step": first + k - 1, "loss": loss(k, break_at), "lr": RATES[k - 1]} for k in range(1, N + 1)]


@pytest.fixture
def judged(monkeypatch, capsys):
    def judge(path, *options):
        code, out, err = run_keel(monkeypatch, capsys, "max-lr", "--from-log", path, *options, "--json")
        assert code == 0, err
        return json.loads(out)

    return judge


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    def refuse(path, *options):
        before = sorted(tmp_path.rglob("*"))
        code, out, err = run_keel(monkeypatch, capsys, "max-lr", "--from-log", path, *options, "-o", tmp_path / "answer.json")
        assert (code, out) == (2, "")
        assert sorted(tmp_path.rglob("*")) == before
        assert len(err.splitlines()) <= 5
        assert "Traceback" not in err
        return err

    return refuse


def assert_breaks(answer, step, *, within=1):
    assert answer["outcome"] == "irrecoverable_spike"
    assert abs(answer["onset_step"] - step) <= within
    assert answer["max_lr"] == pytest.approx(RATES[298], rel=0.01)


@pytest.mark.parametrize("told", [{}, {"loss": None}, {"loss": "N/A"}, {"loss": math.nan}])
@pytest.mark.parametrize("bad_from", [300, 580])
def test_a_run_whose_losses_and_norms_end_in_nothing_is_not_healthy(tmp_path, judged, told, bad_from):
    rows = [row | {"grad_norm": 1.0} for row in table()]
    bad = [{"step": row["step"], "lr": row["lr"], "grad_norm": math.nan} | told for row in rows[bad_from - 1 :]]
    answer = judged(write_lines(tmp_path / "log.jsonl", [*rows[: bad_from - 1], *bad]))
    assert answer["outcome"] == "non_finite"
    assert answer["onset_step"] == bad_from


@pytest.mark.parametrize("word", ["", "null", "N/A"])
def test_a_run_whose_end_is_unknown_is_not_healthy(tmp_path, judged, word):
    rows = [row | ({"loss": word} if row["step"] >= 400 else {}) for row in table()]
    answer = judged(write_csv(tmp_path / "log.csv", rows))
    assert answer["outcome"] in ("non_finite", "incomplete")


def test_the_steps_of_the_optimizer_date_the_break(tmp_path, judged):
    rows, calls = [], 0
    for row in table(300):
        told = {"train/loss": row["loss"], "train/learning_rate": row["lr"], "train/global_step": row["step"]}
        rows.append({"_step": calls, **told})
        if row["step"] % 2 == 0:
            rows.append({"_step": calls + 1, "eval/loss": 9.0, "train/global_step": row["step"]})
        calls = rows[-1]["_step"] + 1
    answer = judged(write_lines(tmp_path / "log.jsonl", rows))
    assert_breaks(answer, 300)
    assert answer["ramp_steps"] == N


def test_sparse_rows_are_joined(tmp_path, judged):
    rows = [part for row in table(300, first=0) for part in ({"step": row["step"], "lr-AdamW": row["lr"]}, row | {"lr": ""})]
    rows = [{"epoch": "", "lr-AdamW": "", "train_loss_step": "", "val_loss": ""} | row for row in rows]
    rows = [{**row, "train_loss_step": row.get("loss", "")} for row in rows]
    names = ("epoch", "lr-AdamW", "step", "train_loss_step", "val_loss")
    path = write_csv(tmp_path / "metrics.csv", [{name: row[name] for name in names} for row in rows])
    assert_breaks(judged(path), 299)


def console(first: int = 1) -> str:
    return "".join(f"iter {k + first - 1}: loss {loss(k, 300):.4f}, time 12.34ms, mfu 1.23%\n" for k in range(1, N + 1))


@pytest.mark.parametrize("first", [0, 1, 10_001])
def test_a_ramp_that_is_given_by_hand(tmp_path, judged, first):
    (tmp_path / "log.txt").write_text(console(first))
    answer = judged(tmp_path / "log.txt", "--ramp", "0:0.05:600")
    assert_breaks(answer, first + 299)
    assert answer["ramp_steps"] == N


def test_stdin(monkeypatch, judged):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(console().encode())))
    answer = judged("-", "--ramp", "0:0.05:600")
    assert_breaks(answer, 300)
    assert answer["source"] == "stdin"


def test_one_of_several_runs(tmp_path, judged, refused):
    rows = [row | {"seed": seed} for seed in range(3) for row in table(300 if seed == 1 else None)]
    path = write_csv(tmp_path / "log.csv", rows)
    assert "holds 3 runs, told apart by column 'seed': 0, 1, 2\nchoose one, such as --run 0" in refused(path)
    assert_breaks(judged(path, "--run", "1"), 300)
    assert judged(path, "--run", "2")["outcome"] == "healthy"


def test_a_reference_of_several_runs_is_none(tmp_path, refused):
    log = write_csv(tmp_path / "log.csv", table())
    reference = write_csv(tmp_path / "reference.csv", [row | {"seed": seed} for seed in range(3) for row in table()])
    message = refused(log, "--reference", reference)
    assert "holds 3 runs, told apart by column 'seed': 0, 1, 2\ngive a log of one run" in message


def test_columns_by_hand(tmp_path, judged, refused):
    rows = [{"step": r["step"], "a/avg_loss": r["loss"], "a/max_loss": r["loss"] + 1, "lr": r["lr"]} for r in table(300)]
    path = write_csv(tmp_path / "log.csv", rows)
    assert "a/avg_loss, a/max_loss\nchoose one with --column loss=NAME" in refused(path)
    assert_breaks(judged(path, "--column", "loss=a/avg_loss"), 300)
    assert "--column is QUANTITY=NAME such as loss=train/ce, got 'a/avg_loss'" in refused(path, "--column", "a/avg_loss")


def test_a_reference_is_read_under_its_own_names_or_those_of_the_log(tmp_path, judged):
    log = write_csv(tmp_path / "log.csv", [{"step": r["step"], "ce": r["loss"], "lr": r["lr"]} for r in table(300)])
    plain = write_csv(tmp_path / "plain.csv", table())
    named = write_csv(tmp_path / "named.csv", [{"step": r["step"], "ce": r["loss"]} for r in table()])
    for reference in (plain, named):
        answer = judged(log, "--column", "loss=ce", "--reference", reference)
        assert not any("without a reference" in reason for reason in answer["reasons"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {i} of a text to learn: {i * i % 97}.\n" for i in range(400)))
    return path


def in_unit(factor: float, start: float = 5.5) -> list[dict[str, float]]:
    """A healthy run from a loss in nats to half of it, logged in another unit."""
    return [row | {"loss": factor * (start / 2 + (row["loss"] - 2.5) * start / 7)} for row in table()]


def test_entropy_and_vocabulary_of_a_text_beside_a_log(tmp_path, text, judged):
    answer = judged(write_csv(tmp_path / "log.csv", in_unit(1)), "--text", text)
    assert not any("unigram entropy or a reference" in reason for reason in answer["reasons"])
    assert not any("ln V" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("factor", "options", "words"),
    [
        (1 / math.log(2), (), "is it in bits (--loss-unit bits)?"),
        (1 / math.log(2), ("--loss-unit", "bits"), None),
        (1, (), None),
        (1, ("--loss-unit", "bits"), "is it in nats (no --loss-unit bits)?; ln V is not used"),
        (0.3, (), "a run that began trained, another vocabulary or another unit; ln V is not used"),
        (3, (), "a run that began trained, another vocabulary or another unit"),
    ],
)
def test_a_first_loss_far_from_that_of_an_untrained_model_is_remarked_on(tmp_path, text, judged, factor, options, words):
    answer = judged(write_csv(tmp_path / "log.csv", in_unit(factor)), "--text", text, *options)
    notes = [note for note in answer["notes"] if "ln V = 5.545" in note]
    assert notes == [] if words is None else notes[0].endswith(words)


def test_bits_give_the_verdict_of_nats(tmp_path, judged):
    nats = judged(write_csv(tmp_path / "a.csv", table(300)))
    bits = judged(
        write_csv(tmp_path / "b.csv", [r | {"loss": r["loss"] / math.log(2)} for r in table(300)]), "--loss-unit", "bits"
    )
    assert {k: nats[k] for k in ("outcome", "onset_step", "max_lr")} == {
        k: bits[k] for k in ("outcome", "onset_step", "max_lr")
    }
    assert bits["best_loss"] == pytest.approx(nats["best_loss"])


BAD = {
    "no file": ("none.csv", (), "no file"),
    "a ramp beside rates": ("log.csv", ("--ramp", "0:1:600"), "leave out --ramp"),
    "no ramp": ("log.csv", ("--ramp", "600"), "--ramp is START:PEAK:STEPS"),
    "no run": ("log.csv", ("--run", "x"), "there is one run; leave out --run"),
    "no column": ("log.csv", ("--column", "loss=x"), "no column 'x'"),
    "no unit": ("log.csv", ("--loss-unit", "dits"), "no unit 'dits' (--loss-unit); known are nats, bits"),
    "too short a ramp": ("log.csv", ("--ramp-steps", "100"), "goes on to step 600, beyond a ramp of 100 steps"),
    "no text": ("log.csv", ("--text", "nowhere.txt"), "there is no text file or folder nowhere.txt"),
    "two readers of stdin": ("-", ("--reference", "-"), "cannot both be read from stdin"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_short_message_and_nothing_is_written(tmp_path, refused, name):
    write_csv(tmp_path / "log.csv", table())
    path, options, message = BAD[name]
    assert message in refused(path if path == "-" else tmp_path / path, *options)
