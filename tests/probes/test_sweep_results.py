"""A sweep as one tidy frame, judged again beside a reference, and summed up over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from probes.run_folder import StepRecord
from probes.sweep_folder import SweepFolder
from probes.sweep_results import COLUMNS, judge_again, results_frame, seed_table, status_rows
from probes.trial import SweepError, labels
from probes.trial_folder import TrialFolder
from probes.trial_run import run_trial
from tests.probes._sweeps import one_trial, pretended_result, small_sweep


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


# Trials that differ in more than their seed

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "batch": {"training": {"batch_size": 4}},
    "window": {"training": {"seq_len": 8}},
    "clip": {"training": {"clip": 0.0}},
    "accumulation": {"training": {"accumulation": 2}},
    "weight decay": {"training": {"weight_decay": 0.0}},
    "scheme parameter": {"model": {"scheme_parameters": {"alpha": 1.5}}},
    "dtype": {"model": {"compute_dtype": "bfloat16"}},
    "init": {"model": {"init_std": 0.03}},
    "text": {"corpus": {"max_bytes": 50_000}},
    "to the end": {"early_stop": False},
    "ffn": {"model": {"ffn_width": 32}},
}


def pretend(folder: TrialFolder, max_lr: float) -> TrialFolder:
    """A finished trial that was never trained."""
    result = pretended_result(folder.trial)
    result["judgement"] |= {"outcome": "non_finite", "onset_step": 9, "max_lr": max_lr, "lower_bound": False}
    folder.write_trial()
    folder.write_result(result)
    return folder


def pretended(path: Path, *changes: dict[str, Any], seeds: Sequence[int] = (0,)) -> list[TrialFolder]:
    sweep = small_sweep(schemes=["keel"], seeds=list(seeds), grid=[{}, *changes])
    return [pretend(TrialFolder(path / t.key, t), 0.001 * (n + 1)) for n, t in enumerate(sweep.trials())]


@pytest.mark.parametrize("change", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_only_trials_that_differ_in_their_seed_alone_are_pooled(tmp_path: Path, change: dict[str, Any]) -> None:
    places = pretended(tmp_path, change, seeds=(0, 1, 2))
    assert len(places) == 6
    rows = seed_table(results_frame(places))
    assert [row["seeds"] for row in rows] == [3, 3]
    assert [row["max_lr"].split(" ")[0] for row in rows] == ["0.002", "0.005"], "the median of each"
    told = [{name: value for name, value in row.items() if name not in ("max_lr", "best_loss")} for row in rows]
    assert told[0] != told[1], "the table says what is different"


@pytest.mark.parametrize("change", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_labels_and_states_tell_trials_apart(tmp_path: Path, change: dict[str, Any]) -> None:
    places = pretended(tmp_path, change, seeds=(0, 1))
    named = labels([place.trial for place in places])
    assert len(named) == len(set(named.values())) == 4
    sweep = SweepFolder(tmp_path)
    sweep.write("small", [place.trial for place in places])
    rows = [{name: value for name, value in row.items() if name not in ("trial", "about")} for row in status_rows(sweep)]
    assert len({tuple(row.items()) for row in rows}) == 4
    assert len({tuple(row) for row in rows}) == 1, "the same columns in every row"


def test_five_experiments_of_one_seed_are_five_rows(tmp_path: Path) -> None:
    changes = [EXPERIMENTS[name] for name in ("batch", "scheme parameter", "clip", "to the end")]
    rows = seed_table(results_frame(pretended(tmp_path, *changes)))
    assert [row["seeds"] for row in rows] == [1] * 5
    assert [row["scheme_parameters"] for row in rows] == ["none", "none", "alpha=1.5", "none", "none"]
    assert not any("(" in row["max_lr"] for row in rows), "no interval over one seed"


def test_fields_that_follow_the_shape_are_no_columns(tmp_path: Path) -> None:
    sweep = small_sweep(schemes=["keel", "pre_ln"], widths=[16, 32], blocks=[1, 2])
    places = [pretend(TrialFolder(tmp_path / t.key, t), 0.01) for t in sweep.trials()]
    assert tuple(results_frame(places).columns) == COLUMNS
    assert all("ffn_width" not in label for label in labels([place.trial for place in places]).values())


def test_a_trial_given_twice_is_one_seed(tmp_path: Path) -> None:
    places = pretended(tmp_path, seeds=(0, 1))
    (row,) = seed_table(results_frame([*places, *places]))
    assert row["seeds"] == 2


def test_a_reference_that_is_not_the_only_one_is_refused(tmp_path: Path) -> None:
    trials = small_sweep(schemes=["keel"], grid=[{}, {"model": {"scheme_parameters": {"alpha": 1.5}}}]).trials()
    places = [TrialFolder(tmp_path / trial.key, trial) for trial in trials]
    for place in places:
        pretend(place, 0.01)
        run_trial_log(place)
    with pytest.raises(
        SweepError, match=rf"several trials of scheme 'keel' could be .*{trials[0].key} .*{trials[1].key} .*alpha=1\.5"
    ):
        judge_again(places, reference="keel")


def run_trial_log(place: TrialFolder) -> None:
    place.run_path.mkdir(parents=True)
    records = [StepRecord(step=k, lr=1e-3 * k, loss=5 - 0.01 * k, grad_norm=1.0, time=0.1 * k) for k in range(1, 61)]
    (place.run_path / "log.jsonl").write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
