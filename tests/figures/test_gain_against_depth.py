"""Gain against depth: lines are the closed form, markers the Monte Carlo, for every scheme."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import keel_theory.schemes
from figures import gain_against_depth
from figures._style import scheme_style
from figures.pipeline import stored_frame
from keel_theory.propagation import shortcut_log_product
from keel_theory.schemes import get_scheme
from tests.figures._pictures import words

SCHEMES = gain_against_depth.SETTINGS["cpu"]["schemes"]


@pytest.fixture(scope="module")
def frame():
    return gain_against_depth.compute(**gain_against_depth.SETTINGS["smoke"])


@pytest.fixture(scope="module")
def figure(frame):
    return gain_against_depth.draw(frame)


def test_every_scheme_of_the_toolkit_is_drawn() -> None:
    folder = Path(keel_theory.schemes.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert importlib.util.find_spec("keel_theory.schemes.keel") is not None
    assert set(SCHEMES) == modules


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lines_are_the_closed_form_and_markers_the_frames_means(figure, frame, scheme: str) -> None:
    for axes in figure.axes:
        line = next(line for line in axes.lines if line.get_label() == f"closed {scheme}")
        exact = [
            shortcut_log_product(get_scheme(scheme), int(depth), scaled_matrices=2) for depth in line.get_xdata(orig=False)
        ]
        np.testing.assert_allclose(line.get_ydata(orig=False), np.array(exact) / math.log(10), rtol=1e-12, atol=1e-12)
        assert line.get_color() == scheme_style(scheme).color
        bars = next(container for container in axes.containers if container.get_label() == f"drawn {scheme}")
        rows = frame[(frame["scheme"] == scheme) & (frame["kind"] == "monte_carlo")]
        np.testing.assert_allclose(bars[0].get_ydata(orig=False), rows["log10_gain"])
        ends = np.array([segment[:, 1] for segment in bars[2][0].get_segments()])
        np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 2 * rows["standard_deviation"], atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_committed_monte_carlo_agrees_with_the_closed_form(scheme: str) -> None:
    """Within five standard errors and the first-order correction of a width of 512: L / width nats at most."""
    kept = stored_frame("gain_against_depth")
    assert kept is not None
    rows = kept.frame[kept.frame["scheme"] == scheme]
    drawn = rows[rows["kind"] == "monte_carlo"]
    exact = [shortcut_log_product(get_scheme(scheme), int(n), scaled_matrices=2) / math.log(10) for n in drawn["n_sublayers"]]
    allowed = 5 * drawn["standard_error"] + (1 + drawn["n_sublayers"]) / drawn["width"] / math.log(10)
    assert (abs(drawn["log10_gain"] - exact) <= allowed).all()


def test_every_scheme_is_named_once_and_the_caption_says_n(figure) -> None:
    said = "\n".join(words(figure)).split("\n")
    labels = [get_scheme(name).label for name in SCHEMES]
    assert all(said.count(label) == 1 for label in labels)
    assert "n = 8 random stacks" in " ".join(said)


def test_names_lie_apart(figure) -> None:
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        names = sorted(boxes, key=lambda box: -box.y1)
        plain = [(text.get_text(), text.get_position()) for text in axes.texts]
        assert len({position for _, position in plain}) == len(plain)
        assert len(names) > 2
