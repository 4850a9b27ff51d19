"""The phase diagram: what is drawn is what the theory says."""

import numpy as np
import pytest

from figures import phase_diagram
from keel_theory.design import uniform_product
from keel_theory.propagation import propagate_shortcut
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
    for text in [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]:
        box = text.get_window_extent()
        assert box.x0 > 0
        assert box.y0 > 0
        assert box.x1 < width
        assert box.y1 < height


@pytest.mark.parametrize("branch_variance", [0.25, 4.0])
def test_critical_line_moves_with_the_branch_variance(branch_variance: float) -> None:
    figure = phase_diagram.draw(phase_diagram.compute(branch_variance=branch_variance))
    depth, scale = next(line.get_data() for line in figure.axes[0].lines if line.get_color() == "#222222")
    np.testing.assert_allclose(scale, np.sqrt(branch_variance * depth))
    assert float(uniform_product(scale[-1], depth[-1], branch_variance)) == pytest.approx(np.exp(-0.5), rel=0.01)


def _words(branch_variance: float) -> list[str]:
    figure = phase_diagram.draw(phase_diagram.compute(branch_variance=branch_variance))
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("branch_variance", [0.0, 1.0, 1e7, 1e308])
def test_branch_variance_and_the_first_block_s_factor_are_printed(branch_variance: float) -> None:
    """The factor is what the theory gives for Keel's first block from an embedding of unit variance."""
    remark = next(text for text in _words(branch_variance) if "branch variance" in text)
    assert f"$q$ = {branch_variance:g};" in remark
    trace = propagate_shortcut(get_scheme("keel"), 64, branch_variance=min(branch_variance, 1e7))
    if branch_variance <= 1e7:
        assert remark.endswith(f"= {np.exp(trace.log_gains[:2].sum()):.2g}")


@pytest.mark.parametrize(("branch_variance", "said"), [(0.0, True), (1.0, True), (100.0, True), (1e7, False), (1e308, False)])
def test_the_output_is_said_to_be_the_input_only_where_it_is(branch_variance: float, said: bool) -> None:
    assert any("hardly" in text for text in _words(branch_variance)) is said


@pytest.mark.parametrize("branch_variance", [0.0, 1e-4, 1.0, 1e7])
def test_words_are_legible_on_their_band(branch_variance: float) -> None:
    """White on dark bands, dark on pale ones: by the product that the theory gives at the right end of the Post-LN edge."""
    figure = phase_diagram.draw(phase_diagram.compute(branch_variance=branch_variance))
    text = next(text for text in figure.axes[0].texts if "Post-LN" in text.get_text())
    product = float(uniform_product(1.0, 4096, branch_variance))
    assert (text.get_color() == "white") is (product < 1e-10 or product >= 0.999)


def test_main_writes_both_formats(tmp_path) -> None:
    phase_diagram.main(["--preset", "smoke", "--runs", str(tmp_path / "runs"), "-o", str(tmp_path / "new")])
    assert sorted(p.name for p in (tmp_path / "new").glob("*.*g")) == ["phase_diagram.png", "phase_diagram.svg"]
