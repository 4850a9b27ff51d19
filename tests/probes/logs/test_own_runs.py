"""What the folder of a run of this toolkit adds to its log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import rows


def write_run(folder, *, steps=600, schedule="ramp", corpus=None, config=None):
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows())))
    plain = {"schedule": schedule, "steps": steps} if config is None else config
    (folder / "training.json").write_text(json.dumps({"config": plain}))
    if corpus is not None:
        (folder / "result.json").write_text(json.dumps({"corpus": corpus}))
    return folder


@pytest.mark.parametrize("unit", ["nats", "bits"])
def test_losses_of_a_run_of_this_toolkit_are_in_nats(tmp_path, unit):
    log = read_loss_log(write_run(tmp_path), loss_unit=unit)
    np.testing.assert_array_equal(log.losses, [row["loss"] for row in rows()])


def test_the_frame_of_a_run_is_its_log(tmp_path):
    from probes.training import train
    from tests.probes._runs import small_corpus, small_run

    result = train(small_run(schedule="ramp"), corpus=small_corpus(), folder=tmp_path / "run")
    result.to_frame().to_parquet(tmp_path / "frame.parquet")
    frame, log = read_loss_log(tmp_path / "frame.parquet"), read_loss_log(tmp_path / "run")
    for name in ("steps", "losses", "known", "learning_rates", "batch_losses"):
        np.testing.assert_array_equal(getattr(frame, name), getattr(log, name))
    assert frame.grad_norms == log.grad_norms


def test_a_committed_frame_of_several_runs_is_read_run_by_run():
    path = Path(__file__).parents[3] / "figures" / "data" / "fig4_spike.cpu.parquet"
    with pytest.raises(LossLogError, match="holds 4 runs, told apart by column 'trial': 2eff0bf44a56, ") as refused:
        read_loss_log(path)
    name = str(refused.value).split()[-1]
    stored = pd.read_parquet(path).query("trial == @name")
    log = read_loss_log(path, runs=[name])
    np.testing.assert_array_equal(log.losses, stored["loss"])
    np.testing.assert_array_equal(log.learning_rates, stored["lr"])


def known(log):
    return log.ramp_steps, log.unigram_entropy, log.initial_loss


@pytest.mark.parametrize("name", ["", "log.jsonl"], ids=["folder", "its log"])
def test_a_run_of_this_toolkit_tells_its_ramp_and_its_text(tmp_path, name):
    folder = write_run(tmp_path, corpus={"unigram_entropy": 3.2, "vocab_size": 256})
    assert known(read_loss_log(folder / name)) == (600, 3.2, math.log(256))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (600, None, None)),
        ({"schedule": "cosine", "corpus": {"unigram_entropy": 3.2}}, (None, 3.2, None)),
        ({"steps": "many", "corpus": {"unigram_entropy": "x", "vocab_size": 0}}, (None, None, None)),
        ({"config": 3, "corpus": {"unigram_entropy": 3.2}}, (None, None, None)),
    ],
    ids=["unfinished", "no ramp", "wrong kinds", "a stranger's file"],
)
def test_of_other_files_beside_a_log_no_more_is_taken_than_is_there(tmp_path, options, expected):
    assert known(read_loss_log(write_run(tmp_path, **options))) == expected


def test_a_damaged_file_beside_a_log_is_named_and_not_used(tmp_path):
    write_run(tmp_path)
    (tmp_path / "training.json").write_text("{")
    log = read_loss_log(tmp_path)
    assert known(log) == (None, None, None)
    assert any(note.startswith("training.json beside the log cannot be read and is not used") for note in log.notes)
