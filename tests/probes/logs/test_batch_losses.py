"""Losses of the batches by models that only count, where a log has them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import STEPS, assert_is_the_run, micro_batches, rows, write_csv


def with_batches(table, unigram="unigram_loss", bigram="bigram_loss"):
    return [{**row, unigram: 3.0 + 0.01 * i, bigram: 2.0 + 0.02 * i} for i, row in enumerate(table)]


def of_batches(n):
    return [[3.0 + 0.01 * i, 2.0 + 0.02 * i] for i in range(n)]


BATCH_NAMES = {
    "plain": ("loss", "unigram_loss", "bigram_loss"),
    "of training": ("train/loss", "train/unigram_loss", "train/bigram_loss"),
    "of a named run": ("run 7 - train/loss", "run 7 - unigram_loss", "run 7 - bigram_loss"),
    "beside a loss of its own name": ("my_loss", "my_unigram_loss", "my_bigram_loss"),
}


@pytest.mark.parametrize(("loss", "unigram", "bigram"), BATCH_NAMES.values(), ids=list(BATCH_NAMES))
def test_losses_of_the_batches_are_read_and_are_no_losses_of_the_run(tmp_path, loss, unigram, bigram):
    log = read_loss_log(write_csv(tmp_path / "log.csv", with_batches(rows(loss), unigram, bigram)))
    assert_is_the_run(log)
    np.testing.assert_allclose(log.batch_losses, of_batches(10))


@pytest.mark.parametrize("left_out", ["unigram_loss", "bigram_loss"])
def test_a_log_with_one_of_them_has_none(tmp_path, left_out):
    table = [{name: value for name, value in row.items() if name != left_out} for row in with_batches(rows())]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert_is_the_run(log)
    assert log.batch_losses is None
    assert read_loss_log(write_csv(tmp_path / "other.csv", rows())).batch_losses is None


def test_a_log_of_nothing_but_batches_has_no_losses(tmp_path):
    table = with_batches([{"step": k, "lr": 0.1 * k} for k in STEPS])
    with pytest.raises(LossLogError, match="has no losses: columns found are step, lr, unigram_loss, bigram_loss"):
        read_loss_log(write_csv(tmp_path / "log.csv", table))


def test_a_row_that_lacks_one_of_them_knows_neither(tmp_path):
    table = with_batches(rows())
    table[0]["unigram_loss"] = table[3]["bigram_loss"] = ""
    table[5]["bigram_loss"] = "inf"
    found = read_loss_log(write_csv(tmp_path / "log.csv", table)).batch_losses
    assert np.isnan(found).all(axis=1).tolist() == [k in (0, 3) for k in range(10)]
    assert found[5].tolist() == [3.05, math.inf]


def test_a_log_that_began_without_them_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows()[:4], *with_batches(rows())[4:]])))
    found = read_loss_log(path).batch_losses
    assert np.isnan(found[:4]).all()
    np.testing.assert_allclose(found[4:], of_batches(10)[4:])


def test_losses_of_batches_are_means_over_micro_batches(tmp_path):
    table = with_batches(micro_batches())
    table[-1]["bigram_loss"] = ""
    found = read_loss_log(write_csv(tmp_path / "log.csv", table)).batch_losses
    np.testing.assert_allclose(found[:-1], np.array(of_batches(40)).reshape(10, 4, 2).mean(axis=1)[:-1])
    assert np.isnan(found[-1]).all()


def test_a_loss_of_a_batch_that_is_no_number_is_refused(tmp_path):
    table = with_batches(rows())
    table[1]["bigram_loss"] = "two"
    with pytest.raises(LossLogError, match="row 2, column 'bigram_loss': 'two' is not a number"):
        read_loss_log(write_csv(tmp_path / "log.csv", table))


@pytest.mark.parametrize("there", ["unigram_loss", "bigram_loss"])
def test_one_loss_of_the_batches_alone_is_not_used_and_said(tmp_path, there):
    log = read_loss_log(write_csv(tmp_path / "log.csv", [row | {there: 3.0} for row in rows()]))
    assert log.batch_losses is None
    assert any(note.startswith(f"column '{there}' is not used: there is no ") for note in log.notes)


def test_losses_of_batches_end_with_the_ramp(tmp_path):
    rates = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    table = with_batches([{"step": k, "loss": 5.0, "lr": rate} for k, rate in enumerate(rates)])
    log = read_loss_log(write_csv(tmp_path / "log.csv", table)).ramp()
    np.testing.assert_allclose(log.batch_losses, of_batches(4))
