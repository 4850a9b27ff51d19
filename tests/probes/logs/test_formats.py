"""One run in every format that is read."""

from __future__ import annotations

import io
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from probes.logs import LossLogError, Ramp, read_loss_log
from tests.probes.logs._logs import FORMATS, PROGRAMS, RATES, SAMPLES, assert_is_the_run, printed, rows, write_as, write_csv


@pytest.mark.parametrize("form", FORMATS)
def test_one_run_is_the_same_in_every_format(tmp_path, form):
    assert_is_the_run(read_loss_log(write_as(form, tmp_path, rows())))


@pytest.mark.parametrize("form", FORMATS)
def test_stdin_is_read_like_a_file(tmp_path, monkeypatch, form):
    content = write_as(form, tmp_path, rows()).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    log = read_loss_log(tmp_path.__class__("-"))
    assert_is_the_run(log)
    assert log.source == "stdin"


def read_printed(tmp_path, program, **options):
    path = tmp_path / "log.txt"
    text = printed(program, **options)
    path.write_text(text)
    rated = "rate" in text or "lr" in text.lower().replace("lm", "")
    return read_loss_log(path, ramp=None if rated else Ramp(start=0, peak=0.05, steps=10))


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_programs_print(tmp_path, program):
    log = read_printed(tmp_path, program)
    np.testing.assert_array_equal(log.steps, range(1, 11))
    np.testing.assert_allclose(log.losses, [5 - 0.1 * k for k in range(1, 11)])
    np.testing.assert_allclose(log.learning_rates, RATES, rtol=1e-6)
    assert log.known.all()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("bad_from", [2, 6, 10])
def test_steps_of_losses_that_are_not_finite_are_kept_in_what_programs_print(tmp_path, program, bad_from):
    log = read_printed(tmp_path, program, bad_from=bad_from)
    np.testing.assert_array_equal(log.steps, range(1, 11))
    assert np.isnan(log.losses).tolist() == [k >= bad_from for k in range(1, 11)]
    assert log.known.tolist() == [program != "Megatron-LM" or k < bad_from for k in range(1, 11)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_text_with_a_byte_order_mark(tmp_path, encoding):
    path = tmp_path / "log.txt"
    path.write_text(printed("Megatron-LM"), encoding=encoding)
    assert_is_the_run(read_loss_log(path))


def test_comments_before_a_table(tmp_path):
    path = write_csv(tmp_path / "log.txt", rows(), " ")
    path.write_text(f"# seed 3\n# {path.read_text()}")
    assert_is_the_run(read_loss_log(path))


def test_names_that_stand_again_in_the_middle_are_no_row(tmp_path):
    path = write_csv(tmp_path / "log.csv", rows())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[0], *lines[5:]]))
    assert_is_the_run(read_loss_log(path))


def test_objects_in_rows(tmp_path):
    path = tmp_path / "log.jsonl"
    table = [{"step": r["step"], "train": {"loss": r["loss"], "lr": r["lr"]}, "grad_norm": r["grad_norm"]} for r in rows()]
    path.write_text("\n".join(map(json.dumps, table)))
    assert_is_the_run(read_loss_log(path))


def test_history_of_a_rate_finder_has_no_steps(tmp_path):
    path = tmp_path / "lr.json"
    rates = np.logspace(-7, 0, 40)
    path.write_text(json.dumps({"lr": rates.tolist(), "loss": [5.0] * 40, "best": 3}))
    log = read_loss_log(path).ramp()
    assert log.steps.tolist() == list(range(1, 41))
    np.testing.assert_array_equal(log.learning_rates, rates)


REAL = {  # of SAMPLES: steps, the first that is not finite and its gradient norm
    "trainer_state.json": (list(range(2, 21, 2)), None, math.nan),
    "trainer_console.txt": (list(range(1, 11)), 8, math.nan),
    "lightning_metrics.csv": (list(range(20)), 14, None),
    "lightning_lr_find.json": (list(range(1, 31)), None, None),
    "torch_lr_finder.json": (list(range(1, 41)), None, None),
    "deepspeed": (list(range(32, 385, 32)), 320, None),
}


