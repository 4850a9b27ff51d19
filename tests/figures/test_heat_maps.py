"""The heat maps: what is drawn is what was measured, legibly."""

import numpy as np
import pandas as pd
import pytest

from figures import heat_maps

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
    assert "width 64 · seed 0 · n = 1 run per scheme · cpu" in figure._supxlabel.get_text()


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
