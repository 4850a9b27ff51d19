"""From rows to steps: what is unknown, rows of one step, micro-batches, steps that go back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import FORMATS, RATES, STEPS, log_of, micro_batches, rows, write_as, write_csv, write_lines

UNKNOWN = ["", "null", "None", "none", "N/A", "n/a", "NA", "-", "--", "NULL", "<NA>", "#N/A", " "]
NOT_FINITE = ["nan", "NaN", "NAN", "-nan", "inf", "-inf", "+inf", "Infinity", "-Infinity", "1.#INF", "1.#QNAN", "-nan(ind)"]
PLACES = {"first": range(1, 2), "one": range(5, 6), "to the end": range(6, 11), "last": range(10, 11), "most": range(2, 10)}


def with_losses(at, loss):
    return [row | ({"loss": loss} if row["step"] in at else {}) for row in rows()]


def assert_unknown(log, at):
    assert log.steps.tolist() == list(STEPS)
    np.testing.assert_allclose(log.learning_rates, RATES)
    assert log.known.tolist() == [k not in at for k in STEPS]
    assert np.isnan(log.losses).tolist() == [k in at for k in STEPS]
    assert log.grad_norms == tuple(1.0 + k for k in STEPS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", UNKNOWN)
def test_words_for_unknown_losses_keep_their_rows(tmp_path, word, place):
    table = with_losses(PLACES[place], word)
    assert_unknown(read_loss_log(write_csv(tmp_path / "log.csv", table)), PLACES[place])
    assert_unknown(read_loss_log(write_lines(tmp_path / "log.jsonl", table)), PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "space"])
def test_unknown_losses_keep_their_rows_in_every_format(tmp_path, form, place):
    assert_unknown(read_loss_log(write_as(form, tmp_path, with_losses(PLACES[place], None))), PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_losses_whose_key_is_missing_keep_their_rows(tmp_path, place):
    table = [{k: v for k, v in row.items() if k != "loss" or row["step"] not in PLACES[place]} for row in rows()]
    assert_unknown(read_loss_log(write_lines(tmp_path / "log.jsonl", table)), PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", [*NOT_FINITE, math.nan, math.inf])
def test_losses_that_are_not_finite_are_known(tmp_path, word, place):
    table = with_losses(PLACES[place], word)
    for log in (read_loss_log(write_csv(tmp_path / "log.csv", table)), read_loss_log(write_lines(tmp_path / "l.jsonl", table))):
        assert log.known.all()
        assert np.isfinite(log.losses).tolist() == [k not in PLACES[place] for k in STEPS]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "trainer_state"])
def test_rows_of_which_nothing_but_the_step_is_known_count_to_the_end(tmp_path, form):
    table = [row if row["step"] < 9 else dict.fromkeys(row) | {"step": row["step"]} for row in rows()]
    with pytest.raises(LossLogError, match="no learning rates after step 8, and its steps are 1 to 10"):
        read_loss_log(write_as(form, tmp_path, table))


def test_norms_that_are_not_finite_are_kept_where_losses_are_unknown(tmp_path):
    table = [row | ({"loss": None, "grad_norm": math.nan} if row["step"] > 7 else {}) for row in rows()]
    log = read_loss_log(write_lines(tmp_path / "log.jsonl", table))
    assert [math.isnan(norm) for norm in log.grad_norms] == [k > 7 for k in STEPS]


def test_evaluations_and_summaries_are_no_steps(tmp_path):
    table = [part for row in rows() for part in (row, {"step": row["step"] + 1, "eval_loss": 9.0, "epoch": 1})]
    table += [{"step": 11, "train_runtime": 3.0, "train_loss": 9.0}]
    for path in (write_lines(tmp_path / "log.jsonl", table), write_as("csv", tmp_path, table[:-1])):
        assert read_loss_log(path).steps.tolist() == list(STEPS)


ORDERS = {
    "rate first": lambda rate, loss: [part for pair in zip(rate, loss, strict=True) for part in pair],
    "loss first": lambda rate, loss: [part for pair in zip(loss, rate, strict=True) for part in pair],
    "rate of the next step first": lambda rate, loss: [
        rate[0],
        *(part for pair in zip(rate[1:], loss[:-1], strict=True) for part in pair),
        loss[-1],
    ],
    "rates after the losses": lambda rate, loss: [*loss, *rate],
}


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "trainer_state"])
@pytest.mark.parametrize("order", ORDERS)
def test_sparse_rows_of_one_step_are_joined(tmp_path, order, form):
    rate = [{"step": row["step"], "lr": row["lr"], "grad_norm": row["grad_norm"]} for row in rows()]
    loss = [{"step": row["step"], "loss": row["loss"]} for row in rows()]
    log = read_loss_log(write_as(form, tmp_path, ORDERS[order](rate, loss)))
    assert_unknown(log, ())


NOT_RESUMED = {
    "another rate": (
        [*range(1, 31), *range(16, 46)],
        np.linspace(1e-4, 0.02, 60),
        r"go back to 16, where the learning rate was 0\.005.* and is 0\.01.* now: that is no resumed run",
    ),
    "an old row at the end": ([*range(1, 21), 3], [*np.linspace(1e-3, 0.02, 20), 3e-3], "18 of 21 rows would be replaced"),
}


@pytest.mark.parametrize(("steps", "rates", "message"), NOT_RESUMED.values(), ids=list(NOT_RESUMED))
def test_steps_that_go_back_without_a_resumption_are_refused(tmp_path, steps, rates, message):
    with pytest.raises(LossLogError, match=message):
        read_loss_log(log_of(tmp_path, steps, rates))


@pytest.mark.parametrize("form", ["csv", "jsonl", "trainer_state"])
def test_a_log_whose_newest_row_is_the_first_is_turned_round(tmp_path, form):
    log = read_loss_log(write_as(form, tmp_path, rows()[::-1]))
    assert_unknown(log, ())
    assert "the newest row is the first: rows are read from the last one on" in log.notes


def side_by_side(levels, n=60, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.05, (n, len(levels)))
    return [
        {"step": k, "loss": 3 + 3 * math.exp(-k / 15) + level(k) + noise[k - 1, i], "lr": 0.001 * k}
        for k in range(1, n + 1)
        for i, level in enumerate(levels)
    ]


SIDE_BY_SIDE = {
    "one breaks": [lambda k: 0.0, lambda k: 3.0 * (k > 40), lambda k: 0.0],
    "one is higher": [lambda k: 0.0, lambda k: 1.0],
    "one learns faster": [lambda k: -math.sin(k / 40), lambda k: 0.0],
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_runs_side_by_side_that_nothing_names_are_not_averaged(tmp_path, name):
    path = write_csv(tmp_path / "log.csv", side_by_side(SIDE_BY_SIDE[name]))
    with pytest.raises(LossLogError, match=r"rows of each step, whose losses differ by place by .*: several runs\?"):
        read_loss_log(path)


@pytest.mark.parametrize("per_step", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_that_nothing_names_are_averaged(tmp_path, per_step, seed):
    log = read_loss_log(write_csv(tmp_path / "log.csv", side_by_side([lambda k: 0.0] * per_step, seed=seed)))
    assert len(log.steps) == 60
    assert f"each step has {per_step} rows: its loss is the mean over these micro-batches" in log.notes


def test_rows_without_a_step_that_say_something_are_refused(tmp_path):
    table = rows()
    table[-1]["step"] = ""
    with pytest.raises(LossLogError, match="row 10 has no step, and what it says cannot be placed"):
        read_loss_log(write_csv(tmp_path / "log.csv", table))


def test_the_gradient_norm_of_a_step_is_not_finite_where_that_of_a_micro_batch_is(tmp_path):
    table = [row | {"grad_norm": math.inf if i == 5 else 1.0} for i, row in enumerate(micro_batches())]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.grad_norms[:3] == (1.0, math.inf, 1.0)


def test_resumed_run_counts_its_last_rows(tmp_path):
    table = [{"step": k, "loss": 5.0, "lr": 0.01 * k} for k in range(1, 8)]
    table += [{"step": k, "loss": 4.0, "lr": 0.01 * k} for k in range(4, 11)]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.steps.tolist() == list(range(1, 11))
    assert log.losses.tolist() == [5.0] * 3 + [4.0] * 7
    assert log.notes == ("steps go back: 4 rows were replaced by later ones of the same steps",)


def test_step_repeated_once_counts_its_last_row(tmp_path):
    table = [{"step": k, "loss": 5.0, "lr": 0.1} for k in (1, 2, 3)] + [{"step": 3, "loss": 4.0, "lr": 0.1}]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.losses.tolist() == [5.0, 5.0, 4.0]
    assert "1 rows repeat a step; the last one counts" in log.notes


@pytest.mark.parametrize("with_step", [True, False], ids=["repeated steps", "no step column"])
def test_points_are_optimizer_steps_and_losses_means_over_micro_batches(tmp_path, with_step):
    table = [row if with_step else {"loss": row["loss"], "lr": row["lr"]} for row in micro_batches()]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.steps.tolist() == list(range(1, 11))
    np.testing.assert_allclose(log.learning_rates, 0.005 * np.arange(1, 11))
    np.testing.assert_allclose(log.losses, 6 - 0.1 * np.arange(1, 11))


@pytest.mark.parametrize("with_step", [True, False], ids=["repeated steps", "no step column"])
def test_last_partial_window_is_reported(tmp_path, with_step):
    table = [row if with_step else {"loss": row["loss"], "lr": row["lr"]} for row in micro_batches(last=2)]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert len(log.steps) == 10
    assert log.losses[-1] == pytest.approx(5.0 + 0.2 * -1.0)
    assert "the last step has 2 of 4 micro-batches; its loss is the mean over them" in log.notes


def test_rounded_learning_rates_do_not_make_micro_batches_of_numbered_steps(tmp_path):
    table = [{"step": k, "loss": 5.0 - 0.01 * k, "lr": round(1e-5 * k, 4)} for k in range(1, 101)]
    assert len(read_loss_log(write_csv(tmp_path / "log.csv", table)).steps) == 100


def test_rows_without_steps_are_numbered(tmp_path):
    table = [{"loss": 5.0 - 0.1 * k, "lr": 0.005 * k} for k in STEPS]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.steps.tolist() == list(STEPS)
    assert "no step column: rows are numbered from 1" in log.notes


@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("at", [5, 12, 18])
def test_a_step_out_of_its_place_is_skipped_and_the_others_stay(tmp_path, at, per_step):
    steps = [*range(1, at + 1), 2, *range(at + 1, 21)]
    steps = [step for step in steps for _ in range(per_step)]
    log = read_loss_log(log_of(tmp_path, steps, [0.001 * step for step in steps]))
    assert log.steps.tolist() == list(range(1, 21))
    assert f"{per_step} rows out of the order of steps were skipped" in log.notes


@pytest.mark.parametrize("share", [{}, {"micro_batch": 0}, {"rank": 0}])
@pytest.mark.parametrize("unknown", ["", "n/a", None])
@pytest.mark.parametrize("share_of", [0, 3])
def test_a_step_with_an_unknown_micro_batch_is_unknown(tmp_path, share, unknown, share_of):
    table = [row | dict.fromkeys(share, i % 4) for i, row in enumerate(micro_batches())]
    for k in range(6, 10):
        table[4 * k + share_of]["loss"] = unknown
    path = write_lines(tmp_path / "log.jsonl", table)
    log = read_loss_log(path)
    assert log.known.tolist() == [k < 6 for k in range(10)]
    np.testing.assert_allclose(log.losses[:6], [6 - 0.1 * k for k in range(1, 7)])
    assert "4 steps lack the loss of a micro-batch; their losses are unknown" in log.notes


def test_a_step_that_lacks_the_row_of_a_micro_batch_is_unknown_unless_the_log_ends_there(tmp_path):
    table = [row | {"micro_batch": i % 4} for i, row in enumerate(micro_batches(last=3)) if i != 13]
    assert read_loss_log(write_lines(tmp_path / "log.jsonl", table)).known.tolist() == [k != 3 for k in range(10)]


def test_a_broken_micro_batch_beside_an_unknown_one_is_a_broken_step(tmp_path):
    table = micro_batches()
    table[20]["loss"], table[21]["loss"] = float("nan"), None
    log = read_loss_log(write_lines(tmp_path / "log.jsonl", table))
    assert log.known.all()
    assert np.isnan(log.losses).tolist() == [k == 5 for k in range(10)]
