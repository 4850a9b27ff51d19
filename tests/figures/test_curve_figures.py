"""Figures 1a, 4, 5, 8a and 8b: the verdict on constructed curves, and what is drawn of them."""

import pandas as pd
import pytest

from figures import fig1a_stability, fig4_spike, fig5_token_budget, fig8a_deep_narrow, fig8b_small_lr
from figures._curves import ONE_COLUMN, TWO_COLUMNS
from tests.figures._frames import assert_printable, learning, run, runs, with_spike

SPIKE, RIPPLE, NONE = 1.5, 0.12, 0.0
"""Heights, nats: a spike, a rise too small to be one, no rise."""


def stability(pre_ln: tuple[float, ...], keel: tuple[float, ...]) -> pd.DataFrame:
    """Heights of a rise at step 200, per seed."""
    heights = {"pre_ln": pre_ln, "keel": keel}
    return runs(
        run(with_spike(learning(400, 2.3, seed=seed), 200, height), scheme=scheme, seed=seed)
        for scheme, of_seed in heights.items()
        for seed, height in enumerate(of_seed)
    )


@pytest.mark.parametrize(
    ("pre_ln", "keel", "verdict"),
    [
        ((SPIKE, SPIKE), (NONE, NONE), "reproduced"),
        ((SPIKE, NONE, SPIKE), (NONE, NONE, NONE), "reproduced in direction"),
        ((SPIKE, SPIKE), (0.5, NONE), "reproduced in direction"),
        ((NONE, NONE), (SPIKE, NONE), "not reproduced"),
        ((NONE, NONE), (RIPPLE, RIPPLE), "not reproduced"),
    ],
)
def test_stability(pre_ln: tuple[float, ...], keel: tuple[float, ...], verdict: str) -> None:
    found = fig1a_stability.finding(stability(pre_ln, keel))
    assert found["verdict"] == verdict
    assert found["pre_ln"]["seeds_with_a_spike"] == sum(height >= 0.5 for height in pre_ln)
    assert found["keel"]["largest_rise"]["seeds"] == len(keel)


def test_stability_is_judged_at_the_deepest_model() -> None:
    deep = stability((SPIKE, SPIKE), (NONE, NONE)).assign(n_sublayers=512)
    shallow = stability((NONE, NONE), (SPIKE, SPIKE))
    deep["trial"] += "-deep"
    both = runs([shallow, deep])
    assert fig1a_stability.finding(both)["verdict"] == "reproduced"
    assert len(fig1a_stability.draw(both).axes) == 2


def test_stability_drawing() -> None:
    frame = stability((SPIKE, SPIKE, SPIKE), (NONE, NONE, NONE))
    says = ["Pre-LN", "Keel", "64 sub-layers", "learning rate 0.03", "n = 3 seeds", "cpu", "nats/token", "unigram entropy"]
    figure = assert_printable(fig1a_stability.draw, frame, width=ONE_COLUMN, says=says)
    drawn = [line.get_color() for line in figure.axes[0].lines if line.get_linewidth() > 1]
    assert drawn == ["#333333", "#0077bb"]
    assert len([line for line in figure.axes[0].lines if line.get_linewidth() == 0.5]) == 6


def spikes(heights: dict[tuple[int, float], float]) -> pd.DataFrame:
    return runs(
        run(with_spike(learning(300, 2.4, seed=depth), 100, height), scheme="pre_ln", n_sublayers=depth, peak_lr=rate)
        for (depth, rate), height in heights.items()
    )


@pytest.mark.parametrize(
    ("heights", "verdict"),
    [
        ((NONE, SPIKE, NONE, SPIKE), "reproduced"),
        ((0.5, SPIKE, NONE, SPIKE), "reproduced in direction"),
        ((NONE, SPIKE, SPIKE, NONE), "not reproduced"),
        ((SPIKE, NONE, SPIKE, NONE), "not reproduced"),
    ],
)
def test_spike(heights: tuple[float, ...], verdict: str) -> None:
    keys = [(128, 0.02), (128, 0.03), (256, 0.02), (256, 0.03)]
    frame = spikes(dict(zip(keys, heights, strict=True)))
    found = fig4_spike.finding(frame)
    assert found["verdict"] == verdict
    assert [(row["n_sublayers"], row["peak_lr"]) for row in found["runs"]] == keys


def test_spike_drawing() -> None:
    frame = spikes({(128, 0.02): NONE, (128, 0.03): SPIKE, (256, 0.02): NONE, (256, 0.03): SPIKE})
    says = ["Pre-LN, 128 sub-layers", "Pre-LN, 256 sub-layers", "LR 0.02", "LR 0.03", "n = 1 seed each", "cpu"]
    figure = assert_printable(fig4_spike.draw, frame, width=ONE_COLUMN, says=says)
    assert len(figure.axes) == 2


