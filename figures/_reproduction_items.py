"""What is in the paper: its equations, figures and tables, in its order, each with the evidence that decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from figures._reproduction_rows import Equation, Figure, Sources, Table
from figures._training_runs import LR_FACTOR
from keel_theory.schemes import get_scheme
from probes.divergence import JudgeThresholds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EQUATIONS", "FIGURES", "TABLES", "label"]

_NOT_RESTATED = "not among the definitions and claims that this toolkit works from; the results before and after are checked"
_OWN_WORDS = "what the paper prints here is not among what this toolkit works from; proved is the identity in its place"

EQUATIONS = (
    Equation(
        numbers="1",
        paper="Highway: x' = T(x)*F(x) + C(x)*x, C = 1 - T",
        derivations=("1",),
        definition="1",
        claims=("1-carry",),
        beside=("1-fading-stream",),
    ),
    Equation(numbers="2", paper="residual: x' = x + F(x)", derivations=("2",), definition="2"),
    Equation(numbers="3", paper="Post-LN: x' = LN(x + F(x))", derivations=("3",), definition="3"),
    Equation(
        numbers="4",
        paper="not restated here",
        derivations=("4",),
        claims=("13-chain",),
        remark=f"{_OWN_WORDS}, Post-LN's Jacobian J_LN(z) (I + dF/dx)",
        restated=False,
    ),
    Equation(
        numbers="5",
        paper="DeepNorm: x' = LN(a x + F(x)), a = L^0.25, initial weights of F scaled by b = L^-0.25",
        derivations=("5",),
        definition="5",
        claims=("5-alpha", "5-beta"),
        beside=("5-initialised", "5-drifted"),
        remark="the scale is that of DeepNorm's own paper, the initial weights are not",
    ),
    Equation(
        numbers="6",
        paper="Pre-LN: x' = x + F(LN(x))",
        derivations=("6",),
        definition="6",
        claims=("6-shortcut", "6-growth", "6-fading"),
    ),
    Equation(
        numbers="7",
        paper="not restated here",
        derivations=("7",),
        claims=("6-shortcut",),
        remark=f"{_OWN_WORDS}, Pre-LN's Jacobian I + dF/dLN(x) J_LN(x)",
        restated=False,
    ),
    Equation(
        numbers="8, 28",
        paper="Keel: x' = LN1(a x + F(LN2(x))), a = L",
        derivations=("8",),
        definition="8",
        claims=("8-reduces",),
    ),
    Equation(
        numbers="9, 23",
        paper="LN: x / ||x||_2 * g elementwise, sqrt(d) left out",
        derivations=("9",),
        definition="9",
        claims=("9-scale", "9-radial"),
        remark="with the factor sqrt(d) that the notation leaves out",
    ),
    Equation(numbers="10, 11, 12", paper="not restated here", remark=_NOT_RESTATED, restated=False),
    Equation(
        numbers="13",
        paper="dx'/dx = J_LN(z) (I + dF/dx); the shortcut's term is kept, the branch's dropped",
        derivations=("13",),
        claims=("13-chain", "13-neglect"),
        remark="the identity holds, the step after it does not: both terms are of one size",
    ),
    Equation(
        numbers="14",
        paper="Post-LN's shortcut gain is of order g_l / (sqrt(2) g_{l-1}), g = ||weight||_inf",
        derivations=("14",),
        claims=("14-gain", "14-largest"),
        beside=("14-rms", "14-bound"),
        remark="an order of magnitude: the most that any gradient gains where the weight before has equal entries, and what a "
        "random one gains where both have; no strict bound",
    ),
    Equation(
        numbers="15",
        paper="with weights of 1 the product over L sub-layers is of order 1 / 2^(L/2)",
        derivations=("15",),
        claims=("15-product",),
        beside=("15-wrong-base", "15-full-gradient"),
        remark="for the path along the shortcuts; in circulation with another base, and not true of the whole gradient",
    ),
    Equation(numbers="16, 17", paper="not restated here", remark=_NOT_RESTATED, restated=False),
    Equation(
        numbers="18",
        paper="Keel's shortcut gain is of order g_{l,1} a / sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2)",
        derivations=("18",),
        claims=("18-gain", "18-largest"),
        beside=("18-rms", "18-bound"),
        remark="an order of magnitude, as Eq. 14",
    ),
    Equation(
        numbers="19",
        paper="with a = L the product is (1 + 1/L^2)^(-L/2), which tends to 1",
        derivations=("19",),
        claims=("19-product", "19-limit", "19-rate", "19-later-blocks"),
        beside=("19-first-block", "19-first-block-initial", "19-wrong-no-power", "19-wrong-limit", "alpha-needed"),
        remark="for sub-layers that are all alike; the first block, which has no scale, adds a constant factor that depends on "
        "what is taken for the input",
    ),
    Equation(numbers="20, 21, 22", paper="not restated here", remark=_NOT_RESTATED, restated=False),
    Equation(
        numbers="24",
        paper="attempt 1: x' = LN(a x + F(x)), a = L, ordinary initialisation",
        derivations=("24",),
        definition="24",
        claims=("24-26-shortcut",),
    ),
    Equation(
        numbers="25",
        paper="attempt 2: x' = LN(a x + F(b*x)), b a learnable vector started at 1",
        derivations=("25",),
        definition="25",
        claims=("24-26-shortcut",),
    ),
    Equation(
        numbers="26",
        paper="attempt 3: x' = LN(a x + F(b*LN(x))); b merged into LN's weight gives Keel",
        derivations=("26",),
        definition="26",
        claims=("24-26-shortcut", "26-merge"),
    ),
    Equation(
        numbers="27",
        paper="gain of Keel's branch: of order g_{l,1} g_{l,2} ||dF/dLN2(x)|| / (g_{l-1,1} sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2))",
        derivations=("27",),
        claims=("27-branch-gain", "27-depth"),
        remark="for a branch whose Jacobian acts alike on all directions",
    ),
    Equation(
        numbers="29, 30",
        paper="not restated here",
        derivations=("29",),
        remark=f"{_OWN_WORDS}, the setting of depth-wise test-time training",
        restated=False,
    ),
    Equation(
        numbers="31, 32, 33, 34",
        paper="depth-wise test-time training: x' = x + G(x) Wo^T is one gradient step on -<x Wo, G(x)>",
        derivations=("34",),
        claims=("34-held-target",),
        beside=("34-full-gradient",),
        remark="with G(x) held constant when the gradient is taken",
    ),
)


def _template(text: str) -> Callable[[Mapping[str, Any]], str]:
    """Words with a finding's numbers in their places."""
    return lambda finding: text.format(**finding)


