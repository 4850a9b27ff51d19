"""The heat maps: what is drawn is what was measured, legibly."""

import inspect
import itertools

import numpy as np
import pandas as pd
import pytest

from figures import heat_maps, heat_maps_relu
from figures.pipeline import Preset
from probes.training_config import TrainingConfigError

ROWS = ["stream_grad_norm", "shortcut_grad_norm", "token_cosine", "branch_ratio", "update_to_weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def frame(folder):
    return heat_maps.compute(folder=folder, n_blocks=2, steps=50, n_profiles=5)


@pytest.fixture(scope="module")
def figure(frame):
    return heat_maps.draw(frame)


def _meshes(figure):
    return [(axes, mesh) for axes in figure.axes for mesh in axes.collections if hasattr(mesh, "get_coordinates")]


def test_frame_has_both_schemes_their_losses_and_landmarks(frame) -> None:
    assert set(frame["scheme"]) == {"post_ln", "keel"}
    counts = frame.groupby(["scheme", "metric"])["step"].nunique().unstack()
    assert (counts[["loss", "lr"]] == 50).all(axis=None)
    assert (counts[ROWS] == 5).all(axis=None)
    assert (counts[["unigram_entropy", "bigram_entropy"]] == 1).all(axis=None)


def test_finished_runs_are_read_not_trained_again(frame, folder, monkeypatch) -> None:
    monkeypatch.setattr("probes.training._Run", lambda *a, **k: pytest.fail("trained again"))
    pd.testing.assert_frame_equal(heat_maps.compute(folder=folder, n_blocks=2, steps=50, n_profiles=5), frame)


def test_size_seed_and_device_are_in_the_frame_and_below_the_maps(frame, figure) -> None:
    assert set(frame["width"]) == {64}
    assert (
        "SwiGLU FFN · width 64 · seed 0 · n = 1 run per scheme · 512 tokens (bytes) per step · cpu"
        in figure._supxlabel.get_text()
    )


def test_every_map_shows_the_measured_values_on_the_rows_own_scale(figure, frame) -> None:
    meshes = [(axes, mesh) for axes, mesh in _meshes(figure) if axes.get_label() != "<colorbar>"]
    assert len(meshes) == 10
    for i, (_, mesh) in enumerate(meshes):
        found = frame[(frame["metric"] == ROWS[i // 2]) & (frame["scheme"] == ["post_ln", "keel"][i % 2])]
        table = found.pivot_table(index="sublayer", columns="step", values="value").to_numpy()
        np.testing.assert_allclose(np.ma.filled(mesh.get_array(), np.nan).reshape(table.shape), table)
        assert mesh.norm.vmin == meshes[i - i % 2][1].norm.vmin


def test_colours_are_logarithmic_where_values_span_decades(figure) -> None:
    meshes = [mesh for axes, mesh in _meshes(figure) if axes.get_label() != "<colorbar>"]
    assert [type(mesh.norm).__name__ for mesh in meshes[::2]] == ["LogNorm", "LogNorm", "Normalize", "LogNorm", "LogNorm"]


def test_words_stay_inside_the_figure_and_apart(figure) -> None:
    width, height = figure.canvas.get_width_height()
    labels = [figure._supxlabel, *(axes.yaxis.label for axes in figure.axes)]
    labels += [axes._left_title for axes in figure.axes] + [text for axes in figure.axes for text in axes.texts]
    boxes = {label.get_text(): label.get_window_extent() for label in labels if label.get_text() and label.get_visible()}
    assert {"Post-LN, 4 sub-layers", "Keel, 4 sub-layers", "unigram\nentropy"} <= set(boxes)
    for box in boxes.values():
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
    assert boxes["Post-LN, 4 sub-layers"].x1 < boxes["Keel, 4 sub-layers"].x0


@pytest.fixture(scope="module")
def four():
    return heat_maps.compute(n_blocks=2, steps=50, n_profiles=5, ffns=["swiglu", "relu"])


def test_gated_and_plain_ffn_stand_side_by_side(four) -> None:
    figure = heat_maps.draw(four)
    titles = [axes._left_title.get_text() or axes.get_title() for axes in figure.axes[:4]]
    assert titles == ["Post-LN, SwiGLU", "Keel, SwiGLU", "Post-LN, ReLU", "Keel, ReLU"]
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes[:4]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_finding_is_of_each_run(four) -> None:
    found = heat_maps.finding(four)
    run = four[(four["ffn"] == "relu") & (four["scheme"] == "keel") & (four["step"] == 1)]
    grad = run[run["metric"] == "stream_grad_norm"].set_index("sublayer")["value"]
    assert found["relu"]["keel"]["start_full"] == pytest.approx(float(grad[2]) / float(grad[4]))
    assert found["swiglu"]["keel"] != found["relu"]["keel"]
    assert (found["n_sublayers"], found["steps"], found["peak_lr"]) == (4, 50, pytest.approx(0.05))


def test_finding_says_when_tokens_are_alike_and_how_far_the_gradient_falls(frame) -> None:
    changed = frame.copy()
    mine = changed["scheme"] == "post_ln"
    steps = sorted(changed.loc[changed["metric"] == "token_cosine", "step"].unique())
    changed.loc[mine & (changed["metric"] == "token_cosine") & (changed["step"] >= steps[2]), "value"] = 0.995
    below = (changed["metric"] == "stream_grad_norm") & (changed["sublayer"] == 2) & (changed["step"] == steps[3])
    changed.loc[mine & below, "value"] = 0.0
    found = heat_maps.finding(changed)["swiglu"]
    assert (found["post_ln"]["alike_from"], found["keel"]["alike_from"]) == (steps[2], None)
    assert (found["post_ln"]["lowest_full"], found["post_ln"]["lowest_step"]) == (0.0, steps[3])
    at = changed[mine & (changed["step"] == steps[3]) & (changed["sublayer"] == -1)].set_index("metric")["value"]
    assert found["post_ln"]["vanishes"] == {"step": steps[3], "left": 0.0, "lr": float(at["lr"]), "loss": float(at["loss"])}
    assert found["keel"]["vanishes"] is None
    assert found["post_ln"]["cosine_there"] == found["post_ln"]["top_cosine_there"] == pytest.approx(0.995)
    assert found["keel"]["lowest_full"] > 0


def test_frame_without_a_column_of_ffns_is_the_gated_ones(frame) -> None:
    plain = frame.drop(columns="ffn")
    assert heat_maps.finding(plain) == heat_maps.finding(frame)
    assert "FFN" not in heat_maps.draw(plain)._supxlabel.get_text()


def test_plain_ffn_has_a_figure_of_its_own_from_the_same_code() -> None:
    for preset, settings in heat_maps_relu.SETTINGS.items():
        assert settings == {**heat_maps.SETTINGS[preset], "ffns": ["relu"]}
    assert (heat_maps_relu.compute, heat_maps_relu.draw, heat_maps_relu.finding) == (
        heat_maps.compute,
        heat_maps.draw,
        heat_maps.finding,
    )


@pytest.mark.parametrize("preset", [preset.value for preset in Preset])
@pytest.mark.parametrize("module", [heat_maps, heat_maps_relu], ids=["gated", "plain"])
def test_every_preset_is_a_run_that_can_be_judged(module, preset) -> None:
    bound = inspect.signature(module.compute).bind(**module.SETTINGS[preset])
    bound.apply_defaults()
    shared = {name: value for name, value in bound.arguments.items() if name not in {"folder", "schemes", "ffns"}}
    for ffn, scheme in itertools.product(bound.arguments["ffns"], bound.arguments["schemes"]):
        config = heat_maps.run_config(scheme, ffn=ffn, **shared)
        assert (config.model.scheme, config.model.ffn, config.steps) == (scheme, ffn, shared["steps"])


def test_a_ramp_too_short_to_be_judged_is_refused_before_a_text_is_read(monkeypatch) -> None:
    monkeypatch.setattr("probes.corpus.build_corpus", lambda: pytest.fail("read a text"))
    with pytest.raises(TrainingConfigError, match="steps of a ramp must be at least 50, got 12"):
        heat_maps.compute(steps=12, n_blocks=2, n_profiles=4)
