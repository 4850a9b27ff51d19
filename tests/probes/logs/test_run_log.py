"""The part of a log that is a ramp, and how long a ramp it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from probes.cli.main import app
from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import log_of, write_csv


def test_ramp_ends_at_the_last_highest_rate(tmp_path):
    rates = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    table = [{"step": k, "loss": 5.0, "lr": rate} for k, rate in enumerate(rates)]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table)).ramp()
    assert log.learning_rates.tolist() == [0.1, 0.2, 0.3, 0.3]
    assert log.notes == ("2 points after the last one at the highest learning rate (0.3) are not judged",)


UP = [0.001 * k for k in range(1, 21)]


NO_RAMPS = {
    "falling": (UP[::-1], r"the learning rate is highest, 0\.02, at its first step, 1, and falls"),
    "zero": ([0.0] * 20, "the learning rate is 0 throughout"),
    "a short rise and a long decay": (
        [*UP[:5], *np.linspace(0.004, 1e-5, 15)],
        r"highest, 0\.005, at step 5, and the 15 of 20 points after it",
    ),
    "two ramps": (UP[:10] + UP[:10], r"falls from 0\.01 to 0\.001 at step 11 and rises again"),
    "a dip": ([*UP[:10], 0.002, *UP[11:]], r"falls from 0\.01 to 0\.002 at step 11 and rises again"),
}


@pytest.mark.parametrize(("rates", "message"), NO_RAMPS.values(), ids=list(NO_RAMPS))
def test_what_is_no_ramp_is_refused(tmp_path, rates, message):
    log = read_loss_log(log_of(tmp_path, range(1, len(rates) + 1), rates))
    with pytest.raises(LossLogError, match=f"is no ramp: .*{message}"):
        log.ramp()


@pytest.mark.parametrize("told", [{"loss": "nan"}, {"grad_norm": "inf"}, {"loss": "", "grad_norm": "nan"}, {"loss": ""}])
@pytest.mark.parametrize("bad_from", [16, 19])
def test_a_run_that_ends_in_not_a_number_after_its_ramp_is_refused(tmp_path, told, bad_from):
    rates = UP[:15] + UP[13:8:-1]
    table = [{"step": k, "loss": 5.0, "lr": rate, "grad_norm": 1.0} for k, rate in enumerate(rates, start=1)]
    table = [row | (told if row["step"] >= bad_from else {}) for row in table]
    with pytest.raises(
        LossLogError, match=r"goes on in losses or gradient norms that are unknown or not finite, after its .* at step 15"
    ):
        read_loss_log(write_csv(tmp_path / "log.csv", table)).ramp()


BEHIND = {
    "zeros": (lambda k: {"loss": 0.0}, "not above 0"),
    "not a number until the last": (lambda k: {"loss": "nan"} if k < 100 else {}, "unknown or not finite"),
    "gradient norms of infinity until the last": (lambda k: {"grad_norm": "inf"} if k < 100 else {}, "unknown or not finite"),
    "unknown until near the end": (lambda k: {"loss": ""} if k < 98 else {}, "unknown or not finite"),
    "far above": (lambda k: {"loss": 14.0}, "goes from a loss of 3 to 14 nats"),
    "far above in the end": (lambda k: {"loss": 4.0} if k > 88 else {}, "goes from a loss of 3 to 4 nats"),
}


def rise_and_decay(change=lambda k: {}, every=1):
    rates = [*range(1, 61), *range(59, 19, -1)]
    table = [
        {"step": k, "loss": 3.0 + 3 * max(0, 40 - k) / 40 + 0.01 * (-1) ** k, "lr": 1e-3 * rate, "grad_norm": 1.0}
        | (change(k) if k > 60 else {})
        for k, rate in enumerate(rates, start=1)
    ]
    return [row | ({"loss": ""} if row["step"] % every else {}) for row in table]


@pytest.mark.parametrize(("change", "message"), BEHIND.values(), ids=list(BEHIND))
def test_what_is_lost_behind_its_ramp_is_refused(tmp_path, change, message):
    log = read_loss_log(write_csv(tmp_path / "log.csv", rise_and_decay(change)))
    with pytest.raises(LossLogError, match=f"{message}.*after its highest learning rate at step 60"):
        log.ramp()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("odd", [{}, {"loss": "nan"}, {"loss": 9.0}, {"loss": ""}])
def test_a_single_odd_step_behind_a_ramp_is_no_reason(tmp_path, odd, every):
    log = read_loss_log(write_csv(tmp_path / "log.csv", rise_and_decay(lambda k: odd if k == 70 else {}, every)))
    assert log.ramp().steps[-1] == 60


RAMPS = {
    "rising": UP,
    "warm-up and a constant rate": UP[:5] + [0.005] * 15,
    "rounded": [round(rate, 3) for rate in np.linspace(1e-4, 0.02, 20)],
    "a rise and a shorter decay": UP[:15] + UP[13:8:-1],
    "a wobble": [rate * (1 + 0.002 * (-1) ** k) for k, rate in enumerate(UP)],
    "one point": [0.1],
    "one rate throughout": [0.1] * 20,
}


@pytest.mark.parametrize("rates", RAMPS.values(), ids=list(RAMPS))
def test_what_is_a_ramp_is_kept(tmp_path, rates):
    log = read_loss_log(log_of(tmp_path, range(1, len(rates) + 1), rates)).ramp()
    assert log.learning_rates[-1] == max(rates)
    assert len(log.steps) > len(rates) / 2


def numbered(first, distance, n=40):
    return [first + distance * k for k in range(n)]


@pytest.mark.parametrize("first", [0, 1, 10, 10_001])
@pytest.mark.parametrize("distance", [1, 2, 10])
def test_the_length_of_a_log_is_last_minus_first_whatever_its_numbers(tmp_path, first, distance):
    log = read_loss_log(log_of(tmp_path, numbered(first, distance), np.linspace(1e-4, 0.02, 40)))
    assert log.n_steps == 40 * distance


@pytest.mark.parametrize(("first", "steps", "begins"), [(0, 40, 0), (1, 40, 1), (1, 90, 1), (5, 50, 1), (10_001, 60, 10_001)])
def test_where_a_ramp_of_given_length_begins(tmp_path, first, steps, begins):
    log = read_loss_log(log_of(tmp_path, numbered(first, 1), np.linspace(1e-4, 0.02, 40)))
    assert log.first_step_of(steps) == begins


@pytest.mark.parametrize("first", [0, 1, 10_001])
def test_a_log_that_goes_on_beyond_its_ramp_is_refused(tmp_path, first):
    log = read_loss_log(log_of(tmp_path, numbered(first, 1), np.linspace(1e-4, 0.02, 40)))
    with pytest.raises(LossLogError, match=rf"goes on to step {first + 39}, beyond a ramp of 39 steps.* \(--ramp-steps\)"):
        log.first_step_of(39)


def ends_early(tmp_path, form, last, total, every=1):
    table = [{"step": k, "loss": 5.0 - 0.01 * k, "lr": 0.001 * k} for k in range(every, last + 1, every)]
    path = tmp_path / "log.txt"
    if form == "trainer_state":
        path.write_text(json.dumps({"global_step": last, "max_steps": total, "log_history": table}))
    elif form == "columns":
        lines = [f"{k},{5 - 0.01 * k if k <= last else ''},{0.001 * k if k <= last else ''},5,0.1" for k in range(1, total + 1)]
        path.write_text("\n".join(["Step,A - loss,A - lr,B - loss,B - lr", *lines]))
    else:
        path.write_text("\n".join(form.format(total=total, **row) for row in table))
    return read_loss_log(path, runs=["A"] if form == "columns" else [])


TOLD = ["trainer_state", "columns", " iteration {step:8d}/ {total:7d} | learning rate: {lr:E} | lm loss: {loss:E} |"]
TOLD += ["step {step}/{total} | loss {loss} | lr {lr}", "[INFO] Step {step} of {total}: loss {loss} lr {lr}"]


@pytest.mark.parametrize("form", TOLD)
def test_a_log_that_says_how_many_steps_it_lacks_is_no_whole_ramp(tmp_path, form):
    log = ends_early(tmp_path, form, 30, 60).ramp()
    assert log.ramp_steps == 60
    assert "the log ends at step 30 of 60, and its rate has not begun to fall" in log.notes
    assert ends_early(tmp_path, form, 60, 60).ramp().ramp_steps is None


def test_a_last_step_between_two_logged_ones_is_not_missing(tmp_path):
    assert ends_early(tmp_path, "trainer_state", 60, 65, every=10).ramp().ramp_steps is None


def test_a_ramp_that_ends_within_the_log_is_whole_however_long_the_run_was_to_be(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(f"step {k}/60 | loss {5 - 0.01 * k} | lr {0.001 * min(k, 50 - k)}" for k in range(1, 41)))
    assert read_loss_log(path).ramp().ramp_steps is None


@pytest.mark.parametrize("height", [1e200, 1e307, 1.7e308])
@pytest.mark.filterwarnings("error")
def test_losses_near_the_largest_number_warn_of_nothing(tmp_path, height, capsys):
    table = [row | {"loss": row["loss"] if row["step"] < 50 else height} for row in rise_and_decay()[:60]]
    app(["max-lr", "--from-log", str(write_csv(tmp_path / "log.csv", table))], standalone_mode=False)
    assert "Warning" not in capsys.readouterr().err
