"""Figure 3 and Table 1: what is chosen, ordered and drawn of judged runs."""

import numpy as np
import pandas as pd
import pytest

from figures import fig1a_stability, fig3_divergence, fig5_token_budget, fig8a_deep_narrow, table1_max_lr
from figures._curves import TWO_COLUMNS
from figures._training_runs import figure_sweep, scaled_lr
from figures.pipeline import Preset, settings_key, stored_frame
from tests.figures._frames import assert_printable, learning, run, runs, words
from tests.figures._pictures import assert_inside_axes

DEGRADING = learning(400, 3.0, start=5.5, noise=0.02) + 0.3


def judged(kinds: dict[str, np.ndarray], scheme: str = "post_ln", onset: int = 100) -> pd.DataFrame:
    """Kind -> losses of the diverged run; beside each the healthy one, and four runs that were looked at."""
    ramp = {"run": "ramp", "final_lr": 1e-7, "peak_lr": 0.05, "beside": "", "max_lr": 0.0125, "reason": "because"}
    healthy = {**ramp, "judged": "healthy", "onset_step": -1}
    parts = []
    for kind, losses in kinds.items():
        diverged = run(losses, scheme=scheme)
        parts.append(diverged.assign(**{**ramp, "kind": kind, "role": "diverged", "judged": kind, "onset_step": onset}))
        parts.append(run(learning(400, 2.2)).assign(**{**healthy, "kind": kind, "role": "healthy"}))
    for seed in range(4):
        parts.append(run(learning(400, 2.2), seed=seed).tail(1).assign(**{**healthy, "kind": "", "role": "tried"}))
    return runs(parts)


def plain_degradation() -> pd.DataFrame:
    """A plain training at 0.03 that two of three seeds judge degraded beside one at 0.01, and nothing else."""
    common = {"run": "plain", "scheme": "pre_ln", "max_lr": np.nan, "reason": "because", "onset_step": -1}
    fast = {**common, "peak_lr": 0.03, "final_lr": 0.03}
    beside = "pre_ln, cosine of 0.01 in 800 steps, seed 0"
    drawn = {"kind": "degradation", "role": "diverged", "judged": "degradation", "beside": beside}
    parts = [
        run(DEGRADING, **fast | drawn | {"onset_step": 8}),
        run(
            learning(800, 2.2),
            **common
            | {"peak_lr": 0.01, "final_lr": 1e-7, "kind": "degradation", "role": "healthy", "judged": "healthy", "beside": ""},
        ),
    ]
    for seed, outcome in enumerate(["degradation", "healthy", "degradation"]):
        for name, found in (("", "healthy"), (beside, outcome)):
            tried = {"kind": "", "role": "tried", "judged": found, "beside": name, "seed": seed}
            parts.append(run(DEGRADING, **fast | tried).tail(1))
    return runs(parts)


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
        "no run of this kind beside a healthy one among 4 looked at",
        "Post-LN onset: step 100 Max LR 0.013",
        "cpu",
    ]
    frame = judged({"stagnation": learning(400, 3.2), "irrecoverable_spike": learning(400, 3.0)})
    figure = assert_printable(fig3_divergence.draw, frame, width=TWO_COLUMNS, says=says)
    assert [len(axes.lines) for axes in figure.axes] == [6, 6, 0]


def test_a_plain_training_has_a_learning_rate_and_no_max_lr() -> None:
    frame = plain_degradation()
    found = fig3_divergence.finding(frame)
    assert found["degradation"]["max_lr"] is None
    assert found["degradation"]["peak_lr"] == 0.03
    assert found["degradation"]["each_seed"] == [True, False, True]
    assert found["runs_looked_at"] == 3
    assert found["outcomes"] == {"plain": {"degradation": 2, "healthy": 1}}
    assert [each["judged"][1]["outcome"] for each in found["looked_at"]] == ["degradation", "healthy", "degradation"]
    says = [
        "Pre-LN, LR 0.03 onset: step 8",
        "Pre-LN, LR 0.01, healthy",
        "no ramp, so no Max LR",
        "Pre-LN at 0.03 held, 400 steps",
        "Pre-LN at 0.01 with cosine decay, 800 steps",
        "so judged in 2 of 3 seeds",
        "0 ramps and 3 plain trainings",
    ]
    figure = assert_printable(fig3_divergence.draw, frame, width=TWO_COLUMNS, says=says)
    panel = words(figure).split("Real runs")[1]
    assert "Max LR 0" not in panel
    assert_inside_axes(figure, beside=["unigram\nentropy"])


@pytest.mark.parametrize("scheme", ["post_ln", "scaled_shortcut", "scaled_shortcut_normed_input_gain"])
@pytest.mark.parametrize("onset", [1, 150, 199, 200, 250, 399])
def test_names_stay_inside_their_axes(scheme: str, onset: int) -> None:
    kinds = {kind: learning(400, 3.0) for kind in fig3_divergence.KINDS}
    figure = fig3_divergence.draw(judged(kinds, scheme, onset))
    assert_inside_axes(figure, beside=["unigram\nentropy"])


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
        "training": {
            "corpus": {"unigram_entropy": 3.2, "bigram_entropy": 2.4, "vocab_size": 256},
            "validation_loss": None,
            "outcome": "finished",
        }
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


