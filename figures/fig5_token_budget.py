# %%
r"""Loss of Pre-LN and Keel for two token budgets: the paper's Figure 5.

The paper (10 and 40 billion tokens, learning rate tuned over {1, 1.5, 3, 4.5}e-3): Keel starts higher, overtakes, and the gap
grows with the tokens. Here, as there, each budget has its own warm-up (a tenth of it) and cosine, the second is four times the
first, and the learning rate of each scheme is the one of lowest validation loss among those four times the factor of
``figures/_training_runs.py``, tried on the smaller budget with the first seed and used for both budgets and every seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import CUT_WORDS, TWO_COLUMNS, caption, draw_seeds, limit_losses, mark_entropy, size_words, smoothed
from figures._findings import conclude, every, failed_runs, in_runs, learned_nothing, paired_gap, same_sign, spread_over_seeds
from figures._style import label_line_ends, paper_style, scheme_style
from figures._training_runs import curve_frame, figure_sweep, scaled_lr, trained
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from probes.trial_folder import TrialFolder

__all__ = ["NAME", "SETTINGS", "BudgetRuns", "budget_runs", "compute", "draw", "finding", "main"]

NAME = "fig5_token_budget"
_PAPER_RATES = (1e-3, 1.5e-3, 3e-3, 4.5e-3)
_WARMUP_SHARE = 0.1
_ENDS_LOWER, _GROWS = "Keel ends lower with the larger budget", "the gap grows with tokens"
_SHADES = ("#88ccee", "#0077bb")

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "budgets": [30, 60],
            "peaks": [scaled_lr(rate) for rate in _PAPER_RATES[1:3]],
            "seeds": [0, 1],
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [4],
                "widths": [16],
                "training": {"batch_size": 2, "seq_len": 32, "validation_tokens": 1024},
                "corpus": {"max_bytes": 200_000},
            },
        },
        "cpu": {
            "budgets": [400, 1600],
            "peaks": [scaled_lr(rate) for rate in _PAPER_RATES],
            "seeds": [0, 1],
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [32],
                "widths": [64],
                "training": {"batch_size": 4, "seq_len": 64, "validation_tokens": 32_768},
            },
        },
        "gpu": {
            "device": "cuda",
            "budgets": [2500, 10_000],
            "peaks": list(_PAPER_RATES),
            "seeds": [0, 1, 2],
            "sweep": {
                "schemes": ["pre_ln", "keel"],
                "blocks": [256],
                "widths": [512],
                "training": {
                    "batch_size": 32,
                    "seq_len": 256,
                    "validation_tokens": 262_144,
                    "activation_checkpointing": True,
                },
                "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
            },
        },
    }
)
"""``budgets`` are optimizer steps. The GPU preset (512 sub-layers of width 512, one GPU of 80 GB or more; several passes over
the default text, so name more of it in ``sweep.corpus.sources``) has never been run."""


class BudgetRuns:
    """Finished runs of this figure.

    Args:
        tuning: every learning rate on the smaller budget, first seed.
        budgets: by budget, every scheme and seed at its chosen learning rate.
    """

    def __init__(self, tuning: Sequence[TrialFolder], budgets: Mapping[int, Sequence[TrialFolder]]) -> None:
        self.tuning, self.budgets = tuple(tuning), dict(budgets)


@contextmanager
def budget_runs(
    folder: Path | None,
    *,
    sweep: Mapping[str, Any],
    budgets: Sequence[int],
    peaks: Sequence[float],
    seeds: Sequence[int],
    device: str = "cpu",
) -> Iterator[BudgetRuns]:
    """Tune, then train both budgets; the trained models are kept.

    Args:
        folder: of this figure, or of one beside it.
        sweep: of both, as in a sweep's TOML file, without what the other arguments say.
        budgets: optimizer steps, the smaller first.
        peaks: learning rates tried.
        seeds: of the runs; the first is tuned with.
        device: of the runs.

    Yields:
        The runs.
    """
    tuned = {**sweep, "peaks": list(peaks), "seeds": list(seeds[:1]), "grid": [_budget(sweep, budgets[0])]}
    with trained(figure_sweep(NAME, tuned, device), folder, keep_weights=True) as tuning:
        best = _best_rates(tuning)
        grids = [
            {**_budget(sweep, steps), "schemes": [scheme], "peaks": [rate]}
            for steps in budgets
            for scheme, rate in best.items()
        ]
        final = {**sweep, "seeds": list(seeds), "grid": grids}
        with trained(figure_sweep(NAME, final, device), folder, keep_weights=True) as runs:
            yield BudgetRuns(tuning, {n: [run for run in runs if run.trial.config.steps == n] for n in budgets})


def _budget(sweep: Mapping[str, Any], steps: int) -> dict[str, Any]:
    return {"training": {"schedule": "cosine", "steps": steps, "warmup": round(_WARMUP_SHARE * steps)}}


def _best_rates(tuning: Sequence[TrialFolder]) -> dict[str, float]:
    """Per scheme the learning rate of lowest validation loss; a run that ended in not-a-number has none."""
    best: dict[str, tuple[float, float]] = {}
    for place in tuning:
        config = place.trial.config
        loss = (place.result or {})["training"]["validation_loss"]
        found = (float("inf") if loss is None else float(loss), config.peak_lr)
        best[config.model.scheme] = min(found, best.get(config.model.scheme, found))
    return {scheme: rate for scheme, (_, rate) in best.items()}


def compute(
    *,
    folder: Path | None = None,
    sweep: Mapping[str, Any],
    budgets: Sequence[int],
    peaks: Sequence[float],
    seeds: Sequence[int],
    device: str = "cpu",
) -> pd.DataFrame:
    """Tune and train, or read what is trained.

    Args:
        folder: of the runs.
        sweep: as :func:`budget_runs`.
        budgets: optimizer steps, the smaller first.
        peaks: learning rates tried.
        seeds: of the runs.
        device: of the runs.

    Returns:
        As :func:`figures._training_runs.curve_frame`, with ``role``: ``budget``, or ``tuning``, of which the last step alone is
        kept.
    """
    import pandas as pd

    with budget_runs(folder, sweep=sweep, budgets=budgets, peaks=peaks, seeds=seeds, device=device) as runs:
        tuning = curve_frame(runs.tuning).groupby("trial", sort=False).tail(1)
        curves = curve_frame([place for of_budget in runs.budgets.values() for place in of_budget])
    return pd.concat([curves.assign(role="budget"), tuning.assign(role="tuning")], ignore_index=True)


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether Keel starts higher, overtakes, and gains with tokens.

    The start is what lies before the first crossing: the steps until the smoothed losses first change places, all of them if
    they never do.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per budget the gap Pre-LN minus Keel (nats per token, seed by seed) of the start and of validation, the first crossing's
        step (one past the last if there is none) and that from which on Keel's smoothed loss is the lower one; where each
        scheme's learning rate lies in the grid it was tuned over; the parts of the statement; and the verdict: reproduced if in
        every seed and budget Keel starts higher and ends lower, and the gap is larger with more tokens; in direction if in
        every seed Keel ends lower with more tokens, and the gap grows; not decided where seeds differ, or a run ends at the
        unigram entropy.
    """
    curves = frame[frame["role"] == "budget"]
    runs = in_runs(curves)
    by_budget = {int(rows["steps"].iloc[0]): rows for _, rows in runs.groupby("steps")}
    starts = {steps: _starts(curves[curves["steps"] == steps]) for steps in by_budget}
    ends = {steps: np.array(paired_gap(rows, "validation_loss")) for steps, rows in by_budget.items()}
    few, many = sorted(by_budget)
    growth = ends[many] - ends[few]
    failed = runs[learned_nothing(runs)]
    parts = _parts({steps: [gap for gap, _ in of_budget] for steps, of_budget in starts.items()}, ends, comparable=failed.empty)
    return {
        "peak_lr": {str(scheme): float(rows["peak_lr"].iloc[0]) for scheme, rows in runs.groupby("scheme", sort=False)},
        "place_in_the_grid": _places_in_the_grid(runs, frame.loc[frame["role"] == "tuning", "peak_lr"].tolist()),
        "budgets": [
            {
                "steps": steps,
                "tokens": steps * int(by_budget[steps]["tokens_per_step"].iloc[0]),
                "start_gap_pre_ln_minus_keel": spread_over_seeds([gap for gap, _ in starts[steps]]),
                "first_crossing_step": spread_over_seeds([step for _, step in starts[steps]]),
                "validation_gap_pre_ln_minus_keel": spread_over_seeds(ends[steps].tolist()),
                "overtakes_at_step": spread_over_seeds(_overtaking(curves[curves["steps"] == steps])),
                "validation_loss": {
                    str(scheme): spread_over_seeds(rows["validation_loss"].tolist())
                    for scheme, rows in by_budget[steps].groupby("scheme", sort=False)
                },
            }
            for steps in (few, many)
        ],
        "growth_of_the_gap": spread_over_seeds(growth.tolist()),
        "learned_nothing": failed_runs(failed),
        "parts": parts,
        "verdict": conclude(parts, main=[_ENDS_LOWER, _GROWS]),
    }


