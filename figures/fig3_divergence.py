# %%
r"""Three ways to diverge, from real runs: the paper's Figure 3.

The paper draws a converged and a diverged loss curve for each: stagnation, an irrecoverable spike, degradation. Here every run
of the lists below is judged by the divergence judge as it stands, and for each kind the first run that it calls so is drawn,
beside a healthy run. Nothing is drawn for a kind of which there is no run.

Runs that are looked at, in this order:

1. the finer ramp of Table 1 (0.05 in 600 steps, the same trials), then a slow ramp (0.003 in 600 steps) of the schemes that
   stagnate on the former, where a run below its limit might still learn, but slowly. The healthy run is one over the same ramp,
   text and seed, Keel's and then Pre-LN's; with it degradation is judged, the other kinds are judged without.
2. plain trainings, the same trials as Figures 1a and 8a: Pre-LN at learning rates above its best, beside the healthy run of the
   same scheme, shape, batch, text and seed (the first seed's where there is none) at the learning rate that Figure 5 tuned. All
   kinds are judged beside it. The two differ in their learning rates and in the length of their schedules, so the judge's onset
   is where their losses part, and there is no ramp that Max LR could be read from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures import fig1a_stability, fig5_token_budget, fig8a_deep_narrow
from figures._curves import TWO_COLUMNS, caption, mark_entropy, size_words
from figures._findings import decide
from figures._style import paper_style, scheme_style
from figures._training_runs import curve_frame, figure_sweep, trained
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from probes.judgement import Judgement
    from probes.trial_folder import TrialFolder

__all__ = ["KINDS", "NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig3_divergence"
KINDS = ("stagnation", "irrecoverable_spike", "degradation")
_HEALTHY_COLOR = "#999999"
_PLAIN_SCHEME = "pre_ln"
_MAY_DIFFER = frozenset({"peak_lr", "final_lr", "warmup", "steps", "validation_tokens", "seed", "model.seed"})
"""Of a plain training and the healthy run beside it."""


def _plain(preset: str, blocks: int, width: int) -> dict[str, Any]:
    """Settings of other figures, for one scheme in one shape; their trials are the same."""
    budget = fig5_token_budget.SETTINGS[preset]
    reference = {name: budget[name] for name in ("budgets", "peaks", "seeds")}
    stability, deep = (module.SETTINGS[preset]["sweep"] for module in (fig1a_stability, fig8a_deep_narrow))
    cells = [cell for cell in deep["grid"] if (cell["blocks"], cell["widths"]) == ([blocks], [width])]
    one = {"schemes": [_PLAIN_SCHEME]}
    return {
        "reference": {**reference, "sweep": {**budget["sweep"], **one}},
        "candidates": {
            fig1a_stability.NAME: {**stability, **one, "blocks": [blocks], "widths": [width]},
            fig8a_deep_narrow.NAME: {**deep, **one, "grid": cells},
        },
    }


SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "references": ["pre_ln"],
            "sweeps": {
                "fig3_divergence": {
                    "schemes": ["post_ln", "scaled_shortcut", "pre_ln"],
                    "blocks": [4],
                    "widths": [16],
                    "peaks": [0.2],
                    "training": {"steps": 60, "batch_size": 2, "seq_len": 16},
                    "corpus": {"max_bytes": 200_000},
                }
            },
            "plain": _plain("smoke", 4, 16),
        },
        "cpu": {
            "references": ["keel", "pre_ln"],
            "sweeps": {
                "table1_cpu": {
                    "schemes": [
                        "post_ln",
                        "scaled_shortcut",
                        "deepnorm",
                        "hybrid_norm",
                        "mix_ln",
                        "scaled_shortcut_input_gain",
                        "scaled_shortcut_normed_input_gain",
                        "pre_ln",
                        "keel",
                    ],
                    "blocks": [32],
                    "widths": [64],
                    "peaks": [0.05],
                    "training": {"steps": 600, "batch_size": 4, "seq_len": 64},
                },
                "fig3_divergence": {
                    "schemes": ["post_ln", "deepnorm", "hybrid_norm", "mix_ln", "pre_ln", "keel"],
                    "blocks": [32],
                    "widths": [64],
                    "peaks": [0.003],
                    "early_stop": False,
                    "training": {"steps": 600, "batch_size": 4, "seq_len": 64},
                },
            },
            "plain": _plain("cpu", 32, 64),
        },
        "gpu": {
            "device": "cuda",
            "references": ["keel", "pre_ln"],
            "sweeps": {
                "fig3_divergence": {
                    "schemes": ["post_ln", "scaled_shortcut", "deepnorm", "hybrid_norm", "mix_ln", "pre_ln", "keel"],
                    "blocks": [256],
                    "widths": [512],
                    "peaks": [0.05, 0.001],
                    "early_stop": False,
                    "training": {"steps": 1000, "batch_size": 32, "seq_len": 256, "activation_checkpointing": True},
                    "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
                }
            },
            "plain": _plain("gpu", 256, 512),
        },
    }
)
"""``references`` are the schemes whose healthy ramp stands beside the others, the preferred one first; ``plain`` are trainings
at a learning rate that does not ramp. The GPU preset (512 sub-layers of width 512, one GPU of 80 GB or more) has never been
run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A run, with what the judge says of it alone, and beside each healthy run that there is, the preferred one first."""

    place: TrialFolder
    alone: Judgement
    beside: tuple[tuple[TrialFolder, Judgement], ...]

    @property
    def is_ramp(self) -> bool:
        return _is_ramp(self.place)


def _is_ramp(place: TrialFolder) -> bool:
    return place.trial.config.schedule == "ramp"


def compute(
    *,
    folder: Path | None = None,
    sweeps: Mapping[str, Any],
    references: Sequence[str],
    plain: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> pd.DataFrame:
    """Have the runs, judge them, and keep those that are drawn.

    Args:
        folder: of this figure; sweeps lie beside it under their own names.
        sweeps: ramps, by name, as in a sweep's TOML file.
        references: schemes whose ramps may be the healthy ones.
        plain: ``reference``, arguments of :func:`figures.fig5_token_budget.budget_runs`, whose largest budget has the healthy
            runs; ``candidates``, by name, as in a sweep's TOML file. None for no plain trainings.
        device: of the runs.

    Returns:
        Curves as :func:`figures._training_runs.curve_frame`, with ``kind``, ``role`` (``diverged``, ``healthy``; ``tried``: the
        last step of every run that was looked at, once for each judgement of it), ``run`` (``ramp``, ``plain``), ``final_lr``,
        ``judged`` (the outcome), ``beside`` (the healthy run it was judged with, empty for none), ``onset_step`` (-1 for none),
        ``max_lr`` (NaN for a plain training), ``reason``.
    """
    import pandas as pd

    with ExitStack() as stack:
        folders = [
            place
            for name, values in sweeps.items()
            for place in stack.enter_context(trained(figure_sweep(name, {"kind": "stress", **values}, device), folder))
        ]
        judged = list(_judged_ramps(folders, references))
        if plain is not None:
            judged += _judged_plain(stack, plain, folder, device)
        parts = [part for kind in KINDS for part in _chosen(kind, judged)]
        parts += [part for each in judged for part in _tried(each)]
    return pd.concat(parts, ignore_index=True)


def _judged_ramps(folders: Sequence[TrialFolder], references: Sequence[str]) -> Iterator[_Judged]:
    """Every ramp, by itself and beside the healthy ones."""
    alone = {place.trial.key: _judge(place) for place in folders}
    healthy = [place for place in folders if alone[place.trial.key].outcome.value == "healthy"]
    for place in folders:
        beside = tuple((other, _judge(place, other)) for other in _healthy_runs(place, healthy, references))
        yield _Judged(place=place, alone=alone[place.trial.key], beside=beside)


def _judged_plain(stack: ExitStack, plain: Mapping[str, Any], folder: Path | None, device: str) -> Iterator[_Judged]:
    """Every plain training, by itself and beside a healthy run at the tuned learning rate."""
    budgets = stack.enter_context(fig5_token_budget.budget_runs(folder, device=device, **plain["reference"])).budgets
    healthy = [place for place in budgets[max(budgets)] if _judge(place).outcome.value == "healthy"]
    for name, values in plain["candidates"].items():
        for place in stack.enter_context(trained(figure_sweep(name, values, device), folder)):
            beside = tuple((other, _judge(place, other)) for other in _tuned_run(place, healthy))
            yield _Judged(place=place, alone=_judge(place), beside=beside)


def _tuned_run(place: TrialFolder, healthy: Sequence[TrialFolder]) -> Sequence[TrialFolder]:
    """The healthy run that differs in its schedule only; of the first seed where there is none of the same."""
    config = place.trial.config
    alike = [other for other in healthy if set(config.differences(other.trial.config.to_dict())) <= _MAY_DIFFER]
    same_seed = [other for other in alike if other.trial.config.seed == config.seed]
    return (same_seed or alike)[:1]


def _judge(place: TrialFolder, reference: TrialFolder | None = None) -> Judgement:
    from probes.trial_run import judge_records

    corpus = (place.result or {})["training"]["corpus"]
    records = None if reference is None else reference.records()
    return judge_records(place.records(), corpus, ramp_steps=place.trial.config.steps, reference=records)


def _healthy_runs(place: TrialFolder, healthy: Sequence[TrialFolder], references: Sequence[str]) -> Iterator[TrialFolder]:
    """Healthy runs of the reference schemes that differ in nothing but their scheme."""
    for scheme in references:
        for other in healthy:
            differing = set(place.trial.config.differences(other.trial.config.to_dict()))
            if other.trial.config.model.scheme == scheme and differing == {"model.scheme"}:
                yield other


def _chosen(kind: str, judged: Sequence[_Judged]) -> Iterator[pd.DataFrame]:
    """Curves of the first run of a kind and of its healthy run."""
    for each in judged:
        for healthy, beside in each.beside:
            with_it = kind == "degradation" or not each.is_ramp
            judgement = beside if with_it else each.alone
            if judgement.outcome.value == kind:
                yield _part(each.place, kind, "diverged", judgement, healthy if with_it else None)
                yield _part(healthy, kind, "healthy", _judge(healthy))
                return


def _tried(each: _Judged) -> Iterator[pd.DataFrame]:
    yield _part(each.place, "", "tried", each.alone).tail(1)
    for healthy, beside in each.beside:
        yield _part(each.place, "", "tried", beside, healthy).tail(1)


def _part(place: TrialFolder, kind: str, role: str, judgement: Judgement, reference: TrialFolder | None = None) -> pd.DataFrame:
    return curve_frame([place]).assign(
        kind=kind,
        role=role,
        run="ramp" if _is_ramp(place) else "plain",
        final_lr=place.trial.config.final_lr,
        judged=judgement.outcome.value,
        beside="" if reference is None else _run_words(reference),
        onset_step=-1 if judgement.onset_step is None else judgement.onset_step,
        max_lr=judgement.max_lr if _is_ramp(place) else math.nan,
        reason=judgement.reasons[0],
    )


def _run_words(place: TrialFolder) -> str:
    config = place.trial.config
    return f"{config.model.scheme}, {config.schedule} of {config.peak_lr:g} in {config.steps} steps, seed {config.seed}"


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Which of the three kinds were met in real runs.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per kind the run that is drawn, its onset and Max LR (None for a plain training), and whether the same setting is
        called so in each seed looked at; None where there is no run. Which run is drawn beside which, in words. The number of
        runs looked at; their outcomes, of ramps judged alone and of plain trainings judged beside a healthy run; every
        judgement of every run; and the verdict: reproduced if all three kinds were met, in direction if two.
    """
    tried = frame[frame["role"] == "tried"]
    found = {kind: _first(frame, kind) for kind in KINDS}
    met = sum(run is not None for run in found.values())
    deciding = (tried["run"] == "plain") == (tried["beside"] != "")
    return {
        **found,
        "drawn_in_words": "; ".join(words for kind in KINDS if (words := _drawn_words(frame, kind))),
        "runs_looked_at": tried["trial"].nunique(),
        "outcomes": {
            str(run): {str(outcome): int(n) for outcome, n in rows["judged"].value_counts().items()}
            for run, rows in tried[deciding].groupby("run", sort=False)
        },
        "looked_at": [_looked_at(rows) for _, rows in tried.groupby("trial", sort=False)],
        "parts": {kind.replace("_", " "): run is not None for kind, run in found.items()},
        "verdict": decide(fully=met == len(KINDS), in_direction=met == len(KINDS) - 1),
    }


