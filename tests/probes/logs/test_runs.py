"""One run at a time: logs of several are refused with the list of them, or read by name."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from probes.logs import LossLogError, Ramp, read_loss_log
from tests.probes.logs._logs import FORMATS, write_as, write_csv, write_lines

STEPS = range(1, 41)


def of_run(run, /, **extra):
    """A run of its own level: 5, 6, 7 ..."""
    return [{**extra, "step": k, "loss": 5.0 + run - 0.01 * k, "lr": 0.001 * k} for k in STEPS]


def assert_is_run(log, run):
    assert log.steps.tolist() == list(STEPS)
    np.testing.assert_allclose(log.losses, [5.0 + run - 0.01 * k for k in STEPS])
    np.testing.assert_allclose(log.learning_rates, [0.001 * k for k in STEPS])


def refused(path, message, **options):
    with pytest.raises(LossLogError, match=message) as caught:
        read_loss_log(path, **options)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


ORDERS = {"one after the other": lambda table: table, "by step": lambda table: sorted(table, key=lambda row: row["step"])}
FLAT = [form for form in FORMATS if form != "tidy"]


@pytest.mark.parametrize("name", ["run", "run_id", "Run Name", "seed", "trial", "experiment", "scheme"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_column_of_runs(tmp_path, name, order):
    table = ORDERS[order]([row for run in range(3) for row in of_run(run, **{name: run})])
    path = write_csv(tmp_path / "log.csv", table)
    message = refused(path, f"holds 3 runs, told apart by column '{name}': 0, 1, 2")
    assert "--run 0" in message
    for run in range(3):
        assert_is_run(read_loss_log(path, runs=[str(run)]), run)
    refused(path, "no run '3'", runs=["3"])


@pytest.mark.parametrize("form", FLAT)
def test_a_column_of_runs_in_every_format(tmp_path, form):
    path = write_as(form, tmp_path, [row for run in range(2) for row in of_run(run, run=f"r{run}")])
    refused(path, "holds 2 runs, told apart by column 'run': r0, r1")
    assert_is_run(read_loss_log(path, runs=["r1"]), 1)


def test_a_table_of_metrics_of_several_runs(tmp_path):
    frames = [pd.DataFrame(of_run(run)).melt("step", var_name="metric").assign(seed=run) for run in range(2)]
    path = tmp_path / "log.parquet"
    pd.concat(frames).to_parquet(path)
    refused(path, "holds 2 runs, told apart by column 'seed': 0, 1")
    assert_is_run(read_loss_log(path, runs=["1"]), 1)


def test_several_columns_of_runs_make_one_name(tmp_path):
    table = [row for a in range(2) for b in range(2) for row in of_run(2 * a + b, scheme="xy"[a], seed=b)]
    path = write_csv(tmp_path / "log.csv", table)
    refused(path, "holds 4 runs, told apart by columns 'scheme', 'seed': x/0, x/1, y/0, y/1")
    assert_is_run(read_loss_log(path, runs=["y/0"]), 2)


def test_a_column_of_one_run_is_no_choice(tmp_path):
    path = write_csv(tmp_path / "log.csv", of_run(0, run="a", seed=3))
    assert_is_run(read_loss_log(path), 0)
    refused(path, "no run 'b' in .*: there is one run; leave out --run", runs=["b"])


def test_rows_of_no_run_among_runs_are_refused(tmp_path):
    table = [row | ({"run": ""} if row["step"] > 1 else {}) for run in range(2) for row in of_run(run, run=f"r{run}")]
    refused(
        write_csv(tmp_path / "log.csv", table), "does not say of 78 of 80 rows of which run they are: column 'run'", runs=["r1"]
    )


def test_a_column_of_runs_is_named_by_hand(tmp_path):
    table = [row for run in range(2) for row in of_run(run, variant=f"v{run}")]
    path = write_csv(tmp_path / "log.csv", table)
    assert_is_run(read_loss_log(path, columns={"run": "variant"}, runs=["v1"]), 1)


@pytest.mark.parametrize("name", ["variant", "optimizer", "config"])
def test_an_unknown_column_that_tells_the_rows_of_a_step_apart_is_not_averaged(tmp_path, name):
    table = ORDERS["by step"]([row for run in "abc" for row in of_run(0, **{name: run})])
    path = write_csv(tmp_path / "log.csv", table)
    message = refused(path, f"3 rows of each step, told apart by column '{name}': a, b, c")
    assert f"--column run={name}" in message


SHARES = ["micro_batch", "microstep", "micro batch index", "rank", "local_rank", "global/rank"]


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_and_ranks_that_are_named_are_averaged_and_said(tmp_path, name, order):
    table = ORDERS[order]([row for part in range(3) for row in of_run(part, **{name: part})])
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert_is_run(log, 1)
    assert f"each step has 3 rows: its loss is the mean over these micro-batches (column '{name}')" in log.notes


@pytest.mark.parametrize("separator", [" - ", ": "])
@pytest.mark.parametrize("labels", [("A", "B"), ("seed: 1", "seed: 2"), ("fast run 7", "slow run 7"), ("a-b", "c-d")])
@pytest.mark.parametrize("shared_rate", [False, True])
def test_runs_as_columns(tmp_path, separator, labels, shared_rate):
    rate = (lambda _: "lr") if shared_rate else (lambda label: f"{label}{separator}train/learning_rate")
    table = [
        {"Step": a["step"]}
        | {f"{label}{separator}train/loss": row["loss"] for label, row in zip(labels, (a, b), strict=True)}
        | {f"{label}{separator}train/loss__MIN": 0.0 for label in labels}
        | {rate(label): a["lr"] for label in labels}
        for a, b in zip(of_run(0), of_run(1), strict=True)
    ]
    path = write_csv(tmp_path / "log.csv", table)
    refused(path, f"holds 2 runs, told apart by the names of their columns: {labels[0]}, {labels[1]}")
    for run, label in enumerate(labels):
        assert_is_run(read_loss_log(path, runs=[label]), run)


def test_a_run_as_a_column_ends_where_its_own_cells_end(tmp_path):
    table = [
        {"Step": row["step"], "A - loss": row["loss"] if row["step"] <= 20 else "", "B - loss": row["loss"]}
        | {"A - lr": row["lr"] if row["step"] <= 20 else "", "B - lr": row["lr"]}
        for row in of_run(0)
    ]
    path = write_csv(tmp_path / "log.csv", table)
    assert read_loss_log(path, runs=["A"]).steps[-1] == 20
    assert read_loss_log(path, runs=["B"]).steps[-1] == 40


def test_one_run_as_a_column_needs_no_name(tmp_path):
    table = [{"Step": r["step"], "A - train/loss": r["loss"], "A - lr": r["lr"], "A - eval/loss": 9.0} for r in of_run(0)]
    assert_is_run(read_loss_log(write_csv(tmp_path / "log.csv", table)), 0)


@pytest.mark.parametrize("first", [0, 1, 10, 10_001])
@pytest.mark.parametrize("form", ["csv", "jsonl", "trainer_state"])
def test_a_start_anew_is_another_run(tmp_path, form, first):
    shifted = [[row | {"step": row["step"] + first - 1} for row in of_run(run)] for run in range(2)]
    path = write_as(form, tmp_path, shifted[0][:15] + shifted[1])
    refused(path, rf"holds 2 runs, told apart by steps that start again at the first one \({first} to {first + 14}, {first} to")
    log = read_loss_log(path, runs=["2"])
    assert log.steps.tolist() == [first + k - 1 for k in STEPS]
    assert log.losses[0] == pytest.approx(5.99)
    assert len(read_loss_log(path, runs=["1"]).steps) == 15


@pytest.mark.parametrize("form", ["csv", "jsonl", "trainer_state"])
def test_rows_that_are_written_again_are_the_same_run(tmp_path, form):
    table = [row | ({"loss": float("nan")} if row["step"] == 7 and form == "jsonl" else {}) for row in of_run(0)]
    log = read_loss_log(write_as(form, tmp_path, table[:15] + table))
    assert log.steps.tolist() == list(STEPS)
    changed = [row | ({"loss": 9.0} if row["step"] == 15 else {}) for row in table]
    refused(write_as(form, tmp_path, changed[:15] + table), "holds 2 runs")


def test_a_start_anew_whose_rows_are_sparse_is_another_run(tmp_path):
    table = [
        part
        for run in range(2)
        for row in of_run(run)
        for part in ({k: row[k] for k in ("step", name)} for name in ("lr", "loss"))
    ]
    path = write_lines(tmp_path / "log.jsonl", table)
    refused(path, "holds 2 runs")
    assert_is_run(read_loss_log(path, runs=["2"]), 1)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_start_anew_does_not_fill_in_what_was_unknown_before(tmp_path, form):
    """Whether or not there are rates beside the losses."""
    first = [{"step": k, "loss": 5.0 if k < 19 else None} for k in range(1, 21)]
    path = write_as(form, tmp_path, first + [{"step": row["step"], "loss": row["loss"]} for row in of_run(1)])
    logs = [read_loss_log(path, runs=[run], ramp=Ramp(start=0, peak=0.04, steps=40)) for run in "12"]
    assert logs[0].known.tolist() == [k < 19 for k in range(1, 21)]
    assert_is_run(logs[1], 1)


def test_a_run_inside_a_run_is_named_after_it(tmp_path):
    table = [row for run in range(2) for row in of_run(run, run=f"r{run}")[:30] + of_run(run + 2, run=f"r{run}")]
    path = write_csv(tmp_path / "log.csv", table)
    refused(path, "steps that start again", runs=["r1"])
    assert_is_run(read_loss_log(path, runs=["r1", "2"]), 3)


@pytest.mark.parametrize("back_to", [4, 20, 35])
def test_a_resumed_run_is_one_run(tmp_path, back_to):
    table = of_run(7)[: back_to - 1] + of_run(9)[back_to - 1 : 36] + of_run(7)[back_to - 1 :]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert_is_run(log, 7)
    assert f"steps go back: {37 - back_to} rows were replaced by later ones of the same steps" in log.notes


@pytest.mark.parametrize("back_to", [1, 2])
def test_a_start_anew_is_another_run_whichever_of_its_first_steps_is_logged(tmp_path, back_to):
    path = write_csv(tmp_path / "log.csv", of_run(0)[:36] + of_run(1)[back_to - 1 :])
    refused(path, rf"holds 2 runs, told apart by steps that start again at the first one \(1 to 36, {back_to} to 40\)")
    assert read_loss_log(path, runs=["2"]).losses[-1] == pytest.approx(5.6)


@pytest.mark.parametrize("name", ["seed", "name"])
def test_a_column_that_is_another_in_each_row_names_no_runs(tmp_path, name):
    path = write_csv(tmp_path / "log.csv", [row | {name: f"{row['step']}x"} for row in of_run(0)])
    assert_is_run(read_loss_log(path), 0)


def test_the_column_of_one_run_named_by_hand_brings_the_others_of_it(tmp_path):
    pairs = zip(of_run(0), of_run(1), strict=True)
    table = [
        {"Step": a["step"], "A - loss": a["loss"], "B - loss": b["loss"], "A - lr": 9, "B - lr": b["lr"]} for a, b in pairs
    ]
    assert_is_run(read_loss_log(write_csv(tmp_path / "log.csv", table), columns={"loss": "B - loss"}), 1)


@pytest.mark.parametrize("name", ["log.jsonl", "trainer_state.json", "metrics.csv"])
def test_folders_of_runs(tmp_path, name):
    for run in range(2):
        folder = tmp_path / "runs" / f"version_{run}"
        folder.mkdir(parents=True)
        form = {"jsonl": "jsonl", "json": "trainer_state", "csv": "csv"}[name.split(".")[1]]
        write_as(form, folder, of_run(run)).rename(folder / name)
    refused(tmp_path, "holds 2 runs, told apart by their folders: runs/version_0, runs/version_1")
    refused(tmp_path / "runs", "holds 2 runs, told apart by their folders: version_0, version_1")
    assert_is_run(read_loss_log(tmp_path / "runs", runs=["version_1"]), 1)
    assert_is_run(read_loss_log(tmp_path / "runs" / "version_1"), 1)


def deepspeed(folder, run, *, again=False):
    folder.mkdir(exist_ok=True, parents=True)
    for name, key in (("train_loss", "loss"), ("lr", "lr")):
        with (folder / f"Train_Samples_{name}.csv").open("a" if again else "w") as file:
            file.write(f"step,{name}\n" + "".join(f"{row['step']},{row[key]}\n" for row in of_run(run)))


def test_folders_of_deepspeed(tmp_path):
    for run in range(2):
        deepspeed(tmp_path / f"job{run}", run)
    refused(tmp_path, "holds 2 runs, told apart by their folders: job0, job1")
    assert_is_run(read_loss_log(tmp_path / "job1"), 1)
    deepspeed(tmp_path / "job1", 2, again=True)
    refused(tmp_path / "job1", "steps that start again at the first one")
    assert_is_run(read_loss_log(tmp_path / "job1", runs=["2"]), 2)


def test_many_runs_are_listed_shortly(tmp_path):
    table = [row for run in range(100) for row in of_run(run, run=run)[:3]]
    assert len(refused(write_csv(tmp_path / "log.csv", table), "holds 100 runs")) < 400


def test_names_of_runs_are_quoted_for_a_shell(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps([row for run in ("my run", "other") for row in of_run(0, run=run)]))
    assert "--run 'my run'" in refused(path, "holds 2 runs")


def broken(table, last=3):
    return [*table[:-last], *(row | {"loss": float("nan")} for row in table[-last:])]


@pytest.mark.parametrize("back_to", [20, 30])
def test_replaced_rows_that_are_not_finite_are_told(tmp_path, back_to):
    log = read_loss_log(write_csv(tmp_path / "log.csv", broken(of_run(0)[:36]) + of_run(0)[back_to - 1 :]))
    assert "3 of the rows that were replaced held losses or gradient norms that are not finite" in log.notes


@pytest.mark.parametrize("back_to", [1, 2, 4, 5])
def test_an_early_start_anew_after_losses_that_are_not_finite_is_another_run(tmp_path, back_to):
    refused(write_csv(tmp_path / "log.csv", broken(of_run(0)[:15]) + of_run(0)[back_to - 1 :]), "holds 2 runs")


def test_a_first_step_again_after_a_loss_that_is_not_finite_is_another_run(tmp_path):
    refused(write_csv(tmp_path / "log.csv", broken(of_run(0)[:1], 1) + of_run(0)), "begins again at its first step, 1")


@pytest.mark.parametrize("n_first", [2, 5, 20])
def test_a_start_anew_without_steps_is_another_run(tmp_path, n_first):
    table = [{key: row[key] for key in ("loss", "lr")} for row in broken(of_run(0)[:n_first], 1) + of_run(0)]
    refused(write_lines(tmp_path / "log.jsonl", table), f"in row {n_first + 1} its learning rate is back at the first one")


@pytest.mark.parametrize("order", [str, lambda step: step * 17 % 41])
def test_a_run_whose_rows_are_in_no_order_is_sorted(tmp_path, order):
    table = sorted(of_run(0), key=lambda row: order(row["step"]))
    log = read_loss_log(write_csv(tmp_path / "log.csv", table))
    assert_is_run(log, 0)
    assert "rows are not in the order of their steps, and have each step once: they are sorted" in log.notes
