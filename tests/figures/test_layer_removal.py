"""The figure of removal costs: everything measured is on it, below zero and beyond number too."""

from __future__ import annotations

import math

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer

from figures.layer_removal import draw


@pytest.fixture(autouse=True)
def _headless() -> None:
    mpl.use("Agg")


def frame(values: list[float], counted_in: str = "block", span: int = 1) -> pd.DataFrame:
    rows = []
    for i, value in enumerate(values):
        place = f"block {i}" if counted_in == "block" else f"block {i // 2} {('attention', 'ffn')[i % 2]}"
        status = "nan" if math.isnan(value) else "inf" if math.isinf(value) else "ok" if value else "zero"
        for metric, factor in (("delta_loss", 1.0), ("delta_perplexity", 20.0)):
            low, high = (factor * (value + d) if math.isfinite(value) else math.nan for d in (-0.01, 0.01))
            rows.append(
                {
                    "family": "llama",
                    "n_blocks": len(values),
                    "n_sublayers": 2 * len(values),
                    "counted_in": counted_in,
                    "span": span,
                    "place": place,
                    "kind": "unit",
                    "start": i,
                    "metric": metric,
                    "value": factor * value,
                    "low": low,
                    "high": high,
                    "status": status,
                }
            )
    return pd.DataFrame(rows)


def test_every_cost_is_drawn_where_it_is_negative_ones_below_zero() -> None:
    costs = [9.0, 0.1, -0.02, 0.0, 0.3]
    above, below = draw(frame(costs)).axes
    for axes, factor in ((above, 20.0), (below, 1.0)):
        [bars] = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
        assert bars.lines[0].get_ydata() == pytest.approx([factor * cost for cost in costs])
        assert axes.get_yscale() == "symlog"
        low, high = axes.get_ylim()
        assert low < -0.02 * factor
        assert high > 9.0 * factor
    assert below.get_xlabel() == "block removed"


def test_error_bars_are_the_interval() -> None:
    _, below = draw(frame([1.0, 2.0])).axes
    [bars] = [c for c in below.containers if isinstance(c, ErrorbarContainer)]
    ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    assert ends == [pytest.approx([0.99, 1.01]), pytest.approx([1.99, 2.01])]


def test_attention_and_ffn_have_their_own_marks() -> None:
    above, below = draw(frame([1.0, 2.0, 0.5, 0.1], "sublayer")).axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["attention", "FFN"]
    assert below.get_xlabel() == "sub-layer removed"


def test_what_is_no_number_stands_at_the_edge_and_is_counted() -> None:
    above, _ = draw(frame([1.0, math.nan, math.inf, 0.2])).axes
    [mark] = [line for line in above.lines if line.get_marker() == "x"]
    assert mark.get_xdata().tolist() == [1, 2]
    assert any("not finite: 2 of 4" in text.get_text() for text in above.texts)


def test_nothing_finite_still_draws() -> None:
    figure = draw(frame([math.nan, math.nan]))
    assert any("not finite: 2 of 2" in text.get_text() for text in figure.axes[0].texts)


def test_spans_and_hundreds_of_units(tmp_path) -> None:
    figure = draw(frame([0.01 * (i % 7) - 0.01 for i in range(512)], span=3))
    assert figure.axes[1].get_xlabel() == "first of 3 consecutive blocks removed"
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
