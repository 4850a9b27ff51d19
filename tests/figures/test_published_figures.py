"""Figures 1b and 1c: the published numbers, hollow, and the gains between them."""

import numpy as np
import pytest

from figures import fig1b_capabilities, fig1c_depth_scaling
from figures._style import scheme_style
from figures.paper_tables import load_tables
from tests.figures._pictures import assert_readable, words


@pytest.fixture(scope="module", params=[fig1b_capabilities, fig1c_depth_scaling], ids=lambda module: module.__name__)
def module(request):
    return request.param


@pytest.fixture(scope="module")
def figure(module):
    return module.draw(module.compute())


def _hollow(figure, scheme):
    style = scheme_style(scheme)
    return [
        line
        for line in figure.axes[0].lines
        if line.get_markerfacecolor() == "white" and line.get_marker() == style.marker and line.get_color() == style.color
    ]


@pytest.mark.parametrize("scheme", ["pre_ln", "keel"])
def test_hollow_markers_are_the_published_scores(module, figure, scheme) -> None:
    (line,) = _hollow(figure, scheme)
    table = load_tables().frame("figure1b_capabilities" if module is fig1b_capabilities else "figure1c_depth_scaling")
    published = table.loc[table["architecture"] == scheme, "value"]
    drawn = line.get_xdata() if module is fig1b_capabilities else line.get_ydata()
    np.testing.assert_array_equal(np.asarray(drawn, float), published)


def test_every_score_and_every_gain_is_written(module, figure) -> None:
    frame = module.compute()
    published = frame[frame["source"] == "published"]
    key = "capability" if "capability" in published else "n_sublayers"
    table = published.pivot_table(index=key, columns="scheme", values="score")
    said = words(figure)
    assert {f"{score:.1f}" for score in table.to_numpy().ravel()} <= set(said)
    assert {f"{gain:+.1f}" for gain in table["keel"] - table["pre_ln"]} <= set(said)
    assert {"Keel", "Pre-LN"} <= set(said)


def test_axes_have_units_and_the_caption_says_where_the_numbers_are_from(figure) -> None:
    said = "\n".join(words(figure))
    assert "average score (%)" in said
    assert "published averages" in said.replace("\n", " ")


def test_words_are_apart_and_inside(figure) -> None:
    assert_readable(figure, width=3.35)


def test_capabilities_are_the_papers_four() -> None:
    assert set(fig1b_capabilities.compute()["capability"]) == {"multilingual", "general_knowledge", "math_and_code", "overall"}


def test_recomputed_averages_are_the_means_of_table_3s_columns() -> None:
    frame = fig1c_depth_scaling.compute()
    table = load_tables().frame("table3_depth_scaling", architecture="keel", n_sublayers=512)
    mean = table.loc[table["benchmark"] != "Average", "value"].mean()
    found = frame[(frame["source"] == "recomputed") & (frame["scheme"] == "keel") & (frame["n_sublayers"] == 512)]
    assert found["score"].item() == pytest.approx(mean)
    crosses = [line for line in fig1c_depth_scaling.draw(frame).axes[0].lines if line.get_marker() == "x"]
    assert sum(len(line.get_ydata()) for line in crosses) == 8


def test_gain_panel_shows_keel_minus_pre_ln() -> None:
    frame = fig1c_depth_scaling.compute()
    gain = fig1c_depth_scaling.gains(frame)
    assert gain.round(1).to_dict() == {64: 1.7, 128: 1.2, 512: 3.8, 1024: 3.0}
    (line,) = fig1c_depth_scaling.draw(frame).axes[1].lines
    np.testing.assert_array_equal(line.get_ydata(), gain)


def test_findings_are_the_published_gains_without_a_verdict() -> None:
    capabilities = fig1b_capabilities.finding(fig1b_capabilities.compute())
    assert {name: round(gain, 1) for name, gain in capabilities["gains"].items()} == {
        "multilingual": 4.4,
        "general_knowledge": 2.8,
        "math_and_code": 6.4,
        "overall": 3.8,
    }
    depths = fig1c_depth_scaling.finding(fig1c_depth_scaling.compute())
    assert round(depths["gains"]["512 sub-layers"], 1) == 3.8
    assert 0 < depths["largest_difference"] < 0.06
    assert "verdict" not in capabilities | depths