def _looked_at(rows: pd.DataFrame) -> dict[str, Any]:
    """Every judgement of one run."""
    return {
        **_identity(rows.iloc[0]),
        "judged": [{"beside": str(row["beside"]), "outcome": str(row["judged"])} for _, row in rows.iterrows()],
    }


def _identity(row: pd.Series[Any]) -> dict[str, Any]:
    return {
        "scheme": str(row["scheme"]),
        "n_sublayers": int(row["n_sublayers"]),
        "run": str(row["run"]),
        "peak_lr": float(row["peak_lr"]),
        "steps": int(row["steps"]),
        "seed": int(row["seed"]),
    }


def _first(frame: pd.DataFrame, kind: str) -> dict[str, Any] | None:
    rows = frame[(frame["kind"] == kind) & (frame["role"] == "diverged")]
    if rows.empty:
        return None
    row = rows.iloc[0]
    return {
        **_identity(row),
        "beside": str(row["beside"]),
        "onset_step": int(row["onset_step"]),
        "max_lr": float(row["max_lr"]) if row["run"] == "ramp" else None,
        "reason": str(row["reason"]),
        "each_seed": _each_seed(frame, row, kind),
    }


def _drawn_words(frame: pd.DataFrame, kind: str) -> str:
    """Which run is drawn for a kind, beside which, and how it was judged; empty where there is none."""
    rows = frame[frame["kind"] == kind]
    if rows.empty:
        return ""
    diverged, healthy = (rows[rows["role"] == role].iloc[0] for role in ("diverged", "healthy"))
    judged = "judged alone" if diverged["beside"] == "" else f"judged beside {diverged['beside']}"
    runs = " beside a healthy ".join(
        f"{_schedule(row)} of {get_scheme(str(row['scheme'])).label}" for row in (diverged, healthy)
    )
    return f"{kind.replace('_', ' ')}: {runs}, {judged}"


