"""Cost of the second norm: counted operations, times in turns, and what is drawn of them."""

import numpy as np
import pytest

from figures import second_norm_cost
from figures._style import scheme_style
from figures.second_norm_cost import overheads, uncounted_flops
from probes.config import ModelConfig
from tests.figures._pictures import words


@pytest.fixture(scope="module")
def frame():
    return second_norm_cost.compute(widths=[32, 64], n_blocks=1, batch_size=1, seq_len=16, rounds=4)


@pytest.fixture(scope="module")
def figure(frame):
    return second_norm_cost.draw(frame)


def test_every_round_times_every_scheme(frame) -> None:
    assert (frame.groupby(["width", "scheme"])["round"].nunique() == 4).all()
    assert set(frame["scheme"]) == {"keel", "post_ln", "pre_ln"}
    assert (frame["seconds"] > 0).all()


@pytest.mark.parametrize("width", [32, 64])
def test_operations_are_those_of_matrix_products_attention_and_norms(frame, width: int) -> None:
    """Per token and weight of a matrix 6; two products of attention forward and four backward, over all pairs of tokens."""
    row = frame[(frame["width"] == width) & (frame["scheme"] == "post_ln")].iloc[0]
    matrices = 3 * width**2 + 9 * width**2
    attention = row["flops"] - row["norm_flops"] - 6 * 16 * matrices
    assert attention == 6 * 2 * 16 * 16 * width
    assert row["norm_flops"] == 16 * width * (2 + 1) * 12


@pytest.mark.parametrize(("n_blocks", "norms", "scales"), [(1, 3, 0), (4, 15, 6)])
def test_norms_are_counted_from_the_spec(n_blocks: int, norms: int, scales: int) -> None:
    """Keel has two norms per sub-layer but for the first, and a final one; its first block is not scaled."""
    config = ModelConfig(scheme="keel", n_blocks=n_blocks)
    assert uncounted_flops(config) == 64 * (12 * (norms + 1) + 2 * scales)


def test_overheads_are_ratios_within_a_round(frame) -> None:
    made = frame.assign(seconds=frame["scheme"].map({"keel": 1.1, "post_ln": 1.0, "pre_ln": 0.8}) * (1 + frame["round"]))
    shares = overheads(made).set_index(["other", "width"])
    assert shares.loc[("post_ln", 64), "seconds"] == pytest.approx(10)
    assert shares.loc[("pre_ln", 64), "seconds"] == pytest.approx(37.5)
    assert shares.loc[("post_ln", 64), "high"] == pytest.approx(10)
    counts = frame.drop_duplicates(["width", "scheme"]).set_index(["width", "scheme"])["flops"]
    assert shares.loc[("post_ln", 64), "flops"] == pytest.approx(100 * (counts[64, "keel"] / counts[64, "post_ln"] - 1))


def test_share_of_operations_falls_with_the_width(frame) -> None:
    shares = overheads(frame).query("other == 'post_ln'").sort_values("width")["flops"].to_numpy()
    assert shares[0] > shares[1] > 0


@pytest.mark.parametrize("other", ["post_ln", "pre_ln"])
def test_what_is_drawn_is_what_was_measured(figure, frame, other: str) -> None:
    shares = overheads(frame).query("other == @other")
    above, below = figure.axes
    bars = next(bar for bar in above.containers if bar[0].get_color() == scheme_style(other).color)
    np.testing.assert_allclose(bars[0].get_ydata(orig=False), shares["seconds"])
    line = next(line for line in below.lines if line.get_color() == scheme_style(other).color)
    np.testing.assert_allclose(line.get_ydata(orig=False), shares["flops"])


def test_units_rounds_and_clock_are_written(figure) -> None:
    said = " ".join(" ".join(words(figure)).split())
    assert "more time (%)" in said
    assert "more FLOP (%)" in said
    assert "n = 4 interleaved rounds" in said
    assert "CPU time of one thread" in said
    assert figure.get_size_inches()[0] == 3.35