@pytest.mark.parametrize("name", REAL)
def test_logs_that_the_libraries_wrote(name):
    steps, bad_from, norm = REAL[name]
    log = read_loss_log(SAMPLES / name).ramp()
    assert log.steps.tolist() == steps
    assert np.isnan(log.losses).tolist() == [bad_from is not None and step >= bad_from for step in steps]
    assert log.known.all()
    assert np.all(np.diff(log.learning_rates) > 0)
    if norm is None:
        assert log.grad_norms is None
    else:
        assert math.isnan(log.grad_norms[-1])


def test_a_trainer_without_its_filter_hides_losses_and_not_norms():
    log = read_loss_log(SAMPLES / "trainer_state.json")
    assert (log.losses == 0).any()
    assert [math.isfinite(norm) for norm in log.grad_norms] == [step <= 14 for step in log.steps]
    assert any("logging_nan_inf_filter" in note for note in log.notes)


def test_the_last_checkpoint_of_a_trainer_has_the_whole_history(tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_as("trainer_state", tmp_path, rows()[:step]).rename(tmp_path / f"checkpoint-{step}" / "trainer_state.json")
    assert_is_the_run(read_loss_log(tmp_path))


FOREIGN = {
    "run.wandb": (b":W&B\x00\x01", "is a file of wandb's own; export the run's history as CSV or JSON lines"),
    "log.parquet": (b"PAR1 and no more", "cannot read .* as Parquet"),
    "log.csv.gz": (b"\x1f\x8b\x08\x00", "it is no text"),
    "log.xlsx": (b"PK\x03\x04\x00\x00", "it is no text"),
    "log.txt": (
        b"hello\nthere is nothing here\n",
        "is no table: row 1 has 4 cells, and there are 1 column names\ntext that a program printed needs lines such as",
    ),
    "numbers.csv": (b"1,5,0.1\n2,4,0.2\n", "has no column names: its first line is 1, 5, 0.1"),
    "extra.csv": (b"step,loss,lr\n1,5,0.1\n2,4,1,000\n", "row 2, has 4 cells, and there are 3 column names"),
    "gap.txt": (b"step loss lr\n1 5 0.1\n2 0.2\n3 4 0.3\n", "row 2 has 2 cells, and there are 3 column names"),
    "twice.csv": (b"step,loss,loss,lr\n1,5,4,0.1\n", "has several columns of the name loss"),
    "lengths.json": (b'{"lr": [1, 2], "loss": [1]}', r"columns of different lengths: lr \(2\), loss \(1\)"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name):
    content, message = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LossLogError, match=message) as refused:
        read_loss_log(tmp_path / name)
    assert len(str(refused.value).splitlines()) <= 5


@pytest.mark.parametrize("unknown", ["None", "none", "null", "N/A", "NA", "<NA>", "-", "--", "unknown", "?"])
@pytest.mark.parametrize(
    "line",
    [
        "INFO:train:Step {k} loss {loss} lr {lr}",
        "[INFO] Step={k} Loss={loss} LR={lr}",
        "step {k} | lr {lr} | loss {loss}",
        "step {k}: loss: {loss}, lr: {lr}",
        "iter {k}: loss {loss}, lr {lr}, time 12.34ms",
        " iteration {k}/ 10 | learning rate: {lr} | lm loss: {loss} |",
    ],
)
def test_a_printed_loss_that_is_not_known_is_unknown_and_hides_nothing(tmp_path, line, unknown):
    lines = [line.format(k=k, loss=5 - 0.1 * k if k < 6 else unknown, lr=0.005 * k) for k in range(1, 11)]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    log = read_loss_log(path)
    assert log.steps.tolist() == list(range(1, 11))
    assert log.known.tolist() == [k < 6 for k in range(1, 11)]
    np.testing.assert_allclose(log.learning_rates, [0.005 * k for k in range(1, 11)])