def label(scheme: str) -> str:
    """The scheme's name in words."""
    return get_scheme(scheme).label


def _gains(finding: Mapping[str, Any]) -> str:
    gains = ", ".join(f"{name.replace('_', ' ')} {gain:+.1f}" for name, gain in finding["gains"].items())
    return f"published, Keel over Pre-LN in points: {gains}"


def _kinds(finding: Mapping[str, Any]) -> str:
    words = []
    for kind in ("stagnation", "irrecoverable_spike", "degradation"):
        run, name = finding[kind], kind.replace("_", " ")
        words.append(f"{name}: {'met in no run' if run is None else _first_run(run)}")
    return f"{'; '.join(words)} ({finding['runs_looked_at']} runs looked at)"


def _first_run(run: Mapping[str, Any]) -> str:
    rate = "" if run["max_lr"] is None else f", Max LR {run['max_lr']:.3g}"
    return f"{label(run['scheme'])}{rate}, onset at step {run['onset_step']} of {run['steps']}"


def _spikes(finding: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{run['n_sublayers']} sub-layers at {run['peak_lr']:g}: largest rise {run['largest_rise']:.2f} nats, "
        f"{run['seeds_with_a_spike']} of {run['largest_rise'].seeds} seeds spike"
        for run in finding["runs"]
    )


