# %%
r"""Three ways to diverge, from real runs: the paper's Figure 3.

The paper draws a converged and a diverged loss curve for each: stagnation, an irrecoverable spike, degradation. Here every run
of the lists below is judged by the divergence judge as it stands, and for each kind the first run that it calls so is drawn,
beside the healthy run over the same ramp, text and seed. Nothing is drawn for a kind of which there is no run.

Runs that are looked at, in this order: the finer ramp of Table 1 (0.05 in 600 steps, the same trials), then a slow ramp (0.003
in 600 steps) of the schemes that stagnate on the former, where a run below its limit might still learn, but slowly: degradation
is judged with a healthy run as reference, Keel's and then Pre-LN's, and the ramps of Table 1 alone are not sure to hold one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import TWO_COLUMNS, caption, mark_entropy, size_words
from figures._findings import decide
from figures._style import paper_style, scheme_style
from figures._training_runs import curve_frame, figure_sweep, trained
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from probes.judgement import Judgement
    from probes.trial_folder import TrialFolder

__all__ = ["KINDS", "NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig3_divergence"
KINDS = ("stagnation", "irrecoverable_spike", "degradation")
_HEALTHY_COLOR = "#999999"

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
        },
    }
)
"""``references`` are the schemes whose healthy run stands beside the others, the preferred one first. The GPU preset (512
sub-layers of width 512, one GPU of 80 GB or more) has never been run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A run, with what the judge says of it alone, and beside each healthy run that there is, the preferred one first."""

    place: TrialFolder
    alone: Judgement
    beside: tuple[tuple[TrialFolder, Judgement], ...]


def compute(
    *, folder: Path | None = None, sweeps: Mapping[str, Any], references: Sequence[str], device: str = "cpu"
) -> pd.DataFrame:
    """Have the runs, judge them, and keep those that are drawn.

    Args:
        folder: of this figure; sweeps lie beside it under their own names.
        sweeps: by name, as in a sweep's TOML file.
        references: schemes whose runs may be the healthy ones.
        device: of the runs.

    Returns:
        Curves as :func:`figures._training_runs.curve_frame`, with ``kind``, ``role`` (``diverged``, ``healthy``; ``tried``: the
        last step of every run that was looked at), ``judged`` (the outcome), ``onset_step`` (-1 for none), ``max_lr``,
        ``reason``.
    """
    import pandas as pd

    with ExitStack() as stack:
        folders = [
            place
            for name, values in sweeps.items()
            for place in stack.enter_context(trained(figure_sweep(name, {"kind": "stress", **values}, device), folder))
        ]
        judged = list(_judged(folders, references))
        parts = [part for kind in KINDS for part in _chosen(kind, judged)]
        parts += [_part(each.place, "", "tried", each.alone, last=True) for each in judged]
    return pd.concat(parts, ignore_index=True)


def _judged(folders: Sequence[TrialFolder], references: Sequence[str]) -> Iterator[_Judged]:
    """Every run, by itself and beside the healthy ones."""
    alone = {place.trial.key: _judge(place) for place in folders}
    healthy = [place for place in folders if alone[place.trial.key].outcome.value == "healthy"]
    for place in folders:
        beside = tuple((other, _judge(place, other)) for other in _healthy_runs(place, healthy, references))
        yield _Judged(place=place, alone=alone[place.trial.key], beside=beside)


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
            judgement = beside if kind == "degradation" else each.alone
            if judgement.outcome.value == kind:
                yield _part(each.place, kind, "diverged", judgement)
                yield _part(healthy, kind, "healthy", _judge(healthy))
                return


def _part(place: TrialFolder, kind: str, role: str, judgement: Judgement, *, last: bool = False) -> pd.DataFrame:
    curve = curve_frame([place])
    return (curve.tail(1) if last else curve).assign(
        kind=kind,
        role=role,
        judged=judgement.outcome.value,
        onset_step=-1 if judgement.onset_step is None else judgement.onset_step,
        max_lr=judgement.max_lr,
        reason=judgement.reasons[0],
    )


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Which of the three kinds were met in real runs.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per kind the run that is drawn, its onset and Max LR, or None; the number of runs looked at by outcome; and the verdict:
        reproduced if all three kinds were met, in direction if two.
    """
    tried = frame[frame["role"] == "tried"]
    found = {kind: _first(frame, kind) for kind in KINDS}
    met = sum(run is not None for run in found.values())
    return {
        **found,
        "runs_looked_at": len(tried),
        "outcomes": {str(outcome): int(n) for outcome, n in tried["judged"].value_counts().items()},
        "verdict": decide(fully=met == len(KINDS), in_direction=met == len(KINDS) - 1),
    }


def _first(frame: pd.DataFrame, kind: str) -> dict[str, Any] | None:
    rows = frame[(frame["kind"] == kind) & (frame["role"] == "diverged")]
    if rows.empty:
        return None
    row = rows.iloc[0]
    return {
        "scheme": str(row["scheme"]),
        "n_sublayers": int(row["n_sublayers"]),
        "peak_lr": float(row["peak_lr"]),
        "steps": int(row["steps"]),
        "seed": int(row["seed"]),
        "onset_step": int(row["onset_step"]),
        "max_lr": float(row["max_lr"]),
        "reason": str(row["reason"]),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """A panel per kind: the diverged run, and the healthy one over the same ramp.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of two columns' width.
    """
    from matplotlib.figure import Figure as NewFigure

    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 2.5), layout="constrained")
        panels = figure.subplots(1, len(KINDS))
        for axes, kind in zip(panels, KINDS, strict=True):
            axes.set_title(kind.replace("_", " "))
            axes.set_xlabel("optimizer step")
            rows = frame[frame["kind"] == kind]
            if rows.empty:
                _say_none(axes, int((frame["role"] == "tried").sum()))
            else:
                _draw_pair(axes, rows)
        panels[0].set_ylabel("training loss (nats/token)")
        shown = frame[frame["role"] != "tried"]
        shown = frame if shown.empty else shown
        ramps = " and ".join(
            f"0 to {peak:g} in {steps} steps" for peak, steps in sorted(set(zip(shown["peak_lr"], shown["steps"], strict=True)))
        )
        caption(
            figure,
            f"Real runs, {size_words(shown)}. Learning rate ramps {ramps}. Thin: every step, thick: running median of 9; "
            f"vertical: onset as the judge dates it. Looked at: {int((frame['role'] == 'tried').sum())} runs; the first of "
            "each kind is drawn; degradation is judged beside Keel's and Pre-LN's healthy runs.",
        )
    return figure


def _say_none(axes: Axes, n_tried: int) -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    words = f"no run of this kind\namong {n_tried} looked at"
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#666666")


def _draw_pair(axes: Axes, rows: pd.DataFrame) -> None:
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
    label = get_scheme(str(first["scheme"])).label.replace(" (", "\n(")
    words = f"{label}\nonset: step {onset}\nMax LR {first['max_lr']:.2g}"
    right = onset < end / 2
    axes.annotate(
        words,
        (onset, 0.97),
        (4 if right else -4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        size=7,
        color=style.color,
    )
    axes.text(
        0.97 if right else 0.03,
        0.03,
        f"{get_scheme(str(healthy['scheme'].iloc[0])).label}, {healthy['judged'].iloc[0].replace('_', ' ')}",
        transform=axes.transAxes,
        ha="right" if right else "left",
        size=7,
        color="#666666",
    )


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
