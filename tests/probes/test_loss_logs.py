import json
import math
import sys

import numpy as np
import pytest

from probes.loss_logs import LossLogError, read_loss_log
from probes.tensorboard_events import TensorBoardError

STEPS = range(1, 11)


def rows(loss="loss", lr="lr", step="step", grad="grad_norm"):
    return [{step: k, loss: 5.0 - 0.1 * k, lr: 0.005 * k, grad: 1.0 + k} for k in STEPS]


def write_csv(path, table, delimiter=","):
    lines = [delimiter.join(table[0]), *(delimiter.join(map(str, row.values())) for row in table)]
    path.write_text("\n".join(lines) + "\n")
    return path


def assert_is_the_run(log):
    np.testing.assert_array_equal(log.steps, STEPS)
    np.testing.assert_allclose(log.losses, [5.0 - 0.1 * k for k in STEPS])
    np.testing.assert_allclose(log.learning_rates, [0.005 * k for k in STEPS])
    assert log.grad_norms == tuple(1.0 + k for k in STEPS)


NAMES = [
    ("loss", "lr", "step", "grad_norm"),
    ("train_loss", "learning_rate", "global_step", "gradient_norm"),
    ("Train/Loss", "LR-AdamW", "Step", "total norm"),
    ("train/loss", "train/learning_rate", "train/global_step", "train/grad_norm"),
    ("lm loss", "learning rate", "iteration", "grad norm"),
    ("run 7 - train/loss", "run 7 - train/lr", "_step", "run 7 - train/grad_norm"),
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_csv_under_common_names(tmp_path, names, delimiter):
    assert_is_the_run(read_loss_log(write_csv(tmp_path / "log.csv", rows(*names), delimiter)))


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_json_lines_under_common_names(tmp_path, names):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(*names))))
    assert_is_the_run(read_loss_log(path))


def test_trainer_state_in_a_folder_skips_evaluations_and_the_summary(tmp_path):
    history = []
    for row in rows(lr="learning_rate"):
        history += [row, {"step": row["step"], "eval_loss": 9.0}]
    state = {"global_step": 10, "log_history": [*history, {"step": 10, "train_loss": 7.0, "train_runtime": 3.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    log = read_loss_log(tmp_path)
    assert_is_the_run(log)
    assert "11 rows without a loss, a learning rate or a step were skipped" in log.notes
    assert any("logging_nan_inf_filter" in note for note in log.notes)


def test_folder_of_a_run_is_read_by_its_log(tmp_path):
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows())))
    assert_is_the_run(read_loss_log(tmp_path))


def test_list_of_rows_as_json(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(rows()))
    assert_is_the_run(read_loss_log(path))


def test_validation_loss_is_no_training_loss(tmp_path):
    path = write_csv(tmp_path / "log.csv", [{"step": 1, "my_val_loss": 3.0, "my_loss": 5.0, "lr": 0.1}])
    assert read_loss_log(path).losses.tolist() == [5.0]


@pytest.mark.parametrize("word", ["nan", "NaN", "NAN", "inf", "-Infinity"])
def test_words_for_not_a_number(tmp_path, word):
    path = tmp_path / "log.csv"
    path.write_text(f"step,loss,lr\n1,5,0.1\n2,{word},0.2\n")
    losses = read_loss_log(path).losses
    assert losses[0] == 5
    assert not math.isfinite(losses[1])