def _budgets(finding: Mapping[str, Any]) -> str:
    budgets = "; ".join(
        f"{budget['tokens']:,} tokens: Pre-LN − Keel {budget['start_gap_pre_ln_minus_keel']:+.2f} nats before they first "
        f"cross at step {budget['first_crossing_step']:.0f}, "
        f"{budget['validation_gap_pre_ln_minus_keel']:+.2f} at the end"
        for budget in finding["budgets"]
    )
    edges = ", ".join(f"{label(scheme)} {place}" for scheme, place in finding["place_in_the_grid"].items())
    return f"{budgets}; growth of the gap {finding['growth_of_the_gap']:+.2f}; tuned learning rates: {edges}"


def _open_models(finding: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{row['checkpoint']}: perplexity {row['perplexity']:.3g}, without a first block up to "
        f"{row['perplexity_without_a_first_block']:.3g}; rank correlation of cost and depth past them "
        f"{row['rank_correlation_past_first']:+.2f} (p = {row['p_of_the_rank_correlation']:.2g})"
        for row in finding["checkpoints"]
    )


def _shapes(finding: Mapping[str, Any]) -> str:
    shapes = "; ".join(
        f"{label(row['scheme'])} {row['n_sublayers']} x {row['width']}: {row['validation_loss']:.3f}"
        for row in finding["shapes"]
    )
    gains = ", ".join(f"{label(scheme)} {gain:+.3f}" for scheme, gain in finding["gain_of_depth"].items())
    return f"validation loss in nats/token, sub-layers x width: {shapes}; depth gains: {gains}"


def _max_lr(finding: Mapping[str, Any]) -> str:
    cells = [cell for cell in finding["cells"] if cell["criterion"] == "overall"]
    depths = sorted({cell["n_sublayers"] for cell in cells})
    words = [f"{finding['n_sublayers']} sub-layers: " + _entries({n: c["max_lr"] for n, c in finding["schemes"].items()})]
    for depth in depths:
        if depth != finding["n_sublayers"]:
            here = {c["scheme"]: c["max_lr"] for c in cells if c["n_sublayers"] == depth}
            words.append(f"{depth} sub-layers: " + _entries(here))
    return f"{'; '.join(words)}. Rank correlation with the paper's order {finding['rank_correlation']:.2f}"