SMALL = {
    "schemes": ["pre_ln"],
    "blocks": [2],
    "widths": [16],
    "training": {"schedule": "cosine", "steps": 400, "warmup": 40, "batch_size": 1, "seq_len": 8},
}
PLAIN = {
    "reference": {"sweep": SMALL, "budgets": [100, 400], "peaks": [0.01], "seeds": [0, 1]},
    "candidates": {
        "good": {**SMALL, "peaks": [0.02], "seeds": [0]},
        "fast": {**SMALL, "peaks": [0.03], "seeds": [0, 1, 2]},
        "other_width": {**SMALL, "peaks": [0.03], "widths": [32]},
    },
}


def plain_runs(tmp_path, monkeypatch, *, stuck: bool) -> pd.DataFrame:
    """Plain trainings with known fates: at 0.03 the loss falls slowly, at 0.01 it does not get far if it is to be stuck."""
    from probes.run_folder import StepRecord

    def records(place):
        config = place.trial.config
        noise = 0.01 * np.random.default_rng(config.seed).standard_normal(config.steps)
        losses = learning(config.steps, 2.0, seed=config.seed)
        if config.peak_lr == 0.03:
            losses = np.linspace(5.5, 4.2, config.steps) + noise
        elif config.peak_lr == 0.01 and stuck:
            losses = np.maximum(learning(config.steps, 1.0), 3.25 + noise)
        rates = [config.learning_rate(i) for i in range(1, config.steps + 1)]
        return [
            StepRecord(step=i + 1, lr=rate, loss=float(loss), grad_norm=1.0, time=0.1 * i)
            for i, (rate, loss) in enumerate(zip(rates, losses, strict=True))
        ]

    corpus = {"unigram_entropy": 3.2, "bigram_entropy": 2.4, "vocab_size": 256}
    result = {"training": {"corpus": corpus, "validation_loss": 2.0, "outcome": "finished"}}
    monkeypatch.setattr("probes.trial_folder.TrialFolder.records", records)
    monkeypatch.setattr("probes.trial_folder.TrialFolder.result", property(lambda self: result))
    monkeypatch.setattr("figures._training_runs._forget_without_weights", lambda folders: None)
    return fig3_divergence.compute(folder=tmp_path / "a", sweeps={}, references=[], plain=PLAIN)


def test_plain_trainings_are_judged_beside_the_tuned_run_of_their_seed(tmp_path, monkeypatch) -> None:
    frame = plain_runs(tmp_path, monkeypatch, stuck=False)
    found = fig3_divergence.finding(frame)
    assert (found["degradation"]["peak_lr"], found["degradation"]["seed"]) == (0.03, 0)
    assert found["degradation"]["each_seed"] == [True, True, True]
    assert found["stagnation"] is found["irrecoverable_spike"] is None
    judged_beside = [
        (each["peak_lr"], each["seed"], [(one["beside"], one["outcome"]) for one in each["judged"][1:]])
        for each in found["looked_at"]
    ]
    tuned = "pre_ln, cosine of 0.01 in 400 steps, seed"
    assert judged_beside == [
        (0.02, 0, [(f"{tuned} 0", "healthy")]),
        (0.03, 0, [(f"{tuned} 0", "degradation")]),
        (0.03, 1, [(f"{tuned} 1", "degradation")]),
        (0.03, 2, [(f"{tuned} 0", "degradation")]),
        (0.03, 0, []),
    ]
    healthy = frame[frame["role"] == "healthy"]
    assert set(zip(healthy["peak_lr"], healthy["steps"], strict=True)) == {(0.01, 400)}
    assert frame["max_lr"].isna().all()


def test_a_tuned_run_that_stagnates_is_no_reference(tmp_path, monkeypatch) -> None:
    found = fig3_divergence.finding(plain_runs(tmp_path, monkeypatch, stuck=True))
    assert found["degradation"] is None
    assert all(len(each["judged"]) == 1 for each in found["looked_at"])


def keys(name: str, values: dict, device: str) -> set[str]:
    return {trial.key for trial in figure_sweep(name, values, device).trials()}


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_plain_trainings_are_trials_of_other_figures(preset: str) -> None:
    settings = fig3_divergence.SETTINGS[preset]
    device = settings.get("device", "cpu")
    for module in (fig1a_stability, fig8a_deep_narrow):
        ours = keys(module.NAME, settings["plain"]["candidates"][module.NAME], device)
        theirs = keys(module.NAME, module.SETTINGS[preset]["sweep"], device)
        assert ours < theirs
        assert len(ours) == len(module.SETTINGS[preset]["sweep"]["seeds"])
    reference, budget = settings["plain"]["reference"], fig5_token_budget.SETTINGS[preset]
    assert reference["sweep"] == {**budget["sweep"], "schemes": ["pre_ln"]}
    assert all(reference[name] == budget[name] for name in ("budgets", "peaks", "seeds"))