def _parts(
    starts: Mapping[int, Sequence[float]], ends: Mapping[int, np.ndarray], *, comparable: bool
) -> dict[str, bool | None]:
    """What the paper says, part by part; of ends nothing where a run learned nothing."""
    few, many = sorted(ends)
    lower = {steps: same_sign(gap) if comparable else None for steps, gap in ends.items()}
    return {
        "Keel starts higher": every(same_sign([-gap for gap in of_budget]) for of_budget in starts.values()),
        "Keel ends lower with the smaller budget": lower[few],
        _ENDS_LOWER: lower[many],
        _GROWS: same_sign(ends[many] - ends[few]) if comparable else None,
    }


def _smoothed_gaps(rows: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per seed Pre-LN minus Keel by step, as it is and smoothed."""
    table = rows.pivot_table(index="step", columns=["scheme", "seed"], values="loss")
    return [(gap, smoothed(gap, _window(rows))) for gap in (table["pre_ln"] - table["keel"]).to_numpy(float).T]


def _starts(rows: pd.DataFrame) -> list[tuple[float, float]]:
    """Per seed the mean gap before the first crossing, and its step."""
    found = []
    for gap, smooth in _smoothed_gaps(rows):
        crossed = np.flatnonzero((smooth > 0) != (smooth[0] > 0))
        end = int(crossed[0]) if len(crossed) else len(gap)
        found.append((float(gap[:end].mean()), float(end + 1)))
    return found


def _places_in_the_grid(runs: pd.DataFrame, tried: Sequence[float]) -> dict[str, str]:
    """Where each scheme's learning rate lies among those tried; at an edge the best one may lie outside."""
    words = {min(tried): "the lowest tried", max(tried): "the highest tried"}
    rates = runs.groupby("scheme", sort=False)["peak_lr"].first()
    return {str(scheme): words.get(float(rate), "inside the grid") for scheme, rate in rates.items()}


def _overtaking(rows: pd.DataFrame) -> list[float]:
    """Per seed, the first step after which Keel's smoothed loss stays below Pre-LN's; one past the last if it never does."""
    return [float(np.flatnonzero(np.append(True, smooth <= 0))[-1] + 1) for _, smooth in _smoothed_gaps(rows)]


def draw(frame: pd.DataFrame) -> Figure:
    """Loss against tokens for each budget, and the gap against the share of the budget.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of two columns' width.
    """
    from matplotlib.figure import Figure as NewFigure

    curves = frame[frame["role"] == "budget"].copy()
    curves["tokens"] = curves["step"] * curves["tokens_per_step"] / 1e3
    budgets = sorted(curves["steps"].unique())
    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 2.6), layout="constrained")
        few, many, gaps = figure.subplots(1, 3)
        many.sharey(few)
        for axes, steps in zip((few, many), budgets, strict=True):
            _draw_budget(axes, curves[curves["steps"] == steps])
        limit_losses(few, curves, budgets[0] // 20)
        few.set_ylabel("training loss (nats/token)")
        names = _draw_gaps(gaps, curves)
        rates = {get_scheme(str(s)).label: rows["peak_lr"].iloc[0] for s, rows in curves.groupby("scheme", sort=False)}
        tried = ", ".join(f"{rate:g}" for rate in sorted(frame["peak_lr"][frame["role"] == "tuning"].unique()))
        caption(
            figure,
            f"{size_words(curves)}. Peak learning rate by validation loss on the smaller budget, out of {tried}: "
            f"{', '.join(f'{label} {rate:g}' for label, rate in rates.items())}; warm-up over a tenth of the budget, cosine "
            f"decay. Thin: each seed (mean of 5 % of the steps), thick: their median; {CUT_WORDS}. ○: gap of the validation "
            "losses, by seed.",
        )
        for axes, steps in zip((few, many), budgets, strict=True):
            _name_ends(axes, curves[curves["steps"] == steps])
        label_line_ends(gaps, *names)
    return figure


def _window(rows: pd.DataFrame) -> int:
    return max(3, int(rows["steps"].iloc[0]) // 20)


def _draw_budget(axes: Axes, rows: pd.DataFrame) -> None:
    for scheme, of_scheme in rows.groupby("scheme", sort=False):
        draw_seeds(axes, of_scheme, window=_window(rows), color=scheme_style(str(scheme)).color, x="tokens")
    axes.margins(x=0.0)
    mark_entropy(axes, rows)
    axes.set_title(f"{rows['tokens'].max():,.0f} thousand tokens")
    axes.set_xlabel("thousand tokens")


def _name_ends(axes: Axes, rows: pd.DataFrame) -> None:
    ends, colors = {}, {}
    for scheme, of_scheme in rows.groupby("scheme", sort=False):
        label, style = get_scheme(str(scheme)).label, scheme_style(str(scheme))
        last = of_scheme[of_scheme["step"] > 0.95 * of_scheme["steps"]]
        ends[label] = (float(rows["tokens"].max()), float(last["loss"].mean()))
        colors[label] = style.color
    label_line_ends(axes, ends, colors)


def _draw_gaps(axes: Axes, curves: pd.DataFrame) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Pre-LN minus Keel: above zero, Keel is ahead. The names of the curves are left for later: their ends and colours."""
    axes.axhline(0, color="#666666", linewidth=0.8)
    ends, colors = {}, {}
    for (steps, rows), color in zip(curves.groupby("steps"), _SHADES, strict=True):
        table = rows.pivot_table(index="step", columns=["scheme", "seed"], values="loss")
        difference = (table["pre_ln"] - table["keel"]).to_numpy(float)
        window = _window(rows)
        smooth = np.stack([smoothed(column, window) for column in difference.T])
        share = table.index.to_numpy(float) / float(rows["steps"].iloc[0]) * 100
        if len(smooth) > 1:
            axes.plot(share, smooth.T, color=color, linewidth=0.5, alpha=0.6)
        axes.plot(share, np.median(smooth, axis=0), color=color, linewidth=1.4)
        runs = in_runs(rows)
        gap = paired_gap(runs, "validation_loss")
        axes.plot([103] * len(gap), gap, "o", mfc="white", mec=color, ms=3.6, clip_on=False, zorder=4)
        label = f"{int(str(steps)) * int(rows['tokens_per_step'].iloc[0]) / 1e3:,.0f} k"
        ends[label], colors[label] = (105.0, float(np.median(gap))), color
    axes.set(xlim=(0, 105), xlabel="share of the budget (%)", ylabel="Pre-LN minus Keel (nats/token)")
    axes.set_title("gap, above 0: Keel ahead")
    return ends, colors


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
