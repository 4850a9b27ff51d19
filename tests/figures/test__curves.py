"""Smoothing, limits and captions of curve figures."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from figures._curves import CUT_WORDS, caption, draw_seeds, limit_losses, mark_entropy, size_words, smoothed
from figures._style import paper_style
from tests.figures._frames import UNIGRAM, learning, run, runs, with_spike


@pytest.mark.parametrize("window", [1, 2, 5, 9, 200])
def test_smoothing_is_the_mean_of_what_there_is_of_the_window(window: int) -> None:
    values = np.random.default_rng(0).standard_normal(40)
    half = window // 2
    slow = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    np.testing.assert_allclose(smoothed(values, window), slow)


def test_one_seed_is_one_line_and_several_are_thin_lines_and_their_median() -> None:
    frame = runs(run(np.full(20, level), seed=seed) for seed, level in enumerate((1.0, 2.0, 9.0)))
    axes = Figure().add_subplot()
    assert draw_seeds(axes, frame, window=3, color="red") == (20.0, 2.0)
    assert [line.get_ydata()[0] for line in axes.lines] == [1.0, 2.0, 9.0, 2.0]
    alone = Figure().add_subplot()
    draw_seeds(alone, frame[frame["seed"] == 0], window=3, color="red")
    assert len(alone.lines) == 1


def test_a_curve_that_breaks_off_is_named_where_it_ends() -> None:
    losses = learning(50, 2.0)
    losses[30:] = np.nan
    x, y = draw_seeds(Figure().add_subplot(), run(losses), window=1, color="red")
    assert (x, y) == (30.0, pytest.approx(losses[29]))


@pytest.mark.parametrize("height", [0.0, 4.0])
def test_limits_hold_everything_after_the_first_fall(height: float) -> None:
    frame = run(with_spike(learning(400, 2.2), 200, height))
    axes = Figure().add_subplot()
    limit_losses(axes, frame)
    low, high = axes.get_ylim()
    after = smoothed(frame["loss"].to_numpy(), 5)[12:]
    assert low < after.min()
    assert high > max(after.max(), UNIGRAM)
    assert high < after.max() + 0.5
    assert "3 %" in CUT_WORDS


def test_the_entropy_is_a_line_with_a_name_inside_or_beside() -> None:
    for outside in (False, True):
        axes = Figure().add_subplot()
        mark_entropy(axes, run(learning(50, 2.0)), outside=outside)
        assert axes.lines[0].get_ydata() == [UNIGRAM, UNIGRAM]
        assert axes.texts[0].get_ha() == ("left" if outside else "right")


def test_sizes_that_differ_are_listed() -> None:
    frame = runs([run(learning(50, 2.0), n_sublayers=16, width=128), run(learning(50, 2.0), seed=1)])
    assert size_words(frame) == "16 and 64 sub-layers, width 64 and 128; 256 tokens (bytes) per step; n = 1 seed each; cpu"


@pytest.mark.parametrize(
    ("more_seeds", "said"), [((), "n = 2 seeds each"), ((2,), "n = 2 to 3 seeds each")], ids=["as many", "more of one"]
)
def test_seeds_are_counted_in_each_setting(more_seeds: tuple[int, ...], said: str) -> None:
    settings = [(scheme, seed) for scheme in ("keel", "pre_ln") for seed in (0, 1)] + [("keel", seed) for seed in more_seeds]
    frame = runs(run(learning(50, 2.0), scheme=scheme, seed=seed) for scheme, seed in settings)
    assert f"; {said}; " in size_words(frame)


@pytest.mark.parametrize("width", [3.35, 7.0])
def test_a_caption_stays_inside_and_below(width: float) -> None:
    with paper_style():
        figure = Figure(figsize=(width, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel("x")
        caption(figure, "Pre-LN, 64 sub-layers of width 64, the median over seeds: " * 12)
        figure.draw_without_rendering()
        (text,) = figure.texts
        assert "Pre-\nLN" not in text.get_text()
        assert text.get_window_extent().y1 <= axes.get_tightbbox().y0
        assert text.get_window_extent().x1 <= figure.bbox.x1
