"""Full beside shortcut-only gradients: measured by the probe, drawn as measured, and what they say of Eq. (15)."""

import numpy as np
import pytest
import torch

from figures import full_and_shortcut
from figures._style import scheme_style
from figures.full_and_shortcut import bottom_gains, closed_form_gains
from figures.pipeline import stored_frame
from keel_theory.schemes import get_scheme
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer
from tests.figures._pictures import words


@pytest.fixture(scope="module")
def frame():
    return full_and_shortcut.compute(blocks=[1, 3], width=32, seeds=[0, 1, 2], seq_len=8)


@pytest.fixture(scope="module")
def figure(frame):
    return full_and_shortcut.draw(frame)


@pytest.fixture(scope="module")
def committed():
    kept = stored_frame("full_and_shortcut")
    assert kept is not None
    return kept.frame


def test_frame_holds_what_the_probe_measures(frame) -> None:
    config = full_and_shortcut._config("keel", "relu", 3, 32, 1)
    assert config.init_std == 32**-0.5
    measured = measure_gradient_norms(Transformer(config), [full_and_shortcut._text(8, 1)])
    rows = frame.query("scheme == 'keel' and ffn == 'relu' and n_sublayers == 6 and seed == 1")
    top = measured.boundaries[6]
    assert top.name == "block 2 ffn"
    for row in rows.itertuples():
        boundary = measured.boundaries[row.boundary]
        assert row.full == pytest.approx(boundary.stream_grad.value / top.stream_grad.value)
        assert row.shortcut == pytest.approx(boundary.shortcut_grad.value / top.shortcut_grad.value)


def test_rows_are_one_per_boundary_and_model(frame) -> None:
    assert len(frame) == 3 * 2 * 3 * (3 + 7)
    assert (frame.loc[frame["boundary"] == frame["n_sublayers"], ["full", "shortcut", "closed_form"]] == 1.0).all(axis=None)


def test_seeds_have_other_weights_and_other_text() -> None:
    assert not torch.equal(full_and_shortcut._text(16, 0), full_and_shortcut._text(16, 1))


@pytest.mark.parametrize(
    ("scheme", "index", "expected"),
    [("post_ln", 5, 1 / np.sqrt(1 + 0.25)), ("pre_ln", 5, 1.0), ("keel", 0, 1.0), ("keel", 5, 8 / np.sqrt(64 + 0.25))],
)
def test_closed_form_is_the_papers_with_measured_sizes(scheme: str, index: int, expected: float) -> None:
    gains = closed_form_gains(get_scheme(scheme).specs(8), np.ones(8), np.full(8, 0.5))
    assert gains[index] == pytest.approx(expected)


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("scheme", ["post_ln", "pre_ln", "keel"])
def test_curves_are_the_medians_of_the_frame(figure, frame, scheme: str, column: int) -> None:
    ffn = ["swiglu", "relu"][column]
    mine = frame[(frame["scheme"] == scheme) & (frame["ffn"] == ffn)]
    profile = mine[mine["n_sublayers"] == 6].groupby("boundary")[["full", "closed_form"]].median()
    depth = bottom_gains(mine).groupby("n_sublayers")[["full", "closed_form", "shortcut"]].median()
    above, below = figure.axes[column], figure.axes[2 + column]
    for axes, expected in ((above, profile), (below, depth)):
        lines = {line.get_label(): line for line in axes.lines}
        np.testing.assert_allclose(lines[f"full {scheme}"].get_ydata(orig=False), expected["full"])
        np.testing.assert_allclose(lines[f"closed {scheme}"].get_ydata(orig=False), expected["closed_form"])
        assert lines[f"full {scheme}"].get_color() == scheme_style(scheme).color
        assert axes.get_yscale() == "log"
    bars = next(container for container in below.containers if container.get_label() == f"shortcut {scheme}")
    np.testing.assert_allclose(bars[0].get_ydata(orig=False), depth["shortcut"])
    assert bars[0].get_markerfacecolor() == "white"


def test_names_size_and_seeds_are_written(figure) -> None:
    said = " ".join(words(figure))
    assert all(said.count(name) == 3 for name in ("Post-LN", "Pre-LN", "Keel"))  # in the key and at the ends of both columns
    assert "n = 3 seeds" in said
    assert "width 32" in said
    assert figure.get_size_inches()[0] == 7.0


@pytest.mark.parametrize(("ffn", "shortcut"), [("swiglu", (1e-18, 1e-14)), ("relu", (1e-24, 1e-20))])
def test_committed_post_ln_dies_on_the_shortcut_and_not_in_full(committed, ffn: str, shortcut: tuple[float, float]) -> None:
    """At width 512, 128 sub-layers: the argument of Eq. (15) is about one path."""
    rows = bottom_gains(committed).query("scheme == 'post_ln' and n_sublayers == 128 and ffn == @ffn")
    assert len(rows) >= 3
    assert rows["shortcut"].between(*shortcut).all()
    assert (rows["full"] > 1).all()
    np.testing.assert_allclose(np.log(rows["shortcut"]), np.log(rows["closed_form"]), rtol=0.07)


def test_committed_keel_and_pre_ln_keep_the_shortcut(committed) -> None:
    rows = bottom_gains(committed).query("scheme != 'post_ln'")
    assert (rows["shortcut"] > 0.9).all()


def test_committed_full_gradient_grows_with_a_gated_ffn_only(committed) -> None:
    full = bottom_gains(committed).query("scheme == 'post_ln' and n_sublayers == 128").groupby("ffn")["full"].median()
    assert full["swiglu"] > 1e5
    assert full["relu"] < 10


def test_finding_is_of_the_deepest_model_below_its_first_block(frame) -> None:
    found = full_and_shortcut.finding(frame)
    assert (found["n_sublayers"], found["width"]) == (6, 32)
    rows = frame.query("scheme == 'keel' and ffn == 'relu' and n_sublayers == 6 and boundary == 2")
    spread = found["relu"]["keel"]["shortcut"]
    assert spread == {
        "median": rows["shortcut"].median(),
        "low": rows["shortcut"].min(),
        "high": rows["shortcut"].max(),
        "seeds": 3,
    }
    assert found["swiglu"]["pre_ln"]["shortcut"]["median"] == 1.0
    assert found["eq_15"] == pytest.approx(found["eq_15_per_sublayer"] ** 6)
    assert found["relu"]["keel"]["shortcut_per_sublayer"] ** 6 == pytest.approx(rows["shortcut"].median())
    changed = frame.assign(full=frame["full"].where(frame["boundary"] != 2, 7.0))
    assert full_and_shortcut.finding(changed)["swiglu"]["post_ln"]["full"]["low"] == 7.0