@pytest.mark.parametrize("text", ['{"step": 1, "loss": NaN, "lr": 0.1}\n', '{"step": 1, "loss": "NaN", "lr": 0.1}\n'])
def test_not_a_number_in_json(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    assert math.isnan(read_loss_log(path).losses[0])


def test_empty_cells_are_missing_rows_and_not_losses(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,lr,grad_norm\n1,5,0.1,\n2,,0.2,1\n\n3,4,,1\n4,3,0.4,2\n")
    log = read_loss_log(path)
    assert log.steps.tolist() == [1, 4]
    assert log.grad_norms == (None, 2.0)
    assert log.notes == ("2 rows without a loss, a learning rate or a step were skipped",)


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


def micro_batches(n_steps=10, per_step=4, last=4):
    """Learning rate k * 0.005 within step k; losses whose mean is 6 - 0.1 k (full steps)."""
    table = [
        {"step": k, "loss": 6 - 0.1 * k + 0.2 * (i - (per_step - 1) / 2), "lr": 0.005 * k}
        for k in range(1, n_steps + 1)
        for i in range(per_step)
    ]
    return table[: len(table) - per_step + last]


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


def test_ramp_ends_at_the_last_highest_rate(tmp_path):
    rates = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    table = [{"step": k, "loss": 5.0, "lr": rate} for k, rate in enumerate(rates)]
    log = read_loss_log(write_csv(tmp_path / "log.csv", table)).ramp()
    assert log.learning_rates.tolist() == [0.1, 0.2, 0.3, 0.3]
    assert log.notes == ("2 points after the last one at the highest learning rate (0.3) are not judged",)


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


def test_losses_of_batches_end_with_the_ramp(tmp_path):
    rates = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    table = with_batches([{"step": k, "loss": 5.0, "lr": rate} for k, rate in enumerate(rates)])
    log = read_loss_log(write_csv(tmp_path / "log.csv", table)).ramp()
    np.testing.assert_allclose(log.batch_losses, of_batches(4))


def test_a_loss_of_a_batch_that_is_no_number_is_refused(tmp_path):
    table = with_batches(rows())
    table[1]["bigram_loss"] = "two"
    with pytest.raises(LossLogError, match="row 2, column 'bigram_loss': 'two' is not a number"):
        read_loss_log(write_csv(tmp_path / "log.csv", table))


def log_of(tmp_path, steps, rates):
    table = [{"step": k, "loss": 5.0 - 0.001 * i, "lr": rate} for i, (k, rate) in enumerate(zip(steps, rates, strict=True))]
    return write_csv(tmp_path / "log.csv", table)


UP = [0.001 * k for k in range(1, 21)]
NO_RAMPS = {
    "falling": (UP[::-1], r"the learning rate is highest, 0\.02, at its first step, 1, and falls"),
    "constant": ([0.1] * 20, r"highest, 0\.1, at its first step, 1, and does not change"),
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


RAMPS = {
    "rising": UP,
    "warm-up and a constant rate": UP[:5] + [0.005] * 15,
    "rounded": [round(rate, 3) for rate in np.linspace(1e-4, 0.02, 20)],
    "a rise and a shorter decay": UP[:15] + UP[13:8:-1],
    "a wobble": [rate * (1 + 0.002 * (-1) ** k) for k, rate in enumerate(UP)],
    "one point": [0.1],
}


@pytest.mark.parametrize("rates", RAMPS.values(), ids=list(RAMPS))
def test_what_is_a_ramp_is_kept(tmp_path, rates):
    log = read_loss_log(log_of(tmp_path, range(1, len(rates) + 1), rates)).ramp()
    assert log.learning_rates[-1] == max(rates)
    assert len(log.steps) > len(rates) / 2


RESTARTS = {
    "steps of five epochs": (
        [*range(1, 21)] * 5,
        np.linspace(1e-4, 0.02, 100),
        r"go back to 1, where the learning rate was 0\.0001",
    ),
    "the same ramp three times": ([*range(1, 21)] * 3, UP * 3, "40 of 60 rows would be replaced"),
    "an old row at the end": ([*range(1, 21), 2], [*UP, UP[1]], "19 of 21 rows would be replaced"),
}


@pytest.mark.parametrize(("steps", "rates", "message"), RESTARTS.values(), ids=list(RESTARTS))
def test_steps_that_start_anew_are_refused(tmp_path, steps, rates, message):
    with pytest.raises(LossLogError, match=message):
        read_loss_log(log_of(tmp_path, steps, rates))


@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("at", [5, 12, 18])
def test_a_step_out_of_its_place_is_skipped_and_the_others_stay(tmp_path, at, per_step):
    steps = [*range(1, at + 1), 2, *range(at + 1, 21)]
    steps = [step for step in steps for _ in range(per_step)]
    log = read_loss_log(log_of(tmp_path, steps, [0.001 * step for step in steps]))
    assert log.steps.tolist() == list(range(1, 21))
    assert f"{per_step} rows out of the order of steps were skipped" in log.notes


def write_run(folder, *, steps=600, schedule="ramp", corpus=None, config=None):
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows())))
    plain = {"schedule": schedule, "steps": steps} if config is None else config
    (folder / "training.json").write_text(json.dumps({"config": plain}))
    if corpus is not None:
        (folder / "result.json").write_text(json.dumps({"corpus": corpus}))
    return folder


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


