"""Figure 3 and Table 1: what is chosen, ordered and drawn of judged runs."""

import numpy as np
import pandas as pd
import pytest

from figures import fig3_divergence, table1_max_lr
from figures._curves import TWO_COLUMNS
from tests.figures._frames import assert_printable, learning, run, runs, words

DEGRADING = learning(400, 3.0, start=5.5, noise=0.02) + 0.3


def judged(kinds: dict[str, np.ndarray]) -> pd.DataFrame:
    """Kind -> losses of the diverged run; beside each the healthy one, and four runs that were looked at."""
    parts = []
    for kind, losses in kinds.items():
        common = {"kind": kind, "max_lr": 0.0125, "reason": "because", "peak_lr": 0.05}
        parts.append(run(losses, scheme="post_ln").assign(role="diverged", judged=kind, onset_step=100, **common))
        parts.append(run(learning(400, 2.2)).assign(role="healthy", judged="healthy", onset_step=-1, **common))
    tried = (
        run(learning(400, 2.2)).tail(1).assign(role="tried", kind="", judged="healthy", onset_step=-1, max_lr=1.0, reason="")
    )
    return runs([*parts, *[tried] * 4])


def test_three_kinds_are_reproduced_two_in_direction() -> None:
    kinds = {"stagnation": learning(400, 3.2), "irrecoverable_spike": learning(400, 3.0), "degradation": DEGRADING}
    full = fig3_divergence.finding(judged(kinds))
    assert full["verdict"] == "reproduced"
    assert full["degradation"]["onset_step"] == 100
    assert full["runs_looked_at"] == 4
    del kinds["degradation"]
    partly = fig3_divergence.finding(judged(kinds))
    assert partly["verdict"] == "reproduced in direction"
    assert partly["degradation"] is None
    del kinds["stagnation"]
    assert fig3_divergence.finding(judged(kinds))["verdict"] == "not reproduced"


def test_a_kind_without_a_run_is_said_not_drawn() -> None:
    says = [
        "stagnation",
        "irrecoverable spike",
        "no run of this kind among 4 looked at",
        "Post-LN onset: step 100 Max LR 0.013",
        "cpu",
    ]
    frame = judged({"stagnation": learning(400, 3.2), "irrecoverable_spike": learning(400, 3.0)})
    figure = assert_printable(fig3_divergence.draw, frame, width=TWO_COLUMNS, says=says)
    assert [len(axes.lines) for axes in figure.axes] == [6, 6, 0]


def test_nothing_at_all_can_be_drawn() -> None:
    assert words(fig3_divergence.draw(judged({}))).count("no run of this kind") == 3


def test_runs_are_chosen_by_the_judge_alone(tmp_path, monkeypatch) -> None:
    """Logs with a known fate in place of those that were trained."""
    from probes.run_folder import StepRecord

    steps = 400
    fates = {
        "post_ln": np.maximum(learning(steps, 1.0), 3.25 + 0.01 * np.random.default_rng(0).standard_normal(steps)),
        "scaled_shortcut": learning(steps, 2.0) + np.where(np.arange(steps) > 200, 2.0, 0.0),
        "mix_ln": np.linspace(5.5, 4.2, steps) + 0.01 * np.random.default_rng(1).standard_normal(steps),
        "pre_ln": learning(steps, 2.0),
    }

    def records(place):
        losses = fates[place.trial.config.model.scheme]
        lr = [place.trial.config.learning_rate(i) for i in range(1, steps + 1)]
        return [StepRecord(step=i + 1, lr=lr[i], loss=float(losses[i]), grad_norm=1.0, time=0.1 * i) for i in range(steps)]

    monkeypatch.setattr("probes.trial_folder.TrialFolder.records", records)
    result = {
        "training": {"corpus": {"unigram_entropy": 3.2, "vocab_size": 256}, "validation_loss": None, "outcome": "finished"}
    }
    monkeypatch.setattr("probes.trial_folder.TrialFolder.result", property(lambda self: result))
    sweep = {"schemes": list(fates), "blocks": [2], "widths": [16], "training": {"steps": steps, "batch_size": 1, "seq_len": 8}}
    frame = fig3_divergence.compute(folder=tmp_path / "a", sweeps={"known": sweep}, references=["pre_ln"])
    found = fig3_divergence.finding(frame)
    assert {kind: found[kind] and found[kind]["scheme"] for kind in fig3_divergence.KINDS} == {
        "stagnation": "post_ln",
        "irrecoverable_spike": "scaled_shortcut",
        "degradation": "mix_ln",
    }
    assert found["irrecoverable_spike"]["onset_step"] == pytest.approx(201, abs=4)
    assert set(frame.loc[frame["role"] == "healthy", "scheme"]) == {"pre_ln"}
    assert set(frame.loc[frame["role"] == "tried", "scheme"]) == set(fates)


def table(max_lr: dict[str, tuple[float, ...]], bounds: tuple[str, ...] = (), **columns: object) -> pd.DataFrame:
    """Max LR per seed; of the schemes in ``bounds`` lower bounds."""
    rows = []
    for scheme, values in max_lr.items():
        for seed, value in enumerate(values):
            bound = scheme in bounds
            overall = {
                "criterion": "overall",
                "status": "healthy" if bound else "stagnation",
                "max_lr": value,
                "lower_bound": bound,
            }
            single = {"criterion": "stagnation", "status": "not_met" if bound else "met", "max_lr": value, "lower_bound": bound}
            rows += [{"scheme": scheme, "seed": seed, **values} for values in (overall, single)]
    constant = {
        "n_sublayers": 64,
        "width": 64,
        "peak_lr": 0.05,
        "steps": 600,
        "batch_size": 4,
        "seq_len": 64,
        "best_loss": 2.5,
        "device": "cpu",
    }
    return pd.DataFrame(rows).assign(**(constant | columns))


