"""Which column is taken for what, and how to say it by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes.cli._finished_runs import LogOptions, landmarks_of
from probes.errors import KeelError
from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import STEPS, assert_is_the_run, rows, write_csv, write_lines


@pytest.mark.parametrize("name", ["global_step", "trainer/global_step", "train/global_step", "optimizer_step", "iteration"])
@pytest.mark.parametrize("calls", ["_step", "Step"])
def test_optimizer_steps_outrank_log_calls(tmp_path, name, calls):
    """With evaluations between them, each a log call of its own."""
    table, k = [], 0
    for row in rows(step=name):
        table.append({calls: k, **row})
        if row[name] % 2 == 0:
            table.append({calls: k + 1, "eval/loss": 9.0, name: row[name]})
        k = table[-1][calls] + 1
    assert_is_the_run(read_loss_log(write_lines(tmp_path / "log.jsonl", table)))


@pytest.mark.parametrize("name", ["train_loss_step", "loss_step"])
def test_the_loss_of_a_step_is_no_step(tmp_path, name):
    table = [{"lr": row["lr"], name: row["loss"], "time per step": 0.1} for row in rows()]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert log.steps.tolist() == list(STEPS)
    assert "no step column: rows are numbered from 1" in log.notes


def test_optimizer_steps_outrank_plain_steps(tmp_path):
    table = [row | {"global_step": row["step"], "step": 100 + 2 * row["step"]} for row in rows()]
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", table)))


def test_optimizer_steps_that_are_not_everywhere_are_passed_over_and_said(tmp_path):
    sparse = [{"_step": k, "loss": 5.0 - 0.1 * k, "lr": 0.005 * k} | ({"global_step": 7 * k} if k % 2 else {}) for k in STEPS]
    log = read_loss_log(write_lines(tmp_path / "log.jsonl", sparse))
    assert log.steps.tolist() == list(STEPS)
    assert "steps are those of '_step', for 'global_step' is missing in 5 of 10 rows" in log.notes


def test_a_step_that_does_not_change_is_passed_over_and_said(tmp_path):
    log = read_loss_log(write_csv(tmp_path / "log.csv", [row | {"global_step": 0} for row in rows()]))
    assert_is_the_run(log)
    assert "steps are those of 'step', for 'global_step' does not change" in log.notes


NAMED = {"loss": "metrics/ce (mean)", "lr": "eta", "step": "updates done", "grad_norm": "|g|"}


def test_columns_are_named_by_hand(tmp_path):
    path = write_csv(tmp_path / "log.csv", rows(*NAMED.values()))
    assert_is_the_run(read_loss_log(path, columns=NAMED))
    with pytest.raises(LossLogError, match=r"has no losses: columns found are updates done, metrics/ce \(mean\), eta, \|g\|"):
        read_loss_log(path)


def test_a_named_column_stands_before_a_known_one(tmp_path):
    table = [row | {"loss": 9.0, "ce": row["loss"]} for row in rows()]
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", table), columns={"loss": "ce"}))


def test_case_and_signs_of_a_named_column_do_not_matter(tmp_path):
    path = write_csv(tmp_path / "log.csv", rows("Train/CE"))
    assert_is_the_run(read_loss_log(path, columns={"loss": "train_ce"}))


@pytest.mark.parametrize(
    ("names", "quantity"),
    [
        (("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss"), "loss"),
        (("ce_loss", "mse_loss"), "loss"),
        (("encoder lr", "decoder lr"), "lr"),
    ],
)
def test_several_candidates_are_refused_by_name(tmp_path, names, quantity):
    table = [
        {key: value for key, value in row.items() if key != quantity} | dict.fromkeys(names, row[quantity]) for row in rows()
    ]
    path = write_csv(tmp_path / "log.csv", table)
    with pytest.raises(
        LossLogError, match=f"several columns .*: {names[0]}, {names[1]}\nchoose one with --column {quantity}=NAME"
    ):
        read_loss_log(path)
    assert_is_the_run(read_loss_log(path, columns={quantity: names[0]}))


def test_auxiliary_losses_and_rates_of_the_configuration_are_none(tmp_path):
    others = {"train/aux_loss": 9.0, "z_loss": 9.0, "val_loss": 9.0, "peak_lr": 1.0, "final_lr": 0.0}
    table = [row | others for row in rows("train/ce_loss", "optimizer/lr")]
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", table)))


def test_rates_of_parameter_groups_are_those_of_the_first_and_said(tmp_path):
    table = [row | {"lr-AdamW/pg2": 1.0} for row in rows(lr="lr-AdamW/pg1")]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert_is_the_run(log)
    assert "the learning rate is that of 'lr-AdamW/pg1', the first of 2 columns" in log.notes


NORMS = ["gnorm", "norm", "grads/norm", "gradient_norm/total", "train/gradient_norm_total", "grad_norm_before_clip"]
NORMS += ["grad_norm_avg", "grad_l2_norm", "train/grad_norm/all", "Grad Norm (L2)", "encoder.grad_norm", "gradnorms"]


@pytest.mark.parametrize("name", NORMS)
def test_gradient_norms_by_other_names(tmp_path, name):
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", rows(grad=name))))


@pytest.mark.parametrize("name", ["weight_norm", "val/grad_norm", "norm_type", "layer norm", "gradient_checkpointing"])
def test_other_norms_are_none_of_gradients(tmp_path, name):
    assert read_loss_log(write_csv(tmp_path / "log.csv", rows(grad=name))).grad_norms is None


def test_a_column_of_words_holds_no_gradient_norms(tmp_path):
    table = [row | {"grad_norm_type": "L2"} for row in rows()]
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", table)))


@pytest.mark.parametrize("broken", ["body grad_norm", "head grad_norm"])
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_of_several_gradient_norms_each_counts_where_it_is_not_finite(tmp_path, broken, what):
    table = [row | {"head grad_norm": 1.0} for row in rows(grad="body grad_norm")]
    table[4][broken] = what
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert [k for k, norm in enumerate(log.grad_norms) if not np.isfinite(norm)] == [4]
    assert any("gradient norms are those of body grad_norm, head grad_norm" in note for note in log.notes)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss": "nll"}, r"no column 'nll' \(--column\); columns found are step, loss, lr, grad_norm"),
        ({"speed": "loss"}, "--column names one of loss, lr, step, grad_norm, run, .*, got 'speed'"),
    ],
)
def test_names_that_are_not_there_are_refused(tmp_path, columns, message):
    with pytest.raises(LossLogError, match=message):
        read_loss_log(write_csv(tmp_path / "log.csv", rows()), columns=columns)


def test_a_hundred_columns_are_listed_shortly(tmp_path):
    path = write_csv(tmp_path / "log.csv", [{f"{'x' * 60}{k}": 1.0 for k in range(100)}])
    for columns in ({}, {"loss": "nll"}):
        with pytest.raises(LossLogError, match="and 92 more") as refused:
            read_loss_log(path, columns=columns)
        assert len(str(refused.value)) < 900
        assert len(str(refused.value).splitlines()) <= 5


@pytest.mark.parametrize(("unit", "factor"), [("nats", 1.0), ("bits", math.log(2))])
def test_units_of_the_loss(tmp_path, unit, factor):
    table = [row | {"unigram_loss": 3.0, "bigram_loss": 2.0} for row in rows()]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table), loss_unit=unit)
    np.testing.assert_allclose(log.losses, [factor * (5.0 - 0.1 * k) for k in STEPS])
    np.testing.assert_allclose(log.batch_losses, [[3.0 * factor, 2.0 * factor]] * 10)


def test_an_unknown_unit_is_refused(tmp_path):
    with pytest.raises(LossLogError, match=r"no unit 'dits' \(--loss-unit\); known are nats, bits"):
        read_loss_log(write_csv(tmp_path / "log.csv", rows()), loss_unit="dits")


SECOND = [
    ("loss", "loss.1"),
    ("loss", "loss_run2"),
    ("loss", "loss_2"),
    ("train/loss", "seed2/train/loss"),
    ("loss", "lm_loss"),
]
SECOND += [("train_loss", "run 2 train_loss"), ("lm loss", "train/loss")]


@pytest.mark.parametrize("names", SECOND)
@pytest.mark.parametrize("turned", [False, True])
def test_two_columns_of_losses_are_refused_unless_one_is_named(tmp_path, names, turned):
    first, second = names[::-1] if turned else names
    table = [{first: row["loss"], second: 9.0} | {key: row[key] for key in ("step", "lr", "grad_norm")} for row in rows()]
    path = write_csv(tmp_path / "log.csv", table)
    with pytest.raises(LossLogError, match=r"several columns that could hold its losses: .*\nchoose one with --column loss="):
        read_loss_log(path)
    assert_is_the_run(read_loss_log(path, columns={"loss": first}))


@pytest.mark.parametrize(
    "second", ["val_loss", "loss_avg", "train/loss_epoch", "loss_ema", "eval/loss", "loss scale", "z loss"]
)
def test_an_evaluation_or_an_average_is_no_second_loss(tmp_path, second):
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", [row | {second: 9.0} for row in rows()])))


def test_a_second_column_that_says_the_same_is_none(tmp_path):
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", [row | {"lm_loss": row["loss"]} for row in rows()])))


@pytest.mark.parametrize("given", [{"loss": "lr"}, {"lr": "loss"}, {"step": "lr"}, {"grad_norm": "loss"}])
def test_a_column_is_taken_for_one_quantity(tmp_path, given):
    with pytest.raises(LossLogError, match="is taken for both"):
        read_loss_log(write_csv(tmp_path / "log.csv", rows()), columns=given)


def test_a_quantity_is_given_one_column(tmp_path):
    options = LogOptions(path=write_csv(tmp_path / "log.csv", rows()), columns=["loss=loss", "loss=lr"], runs=[])
    with pytest.raises(LossLogError, match="--column loss=NAME is given more than once"):
        options.read()


@pytest.mark.parametrize("entropy", [-3.0, 0.0, math.inf, math.nan])
def test_an_entropy_is_above_zero(entropy):
    with pytest.raises(KeelError, match="--unigram-entropy is a finite number of nats above 0"):
        landmarks_of(None, None, entropy)
