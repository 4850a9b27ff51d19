"""Figures 6 and 7: verdicts on constructed costs, what a log axis cannot show, and a small run of each."""

import numpy as np
import pandas as pd
import pytest

from figures import fig6_layer_removal, fig7_open_models
from figures._curves import ONE_COLUMN
from figures._removal import TREND_LEVEL, trend_p_past_first, trend_past_first, trend_rises
from probes.checkpoint import load_checkpoint
from probes.layer_removal import measure_layer_removal
from probes.text import checkpoint_batches, default_text
from tests.figures._frames import assert_printable, costs, runs

RISING = np.linspace(0.1, 2.0, 19)


def pair(pre_ln: np.ndarray, keel: tuple[np.ndarray, ...]) -> pd.DataFrame:
    """One cost per block; Pre-LN the same in each seed."""
    parts = [costs(pre_ln, scheme="pre_ln", seed=seed) for seed in range(len(keel))]
    parts += [costs(values, scheme="keel", seed=seed) for seed, values in enumerate(keel)]
    return runs(parts)


def with_first(first: float, rest: np.ndarray) -> np.ndarray:
    return np.array([first, *rest])


@pytest.mark.parametrize(
    ("keel", "verdict"),
    [
        ((with_first(50, 3 * RISING), with_first(50, 2 * RISING)), "reproduced in direction"),
        ((with_first(50, 3 * RISING), with_first(50, 0.9 * RISING)), "not decided"),
        ((with_first(0.1, 3 * RISING), with_first(0.1, 3 * RISING)), "reproduced in direction"),
        ((with_first(50, 3 * RISING[::-1]), with_first(50, 3 * RISING[::-1])), "reproduced in direction"),
        ((with_first(50, 0.5 * RISING), with_first(50, 0.5 * RISING)), "not reproduced"),
    ],
)
def test_layer_removal(keel: tuple[np.ndarray, ...], verdict: str) -> None:
    found = fig6_layer_removal.finding(pair(with_first(50, RISING), keel))
    assert found["verdict"] == verdict
    assert found["pre_ln"]["first_blocks_delta_perplexity"]["median"] == 50
    assert found["pre_ln"]["rank_correlation_with_depth_past_first"]["median"] == 1
    assert found["keel"]["shallow_half_delta_perplexity"]["seeds"] == 2


@pytest.mark.parametrize(("first", "verdict"), [(2e4, "reproduced"), (9e3, "reproduced in direction")])
def test_layer_removal_asks_for_the_papers_perplexity(first: float, verdict: str) -> None:
    found = fig6_layer_removal.finding(pair(with_first(first, RISING), (with_first(first, 3 * RISING),) * 2))
    assert found["verdict"] == verdict
    assert list(found["parts"].values()) == [True, first > 1e4, True, True]


def test_of_seeds_with_opposite_signs_nothing_is_said() -> None:
    """A median above zero of one seed below and one above decides nothing."""
    found = fig6_layer_removal.finding(pair(with_first(50, RISING), (with_first(50, 3 * RISING), with_first(50, 0.9 * RISING))))
    assert found["shallow_half_keel_minus_pre_ln"]["median"] > 0
    assert found["parts"]["Keel's shallow half costs more than Pre-LN's"] is None


WEAK = np.array([2, 1, 6, 3, 9, 5, 4, 13, 7, 18, 8, 11, 10, 19, 12, 0, 14, 15, 1.5])


def test_a_trend_that_chance_would_give_is_none() -> None:
    assert trend_past_first([99.0, *WEAK]) > 0.3
    assert trend_p_past_first([99.0, *WEAK]) > TREND_LEVEL
    assert trend_rises([99.0, *WEAK]) is None
    assert fig7_open_models.finding(costs(with_first(2e4, WEAK), checkpoint="a"))["verdict"] == "not decided"
    found = fig6_layer_removal.finding(pair(with_first(2e4, WEAK), (with_first(2e4, 3 * WEAK),) * 2))
    assert found["parts"]["past the first the cost rises with depth"] is None
    assert found["keel"]["cost_rises_with_depth"] == [False, False]