def _entries(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{label(name)} {value}" for name, value in values.items())


_TRAINED = (
    f"at width {{width}} instead of 1,024 and with the paper's learning rates times {LR_FACTOR} (one rule for all figures, "
    "fixed before their runs: Keel's Max LR as it was judged then, over the paper's)"
)
_JUDGE = JudgeThresholds()
_RISE = (
    f"a rise is a spike from {_JUDGE.rise:g} of what was learned, as the divergence judge counts it, instead of 0.05, which "
    "moves no number"
)
_COMPARABLE = (
    "nothing is compared where a run ends at the unigram entropy, and the direction needs every seed, no longer the median"
)
_PAPER_WIDTH, _PAPER_BLOCKS = 1024, 80


def _paper_width(frame: pd.DataFrame) -> bool:
    return bool(frame["width"].min() >= _PAPER_WIDTH)


FIGURES = (
    Figure(
        place="Figure 1a",
        figure="fig1a_stability",
        paper="at LR 4.5e-3 Pre-LN's loss spikes in the first 1,000 steps, Keel's is smooth",
        ours=_template(
            "largest rise: Pre-LN {pre_ln[largest_rise]:.2f}, Keel {keel[largest_rise]:.2f} nats; seeds with a spike: "
            "{pre_ln[seeds_with_a_spike]} and {keel[seeds_with_a_spike]}, at learning rate {peak_lr:g}"
        ),
        full_size=_paper_width,
        smaller=_TRAINED,
        rule_changed=_RISE,
    ),
    Figure(
        place="Figure 1b",
        figure="fig1b_capabilities",
        paper="scores of Pre-LN and Keel by capability",
        ours=_gains,
        published="scores of models trained on 1T tokens; the published numbers are redrawn and checked against Table 6",
    ),
    Figure(
        place="Figure 1c",
        figure="fig1c_depth_scaling",
        paper="average score against depth, 64 to 1,024 sub-layers",
        ours=lambda finding: f"{_gains(finding)}; at most {finding['largest_difference']:.2f} points from Table 3's columns",
        published="scores of full-scale trainings; the published numbers are redrawn and checked against Table 3",
    ),
    Figure(
        place="Figure 2",
        figure="fig2_block_diagram",
        paper="Keel's block, and its rules for the first one",
        ours=_template(
            "drawn from the scheme's spec; as the paper says: norm in {norm_in}, norm out {norm_out}, scale {scale}, nothing "
            "else {nothing_else} of {n_sublayers} sub-layers"
        ),
        full_size=lambda frame: True,
    ),
    Figure(
        place="Figure 3",
        figure="fig3_divergence",
        paper="three ways to diverge: stagnation, irrecoverable spike, degradation",
        ours=_kinds,
        full_size=_paper_width,
        smaller="in runs of width {width} instead of 1,024, of {steps} steps instead of ramps of 5,000",
        rule_changed="the plain trainings were added to the candidates for degradation after no ramp had shown it; the judge's "
        "thresholds were changed as for Table 1",
        groups=("run", "steps"),
    ),
    Figure(
        place="Figure 4",
        figure="fig4_spike",
        paper="Pre-LN, 512 and 1,024 sub-layers: smooth at LR 3e-3, a spike at 4.5e-3",
        ours=_spikes,
        full_size=_paper_width,
        smaller=f"{_TRAINED}, at depths of {{n_sublayers}} sub-layers",
        rule_changed=_RISE,
    ),
    Figure(
        place="Figure 5",
        figure="fig5_token_budget",
        paper="10B and 40B tokens: Keel starts higher, overtakes Pre-LN, and the gap grows with tokens",
        ours=_budgets,
        full_size=_paper_width,
        smaller=f"{_TRAINED}, with the tokens named",
        rule_changed="the start is what lies before the first crossing, no longer the first tenth; the direction needs every "
        "seed, no longer the median",
        groups=("role",),
    ),
    Figure(
        place="Figure 6",
        figure="fig6_layer_removal",
        paper="first layers critical (perplexity above 1e4); past them the cost grows with depth; Keel's shallow layers matter "
        "more",
        ours=_template(
            "dearest first block: Pre-LN {pre_ln[first_blocks_delta_perplexity]:+.3g}, Keel "
            "{keel[first_blocks_delta_perplexity]:+.3g} perplexity; rank correlation with depth past the first "
            "{pre_ln[rank_correlation_with_depth_past_first]:+.2f} and {keel[rank_correlation_with_depth_past_first]:+.2f}, "
            "not by chance in {pre_ln[cost_rises_with_depth]} and {keel[cost_rises_with_depth]} models; "
            "shallow half, Keel − Pre-LN: {shallow_half_keel_minus_pre_ln:+.3f}"
        ),
        full_size=_paper_width,
        smaller="on the models of Figure 5, of width {width} instead of 1,024",
        rule_changed="the perplexity of 1e4 is tested, a trend counts only if it is significant, and the direction needs "
        "every seed, no longer the median",
    ),
    Figure(
        place="Figure 7",
        figure="fig7_open_models",
        paper="first layers critical (perplexity above 1e4), past them a cost that grows with depth, for Qwen2.5-72B and "
        "LLaMA-3.3-70B, 80 blocks each, on C4",
        ours=_open_models,
        full_size=lambda frame: bool(frame["n_blocks"].min() >= _PAPER_BLOCKS),
        smaller="on a checkpoint of {n_blocks} blocks, and on other text",
        rule_changed="a trend counts only if it is significant",
    ),
    Figure(
        place="Figure 8a",
        figure="fig8a_deep_narrow",
        paper="shallow and wide against deep and narrow (Table 5: 52.2 and 52.3 with Pre-LN, 55.5 for deep Keel)",
        ours=_shapes,
        full_size=_paper_width,
        smaller=_TRAINED,
        groups=("n_sublayers",),
        untested="scores",
        rule_changed=_COMPARABLE,
    ),
    Figure(
        place="Figure 8b",
        figure="fig8b_small_lr",
        paper="Pre-LN against Keel at LR 1.5e-3 (Table 2: 49.5 and 50.5)",
        ours=_template(
            "validation loss: Pre-LN {pre_ln[validation_loss]:.3f}, Keel {keel[validation_loss]:.3f} nats/token; gap "
            "{validation_gap_pre_ln_minus_keel:+.3f}, at learning rate {peak_lr:g}"
        ),
        full_size=_paper_width,
        smaller=_TRAINED,
        untested="scores",
        rule_changed=_COMPARABLE,
    ),
)


def _published_max_lr(sources: Sources) -> str:
    rows = sources.tables["table1_max_lr"]
    depths = rows.groupby("n_sublayers", sort=False)
    words = (
        f"{depth} sub-layers: {_entries(dict(zip(of['architecture'], of['printed'], strict=True)))}" for depth, of in depths
    )
    return f"Max LR on a ramp to 5e-2 in 5,000 steps; {'; '.join(words)}"


_TABLE_1 = Figure(
    place="Table 1",
    figure="table1_max_lr",
    paper=_published_max_lr,
    ours=_max_lr,
    full_size=_paper_width,
    smaller="at width {width} instead of 1,024, over ramps of {steps} steps instead of 5,000, at {n_sublayers} sub-layers",
    rule_changed="the direction asks that Keel be level with Pre-LN at every depth, and a pair is told apart only where "
    f"every ramp agrees, by more than three of its steps; the judge counts a rise from {_JUDGE.rise:g} of what was learned "
    f"instead of 0.05, and a plateau down to {_JUDGE.plateau_margin:g} of (first loss − unigram entropy) below that entropy "
    "instead of 0.1",
    groups=("n_sublayers",),
)


def _sizes(sources: Sources) -> tuple[str, bool]:
    """Whether Table 8's shapes are the presets', and whether the models that the text calls 3B have that size."""
    from probes.config import count_parameters, narrow, wide

    shapes = {"narrow": narrow(512, "pre_ln"), "wide": wide(128, "pre_ln")}
    fields = {"hidden_dim": "width", "intermediate_dim": "ffn_width", "attention_heads": "n_heads", "kv_heads": "n_kv_heads"}
    fields |= {"init_std": "init_std", "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta"}
    table = sources.tables["table8_model_config"].set_index(["shape", "hyper_parameter"])["value"]
    equal = all(
        float(getattr(config, name)) == float(table[shape, row])
        for shape, config in shapes.items()
        for row, name in fields.items()
    )
    models = {
        "Pre-LN 512 x 1024": shapes["narrow"],
        "Keel 512 x 1024": narrow(512, "keel"),
        "Pre-LN 128 x 2048": shapes["wide"],
    }
    counts = {name: count_parameters(config) / 1e9 for name, config in models.items()}
    words = ", ".join(f"{name}: {count:.3f}" for name, count in counts.items())
    same = "the presets have its values" if equal else "the presets do NOT have its values"
    return f"{same}; billions of parameters, sub-layers x width: {words}", equal and {round(n) for n in counts.values()} == {3}


_BENCHMARKS = "scores of trainings at 3B parameters; no such run is within reach here, and no score is imitated"

TABLES: tuple[Figure | Table, ...] = (
    _TABLE_1,
    Table(place="Table 2", paper="scores by learning rate", why=f"{_BENCHMARKS}; losses at the lowest rate are Figure 8b"),
    Table(place="Table 3", paper="scores by depth, 64 to 1,024 sub-layers", why=_BENCHMARKS),
    Table(place="Table 4", paper="scores by token budget, 10B and 40B", why=f"{_BENCHMARKS}; its losses are Figure 5"),
    Table(
        place="Table 5",
        paper="scores of deep and narrow against shallow and wide",
        why=f"{_BENCHMARKS}; its losses are Figure 8a",
    ),
    Table(place="Table 6", paper="scores after pretraining on 1T tokens", why=_BENCHMARKS),
    Table(place="Table 7", paper="scores after supervised fine-tuning", why=_BENCHMARKS),
    Table(
        place="Table 8",
        paper='widths, heads and constants of the narrow and the wide model, called "3B"',
        why="sizes by the configuration code, with one token per byte",
        check=_sizes,
    ),
)
