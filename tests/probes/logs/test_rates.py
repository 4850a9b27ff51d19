"""Learning rates that are not in every row, or not in the log."""

from __future__ import annotations

import numpy as np
import pytest

from probes.logs import LossLogError, Ramp, read_loss_log
from tests.probes.logs._logs import log_of, rows, write_csv, write_lines

RAMP = Ramp(start=0.01, peak=0.05, steps=40)


def without_rates(path, steps):
    return write_csv(path / "log.csv", [{"step": step, "loss": 5.0 - 0.01 * i} for i, step in enumerate(steps)])


def test_a_ramp_of_the_toolkit_is_that_of_its_training(tmp_path):
    """The rate of the k-th step is peak k / steps."""
    from tests.probes._runs import small_run

    config = small_run(steps=50, peak_lr=0.02)
    log = read_loss_log(without_rates(tmp_path, range(1, 51)), ramp=Ramp(start=0, peak=0.02, steps=50))
    np.testing.assert_allclose(log.learning_rates, [config.learning_rate(k) for k in range(1, 51)], rtol=1e-12)


NUMBERINGS = {  # steps of the log, and which step of the ramp each is
    "from 1": (range(1, 41), range(1, 41)),
    "from 0": (range(40), range(1, 41)),
    "from 0, cut short": (range(30), range(1, 31)),
    "from 0, every 10th": (range(0, 40, 10), range(1, 41, 10)),
    "every 10th": (range(10, 41, 10), range(10, 41, 10)),
    "a later part": (range(11, 31), range(11, 31)),
    "after a start from a checkpoint": (range(10_001, 10_041), range(1, 41)),
    "after one, every 10th": (range(10_010, 10_041, 10), range(10, 41, 10)),
}


@pytest.mark.parametrize("name", NUMBERINGS)
def test_rates_of_a_given_ramp(tmp_path, name):
    steps, k = NUMBERINGS[name]
    log = read_loss_log(without_rates(tmp_path, steps), ramp=RAMP)
    np.testing.assert_allclose(log.learning_rates, 0.01 + 0.04 * np.array(k) / 40)
    assert log.ramp_steps == 40
    assert log.steps[0] - log.first_step_of(40) + 1 == k[0]


@pytest.mark.parametrize("steps", [range(41), range(1, 42), range(10_001, 10_042)])
def test_a_log_beyond_the_given_ramp_is_refused(tmp_path, steps):
    with pytest.raises(LossLogError, match=rf"goes on to step {steps[-1]}, step 41 of a ramp of 40 \(--ramp\)"):
        read_loss_log(without_rates(tmp_path, steps), ramp=RAMP)


def test_a_ramp_beside_rates_is_refused(tmp_path):
    path = write_csv(tmp_path / "log.csv", rows())
    with pytest.raises(LossLogError, match="has learning rates, in column 'lr'; leave out --ramp"):
        read_loss_log(path, ramp=RAMP)


def test_a_column_of_rates_that_says_nothing_leaves_room_for_a_ramp(tmp_path):
    table = [row | {"lr": "N/A"} for row in rows()]
    path = write_csv(tmp_path / "log.csv", table)
    assert read_loss_log(path, ramp=Ramp(start=0, peak=1, steps=10)).learning_rates[-1] == 1
    with pytest.raises(LossLogError, match="column 'lr' says nothing in any row"):
        read_loss_log(path)


def test_rows_that_are_not_numbered_must_be_as_many_as_the_ramp_has_steps(tmp_path):
    path = write_csv(tmp_path / "log.csv", [{"loss": 5.0 - 0.01 * k} for k in range(40)])
    np.testing.assert_allclose(read_loss_log(path, ramp=RAMP).learning_rates[[0, -1]], [0.011, 0.05])
    with pytest.raises(LossLogError, match=r"has 40 rows without steps, and a ramp of 400 steps is given \(--ramp\)"):
        read_loss_log(path, ramp=Ramp(start=0, peak=1, steps=400))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0.05", "--ramp is START:PEAK:STEPS such as 0:0.05:600, got '0:0.05'"),
        ("0:x:600", "got '0:x:600'"),
        ("0:0.05:6e2", "got '0:0.05:6e2'"),
        ("0:0.05:0", "at least 1 step, got 0"),
        ("0.05:0:600", "rises from a rate of at least 0 to a higher one, got 0.05 to 0"),
        ("0.05:0.05:600", "rises"),
        ("-1:0.05:600", "rises"),
        ("0:nan:600", "rises"),
        ("0:inf:600", "rises"),
    ],
)
def test_what_is_no_ramp_is_refused(text, message):
    with pytest.raises(LossLogError, match=message):
        Ramp.parse(text)


@pytest.mark.parametrize("rate", [lambda k: 0.001 * k, lambda k: 1e-6 * 1.2**k, lambda k: 0.01])
@pytest.mark.parametrize("every", [2, 10])
def test_rates_that_are_filled_in_at_the_ends_are_not_above_those_that_were(tmp_path, rate, every):
    table = [{"step": k, "loss": 5.0} | ({"lr": rate(k)} if k % every == 0 else {}) for k in range(1, 41 + every // 2)]
    filled = read_loss_log(write_lines(tmp_path / "log.jsonl", table)).learning_rates
    true = np.array([rate(row["step"]) for row in table])
    ends = np.r_[:every, 40 : len(table)]
    assert (filled[ends] <= true[ends] * (1 + 1e-9)).all()
    assert (filled >= 0).all()


@pytest.mark.parametrize("every", [2, 5, 10])
def test_rates_between_logged_ones_are_interpolated_and_said(tmp_path, every):
    table = [{"step": k, "loss": 5.0} | ({"lr": 0.001 * k} if k % every == 0 else {}) for k in range(41)]
    log = read_loss_log(write_lines(tmp_path / "log.jsonl", table))
    np.testing.assert_allclose(log.learning_rates, [0.001 * k for k in range(41)])
    n_missing = 40 - 40 // every
    assert f"{n_missing} of 41 steps have no learning rate; it is interpolated, over up to {every} steps" in log.notes


@pytest.mark.parametrize(
    ("known", "where"), [(range(1, 30), "after step 29"), (range(10, 41), "before step 10"), ([20], "after step 20")]
)
def test_rates_that_are_missing_at_an_end_are_refused(tmp_path, known, where):
    table = [{"step": k, "loss": 5.0, "lr": 0.001 * k if k in known else ""} for k in range(1, 41)]
    with pytest.raises(LossLogError, match=f"has no learning rates {where}, and its steps are 1 to 40"):
        read_loss_log(write_csv(tmp_path / "log.csv", table))


@pytest.mark.parametrize("rate", ["-0.1", "nan", "inf"])
def test_rates_that_are_none_are_refused(tmp_path, rate):
    with pytest.raises(LossLogError, match=r"row 2: learning rate .* is not a finite number >= 0"):
        read_loss_log(log_of(tmp_path, [1, 2, 3], [0.1, rate, 0.3]))
