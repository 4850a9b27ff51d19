"""The phase diagram: what is drawn is what the theory says."""

import numpy as np
import pytest

from figures import phase_diagram
from keel_theory.design import uniform_product
from keel_theory.schemes import get_scheme


@pytest.fixture(scope="module")
def frame():
    return phase_diagram.compute()


def test_frame_is_a_full_grid_of_the_closed_form(frame) -> None:
    assert len(frame) == frame["n_sublayers"].nunique() * frame["alpha"].nunique()
    sample = frame.sample(50, random_state=0)
    np.testing.assert_allclose(sample["product"], uniform_product(sample["alpha"], sample["n_sublayers"]))


def test_curves_are_the_published_scales(frame) -> None:
    figure = phase_diagram.draw(frame)
    depth, scale = next(line.get_data() for line in figure.axes[0].lines if line.get_color() == "#0077bb")
    published = [get_scheme("keel").specs(int(n))[-1].shortcut_scale for n in depth]
    np.testing.assert_allclose(scale, published)


def test_words_stay_inside_the_figure(frame) -> None:
    figure = phase_diagram.draw(frame)
    width, height = figure.canvas.get_width_height()
    for axes in figure.axes:
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.x0 > 0
            assert box.y0 > 0
            assert box.x1 < width
            assert box.y1 < height


@pytest.mark.parametrize("branch_variance", [0.25, 4.0])
def test_critical_line_moves_with_the_branch_variance(branch_variance: float) -> None:
    figure = phase_diagram.draw(phase_diagram.compute(branch_variance))
    depth, scale = next(line.get_data() for line in figure.axes[0].lines if line.get_color() == "#222222")
    np.testing.assert_allclose(scale, np.sqrt(branch_variance * depth))
    assert float(uniform_product(scale[-1], depth[-1], branch_variance)) == pytest.approx(np.exp(-0.5), rel=0.01)


def test_main_writes_both_formats(tmp_path) -> None:
    phase_diagram.main(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["phase_diagram.png", "phase_diagram.svg"]
