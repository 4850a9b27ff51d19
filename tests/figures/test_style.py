"""The shared look: one style per scheme, labels apart, files whole or absent."""

from itertools import pairwise

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st

mpl.use("Agg")

from matplotlib import pyplot as plt

from figures._style import contrast_on_white, label_line_ends, paper_style, save_figure, scheme_style, spread, text_color
from keel_theory.schemes import SCHEMES
from keel_theory.spec import SchemeError


def test_every_scheme_has_its_own_style() -> None:
    styles = [scheme_style(name) for name in SCHEMES]
    assert len(set(styles)) == len(styles)
    assert len({style.color for style in styles}) == len(styles)


@pytest.mark.parametrize("name", SCHEMES)
def test_names_on_white_can_be_read_and_keep_their_hue(name: str) -> None:
    color = scheme_style(name).color
    before, after = mpl.colors.to_rgb(color), mpl.colors.to_rgb(text_color(color))
    assert contrast_on_white(after) >= 4.5
    assert mpl.colors.rgb_to_hsv(after)[0] == pytest.approx(mpl.colors.rgb_to_hsv(before)[0], abs=0.01)
    assert (text_color(color) == color) == (contrast_on_white(before) >= 4.5)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast_on_white(mpl.colors.to_rgb("#767676")) == pytest.approx(4.54, abs=0.01)  # the darkest grey that WCAG names


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(SchemeError, match="unknown scheme 'nonesuch'"):
        scheme_style("nonesuch")


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12), st.floats(0.1, 10))
def test_spread_keeps_order_and_gap(positions: list[float], gap: float) -> None:
    placed = spread(positions, gap)
    by_position = [p for _, p in sorted(zip(positions, placed, strict=True))]
    assert all(b - a >= gap * (1 - 1e-9) for a, b in pairwise(by_position))


def test_spread_leaves_distant_positions_alone() -> None:
    assert spread([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0]


def test_the_style_leaves_settings_as_they_were() -> None:
    before = dict(mpl.rcParams)
    with paper_style():
        assert mpl.rcParams["font.size"] == 8
    assert dict(mpl.rcParams) == before


@pytest.fixture
def figure():
    with paper_style():
        figure, axes = plt.subplots()
        axes.plot([0, 1], [1, 1])
        yield figure
        plt.close(figure)


def test_labels_of_equal_ends_do_not_overlap(figure) -> None:
    axes = figure.axes[0]
    label_line_ends(axes, {"a": (1, 1), "b": (1, 1)}, {"a": "#000000", "b": "#cc3311"})
    figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in axes.texts)
    assert not first.overlaps(second)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figure_files(figure, tmp_path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"figure{suffix}"
    save_figure(figure, path)
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@paper_style()
def test_equal_figures_give_equal_svg_files(tmp_path) -> None:
    for name in ("a.svg", "b.svg"):
        figure, axes = plt.subplots()
        axes.plot([0, 1], [1, 1])
        save_figure(figure, tmp_path / name)
        plt.close(figure)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_nothing_is_left_where_nothing_can_be_written(figure, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        save_figure(figure, tmp_path / "absent" / "figure.png")
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        save_figure(figure, tmp_path / "figure.xyz")
    assert list(tmp_path.iterdir()) == []
