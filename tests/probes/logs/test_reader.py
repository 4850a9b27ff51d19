"""What a log must hold, and the refusals of one that does not."""

from __future__ import annotations

import json
import math

import pytest

from probes.logs import LossLogError, read_loss_log
from tests.probes.logs._logs import assert_is_the_run, rows, write_csv

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
            "no learning rates: columns found are step, loss\nname one with --column lr=NAME or --ramp .*learning_rate",
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
        ("step,loss,lr\n1,,0.1\n", "has no losses: column 'loss' says nothing in any row"),
        ("[1, 2]", "no list of rows, no object of columns"),
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
    with pytest.raises(LossLogError, match=r"holds no log\.jsonl, trainer_state\.json, metrics\.csv, TensorBoard event file"):
        read_loss_log(tmp_path)


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xff\x00\x80")
    with pytest.raises(LossLogError, match="cannot read"):
        read_loss_log(path)