def _schedule(row: pd.Series[Any]) -> str:
    kind = "ramp to" if row["run"] == "ramp" else "plain training at"
    return f"{kind} {row['peak_lr']:g} in {row['steps']} steps"


def _each_seed(frame: pd.DataFrame, row: pd.Series[Any], kind: str) -> list[bool]:
    """Whether each seed of a run's setting is called so, judged as that run was: alone, or beside a healthy run."""
    alike = frame[frame["role"] == "tried"]
    for name in ("scheme", "n_sublayers", "width", "run", "peak_lr", "final_lr", "steps"):
        alike = alike[alike[name] == row[name]]
    alike = alike[(alike["beside"] != "") == (row["beside"] != "")]
    return [bool((rows["judged"] == kind).any()) for _, rows in alike.groupby("seed")]


def draw(frame: pd.DataFrame) -> Figure:
    """A panel per kind: the diverged run, and a healthy one.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of two columns' width.
    """
    from matplotlib.figure import Figure as NewFigure

    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 2.6), layout="constrained")
        panels = figure.subplots(1, len(KINDS))
        names: list[tuple[Axes, Annotation]] = []
        for axes, kind in zip(panels, KINDS, strict=True):
            axes.set_title(kind.replace("_", " "))
            axes.set_xlabel("optimizer step")
            rows = frame[frame["kind"] == kind]
            if rows.empty:
                _say_none(axes, frame["trial"][frame["role"] == "tried"].nunique())
            else:
                names.append((axes, _draw_pair(axes, rows)))
        panels[0].set_ylabel("training loss (nats/token)")
        caption(figure, _caption_words(frame))
        for axes, name in names:
            _keep_inside(axes, name)
    return figure


