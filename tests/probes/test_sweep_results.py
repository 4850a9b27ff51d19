"""A sweep as one tidy frame, judged again beside a reference, and summed up over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.sweep_folder import SweepFolder
from probes.sweep_results import COLUMNS, judge_again, results_frame, seed_table, status_rows
from probes.trial import SweepError
from probes.trial_folder import TrialFolder
from probes.trial_run import run_trial
from tests.probes._sweeps import one_trial, small_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """Two schemes, two seeds, one trial not run."""
    folder = SweepFolder(tmp_path_factory.mktemp("sweep"))
    trials = small_sweep(seeds=[0, 1], early_stop=False).trials()
    folder.write("small", trials)
    for trial in trials[:-1]:
        run_trial(folder.folder(trial), threads=1)
    return folder


def folders(sweep: SweepFolder) -> tuple[TrialFolder, ...]:
    return sweep.read()[1]


def test_a_row_per_trial_and_criterion(sweep: SweepFolder) -> None:
    frame = results_frame(folders(sweep))
    assert tuple(frame.columns) == COLUMNS
    assert frame["trial"].nunique() == 3, "what is not finished has no row"
    assert set(frame.groupby("trial").size()) == {5}
    assert not frame.duplicated(["trial", "criterion"]).any()
    assert frame["best_loss"].between(0, 6).all()
    assert (frame["steps_done"] == 60).all()
    assert (frame["judged_seconds"] <= frame["seconds"]).all()


def test_the_overall_row_is_the_verdict(sweep: SweepFolder) -> None:
    frame = results_frame(folders(sweep)).set_index(["trial", "criterion"])
    for folder in folders(sweep)[:-1]:
        assert folder.result is not None
        judgement = folder.result["judgement"]
        row = frame.loc[(folder.trial.key, "overall")]
        assert (row["status"], row["max_lr"], row["lower_bound"]) == (
            judgement["outcome"],
            judgement["max_lr"],
            judgement["lower_bound"],
        )


def test_judging_again_by_the_same_judge_changes_nothing(sweep: SweepFolder) -> None:
    stored = results_frame(folders(sweep))
    again = results_frame(folders(sweep), judge_again(folders(sweep)))
    assert stored.equals(again)


def test_beside_a_reference_degradation_can_be_judged(sweep: SweepFolder) -> None:
    seed_0 = [folder for folder in folders(sweep) if folder.trial.config.seed == 0]
    plain = results_frame(seed_0).query("criterion == 'degradation'")
    beside = results_frame(seed_0, judge_again(seed_0, reference="keel")).query("criterion == 'degradation'")
    assert set(plain["status"]) == {"cannot_judge"}
    assert "cannot_judge" not in set(beside["status"])


def test_a_reference_is_of_the_same_seed(sweep: SweepFolder) -> None:
    others = [f for f in folders(sweep) if (f.trial.config.model.scheme, f.trial.config.seed) != ("keel", 1)]
    others.append(next(f for f in folders(sweep) if f.trial.config.seed == 1 and f.trial.config.model.scheme == "keel"))
    with pytest.raises(SweepError, match=r"no finished trial of scheme 'post_ln' is a reference for keel, .* seed 1"):
        judge_again(others, reference="post_ln")


def test_a_reference_that_ended_early_is_refused(tmp_path: Path) -> None:
    trial = one_trial()
    folder = TrialFolder(tmp_path / trial.key, trial)
    run_trial(folder, threads=1)
    log = folder.run_path / "log.jsonl"
    log.write_text("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[:40]), encoding="utf-8")
    with pytest.raises(SweepError, match=r"ends at step 40; a reference is trained to the end"):
        judge_again([folder], reference="keel")


def test_seeds_are_summed_up(sweep: SweepFolder) -> None:
    frame = results_frame(folders(sweep))
    rows = {row["scheme"]: row for row in seed_table(frame)}
    assert {scheme: row["seeds"] for scheme, row in rows.items()} == {"keel": 2, "post_ln": 1}
    seen = frame.query("criterion == 'overall' and scheme == 'keel'")
    assert rows["keel"]["best_loss"] == pytest.approx(seen["best_loss"].median())
    assert "(" in rows["keel"]["max_lr"], "an interval over two seeds"
    assert "(" not in rows["post_ln"]["max_lr"], "none over one"


def test_status_tells_where_every_trial_stands(sweep: SweepFolder) -> None:
    rows = status_rows(sweep)
    assert [row["state"] for row in rows] == ["finished"] * 3 + ["waiting"]
    assert [row["steps"] for row in rows] == ["60/60"] * 3 + ["0/60"]
    assert all("Max LR" in row["about"] for row in rows[:3])
    last = folders(sweep)[-1]
    last.write_failure("RuntimeError: no")
    try:
        assert status_rows(sweep)[-1]["about"] == "attempt 1: RuntimeError: no"
        assert status_rows(sweep)[-1]["state"] == "failed"
    finally:
        (last.path / "failure.json").unlink()


def test_plain_training_has_one_row(tmp_path: Path) -> None:
    trial = one_trial(kind="train", training={"steps": 60, "batch_size": 2, "seq_len": 16, "validation_tokens": 64})
    folder = TrialFolder(tmp_path / trial.key, trial)
    run_trial(folder, threads=1)
    (row,) = results_frame([folder]).to_dict("records")
    assert (row["criterion"], row["status"], row["kind"]) == ("overall", "finished", "train")
    assert row["validation_loss"] > 0
    assert seed_table(results_frame([folder])) == []
    assert judge_again([folder]) == {}