def test_the_committed_frame_has_every_run_that_was_looked_at() -> None:
    kept = stored_frame("fig3_divergence")
    assert kept is not None
    assert kept.about["key"] == settings_key("fig3_divergence", fig3_divergence, Preset.CPU)
    looked_at = fig3_divergence.finding(kept.frame)["looked_at"]
    assert [each["run"] for each in looked_at] == ["ramp"] * 15 + ["plain"] * 5
    plain = [(each["peak_lr"], each["steps"], each["seed"]) for each in looked_at[15:]]
    fast, faster = scaled_lr(4.5e-3), scaled_lr(6e-3)
    assert plain == [(fast, 1000, seed) for seed in range(3)] + [(faster, 600, seed) for seed in range(2)]
    assert all(each["judged"][1]["beside"].startswith("pre_ln, cosine of 0.01 in 1600 steps") for each in looked_at[15:])
    assert_inside_axes(fig3_divergence.draw(kept.frame), beside=["unigram\nentropy"])


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
        "resolution": 1e-4,
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
    assert found["verdict"] == "not reproduced"
    assert found["parts"]["at 64 sub-layers Keel's Max LR is at least Pre-LN's"] is False
    assert found["pairs_against_the_paper"] == [["pre_ln", "keel"]]
    assert found["order_measured"][-2:] == ["keel", "pre_ln"]


@pytest.mark.parametrize(
    ("keel", "pre_ln", "verdict"),
    [
        ((0.03, 0.031, 0.032), (0.03, 0.031, 0.032), "reproduced in direction"),
        ((0.03, 0.031, 0.032), (0.005, 0.05, 0.05), "not decided"),
        ((0.03, 0.031, 0.032), (0.05, 0.05, 0.05), "not reproduced"),
    ],
    ids=["level", "below in the median, not surely", "surely below"],
)
def test_direction_needs_keel_level_with_pre_ln(keel, pre_ln, verdict: str) -> None:
    weak = {**PAPER_ORDER, "deepnorm": (0.0001, 0.0001, 0.0001)}
    assert table1_max_lr.finding(table({**weak, "keel": keel, "pre_ln": pre_ln}))["verdict"] == verdict


def test_keel_has_to_be_level_at_every_depth() -> None:
    deep = table({"post_ln": (0.00275,), "pre_ln": (0.05,), "keel": (0.003,)}, bounds=("pre_ln",), n_sublayers=256)
    found = table1_max_lr.finding(runs([table(PAPER_ORDER), deep]))
    assert found["verdict"] == "not reproduced"
    assert [value for name, value in found["parts"].items() if "at least Pre-LN's" in name] == [True, False]


@pytest.mark.parametrize(("steps_of_the_ramp", "told_apart"), [(2, False), (3, False), (4, True)])
def test_a_few_steps_of_the_ramp_tell_nothing_apart(steps_of_the_ramp: int, told_apart: bool) -> None:
    lower = 0.001 - steps_of_the_ramp * 1e-4
    found = table1_max_lr.finding(table({"post_ln": (0.001,) * 3, "deepnorm": (lower,) * 3, "keel": (0.03,) * 3}))
    assert found["pairs_against_the_paper"] == ([["post_ln", "deepnorm"]] if told_apart else [])


def test_ramps_have_to_agree_before_a_pair_is_told_apart() -> None:
    fine = table({"deepnorm": (0.004,) * 3, "hybrid_norm": (0.003,) * 3, "keel": (0.05,) * 3}, bounds=("keel",))
    high = table({"deepnorm": (0.005,) * 3, "hybrid_norm": (0.005,) * 3, "keel": (0.07,) * 3}, peak_lr=0.25, steps=1000)
    assert table1_max_lr.finding(fine)["pairs_against_the_paper"] == [["deepnorm", "hybrid_norm"]]
    both = table1_max_lr.finding(runs([fine, high]))
    assert both["pairs_against_the_paper"] == []
    assert ["deepnorm", "hybrid_norm"] in both["pairs_not_told_apart"]


def test_best_losses_are_medians_on_one_ramp() -> None:
    """The lowest of any seed on a longer ramp would compare what cannot be compared."""
    fine = table({"post_ln": (0.002,) * 3, "keel": (0.05,) * 3}, bounds=("keel",))
    fine["best_loss"] = 2.0 + 0.1 * fine["seed"] + 0.5 * (fine["scheme"] == "post_ln")
    high = table({"keel": (0.07,) * 3}, peak_lr=0.25, steps=1000).assign(best_loss=1.0)
    frame = runs([fine, high])
    found = table1_max_lr.finding(frame)
    assert found["ramp_of_the_best_losses"] == 0.05
    assert [found["schemes"][name]["best_loss"] for name in ("post_ln", "keel")] == pytest.approx([2.6, 2.1])
    assert "| Keel | 0.07 (0.07 to 0.07) | 3 | stagnation | 0.25 | 2.10 | 0.0101 |" in table1_max_lr.as_markdown(frame)


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
