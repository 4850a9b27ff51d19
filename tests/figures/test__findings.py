"""Rises, verdicts, and gaps between paired runs."""

import math
from functools import partial

import numpy as np
import pytest

from figures import _findings
from figures._findings import (
    conclude,
    decide,
    every,
    final_loss,
    in_runs,
    largest_rise,
    learned_nothing,
    paired_gap,
    same_sign,
    spread_over_seeds,
)
from probes.divergence import JudgeThresholds
from tests.figures._frames import learning, run, runs, with_spike


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_spike(noise: float, seed: int) -> None:
    assert not largest_rise(learning(1000, 2.2, noise=noise, seed=seed)).is_spike


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_rise_is_found_with_its_height_and_place(noise: float) -> None:
    rise = largest_rise(with_spike(learning(1000, 2.2, noise=noise), at=600, height=1.5))
    assert rise.is_spike
    assert rise.height == pytest.approx(1.5, abs=0.05 + 4 * noise)
    assert 600 <= rise.step_index < 640


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_a_rise_counts_from_the_judge_s_share_of_what_was_learned(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The figure's verdict and the judge's have one source: with another threshold there, another rise is a spike here."""
    calm = learning(1000, 2.2, noise=0.0)
    learned = calm[0] - calm[599]
    below, above = (with_spike(calm, at=600, height=factor * share * learned) for factor in (0.8, 1.25))
    monkeypatch.setattr(_findings, "JudgeThresholds", partial(JudgeThresholds, rise=share))
    assert not largest_rise(below).is_spike
    assert largest_rise(above).is_spike


def test_a_single_step_is_no_rise() -> None:
    assert not largest_rise(with_spike(learning(1000, 2.2, noise=0.0), at=600, height=3.0, length=1)).is_spike


def test_a_loss_that_is_no_number_is_an_infinite_rise() -> None:
    losses = learning(100, 2.2)
    losses[70:] = np.nan
    rise = largest_rise(losses)
    assert (rise.height, rise.step_index, rise.is_spike) == (math.inf, 70, True)


@pytest.mark.parametrize(
    ("fully", "in_direction", "verdict"),
    [
        (True, True, "reproduced"),
        (True, False, "reproduced"),
        (False, True, "reproduced in direction"),
        (False, False, "not reproduced"),
    ],
)
def test_verdicts(fully: bool, in_direction: bool, verdict: str) -> None:
    assert decide(fully=fully, in_direction=in_direction) == verdict


@pytest.mark.parametrize(
    ("main", "other", "verdict"),
    [
        (True, True, "reproduced"),
        (True, False, "reproduced in direction"),
        (True, None, "reproduced in direction"),
        (False, True, "not reproduced"),
        (None, True, "not decided"),
        (None, False, "not decided"),
    ],
)
def test_verdict_by_parts(main: bool | None, other: bool | None, verdict: str) -> None:
    assert conclude({"main": main, "other": other}, main=["main"]) == verdict


def test_one_main_part_that_fails_decides_even_beside_one_that_is_open() -> None:
    assert conclude({"a": None, "b": False}, main=["a", "b"]) == "not reproduced"
    assert conclude({"a": None, "b": True}, main=["a", "b"]) == "not decided"


def test_every_answer_has_to_be_there() -> None:
    assert (every([True]), every([True, None]), every([None, False, True])) == (True, None, False)


@pytest.mark.parametrize(
    ("differences", "sign"),
    [
        ([0.1, 0.2], True),
        ([-0.1, -0.2], False),
        ([-0.013, 0.045], None),
        ([0.1, 0.0], None),
        ([math.nan, 0.1], None),
        ([], None),
    ],
)
def test_direction_needs_the_same_sign_in_every_seed(differences: list[float], sign: bool | None) -> None:
    assert same_sign(differences) is sign


@pytest.mark.parametrize(
    ("loss", "nothing"), [(2.5, False), (3.1, False), (3.2, True), (3.251, True), (5.0, True), (math.nan, True)]
)
def test_a_run_that_ends_at_the_unigram_entropy_has_learned_nothing(loss: float, nothing: bool) -> None:
    table = in_runs(run(learning(100, 2.0), validation_loss=loss))
    assert learned_nothing(table).tolist() == [nothing]


def test_one_row_per_run() -> None:
    frame = runs([run(learning(200, 2.0)), run(with_spike(learning(200, 2.5), 100, 1.0), scheme="pre_ln")])
    table = in_runs(frame).set_index("scheme")
    assert list(table["is_spike"]) == [False, True]
    assert table.loc["keel", "final_loss"] == pytest.approx(frame["loss"][190:200].mean())


def test_final_loss_of_a_broken_run_is_no_number() -> None:
    losses = learning(100, 2.0)
    losses[-1] = np.inf
    assert math.isnan(final_loss(run(losses)))


def test_gaps_pair_runs_of_one_seed() -> None:
    frame = runs(
        run(learning(50, 2.0), scheme=s, seed=i, validation_loss=v + i)
        for s, v in (("keel", 1), ("pre_ln", 1.5))
        for i in (1, 0)
    )
    assert paired_gap(in_runs(frame), "validation_loss") == [0.5, 0.5]


def test_spread_counts_seeds() -> None:
    assert spread_over_seeds([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0, "seeds": 1}
