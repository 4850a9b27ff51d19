"""Runs behind figures: made once, shared by name, kept with their weights where asked."""

import importlib
import tomllib
from pathlib import Path

import numpy as np
import pytest

from figures import _training_runs as training_runs
from figures._training_runs import FigureRunError, curve_frame, figure_sweep, scaled_lr, trained
from probes.sweep_spec import read_sweep

ROOT = Path(__file__).parents[2]
VALUES = {
    "schemes": ["keel", "pre_ln"],
    "blocks": [1],
    "widths": [16],
    "peaks": [0.01],
    "training": {"schedule": "cosine", "steps": 6, "batch_size": 2, "seq_len": 16, "validation_tokens": 64},
    "corpus": {"max_bytes": 60_000},
}
TRAINED = ("fig1a_stability", "fig4_spike", "fig8a_deep_narrow", "fig8b_small_lr")
STRESSED = ("fig3_divergence", "table1_max_lr")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "figure"


@pytest.fixture(scope="module")
def finished(folder):
    with trained(figure_sweep("shared", VALUES), folder) as folders:
        return folders


def test_runs_lie_beside_the_figure_under_the_sweeps_name(finished, folder) -> None:
    assert [place.trial.config.model.scheme for place in finished] == ["keel", "pre_ln"]
    assert all(place.path.parent.parent == (folder.parent / "shared").absolute() for place in finished)
    assert not any((place.run_path / "model.safetensors").exists() for place in finished)


def test_finished_runs_are_not_run_again_by_another_figure(finished, folder, monkeypatch) -> None:
    monkeypatch.setattr(training_runs, "run_sweep", lambda *a, **k: pytest.fail("ran again"))
    with trained(figure_sweep("shared", VALUES), folder.parent / "other_figure") as folders:
        assert [place.path for place in folders] == [place.path for place in finished]


def test_a_frame_holds_every_step_and_what_was_run(finished) -> None:
    frame = curve_frame(finished)
    for place, (_, rows) in zip(finished, frame.groupby("trial", sort=False), strict=True):
        np.testing.assert_allclose(rows["loss"], [record.loss for record in place.records()], rtol=1e-6)
        assert list(rows["step"]) == list(range(1, 7))
        assert rows["validation_loss"].iloc[0] == pytest.approx(place.result["training"]["validation_loss"])
    assert set(frame["scheme"]) == {"keel", "pre_ln"}
    assert (frame["tokens_per_step"] == 32).all()


def test_weights_that_were_not_kept_are_trained_again_to_the_same_numbers(finished, folder, tmp_path) -> None:
    before = curve_frame(finished)
    values = {**VALUES, "schemes": ["keel"]}
    with trained(figure_sweep("shared", values), folder, keep_weights=True) as (place,):
        assert (place.run_path / "model.safetensors").exists()
        after = curve_frame([place])
    np.testing.assert_array_equal(after["loss"], before["loss"][before["scheme"] == "keel"])


def test_without_a_folder_nothing_is_left() -> None:
    with trained(figure_sweep("gone", {**VALUES, "schemes": ["keel"]}), None) as (place,):
        assert place.result is not None
    assert not place.path.exists()


def test_a_run_that_breaks_is_named(tmp_path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    values = {**VALUES, "corpus": {"sources": [str(tmp_path / "short.txt")]}}
    with (
        pytest.raises(FigureRunError, match=r"keel, 2 sub-layers of width 16.*broke.*TextError"),
        trained(figure_sweep("broken", values), tmp_path / "figure"),
    ):
        pytest.fail("no runs, but no error")


def test_costly_sweeps_run_in_processes_of_their_own() -> None:
    cheap = figure_sweep("a", VALUES).trials()
    costly = figure_sweep("a", {**VALUES, "blocks": [64], "widths": [128], "training": {"steps": 2000}}).trials()
    assert training_runs._executor(cheap) == "debug"
    assert training_runs._executor(costly) == "local"


@pytest.mark.parametrize(("paper", "ours"), [(1e-3, 0.0067), (1.5e-3, 0.01), (3e-3, 0.02), (4.5e-3, 0.03), (6e-3, 0.04)])
def test_learning_rates_follow_one_rule(paper: float, ours: float) -> None:
    assert scaled_lr(paper) == ours


@pytest.mark.parametrize("preset", ["smoke", "cpu", "gpu"])
@pytest.mark.parametrize("name", [*TRAINED, *STRESSED])
def test_every_preset_is_a_sweep(name: str, preset: str) -> None:
    settings = importlib.import_module(f"figures.{name}").SETTINGS[preset]
    device = settings.get("device", "cpu")
    sweeps = settings.get("sweeps", {name: settings.get("sweep")})
    kind = "train" if name in TRAINED else "stress"
    for sweep_name, values in sweeps.items():
        trials = figure_sweep(sweep_name, {"kind": kind, **values}, device).trials()
        assert {trial.config.device for trial in trials} == {"cuda" if preset == "gpu" else "cpu"}
        assert {trial.kind for trial in trials} == {kind}


@pytest.mark.parametrize("name", TRAINED)
def test_the_papers_learning_rates_are_the_gpu_presets(name: str) -> None:
    module = importlib.import_module(f"figures.{name}")
    rates = {
        preset: {t.config.peak_lr for t in figure_sweep(name, module.SETTINGS[preset]["sweep"]).trials()}
        for preset in ("cpu", "gpu")
    }
    assert rates["cpu"] == {scaled_lr(rate) for rate in rates["gpu"]}


@pytest.mark.parametrize("name", ["table1_cpu", "table1_cpu_256"])
def test_table_1_is_the_committed_sweep(name: str) -> None:
    from figures.table1_max_lr import SETTINGS

    ours = figure_sweep(name, {"kind": "stress", **SETTINGS["cpu"]["sweeps"][name]}).trials()
    committed = read_sweep(ROOT / "benchmarks" / "sweeps" / f"{name}.toml").trials()
    assert {trial.key for trial in ours} == {trial.key for trial in committed}


def test_the_gpu_table_is_the_committed_sweep() -> None:
    from figures.table1_max_lr import SETTINGS

    path = ROOT / "benchmarks" / "sweeps" / "table1_gpu.toml"
    ours = figure_sweep("table1_gpu", {"kind": "stress", **SETTINGS["gpu"]["sweeps"]["table1_gpu"]}, "cuda").trials()
    assert tomllib.loads(path.read_text(encoding="utf-8"))["name"] == "table1_gpu"
    assert {trial.key for trial in ours} == {trial.key for trial in read_sweep(path).trials()}


def test_figure_3_reuses_trials_of_table_1() -> None:
    from figures.fig3_divergence import SETTINGS

    ours = figure_sweep("table1_cpu", {"kind": "stress", **SETTINGS["cpu"]["sweeps"]["table1_cpu"]}).trials()
    committed = read_sweep(ROOT / "benchmarks" / "sweeps" / "table1_cpu.toml").trials()
    assert {trial.key for trial in ours} <= {trial.key for trial in committed}
