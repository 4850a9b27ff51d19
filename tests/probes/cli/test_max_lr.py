import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import probes.divergence
from probes.cli import max_lr
from probes.control_variates import without_batches
from probes.divergence import JudgeThresholds
from probes.errors import KeelError
from probes.judgement import DEFINITION
from tests._readme import readme_words

N = 500


@pytest.fixture
def app():
    application = typer.Typer()
    max_lr.register(application)
    application.callback()(lambda: None)
    return application


@pytest.fixture
def run(app):
    def invoke(*arguments):
        result = CliRunner().invoke(app, ["max-lr", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def write_log(path, losses, *, rates=True):
    header = "step,loss,lr" if rates else "step,loss"
    lines = [f"{k},{loss},{0.05 * k / N}" if rates else f"{k},{loss}" for k, loss in enumerate(losses, start=1)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


SPIKE = np.concatenate([np.linspace(5, 3, 200), np.full(300, 9.0)])
PLATEAU = np.where(np.arange(1, N + 1) < 30, 11 - 4 * np.arange(1, N + 1) / 30, 7.0)
HEALTHY = 4 + 7 * np.exp(-np.arange(N) / 40)


def test_verdict_has_kind_onset_max_lr_and_resolution(run, tmp_path):
    result = run("--from-log", write_log(tmp_path / "loss.csv", SPIKE))
    assert result.exit_code == 0
    assert result.stdout.startswith("irrecoverable spike from step 201 of 500; Max LR 0.02 (resolution 0.0001)\n")
    assert "best loss 3.0" in result.stdout
    assert "degradation          cannot judge              >= " in result.stdout
    assert result.stderr == ""


def test_reference_and_entropy_change_what_can_be_judged(run, tmp_path):
    log = write_log(tmp_path / "loss.csv", PLATEAU)
    reference = write_log(tmp_path / "reference.csv", HEALTHY, rates=False)
    assert run("--from-log", log).stdout.startswith("cannot judge from step 30 of 500; Max LR >= 0.0029")
    assert run("--from-log", log, "--unigram-entropy", 7).stdout.startswith("stagnation from step 30 of 500; Max LR 0.0029")
    assert run("--from-log", log, "--reference", reference).stdout.startswith("stagnation from step 30 of 500; Max LR 0.0029")


def test_what_batches_make_of_a_loss_is_handed_to_the_judge_and_taken_off_a_reference(run, tmp_path, monkeypatch):
    given = {}
    judge_run = probes.divergence.judge_run
    monkeypatch.setattr(probes.divergence, "judge_run", lambda *a, **options: given.update(options) or judge_run(*a, **options))
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, (N, 2))
    rates = 0.05 * np.arange(1, N + 1) / N
    table = np.column_stack([np.arange(1, N + 1), HEALTHY + noise[:, 1], rates, 3 + noise])
    path = tmp_path / "loss.csv"
    header = "step,loss,lr,unigram_loss,bigram_loss"
    np.savetxt(path, table, delimiter=",", header=header, comments="", fmt=["%d", *["%.17g"] * 4])
    assert run("--from-log", path, "--reference", path).exit_code == 0
    assert given["batch_losses"].tolist() == table[:, 3:].tolist()
    expected = without_batches(table[:, 1], table[:, 3:])
    assert given["landmarks"].reference_losses.tolist() == expected.tolist()
    assert (expected - HEALTHY).std() < 0.5 * noise[:, 1].std()


def test_json_holds_the_same_and_a_file_holds_what_the_terminal_shows(run, tmp_path):
    log = write_log(tmp_path / "loss.csv", SPIKE)
    shown = run("--from-log", log, "--json").stdout
    assert run("--from-log", log, "--json", "-o", tmp_path / "out.json").stdout == ""
    assert (tmp_path / "out.json").read_text() == shown
    answer = json.loads(shown)
    assert (answer["outcome"], answer["onset_step"], answer["max_lr"]) == ("irrecoverable_spike", 201, 0.02)
    assert answer["source"] == str(log)


def test_not_a_number_is_a_clean_answer(run, tmp_path):
    result = run("--from-log", write_log(tmp_path / "loss.csv", ["nan"] * 20), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["outcome"] == "non_finite"


def test_ramp_that_goes_on_makes_the_data_incomplete(run, tmp_path):
    result = run("--from-log", write_log(tmp_path / "loss.csv", HEALTHY), "--ramp-steps", 5000)
    assert result.stdout.startswith("incomplete: no divergence, but the data end at step 500 of 5000; Max LR >= 0.05")


def test_to_end_judges_every_criterion_on_all_points(run, tmp_path):
    log = write_log(tmp_path / "loss.csv", SPIKE)
    early = json.loads(run("--from-log", log, "--json").stdout)
    late = json.loads(run("--from-log", log, "--json", "--to-end").stdout)
    assert early["last_step"] < late["last_step"] == N
    assert early["max_lr"] == late["max_lr"]


def test_thresholds_change_what_counts_and_are_printed(run, tmp_path):
    log = write_log(tmp_path / "loss.csv", np.concatenate([np.linspace(5, 3, 200), np.full(300, 3.5)]))
    usual = json.loads(run("--from-log", log, "--json").stdout)
    lenient = json.loads(run("--from-log", log, "--json", "--threshold", "rise=0.3", "--threshold", "min_points=9").stdout)
    assert usual["outcome"] == "irrecoverable_spike"
    assert lenient["outcome"] == "cannot_judge"
    assert usual["thresholds"] == asdict(JudgeThresholds())
    assert lenient["thresholds"] == asdict(JudgeThresholds(rise=0.3, min_points=9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("raise=0.3", "no threshold 'raise'; there are non_finite_patience=5, rise=0.1,"),
        ("rise", "'rise' is not NAME=VALUE; there are non_finite_patience=5"),
        ("rise=big", "rise is a number above 0, got 'big'"),
        ("min_points=8.5", "min_points is a whole number above 0, got '8.5'"),
        ("rise=-1", "threshold rise must be a positive finite number, got -1.0"),
        ("rise=nan", "threshold rise must be a positive finite number, got nan"),
    ],
)
def test_bad_thresholds_are_usage_errors(app, tmp_path, given, message):
    log = write_log(tmp_path / "loss.csv", SPIKE)
    result = CliRunner().invoke(app, ["max-lr", "--from-log", str(log), "--threshold", given])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--from-log", "--reference"])
def test_missing_files_are_the_users_to_mend(run, tmp_path, option):
    log = write_log(tmp_path / "loss.csv", SPIKE)
    with pytest.raises(KeelError, match=r"no file '.*none\.csv'"):
        run("--from-log", log, option, tmp_path / "none.csv")


def test_log_without_rates_is_refused_with_the_columns_found(run, tmp_path):
    with pytest.raises(KeelError, match="has no learning rates: columns found are step, loss\n"):
        run("--from-log", write_log(tmp_path / "loss.csv", SPIKE, rates=False))


@pytest.mark.parametrize(
    ("losses", "message"), [([5.0], "landmarks: a reference run needs at least two"), (["nan", "nan"], "at least two finite")]
)
def test_useless_reference_is_refused(run, tmp_path, losses, message):
    log, reference = write_log(tmp_path / "loss.csv", SPIKE), write_log(tmp_path / "reference.csv", losses)
    with pytest.raises(KeelError, match=message):
        run("--from-log", log, "--reference", reference)


def test_entropy_must_be_a_number(run, tmp_path):
    with pytest.raises(KeelError, match="--unigram-entropy is a finite number of nats above 0"):
        run("--from-log", write_log(tmp_path / "loss.csv", SPIKE), "--unigram-entropy", "nan")


def test_a_reference_that_diverges_is_refused_by_name(run, tmp_path):
    log, reference = write_log(tmp_path / "loss.csv", HEALTHY), write_log(tmp_path / "reference.csv", SPIKE)
    with pytest.raises(
        KeelError, match=r"reference '.*reference\.csv' diverges itself \(irrecoverable spike from step 201 of 500\)"
    ):
        run("--from-log", log, "--reference", reference)


def test_a_short_reference_leaves_the_unigram_entropy_in_force(run, tmp_path):
    log, reference = write_log(tmp_path / "loss.csv", PLATEAU), write_log(tmp_path / "reference.csv", HEALTHY[:20])
    result = run("--from-log", log, "--reference", reference, "--unigram-entropy", 7)
    assert result.stdout.startswith("stagnation from step 30 of 500; Max LR 0.0029")
    assert "degradation: cannot judge where the reference has no points" in result.stdout


def test_a_ramp_shorter_than_its_log_is_refused_naming_both(run, tmp_path):
    with pytest.raises(KeelError, match=r"goes on to step 500, beyond a ramp of 100 steps \(--ramp-steps\)"):
        run("--from-log", write_log(tmp_path / "loss.csv", SPIKE), "--ramp-steps", 100)


OF_TRAINING = {
    "--preset": "gpu",
    "--blocks": "4",
    "--width": "64",
    "--seeds": "3",
    "--first-seed": "1",
    "--peak": "0.05",
    "--steps": "600",
    "--batch-size": "4",
    "--accumulation": "2",
    "--seq-len": "64",
    "--set": "alpha=2",
    "--dtype": "float32",
    "--device": "cpu",
    "--threads": "1",
}


@pytest.mark.parametrize("option", OF_TRAINING)
def test_options_of_training_are_no_options_of_a_log(app, tmp_path, option):
    """Also where their value is the default one."""
    log = write_log(tmp_path / "loss.csv", SPIKE)
    result = CliRunner().invoke(app, ["max-lr", "--from-log", str(log), option, OF_TRAINING[option]])
    assert result.exit_code == 2
    assert f"{option} cannot be given beside --from-log" in " ".join(result.stderr.replace("│", " ").split())


def test_every_option_is_of_training_of_logs_or_of_judging(app):
    """A new option is sorted into one of them, or refused nowhere."""
    (command,) = (typer.main.get_command(app).commands[name] for name in ["max-lr"])
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    judging = {"--reference", "--unigram-entropy", "--text", "--tokenizer", "--to-end", "--threshold", "--output", "--json"}
    of_logs = {"--from-log", "--run", "--column", "--ramp", "--ramp-steps", "--loss-unit"}
    assert options - {"--help"} == OF_TRAINING.keys() | judging | of_logs | {"--scheme"}


def test_all_foreign_options_are_named_at_once(app, tmp_path):
    log = write_log(tmp_path / "loss.csv", SPIKE)
    result = CliRunner().invoke(app, ["max-lr", "--from-log", str(log), "--seeds", "3", "--peak", "0.2", "--device", "cuda"])
    assert "--seeds, --peak, --device cannot be given" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a finished run (--from-log loss.csv) or a scheme to train"),
        (["--scheme", "keel", "--from-log", "loss.csv"], "one of them"),
        *(
            (["--scheme", "keel", option, "x"], f"{option} cannot be given")
            for option in ("--run", "--column", "--ramp", "--loss-unit")
        ),
        (["--scheme", "keel", "--ramp-steps", "100"], "belongs to --from-log"),
        (["--from-log", "loss.csv", "--ramp", "0:1:10", "--ramp-steps", "10"], "--ramp-steps cannot be given beside --ramp"),
        (
            ["--from-log", "loss.csv", "--tokenizer", "bytes"],
            "--tokenizer cannot be given beside --from-log without the --text",
        ),
        (["--from-log", "loss.csv", "--ramp-steps", "0"], "--ramp-steps"),
    ],
)
def test_contradictions_are_usage_errors(app, options, message):
    result = CliRunner().invoke(app, ["max-lr", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_importing_the_judge_and_the_command_needs_no_torch():
    modules = "probes.cli.max_lr, probes.divergence, probes.logs, probes.seed_summary"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_and_readme_say_what_is_judged(run):
    shown = " ".join(run("--help").stdout.split())
    readme = readme_words()
    for sentence in DEFINITION.split(". "):
        assert sentence.strip(".") in shown
        assert sentence.strip(".")[4:] in readme