PAPER_ORDER = {
    "post_ln": (0.001, 0.0011, 0.0012),
    "deepnorm": (0.002, 0.0021, 0.0022),
    "hybrid_norm": (0.003, 0.0031, 0.0032),
    "mix_ln": (0.004, 0.0041, 0.0042),
    "pre_ln": (0.02, 0.021, 0.022),
    "keel": (0.03, 0.031, 0.032),
}


def test_the_papers_order_is_reproduced() -> None:
    found = table1_max_lr.finding(table(PAPER_ORDER))
    assert found["verdict"] == "reproduced"
    assert found["order_measured"] == found["order_in_the_paper"] == list(PAPER_ORDER)
    assert found["rank_correlation"] == pytest.approx(1)
    assert found["pairs_against_the_paper"] == found["pairs_not_told_apart"] == []
    assert found["schemes"]["keel"]["max_lr"] == "0.031 (0.03 to 0.032)"
    assert {cell["criterion"] for cell in found["cells"]} == {"overall", "stagnation"}
    assert len(found["cells"]) == 12


def test_keel_below_pre_ln_is_a_pair_against_the_paper() -> None:
    found = table1_max_lr.finding(table({**PAPER_ORDER, "pre_ln": (0.04, 0.041, 0.042)}))
    assert found["verdict"] == "reproduced in direction"
    assert found["pairs_against_the_paper"] == [["pre_ln", "keel"]]
    assert found["order_measured"][-2:] == ["keel", "pre_ln"]


def test_a_reversed_order_is_not_reproduced() -> None:
    reversed_order = dict(zip(PAPER_ORDER, reversed(PAPER_ORDER.values()), strict=True))
    found = table1_max_lr.finding(table(reversed_order))
    assert found["verdict"] == "not reproduced"
    assert found["rank_correlation"] == pytest.approx(-1)
    assert len(found["pairs_against_the_paper"]) == 15


def test_of_two_lower_bounds_nothing_is_said() -> None:
    high = {**PAPER_ORDER, "pre_ln": (0.05,) * 3, "keel": (0.05,) * 3}
    found = table1_max_lr.finding(table(high, bounds=("pre_ln", "keel")))
    assert found["pairs_not_told_apart"] == [["pre_ln", "keel"]]
    assert found["schemes"]["keel"]["max_lr"] == ">= 0.05 (0.05 upwards)"


def test_overlapping_intervals_are_not_told_apart() -> None:
    found = table1_max_lr.finding(table({**PAPER_ORDER, "deepnorm": (0.001, 0.002, 0.003)}))
    assert ["post_ln", "deepnorm"] in found["pairs_not_told_apart"]
    assert ["deepnorm", "hybrid_norm"] in found["pairs_not_told_apart"]


def test_the_high_ramp_decides_where_the_fine_one_gives_a_bound() -> None:
    fine = table({"post_ln": (0.002,) * 3, "keel": (0.05,) * 3}, bounds=("keel",))
    high = table({"post_ln": (0.004,) * 3, "keel": (0.07,) * 3}, peak_lr=0.25, steps=1000)
    found = table1_max_lr.finding(runs([fine, high]))["schemes"]
    assert (found["post_ln"]["max_lr"], found["post_ln"]["peak_lr_of_the_ramp"]) == ("0.002 (0.002 to 0.002)", 0.05)
    assert (found["keel"]["max_lr"], found["keel"]["peak_lr_of_the_ramp"]) == ("0.07 (0.07 to 0.07)", 0.25)


def test_the_chart_shows_values_bounds_and_the_paper() -> None:
    shallow = table({**PAPER_ORDER, "scaled_shortcut": (0.03,) * 3, "pre_ln": (0.05,) * 3}, bounds=("pre_ln",))
    high = table({"keel": (0.07,) * 3}, peak_lr=0.25, steps=1000)
    deep = table({"post_ln": (0.002,), "keel": (0.05,)}, bounds=("keel",), n_sublayers=256)
    says = [
        "64 sub-layers",
        "256 sub-layers",
        "Keel",
        "Scaled shortcut (attempt 1)",
        "n = 3 seeds",
        "n = 1 seed",
        "cpu",
        "Max LR",
        "width 1024",
    ]
    figure = assert_printable(table1_max_lr.draw, runs([shallow, high, deep]), width=TWO_COLUMNS, says=says)
    deciding, each, best = figure.axes
    published = sorted(line.get_xdata()[0] for line in deciding.lines if line.get_marker() == "D")
    assert published == [0.00028, 0.0003, 0.00035, 0.00049, 0.00086, 0.00631, 0.00765, 0.0101]
    measured = [line.get_xdata()[0] for line in deciding.lines if line.get_marker() in "os"]
    assert sorted(measured) == pytest.approx([0.0011, 0.002, 0.0021, 0.0031, 0.0041, 0.03, 0.031, 0.05, 0.05, 0.07])
    arrows = [text for text in deciding.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 2
    assert len(each.lines) == 8
    assert len(best.lines) == 10


def test_a_small_table_is_judged_from_its_logs(tmp_path) -> None:
    sweep = {**table1_max_lr.SETTINGS["smoke"]["sweeps"]["table1_smoke"], "schemes": ["keel", "post_ln"], "seeds": [0]}
    frame = table1_max_lr.compute(folder=tmp_path / "table1_max_lr", sweeps={"small": sweep})
    assert len(frame) == 2 * 5
    assert set(frame["sweep"]) == {"small"}
    assert frame.loc[frame["criterion"] == "overall", "max_lr"].between(0, 0.2).all()