def test_layer_removal_drawing_shows_all_costs_and_marks_what_has_no_place() -> None:
    keel = with_first(50, 3 * RISING)
    keel[7] = -0.2
    frame = pair(with_first(50, RISING), (keel, 2 * keel))
    says = [
        "Pre-LN",
        "Keel",
        "block removed",
        "Δ perplexity",
        "n = 4,096 predictions",
        "64 sequences",
        "2 in all",
        "cpu",
        "width 64",
    ]
    figure = assert_printable(fig6_layer_removal.draw, frame, width=ONE_COLUMN, says=says)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    full = next(line for line in axes.lines if line.get_label() == "Keel")
    np.testing.assert_allclose(np.delete(full.get_ydata(), 7), np.delete(keel, 7))
    assert np.isnan(full.get_ydata()[7])
    hollow = [line.get_xdata().tolist() for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [7.0] in hollow


def test_trend_leaves_the_first_tenth_out() -> None:
    assert trend_past_first([99.0, *range(19)]) == pytest.approx((18**3 - 18) / (18**3 - 18))
    assert trend_past_first([99.0, *range(19, 0, -1)]) == -1


@pytest.mark.slow
def test_both_schemes_are_trained_and_measured_once(tmp_path, monkeypatch) -> None:
    frame = fig6_layer_removal.compute(folder=tmp_path / "fig6_layer_removal", **fig6_layer_removal.SETTINGS["smoke"])
    again = tmp_path / "fig5_token_budget"
    assert again.is_dir()  # where figure 5 finds them
    units = frame[frame["metric"] == "delta_perplexity"]
    assert units.groupby(["scheme", "seed"]).size().tolist() == [4, 4, 4, 4]
    assert (frame.loc[frame["metric"] == "perplexity", "value"] > 1).all()
    assert (frame["n_predictions"] == 512).all()
    monkeypatch.setattr("figures._training_runs.run_sweep", lambda *a, **k: pytest.fail("trained again"))
    repeated = fig6_layer_removal.compute(folder=tmp_path / "fig6_layer_removal", **fig6_layer_removal.SETTINGS["smoke"])
    pd.testing.assert_frame_equal(repeated, frame)


@pytest.mark.parametrize(
    ("first", "rest", "verdict"),
    [
        (2e4, RISING, "reproduced"),
        (500.0, RISING, "reproduced in direction"),
        (2e4, RISING[::-1], "not reproduced"),
        (0.01, RISING, "not reproduced"),
    ],
)
def test_open_models(first: float, rest: np.ndarray, verdict: str) -> None:
    found = fig7_open_models.finding(costs(with_first(first, rest), checkpoint="a"))
    assert found["verdict"] == verdict
    (row,) = found["checkpoints"]
    assert row["perplexity_without_a_first_block"] == pytest.approx(10 + max(first, rest[0]))


def test_open_models_have_to_agree() -> None:
    good, bad = costs(with_first(2e4, RISING), checkpoint="a"), costs(with_first(2e4, RISING[::-1]), checkpoint="b")
    assert fig7_open_models.finding(runs([good, bad]))["verdict"] == "not reproduced"


def test_open_models_drawing() -> None:
    frame = runs([costs(with_first(2e4, RISING), checkpoint=name, text="a book") for name in ("one", "another")])
    says = [
        "predicted tokens of a book",
        "one: 20 blocks",
        "another: 20 blocks",
        "perplexity 10 in full",
        "n = 4,096",
        "above 1e4",
        "Qwen2.5-72B",
        "float32 on cpu",
    ]
    figure = assert_printable(fig7_open_models.draw, frame, width=ONE_COLUMN, says=says)
    hollow = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert [line.get_ydata()[0] for line in hollow] == [1e4]


def test_a_checkpoint_is_measured_as_the_probe_does(tmp_path) -> None:
    settings = fig7_open_models.SETTINGS["smoke"]
    with fig7_open_models._located("untrained") as source:
        frame = fig7_open_models.compute(**{**settings, "checkpoints": [source]})
        loaded = load_checkpoint(source)
        batches = checkpoint_batches(loaded, default_text(), n_tokens=512, seq_len=32, batch_size=4)
        direct = measure_layer_removal(loaded.model, batches, layout=loaded.layout)
    measured = frame.loc[frame["metric"] == "delta_perplexity", "value"].to_numpy()
    np.testing.assert_allclose(measured, [cost.delta_perplexity.value for cost in direct.costs], rtol=1e-6)
    assert set(frame["checkpoint"]) == {source}


def test_what_does_not_fit_is_streamed_to_the_same_numbers(monkeypatch) -> None:
    settings = fig7_open_models.SETTINGS["smoke"]
    whole = fig7_open_models.compute(**settings)
    monkeypatch.setattr("probes.streaming.choice.Fit.fits", property(lambda self: False))
    streamed = fig7_open_models.compute(**settings)
    np.testing.assert_allclose(streamed["value"], whole["value"], rtol=1e-4, atol=1e-4)
