"""What a result says in words: the ends, the middle, what is cheap and what is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from probes.paired_bootstrap import Interval
from probes.removal_result import LayerRemoval, UnitCost, cheap_units
from probes.removal_units import Unit, UnitKind


def unit(index: int) -> Unit:
    return Unit(
        name=f"block {index}",
        kind=UnitKind.BLOCK,
        start=index,
        stop=index + 1,
        block=index,
        sublayers=(2 * index, 2 * index + 1),
        modules=(f"blocks.{index}",),
    )


def result(losses: Sequence[float], *, error: float = 0.001, threshold: float = 0.1, full: float = 2.0) -> LayerRemoval:
    """A model whose blocks cost these nats, all with the same standard error; where it is NaN, losses without each block."""

    def interval(value: float) -> Interval:
        known = math.isfinite(value) and math.isfinite(error)
        low, high = (value - 2 * error, value + 2 * error) if known else (math.nan, math.nan)
        return Interval(value=value, standard_error=error if known else math.nan, low=low, high=high)

    whole = full if math.isfinite(full) else 0.0
    costs = tuple(
        UnitCost(
            unit=unit(i),
            loss=interval(whole + loss),
            delta_loss=interval(whole + loss - full),
            delta_perplexity=interval(whole + loss - full),
        )
        for i, loss in enumerate(losses)
    )
    return LayerRemoval(
        family="llama",
        objective="causal",
        n_blocks=len(losses),
        n_sublayers=2 * len(losses),
        n_parameters=1,
        dtype="float32",
        device="cpu",
        unit=UnitKind.BLOCK,
        span=1,
        n_steps=len(losses),
        loss=interval(full),
        perplexity=interval(7.4),
        n_tokens=100,
        n_predictions=99,
        samples="9 sequences",
        seed=0,
        threshold=threshold,
        costs=costs,
    )


def about_the_ends(found: LayerRemoval) -> str:
    [sentence] = [sentence for sentence in found.verdict() if "critical" in sentence]
    return sentence


ENDS = {
    "both": (
        [8.0, 0.1, 0.05, 0.1, 1.5],
        "First and last are critical (block 0 +8, block 4 +1.5), the middle is cheap beside them",
    ),
    "first": ([8.0, 0.1, 0.05, 0.1, 0.2], "Of the ends only block 0 +8 is critical, block 4 +0.2 is not"),
    "last": ([0.1, 0.1, 0.05, 0.1, 2.0], "Of the ends only block 4 +2 is critical, block 0 +0.1 is not"),
    "neither": ([0.3, 0.2, 0.2, 0.3, 0.4], "Neither end is critical with confidence: block 0 +0.3, block 4 +0.4"),
    "below the threshold": ([0.09, 0.001, 0.001, 0.08], "Neither end is critical with confidence"),
    "ends that gain": ([-0.08, -0.5, -0.3, -0.05], "Neither end is critical with confidence: block 0 -0.08, block 3 -0.05"),
    "a middle that gains": ([2.0, -0.1, -0.2, 3.0], "First and last are critical"),
}


@pytest.mark.parametrize(("losses", "words"), ENDS.values(), ids=ENDS)
def test_the_ends_are_called_critical_where_they_are(losses: list[float], words: str) -> None:
    assert about_the_ends(result(losses)).startswith(words)


def test_an_end_that_gains_is_not_called_critical_at_any_threshold() -> None:
    assert about_the_ends(result([-0.08, -0.5, -0.3, -0.05], threshold=-1.0)).startswith("Neither end is critical")


@pytest.mark.parametrize("error", [2.0, math.nan], ids=["wide", "unknown"])
def test_an_end_that_is_not_certain_is_not_called_critical(error: float) -> None:
    assert about_the_ends(result([3.0, 0.1, 0.1, 3.0], error=error)).startswith("Neither end is critical with confidence")


def test_the_middle_is_the_median_of_what_is_finite_between_the_ends() -> None:
    assert "median between them +0.2 nats/token" in about_the_ends(result([9.0, 0.1, math.nan, 0.2, 0.3, 9.0]))


def test_two_units_have_no_middle() -> None:
    assert not any("critical" in sentence for sentence in result([9.0, 9.0]).verdict())


def test_cheap_is_below_the_threshold_with_confidence_and_sorted() -> None:
    costs = result([0.099, 0.05, 0.02, math.nan, 0.5], error=0.01).costs
    assert [cost.unit.name for cost in cheap_units(costs, 0.1)] == ["block 2", "block 1"]


def test_gains_and_missing_numbers_are_said() -> None:
    verdict = result([1.0, -0.5, math.nan, math.inf, 1.0]).verdict()
    assert "The model gains on this text from removing block 1 (below zero with confidence)." in verdict
    assert "The loss is NaN without block 2; the other units are not touched by this." in verdict
    assert "The loss is infinite without block 3; the other units are not touched by this." in verdict


NOT_FINITE = {
    "one": ([math.nan, math.nan, 5.8, math.nan], "finite only without block 2: 5.8 ± 0.001 nats/token"),
    "two": ([4.0, math.inf, 5.8, math.nan], "finite only without block 0: 4 ± 0.001, block 2: 5.8 ± 0.001 nats/token"),
    "none": ([math.nan] * 4, "no removal gives a finite one"),
}


@pytest.mark.parametrize(("full", "word"), [(math.nan, "NaN"), (math.inf, "infinite")], ids=["nan", "inf"])
@pytest.mark.parametrize(("losses", "words"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_full_model_without_a_loss_is_said_and_where_there_is_one(
    losses: list[float], words: str, full: float, word: str
) -> None:
    [sentence] = result(losses, full=full).verdict()
    assert sentence.startswith(f"The full model's loss is {word}; ")
    assert sentence.endswith(f"{words}.")


def test_each_removal_keeps_its_own_loss_where_the_full_model_has_none() -> None:
    rows = result([math.nan, 5.8, math.nan], full=math.nan).to_dict()["rows"]
    assert isinstance(rows, list)
    without = [(row["place"], row["value"], row["status"]) for row in rows if row["metric"] == "loss_without"]
    assert without == [("block 0", None, "nan"), ("block 1", 5.8, "ok"), ("block 2", None, "nan")]
    assert [row["value"] for row in rows if row["metric"] == "delta_loss"] == [None] * 3


ONE_TO_THREE = {
    "one": ([9.0], "Without block 0, the only removal with a finite loss: +9 ± 0.001 nats/token."),
    "two": ([9.0, 0.0], "Most costly (nats/token): block 0 +9 ± 0.001; block 1 +0 ± 0.001. Least: block 1 +0 ± 0.001."),
    "three": ([9.0, 0.1, 9.0], "Most costly (nats/token): block 0 +9 ± 0.001"),
    "all alike": ([0.0] * 6, "All 6 removals with a finite loss cost the same: +0 ± 0.001 nats/token."),
    "one of many": ([math.nan, 9.0, math.nan], "Without block 1, the only removal with a finite loss"),
}


@pytest.mark.parametrize(("losses", "words"), ONE_TO_THREE.values(), ids=ONE_TO_THREE)
def test_few_or_equal_costs_are_not_ranked(losses: list[float], words: str) -> None:
    verdict = result(losses).verdict()
    assert verdict[0].startswith(words)
    if len(losses) <= 3:
        assert not any("critical" in sentence or "middle" in sentence for sentence in verdict)
    assert not any("Rank correlation" in sentence for sentence in verdict)


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_an_end_without_a_number_is_compared_with_nothing(end: int, lost: float) -> None:
    losses = [3.0, 0.1, 0.1, 0.2, 3.0]
    losses[end] = lost
    verdict = " ".join(result(losses).verdict())
    assert "critical" not in verdict
    assert "nan" not in verdict


@pytest.mark.parametrize("n_samples", [2, 4])
def test_an_interval_over_a_handful_of_samples_calls_nothing_certain(n_samples: int) -> None:
    few = replace(result([8.0, 0.1, -0.5, 0.01, 1.5]), n_samples=n_samples, samples=f"{n_samples} stretches of 32 tokens")
    verdict = few.verdict()
    assert f"The text is {n_samples} stretches of 32 tokens: too little for an interval to be trusted" in " ".join(verdict)
    assert not any("with confidence" in sentence or "First and last" in sentence for sentence in verdict)
    assert any("with confidence" in sentence for sentence in replace(few, n_samples=8).verdict())


def test_depth_in_use_is_not_known_without_a_loss() -> None:
    assert result([1.0, 2.0], full=math.nan).to_dict()["effective_depth"] is None
    assert result([1.0, 2.0]).to_dict()["effective_depth"] == 2


@pytest.mark.parametrize(("estimates", "known"), [([1.0, 1.0, 1.0], False), ([1.0, 2.0], False), ([1.0, 3.0, 2.0], True)])
def test_ranks_of_two_points_or_of_constants_are_not_correlated(estimates: list[float], known: bool) -> None:
    plain = result([0.5, 0.9, 0.7][: len(estimates)])
    costs = tuple(replace(c, estimates={"taylor": e}) for c, e in zip(plain.costs, estimates, strict=True))
    both = replace(plain, costs=costs)
    assert any("Rank correlation" in sentence for sentence in both.verdict()) == known
    assert (both.to_dict()["rank_correlations"]["taylor"] is not None) == known