def test_cut_last_line_is_skipped_and_said(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows())) + '\n{"step": 11, "lo')
    log = read_loss_log(path)
    assert_is_the_run(log)
    assert "the last line is cut short and was skipped" in log.notes


def test_reference_needs_no_learning_rates(tmp_path):
    path = write_csv(tmp_path / "log.csv", [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}])
    log = read_loss_log(path, need_rates=False)
    assert log.learning_rates is None
    with pytest.raises(LossLogError, match="has no learning rates"):
        log.ramp()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "step,loss\n1,5\n",
            r"no learning rates: columns found are step, loss; a column of one of these .*learning_rate",
        ),
        ("step,lr\n1,5\n", "has no losses: columns found are step, lr"),
        ("", "holds no rows"),
        ("step,loss,lr\n", "holds no rows"),
        ("step,loss,lr\n1,five,0.1\n", "row 1, column 'loss': 'five' is not a number"),
        ("step,loss,lr\n1.5,5,0.1\n", "row 1: step 1.5 is not a whole number"),
        ("step,loss,lr\nnan,5,0.1\n", "row 1: step nan is not a whole number"),
        ("step,loss,lr\n1,5,-0.1\n", "row 1: learning rate -0.1 is not a finite number"),
        ("step,loss,lr\n1,5,nan\n", "row 1: learning rate nan is not a finite number"),
        ("step,loss,lr\n-1,5,0.1\n", "row 1: step -1 is not at least 0 and below 2"),
        ("step,loss,lr\n1,5,0.1\n1e300,5,0.1\n", r"row 2: step 1e\+300 is not at least 0 and below 2"),
        ("step,loss,lr\n9223372036854775808,5,0.1\n", "row 1: step .* is not at least 0 and below 2"),
        (f'{{"step": 1, "loss": 1{"0" * 400}, "lr": 0.1}}', "row 1, column 'loss': a number of too many digits"),
        (f'{{"step": 1{"0" * 400}, "loss": 1, "lr": 0.1}}', "row 1, column 'step': a number of too many digits"),
        (f'{{"step": 1, "loss": 1, "lr": 1{"0" * 400}}}', "row 1, column 'lr': a number of too many digits"),
        (f'{{"step": 1, "loss": 1{"0" * 5000}, "lr": 0.1}}\n', "line 1, is not JSON: Exceeds the limit"),
        ("[" * 100_000, "line 1, is not JSON"),
        ('{"step": 1, "loss": true, "lr": 0.1}', "row 1, column 'loss': True is not a number"),
        ('{"step": 1, "loss": [1], "lr": 0.1}', r"row 1, column 'loss': \[1\] is not a number"),
        (f"step,loss,lr\n1,{'5' * 200_000},0.1\n", "is not CSV: field larger than field limit"),
        ("step,loss,lr\n1,,0.1\n", "no row of .* has all of loss, lr, step"),
        ("[1, 2]", "not a list of rows"),
        ('{"loss": 1, "lr": 0.1}\n[1]\n', "line 2, is not a JSON object"),
        ('{"loss": 1, "lr": 0.1}\n{"los\n{"loss": 1, "lr": 0.1}\n', "line 2, is not JSON"),
    ],
)
def test_bad_logs_are_refused(tmp_path, text, message):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(LossLogError, match=message):
        read_loss_log(path)


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(LossLogError, match="no file"):
        read_loss_log(tmp_path / "none.csv")
    with pytest.raises(LossLogError, match=r"holds no log\.jsonl, trainer_state\.json or TensorBoard event file"):
        read_loss_log(tmp_path)


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(LossLogError, match="cannot read"):
        read_loss_log(path)


def test_event_files_need_their_package(tmp_path, monkeypatch):
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TensorBoardError, match=r"needs the package tensorboard, .*: pip install 'keel-dynamics\[logs\]'"):
        read_loss_log(path)


@pytest.mark.parametrize("there", ["unigram_loss", "bigram_loss"])
def test_one_loss_of_the_batches_alone_is_not_used_and_said(tmp_path, there):
    log = read_loss_log(write_csv(tmp_path / "log.csv", [row | {there: 3.0} for row in rows()]))
    assert log.batch_losses is None
    assert any(note.startswith(f"column '{there}' is not used: there is no ") for note in log.notes)
