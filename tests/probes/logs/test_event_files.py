"""TensorBoard's event files, written by PyTorch and by the package itself."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from probes.logs import LossLogError, read_loss_log
from probes.logs.event_files import TensorBoardError, is_event_file
from tests.probes.logs._logs import rows

pytest.importorskip("tensorboard")
RUN = {"train/loss": "loss", "train/learning_rate": "lr", "train/grad_norm": "grad_norm"}


def write(folder, table, tags=RUN, **others):
    """As a training loop does: all scalars of a step, then those of the next one."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for row in table:
        for tag, key in tags.items():
            if key in row:
                writer.add_scalar(tag, row[key], row["step"], new_style="new style" in others)
        for tag, value in others.items():
            writer.add_scalar(tag.replace("_of_", "/"), value, row["step"])
    writer.close()
    return folder


def of_run(run):
    return [row | {"loss": row["loss"] + run} for row in rows()]


def assert_is_run(log, run):
    assert log.steps.tolist() == list(range(1, 11))
    np.testing.assert_allclose(log.losses, [row["loss"] + run for row in rows()], rtol=1e-6)
    np.testing.assert_allclose(log.learning_rates, [row["lr"] for row in rows()], rtol=1e-6)


@pytest.mark.parametrize("others", [{}, {"eval_of_loss": 9.0, "weights": 1.0}])
def test_tags_are_chosen_by_their_names(tmp_path, others):
    log = read_loss_log(write(tmp_path, rows(), **others))
    assert_is_run(log, 0)
    assert log.grad_norms == tuple(row["grad_norm"] for row in rows())


def test_scalars_that_are_tensors(tmp_path):
    assert_is_run(read_loss_log(write(tmp_path, rows(), **{"new style": 0.0})), 0)


def test_values_that_are_not_finite_and_values_that_are_missing(tmp_path):
    table = [row | ({"loss": math.nan, "grad_norm": math.inf} if row["step"] > 8 else {}) for row in rows()]
    del table[4]["loss"]
    log = read_loss_log(write(tmp_path, table))
    assert np.isnan(log.losses).tolist() == [k in (5, 9, 10) for k in range(1, 11)]
    assert log.known.tolist() == [k != 5 for k in range(1, 11)]
    assert log.grad_norms[8:] == (math.inf, math.inf)


def test_losses_of_the_batches_have_their_tags(tmp_path):
    log = read_loss_log(write(tmp_path, rows(), unigram_loss=3.0, train_of_bigram_loss=2.0))
    assert log.batch_losses.tolist() == [[3.0, 2.0]] * 10


def test_runs_in_folders_of_one_folder(tmp_path):
    for run in range(2):
        write(tmp_path / f"run{run}", of_run(run))
    with pytest.raises(LossLogError, match="holds 2 runs, told apart by their folders: run0, run1"):
        read_loss_log(tmp_path)
    assert_is_run(read_loss_log(tmp_path, runs=["run1"]), 1)


def test_a_folder_of_one_run_below_is_that_run(tmp_path):
    write(tmp_path / "runs" / "May27_host", rows())
    assert_is_run(read_loss_log(tmp_path), 0)


def rename(folder, number):
    """Files are read in the order of their names, which begin with the time."""
    (path,) = (path for path in folder.iterdir() if not path.name.startswith("events.out.tfevents.0"))
    path.rename(folder / f"events.out.tfevents.0{number}.host")


def test_a_run_that_was_started_again_in_its_folder_is_two(tmp_path):
    for run in range(2):
        rename(write(tmp_path, of_run(run)), run)
    with pytest.raises(
        LossLogError, match=r"holds 2 runs, told apart by steps that start again at the first one \(1 to 10, 1 to 10\)"
    ):
        read_loss_log(tmp_path)
    for run in range(2):
        assert_is_run(read_loss_log(tmp_path, runs=[str(run + 1)]), run)


def test_a_run_that_was_started_again_in_one_file_is_two(tmp_path):
    with pytest.raises(LossLogError, match="holds 2 runs"):
        read_loss_log(write(tmp_path, [*of_run(0), *of_run(1)]))
    assert_is_run(read_loss_log(tmp_path, runs=["2"]), 1)


def test_a_run_that_was_resumed_is_one(tmp_path):
    rename(write(tmp_path, of_run(7)[:6]), 0)
    rename(write(tmp_path, of_run(0)[4:]), 1)
    log = read_loss_log(tmp_path)
    assert log.steps.tolist() == list(range(1, 11))
    np.testing.assert_allclose(log.losses, [row["loss"] + 7 * (row["step"] < 5) for row in rows()], rtol=1e-6)


def test_micro_batches_of_a_step_are_averaged(tmp_path):
    table = [part for row in rows() for part in (row, {"step": row["step"], "loss": row["loss"] + 2})]
    assert_is_run(read_loss_log(write(tmp_path, table)), 1)


def test_missing_quantities_are_refused_with_the_tags_found(tmp_path):
    write(tmp_path / "a", rows(), tags={"train/loss": "loss"}, eval_of_loss=9.0)
    with pytest.raises(LossLogError, match="no learning rates: columns found are step, train/loss, eval/loss"):
        read_loss_log(tmp_path / "a")
    write(tmp_path / "b", rows(), tags={"train/lr": "lr"}, weights=9.0)
    with pytest.raises(LossLogError, match="no losses: columns found are step, train/lr, weights"):
        read_loss_log(tmp_path / "b")


def test_no_scalars(tmp_path):
    write(tmp_path, [])
    with pytest.raises(TensorBoardError, match="holds no scalars"):
        read_loss_log(tmp_path)


def test_event_files_need_their_package(tmp_path, monkeypatch):
    write(tmp_path, rows())
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TensorBoardError, match=r"needs the package tensorboard, .*: pip install 'keel-dynamics\[logs\]'"):
        read_loss_log(tmp_path)


@pytest.mark.parametrize(("name", "is_one"), [("events.out.tfevents.17.host.0", True), ("loss.csv", False)])
def test_event_files_are_known_by_name(name, is_one):
    assert is_event_file(Path(name)) is is_one