def _caption_words(frame: pd.DataFrame) -> str:
    tried = frame[frame["role"] == "tried"].drop_duplicates("trial")
    shown = frame[frame["role"] != "tried"]
    ramps, plain = shown[shown["run"] == "ramp"], shown[shown["run"] == "plain"]
    n_ramps, n_plain = ((tried["run"] == run).sum() for run in ("ramp", "plain"))
    words = [f"Real runs, {size_words(tried if shown.empty else shown)}"]
    if not ramps.empty:
        each = sorted(set(zip(ramps["peak_lr"], ramps["steps"], strict=True)))
        rates = " and ".join(f"0 to {peak:g} in {steps} steps" for peak, steps in each)
        words.append(f"{_kinds_of(ramps)}: learning rate ramps {rates}, grey: a healthy run over the same ramp")
        last, planned = (ramps.groupby("trial")[name].max() for name in ("step", "steps"))
        if (last < planned).any():
            words.append("A ramp is ended where a criterion decides it, before its last step")
    words += [_plain_words(frame, rows) for _, rows in plain.groupby("kind", sort=False)]
    words += [
        "Thin: every step, thick: running median of 9; vertical: onset as the judge dates it",
        f"Looked at: {n_ramps} ramps and {n_plain} plain trainings; the first of each kind is drawn",
    ]
    return ". ".join(words) + "."