def budgets(early: float, few: float, many: float) -> pd.DataFrame:
    """Keel above Pre-LN by ``early`` in the first tenth; below it by ``few`` and ``many`` at the ends of the budgets."""
    parts = []
    for steps, lead in ((100, few), (400, many)):
        for seed in (0, 1):
            pre_ln = learning(steps, 2.5, seed=seed, noise=0.0)
            keel = pre_ln.copy() - lead
            keel[: steps // 10] = pre_ln[: steps // 10] + early
            parts += [run(pre_ln, scheme="pre_ln", seed=seed, peak_lr=0.01), run(keel, seed=seed, peak_lr=0.02)]
    curves = runs(parts).assign(role="budget")
    tuning = curves[(curves["steps"] == 100) & (curves["seed"] == 0)].groupby("trial").tail(1).assign(role="tuning")
    return runs([curves, tuning])


@pytest.mark.parametrize(
    ("early", "few", "many", "verdict"),
    [
        (0.3, 0.05, 0.2, "reproduced"),
        (-0.3, 0.05, 0.2, "reproduced in direction"),
        (0.3, -0.1, 0.2, "reproduced in direction"),
        (0.3, 0.2, 0.05, "not reproduced"),
        (0.3, -0.3, -0.1, "not reproduced"),
    ],
)
def test_token_budget(early: float, few: float, many: float, verdict: str) -> None:
    found = fig5_token_budget.finding(budgets(early, few, many))
    assert found["verdict"] == verdict
    assert [row["validation_gap_pre_ln_minus_keel"]["median"] for row in found["budgets"]] == pytest.approx([few, many])
    for row, lead in zip(found["budgets"], (few, many), strict=True):
        crosses = early > 0 and lead > 0
        whole = 0.9 * lead - 0.1 * early
        assert row["start_gap_pre_ln_minus_keel"]["median"] == pytest.approx(
            -early if crosses else whole, abs=0.25 * early * crosses + 1e-9
        )
    assert [row["tokens"] for row in found["budgets"]] == [25_600, 102_400]
    for row, lead in zip(found["budgets"], (few, many), strict=True):
        late = row["steps"] + 1 if lead < 0 else row["steps"] // 10 + 1 if early > 0 else 1
        assert row["overtakes_at_step"]["median"] == pytest.approx(late, abs=0.05 * row["steps"])
    assert found["peak_lr"] == {"pre_ln": 0.01, "keel": 0.02}


def test_the_start_ends_at_the_first_crossing() -> None:
    """Keel is above for 100 steps of 1,600 and far ahead after: a mean over a tenth of the steps would hide that it was."""
    pre_ln = learning(1600, 2.5, noise=0.0)
    parts = []
    for steps, lead in ((400, 0.1), (1600, 0.4)):
        for seed in (0, 1):
            keel = pre_ln[:steps] - lead
            keel[:100] = pre_ln[:100] + 0.2
            parts += [run(pre_ln[:steps], scheme="pre_ln", seed=seed), run(keel, seed=seed)]
    frame = runs(parts).assign(role="budget")
    few, many = fig5_token_budget.finding(runs([frame, frame.groupby("trial").tail(1).assign(role="tuning")]))["budgets"]
    assert pre_ln[:160].mean() - parts[-1]["loss"][:160].mean() > 0
    assert many["start_gap_pre_ln_minus_keel"]["high"] < -0.1
    assert few["start_gap_pre_ln_minus_keel"]["high"] < -0.1
    assert many["first_crossing_step"]["median"] == pytest.approx(100, abs=40)


def test_a_rate_at_the_edge_of_its_grid_is_said_to_be() -> None:
    frame = budgets(0.3, 0.05, 0.2)
    tuning = frame[frame["role"] == "tuning"]
    wider = runs([frame, tuning.assign(peak_lr=0.04)])
    assert fig5_token_budget.finding(wider)["place_in_the_grid"] == {"pre_ln": "the lowest tried", "keel": "inside the grid"}


def test_token_budget_drawing() -> None:
    says = ["26 thousand tokens", "102 thousand tokens", "Pre-LN minus Keel", "Pre-LN 0.01, Keel 0.02", "n = 2 seeds", "26 k"]
    figure = assert_printable(fig5_token_budget.draw, budgets(0.3, 0.05, 0.2), width=TWO_COLUMNS, says=says)
    markers = [line for line in figure.axes[2].lines if line.get_marker() == "o"]
    assert [line.get_ydata().tolist() for line in markers] == [pytest.approx([0.05] * 2), pytest.approx([0.2] * 2)]


def shapes(losses: dict[tuple[str, int], float], spread: float = 0.0) -> pd.DataFrame:
    return runs(
        run(
            learning(200, loss),
            scheme=scheme,
            n_sublayers=depth,
            width=128 if depth == 16 else 64,
            seed=seed,
            validation_loss=loss + (spread if (scheme, depth, seed) == ("keel", 64, 1) else 0.0),
        )
        for (scheme, depth), loss in losses.items()
        for seed in (0, 1, 2)
    )


@pytest.mark.parametrize(
    ("wide", "deep", "keel_wide", "keel_deep", "spread", "verdict"),
    [
        (2.5, 2.5, 2.5, 2.3, 0.0, "reproduced"),
        (2.5, 2.5, 2.5, 2.3, 0.4, "not decided"),
        (2.5, 2.4, 2.45, 2.39, 0.0, "not reproduced"),
        (2.5, 2.5, 2.9, 2.6, 0.0, "not reproduced"),
    ],
)
def test_deep_narrow(wide: float, deep: float, keel_wide: float, keel_deep: float, spread: float, verdict: str) -> None:
    losses = {("pre_ln", 16): wide, ("pre_ln", 64): deep, ("keel", 16): keel_wide, ("keel", 64): keel_deep}
    found = fig8a_deep_narrow.finding(shapes(losses, spread))
    assert found["verdict"] == verdict
    assert found["gain_of_depth"]["keel"]["median"] == pytest.approx(keel_wide - keel_deep)
    assert found["lead_of_deep_keel_over_pre_ln"]["median"] == pytest.approx(min(wide, deep) - keel_deep)


@pytest.mark.parametrize("end", [3.251, 3.15, float("nan")])
def test_of_a_run_that_ends_at_the_unigram_entropy_nothing_is_compared(end: float) -> None:
    """Keel fails in both shapes with one seed, and gains nothing by depth there, which says nothing of depth."""
    losses = {("pre_ln", 16): 2.5, ("pre_ln", 64): 2.6, ("keel", 16): 2.5, ("keel", 64): 2.7}
    frame = shapes(losses)
    assert fig8a_deep_narrow.finding(frame)["verdict"] == "not reproduced"
    frame.loc[(frame["scheme"] == "keel") & (frame["seed"] == 0), "validation_loss"] = end
    found = fig8a_deep_narrow.finding(frame)
    assert found["verdict"] == "not decided"
    failed = [(run["scheme"], run["n_sublayers"], run["seed"]) for run in found["learned_nothing"]]
    assert sorted(failed) == [("keel", 16, 0), ("keel", 64, 0)]


def test_small_rates_and_budgets_are_not_compared_where_a_run_learned_nothing() -> None:
    rates = small_rate((0.1, 0.2))
    rates.loc[(rates["scheme"] == "pre_ln") & (rates["seed"] == 1), "validation_loss"] = 3.25
    assert fig8b_small_lr.finding(rates)["verdict"] == "not decided"
    curves = budgets(0.3, 0.05, 0.2)
    curves.loc[(curves["scheme"] == "pre_ln") & (curves["steps"] == 400), "validation_loss"] = 3.25
    assert fig5_token_budget.finding(curves)["verdict"] == "not decided"


def test_deep_narrow_drawing() -> None:
    losses = {("pre_ln", 16): 2.5, ("pre_ln", 64): 2.4, ("keel", 16): 2.45, ("keel", 64): 2.3}
    says = [
        "Keel 64 × 64",
        "Keel 16 × 128",
        "Pre-LN 16 × 128",
        "64\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}64:\N{NO-BREAK SPACE}0.43",
        "n = 3 seeds",
        "dashed: shallow and wide",
    ]
    figure = assert_printable(fig8a_deep_narrow.draw, shapes(losses), width=ONE_COLUMN, says=says)
    lines = [line for axes in figure.axes for line in axes.lines]
    dashed = [line for line in lines if line.get_linewidth() == 1.4 and line.get_linestyle() == "--"]
    assert len(dashed) == 2


def small_rate(gaps: tuple[float, ...]) -> pd.DataFrame:
    return runs(
        run(learning(200, 2.5 - (gap if scheme == "keel" else 0), noise=0.0), scheme=scheme, seed=seed, peak_lr=0.01)
        for scheme in ("pre_ln", "keel")
        for seed, gap in enumerate(gaps)
    )


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((0.1, 0.2, 0.1), "reproduced"),
        ((0.1, -0.1, 0.1), "not decided"),
        ((-0.1, -0.1, 0.3), "not decided"),
        ((-0.1, -0.2), "not reproduced"),
    ],
)
def test_small_learning_rate(gaps: tuple[float, ...], verdict: str) -> None:
    found = fig8b_small_lr.finding(small_rate(gaps))
    assert found["verdict"] == verdict
    assert found["validation_gap_pre_ln_minus_keel"]["low"] == pytest.approx(min(gaps), abs=0.01)


def test_small_learning_rate_drawing() -> None:
    says = ["Pre-LN", "Keel", "Peak learning rate 0.01", "n = 2 seeds", "Validation loss", "cosine decay"]
    assert_printable(fig8b_small_lr.draw, small_rate((0.1, 0.2)), width=ONE_COLUMN, says=says)