def _kinds_of(rows: pd.DataFrame) -> str:
    return " and ".join(str(kind).replace("_", " ") for kind in rows["kind"].unique()).capitalize()


def _plain_words(frame: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Which plain training is which, and in how many seeds it is called so."""
    diverged, healthy = (rows[rows["role"] == role].iloc[0] for role in ("diverged", "healthy"))
    seeds = _each_seed(frame, diverged, str(diverged["kind"]))
    return (
        f"{_kinds_of(rows)}: no ramp, so no Max LR, but plain trainings: {_schedule_words(diverged)}, beside, grey, "
        f"{_schedule_words(healthy)}, a learning rate tuned on validation loss; so judged in {sum(seeds)} of {len(seeds)} "
        f"seed{'s' if len(seeds) > 1 else ''}"
    )


def _schedule_words(row: pd.Series[Any]) -> str:
    how = "held" if row["final_lr"] == row["peak_lr"] else "with cosine decay"
    label = get_scheme(str(row["scheme"])).label
    return f"{label} at {row['peak_lr']:g} {how}, {row['steps']} steps"


def _say_none(axes: Axes, n_tried: int) -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    words = f"no run of this kind\nbeside a healthy one\namong {n_tried} looked at"
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#666666")


def _draw_pair(axes: Axes, rows: pd.DataFrame) -> Annotation:
    """Both curves and their names; returns the name that stands at the onset."""
    diverged, healthy = rows[rows["role"] == "diverged"], rows[rows["role"] == "healthy"]
    end = int(diverged["step"].max())
    healthy = healthy[healthy["step"] <= end]
    first = diverged.iloc[0]
    style = scheme_style(str(first["scheme"]))
    for curve, color in ((healthy, _HEALTHY_COLOR), (diverged, style.color)):
        _draw_run(axes, curve, color)
    top = float(min(rows["initial_loss"].iloc[0], np.nanmax(rows["loss"]))) + 0.15
    axes.set(xlim=(0, end), ylim=(float(np.nanmin(rows["loss"])) - 0.35, top))
    mark_entropy(axes, rows, outside=True)
    onset = int(first["onset_step"])
    axes.axvline(onset, color=style.color, linewidth=0.8, linestyle=(0, (4, 2)))
    right = onset < end / 2
    axes.text(
        0.97 if right else 0.03,
        0.03,
        f"{_name(healthy.iloc[0])}, {healthy['judged'].iloc[0].replace('_', ' ')}",
        transform=axes.transAxes,
        ha="right" if right else "left",
        size=7,
        color="#666666",
    )
    limit = f"\nMax LR {first['max_lr']:.2g}" if first["run"] == "ramp" else ""
    return axes.annotate(
        f"{_name(first, wrap=True)}\nonset: step {onset}{limit}",
        (onset, 0.97),
        (4 if right else -4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        size=7,
        color=style.color,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
    )


def _name(row: pd.Series[Any], *, wrap: bool = False) -> str:
    """The scheme, a long one in lines; of a plain training its learning rate too."""
    label = get_scheme(str(row["scheme"])).label
    label = label.replace(" (", "\n(").replace(", ", ",\n") if wrap else label
    return label if row["run"] == "ramp" else f"{label}, LR {row['peak_lr']:g}"


def _keep_inside(axes: Axes, name: Annotation) -> None:
    """Move a name sideways until it is inside its axes; once all is laid out."""
    margin = 2 / 72 * axes.figure.dpi
    extent, box = name.get_window_extent(), axes.get_window_extent()
    too_far_left, too_far_right = max(box.x0 + margin - extent.x0, 0.0), max(extent.x1 - box.x1 + margin, 0.0)
    x, y = name.get_position()
    name.set_position((x + (too_far_left - too_far_right) * 72 / axes.figure.dpi, y))


def _draw_run(axes: Axes, curve: pd.DataFrame, color: str) -> None:
    from probes.onset import running_median

    finite = curve[np.isfinite(curve["loss"])]
    axes.plot(finite["step"], finite["loss"], color=color, linewidth=0.3, alpha=0.45)
    axes.plot(finite["step"], running_median(finite["loss"].to_numpy(float), 9), color=color, linewidth=1.3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
