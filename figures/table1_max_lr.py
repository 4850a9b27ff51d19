# %%
r"""Maximum tolerable learning rate of every scheme: the paper's Table 1 as a chart.

The same trials as ``benchmarks/sweeps/table1_cpu.toml`` and ``table1_cpu_256.toml``, judged anew from their logs: per scheme
and ramp the median over seeds with its bootstrap interval, once by the criterion that decides (the earliest), once by each
criterion, and the best loss on the way. A run without divergence gives a lower bound, drawn as an arrow. Which criterion
decides matters: a scheme that learns further and then falls back diverges, one that never learned as much and only gets worse
slowly does not.

**Order.** A scheme's place is its Max LR on the fine ramp where that ramp reached it, and on the high one otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import TWO_COLUMNS, caption
from figures._findings import conclude
from figures._style import paper_style, scheme_style, text_color
from figures._training_runs import figure_sweep, trained
from figures.paper_tables import load_tables
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from probes.seed_summary import SeedSummary

__all__ = ["NAME", "SETTINGS", "as_markdown", "compute", "draw", "finding", "main"]

NAME = "table1_max_lr"
ARCHITECTURES = ("post_ln", "deepnorm", "hybrid_norm", "mix_ln", "pre_ln", "keel")
"""Of the paper's table, weakest first."""
ATTEMPTS = ("scaled_shortcut", "scaled_shortcut_input_gain", "scaled_shortcut_normed_input_gain")
"""The paper's attempts before Keel; it prints no Max LR for them."""
_HIGH, _FINE = {"peaks": [0.25], "training": {"steps": 1000}}, {"peaks": [0.05], "training": {"steps": 600}}
_CRITERIA = {"stagnation": ("v", "stagnation"), "irrecoverable_spike": ("^", "spike"), "non_finite": ("X", "non-finite")}
_LEAST_CORRELATION = 0.6
_LEAST_RESOLUTIONS = 3
"""Steps of the ramp by which two Max LR must differ to be told apart."""
_TWO_HIGHEST = "Pre-LN and Keel are the two highest"
_CORRELATION = f"the rank correlation with the paper's order is at least {_LEAST_CORRELATION}"
_STRICT = ("the medians have the paper's order", "no pair is against it")
_PAPER_COLOR = "#666666"

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "sweeps": {
                "table1_smoke": {
                    "schemes": list(ARCHITECTURES),
                    "blocks": [2],
                    "widths": [16],
                    "peaks": [0.2],
                    "seeds": [0, 1],
                    "training": {"steps": 50, "batch_size": 2, "seq_len": 16},
                    "corpus": {"max_bytes": 200_000},
                }
            },
        },
        "cpu": {
            "sweeps": {
                "table1_cpu": {
                    "schemes": [*ARCHITECTURES, *ATTEMPTS],
                    "blocks": [32],
                    "widths": [64],
                    "seeds": [0, 1, 2],
                    "training": {"batch_size": 4, "seq_len": 64},
                    "grid": [
                        {**_HIGH, "schemes": ["pre_ln", "keel"], "early_stop": False},
                        {**_HIGH, "schemes": [*ARCHITECTURES[:4], *ATTEMPTS]},
                        _FINE,
                    ],
                },
                "table1_cpu_256": {
                    "schemes": ["post_ln", "pre_ln", "keel"],
                    "blocks": [128],
                    "widths": [64],
                    "peaks": [0.05],
                    "seeds": [0],
                    "training": {"steps": 600, "batch_size": 4, "seq_len": 32},
                },
            },
        },
        "gpu": {
            "device": "cuda",
            "sweeps": {
                "table1_gpu": {
                    "schemes": list(ARCHITECTURES),
                    "widths": [512],
                    "peaks": [0.05],
                    "seeds": [0, 1, 2],
                    "training": {"steps": 600, "batch_size": 32, "seq_len": 256},
                    "model": {"n_heads": 8, "n_kv_heads": 4, "compute_dtype": "bfloat16"},
                    "grid": [{"blocks": [32]}, {"blocks": [256], "training": {"activation_checkpointing": True}}],
                }
            },
        },
    }
)
"""The GPU preset (64 and 512 sub-layers of width 512, one GPU of 80 GB or more) has never been run."""


def compute(*, folder: Path | None = None, sweeps: Mapping[str, Any], device: str = "cpu") -> pd.DataFrame:
    """Have the sweeps finished, and judge their logs anew.

    Args:
        folder: of this figure; sweeps lie beside it under their own names.
        sweeps: by name, as in a sweep's TOML file.
        device: of the runs.

    Returns:
        As :func:`probes.sweep_results.results_frame`, one row per trial and criterion, with ``device`` and ``sweep``.
    """
    import pandas as pd

    from probes.sweep_results import judge_again, results_frame

    parts = []
    with ExitStack() as stack:
        for name, values in sweeps.items():
            folders = stack.enter_context(trained(figure_sweep(name, {"kind": "stress", **values}, device), folder))
            parts.append(results_frame(folders, judge_again(folders)).assign(device=device, sweep=name))
    return pd.concat(parts, ignore_index=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One scheme at one depth and ramp, by one criterion."""

    scheme: str
    n_sublayers: int
    peak_lr: float
    criterion: str
    summary: SeedSummary
    outcomes: tuple[str, ...]
    best_loss: tuple[float, ...]
    resolution: float


class _Seen:
    """What a summary over seeds reads of a judgement."""

    def __init__(self, max_lr: float, lower_bound: bool) -> None:
        self.max_lr, self.lower_bound = max_lr, lower_bound


def _cells(frame: pd.DataFrame) -> list[_Cell]:
    from probes.seed_summary import combine_seeds

    cells = []
    for (scheme, _, _, criterion), rows in frame.groupby(["scheme", "n_sublayers", "peak_lr", "criterion"], sort=False):
        pairs = zip(rows["max_lr"].astype(float), rows["lower_bound"].astype(bool), strict=True)
        seen = [_Seen(max_lr, lower_bound) for max_lr, lower_bound in pairs]
        cells.append(
            _Cell(
                scheme=str(scheme),
                n_sublayers=int(rows["n_sublayers"].iloc[0]),
                peak_lr=float(rows["peak_lr"].iloc[0]),
                criterion=str(criterion),
                summary=combine_seeds(seen),  # type: ignore[arg-type]  # it reads these two fields
                outcomes=tuple(map(str, rows["status"])),
                best_loss=tuple(map(float, rows["best_loss"])),
                resolution=float(rows["resolution"].max()),
            )
        )
    return cells


def _deciding(frame: pd.DataFrame, n_sublayers: int) -> dict[str, _Cell]:
    """Per scheme the cell that gives its place: the finest ramp that reached its Max LR, or the highest."""
    cells = [cell for cell in _cells(frame) if cell.criterion == "overall" and cell.n_sublayers == n_sublayers]
    chosen: dict[str, _Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.peak_lr):
        if cell.scheme not in chosen or chosen[cell.scheme].summary.median_is_bound:
            chosen[cell.scheme] = cell
    return chosen


def _published() -> dict[tuple[str, int], float]:
    """The paper's Max LR by architecture and sub-layers."""
    table = load_tables().frame("table1_max_lr")
    keys = zip(table["architecture"].astype(str), table["n_sublayers"].astype(int), strict=True)
    return dict(zip(keys, table["value"].astype(float), strict=True))


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """The measured order of the architectures beside the paper's, at the shallowest depth.

    Two schemes are told apart where on every ramp that both were run on, and that not both outlast, their bootstrap intervals
    lie apart in the same direction, by more than three times the ramp's resolution. Of a pair of lower bounds, or of a bound
    below the other's value, nothing is said.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per scheme the Max LR by the deciding criterion in words, with kinds, and the median over seeds of the best loss (nats
        per token) on the one ramp that all are compared on; every cell of the table, at every depth, ramp and by every
        criterion that some seed meets, in words; both orders, weakest first; Spearman's rank correlation of the medians; the
        pairs that contradict the paper, and those that cannot be told apart; the parts of the statement; and the verdict:
        reproduced if the medians have the paper's order and no pair contradicts it; in direction if Pre-LN and Keel are the
        two highest, the rank correlation is at least 0.6, and at every depth Keel is level with Pre-LN or above it: neither
        surely below it nor below it in the median. A median below that is not surely so leaves a depth undecided.
    """
    from scipy.stats import spearmanr

    depth = int(frame["n_sublayers"].min())
    chosen, published = _deciding(frame, depth), _published()
    known = [name for name in ARCHITECTURES if name in chosen]
    paper = [published[name, 64] for name in known]
    medians = [chosen[name].summary.median for name in known]
    correlation = float(spearmanr(paper, medians).statistic)
    order = sorted(known, key=lambda name: chosen[name].summary.median)
    relations = _relations(frame, depth)
    contradicting = [pair for pair in combinations(known, 2) if relations[pair] > 0]
    parts = {
        _STRICT[0]: order == known,
        _STRICT[1]: not contradicting,
        _TWO_HIGHEST: set(order[-2:]) == {"pre_ln", "keel"},
        _CORRELATION: correlation >= _LEAST_CORRELATION,
        **_keel_is_level(frame),
    }
    ramp, losses = _best_losses(frame, depth)
    return {
        "n_sublayers": depth,
        "schemes": {
            name: {
                "max_lr": cell.summary.words(),
                "peak_lr_of_the_ramp": cell.peak_lr,
                "outcomes": list(cell.outcomes),
                "best_loss": losses.get(name, math.nan),
                "seeds": cell.summary.n_seeds,
            }
            for name, cell in chosen.items()
        },
        "cells": [
            {
                "scheme": cell.scheme,
                "n_sublayers": cell.n_sublayers,
                "peak_lr_of_the_ramp": cell.peak_lr,
                "criterion": cell.criterion,
                "max_lr": cell.summary.words(),
                "seeds": cell.summary.n_seeds,
            }
            for cell in _cells(frame)
            if cell.criterion == "overall" or "met" in cell.outcomes
        ],
        "order_in_the_paper": known,
        "order_measured": order,
        "rank_correlation": correlation,
        "pairs_against_the_paper": [list(pair) for pair in contradicting],
        "pairs_not_told_apart": [list(pair) for pair in combinations(known, 2) if relations[pair] == 0],
        "ramp_of_the_best_losses": ramp,
        "parts": parts,
        "verdict": conclude(parts, main=[name for name in parts if name not in _STRICT]),
    }


def _relations(frame: pd.DataFrame, n_sublayers: int) -> dict[tuple[str, str], int]:
    """Of every ordered pair of schemes 1 where the first is surely above the second, -1 where it is surely below, else 0."""
    cells = [cell for cell in _cells(frame) if cell.criterion == "overall" and cell.n_sublayers == n_sublayers]
    by_scheme = {cell.scheme: {c.peak_lr: c for c in cells if c.scheme == cell.scheme} for cell in cells}
    return {(a, b): _relation_over_ramps(by_scheme[a], by_scheme[b]) for a, b in permutations(by_scheme, 2)}


def _relation_over_ramps(a: Mapping[float, _Cell], b: Mapping[float, _Cell]) -> int:
    """What all ramps agree on that both were run on; one that both outlast says nothing."""
    shared = [(a[ramp], b[ramp]) for ramp in a if ramp in b]
    found = {_relation(x, y) for x, y in shared if not (x.summary.median_is_bound and y.summary.median_is_bound)}
    return found.pop() if len(found) == 1 else 0


def _keel_is_level(frame: pd.DataFrame) -> dict[str, bool | None]:
    """Per depth at which both were run whether Keel's Max LR is at least level with Pre-LN's."""
    parts: dict[str, bool | None] = {}
    for depth in sorted(map(int, frame["n_sublayers"].unique())):
        chosen = _deciding(frame, depth)
        if not {"pre_ln", "keel"} <= set(chosen):
            continue
        if _relations(frame, depth)["keel", "pre_ln"] < 0:
            level: bool | None = False
        else:
            level = True if chosen["keel"].summary.median >= chosen["pre_ln"].summary.median else None
        parts[f"at {depth} sub-layers Keel's Max LR is at least Pre-LN's"] = level
    return parts


def _best_losses(frame: pd.DataFrame, n_sublayers: int) -> tuple[float, dict[str, float]]:
    """The lowest ramp, and of every scheme run on it the median over seeds of the best loss, nats per token."""
    rows = frame[(frame["n_sublayers"] == n_sublayers) & (frame["criterion"] == "overall")]
    ramp = float(rows["peak_lr"].min())
    medians = rows[rows["peak_lr"] == ramp].groupby("scheme")["best_loss"].median()
    return ramp, {str(scheme): float(loss) for scheme, loss in medians.items()}


def as_markdown(frame: pd.DataFrame) -> str:
    """The table in Markdown: a line per depth and scheme, with the criterion of each seed and the paper's value beside it.

    Args:
        frame: of :func:`compute`.

    Returns:
        Lines without a final newline. Max LR is the median with its 95 % bootstrap interval over seeds, best loss the
        median over seeds, in nats per token, on the lowest ramp for all (empty where a scheme was not run on it); the paper's
        depths are 64, and 512 for models deeper than that of the first lines.
    """
    lowest = float(frame["peak_lr"].min())
    lines = [
        f"| sub-layers | architecture | Max LR | seeds | ended by | ramp to | best loss, ramp to {lowest:g} | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    published, depths = _published(), sorted(map(int, frame["n_sublayers"].unique()))
    for depth in depths:
        chosen, (ramp, losses) = _deciding(frame, depth), _best_losses(frame, depth)
        for name in (*ARCHITECTURES, *ATTEMPTS):
            if name not in chosen:
                continue
            cell = chosen[name]
            paper = published.get((name, 64 if depth == depths[0] else 512))
            cells = [depth, get_scheme(name).label, cell.summary.words(), cell.summary.n_seeds, _ends(cell.outcomes)]
            best = f"{losses[name]:.2f}" if ramp == lowest and name in losses else ""
            cells += [f"{cell.peak_lr:g}", best, "" if paper is None else f"{paper:g}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _ends(outcomes: Sequence[str]) -> str:
    """How the seeds ended, commonest first."""
    words = [outcome.replace("_", " ") for outcome in outcomes]
    kinds = sorted(set(words), key=lambda word: (-words.count(word), word))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{words.count(kind)} {kind}" for kind in kinds)


def _relation(a: _Cell, b: _Cell) -> int:
    """1 where a is surely above b on a ramp, -1 where it is surely below, else 0."""
    needed = _LEAST_RESOLUTIONS * max(a.resolution, b.resolution) * (1 + 1e-9)
    if _low(a.summary) - _high(b.summary) > needed:
        return 1
    return -1 if _low(b.summary) - _high(a.summary) > needed else 0


def _low(summary: SeedSummary) -> float:
    return summary.median if summary.low is None else summary.low


def _high(summary: SeedSummary) -> float:
    if summary.high_is_open:
        return math.inf
    return summary.median if summary.high is None else summary.high


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the chart."""

    scheme: str
    n_sublayers: int
    y: float


def _rows(frame: pd.DataFrame) -> list[_Row]:
    """Shallow models first, in the order of the paper, then the attempts; deeper models below, a gap between the groups."""
    order = {name: i for i, name in enumerate((*ARCHITECTURES, *ATTEMPTS))}
    rows: list[_Row] = []
    y = 0.0
    for depth in sorted(frame["n_sublayers"].unique()):
        schemes = sorted(frame.loc[frame["n_sublayers"] == depth, "scheme"].unique(), key=lambda s: order.get(s, len(order)))
        for scheme in schemes:
            if scheme == ATTEMPTS[0]:
                y += 0.4
            rows.append(_Row(str(scheme), int(depth), y))
            y += 1.0
        y += 1.0
    return rows


def draw(frame: pd.DataFrame) -> Figure:
    """Max LR by the deciding criterion, by each criterion, and the best loss, a line per scheme.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of two columns' width.
    """
    from matplotlib.figure import Figure as NewFigure

    rows, cells = _rows(frame), _cells(frame)
    peaks = sorted(frame["peak_lr"].unique())
    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 1.3 + 0.24 * (rows[-1].y + 1)), layout="constrained")
        deciding, each, best = figure.subplots(1, 3, sharey=True, width_ratios=(1.25, 1.0, 0.7))
        for axes in (deciding, each):
            axes.set_xscale("log")
            axes.set_xlim(2e-4, 1.6 * float(peaks[-1]))
            axes.set_xlabel("Max LR (dimensionless)")
        best.set_xlabel("nats/token")
        for row in rows:
            here = [cell for cell in cells if (cell.scheme, cell.n_sublayers) == (row.scheme, row.n_sublayers)]
            for cell in here:
                shift = _shift(cell.peak_lr, peaks)
                if cell.criterion == "overall":
                    _draw_max_lr(deciding, cell, row.y + shift, "o" if cell.peak_lr == peaks[0] else "s")
                    _draw_best(best, cell, row.y + shift, "o" if cell.peak_lr == peaks[0] else "s")
                elif cell.criterion in _CRITERIA and "met" in cell.outcomes:
                    _draw_max_lr(each, cell, row.y + shift, _CRITERIA[cell.criterion][0])
        _draw_published(deciding, rows)
        _name_rows(deciding, rows)
        deciding.set_title("by the deciding criterion")
        each.set_title("by each criterion met")
        best.set_title("best loss")
        _explain(deciding, each, peaks)
        caption(figure, _caption(frame, peaks))
    return figure


def _shift(peak: float, peaks: Sequence[float]) -> float:
    """The ramps of one scheme stand above each other."""
    return 0.0 if len(peaks) == 1 else 0.4 * (peaks.index(peak) / (len(peaks) - 1) - 0.5)


def _draw_max_lr(axes: Axes, cell: _Cell, y: float, marker: str) -> None:
    """Median, interval, and an arrow where it is open."""
    color, summary = scheme_style(cell.scheme).color, cell.summary
    right = axes.get_xlim()[1]
    low = max(_low(summary), axes.get_xlim()[0])
    high = min(_high(summary), 0.93 * right)
    axes.hlines(y, low, high, color=color, linewidth=1.0)
    axes.plot([max(summary.median, axes.get_xlim()[0])], [y], marker, color=color, ms=4.0, mew=0, zorder=3)
    if summary.high_is_open or summary.median_is_bound:
        axes.annotate(
            "",
            (0.97 * right, y),
            (max(summary.median, low), y),
            arrowprops={"arrowstyle": "->", "color": color, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0},
        )


def _draw_best(axes: Axes, cell: _Cell, y: float, marker: str) -> None:
    import numpy as np

    losses = np.array(cell.best_loss)
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return
    color = scheme_style(cell.scheme).color
    axes.hlines(y, losses.min(), losses.max(), color=color, linewidth=1.0)
    axes.plot([np.median(losses)], [y], marker, color=color, ms=4.0, mew=0, zorder=3)


def _draw_published(axes: Axes, rows: Sequence[_Row]) -> None:
    """The paper's values as hollow diamonds: 64 sub-layers beside the shallowest, 512 beside the deepest."""
    published, depths = _published(), sorted({row.n_sublayers for row in rows})
    of_paper = {depths[0]: 64} | ({depths[-1]: 512} if len(depths) > 1 else {})
    for row in rows:
        value = published.get((row.scheme, of_paper[row.n_sublayers]))
        if value is not None:
            axes.plot([value], [row.y], "D", mfc="white", mec=_PAPER_COLOR, ms=4.0, mew=0.8, zorder=4)
            if of_paper[row.n_sublayers] != row.n_sublayers:
                words = f"paper: {of_paper[row.n_sublayers]}"
                axes.annotate(
                    words,
                    (value, row.y),
                    (5, 0),
                    textcoords="offset points",
                    size=6,
                    color=_PAPER_COLOR,
                    ha="left",
                    va="center",
                )


def _name_rows(axes: Axes, rows: Sequence[_Row]) -> None:
    axes.set_yticks([row.y for row in rows], [_label(row.scheme) for row in rows])
    axes.set_ylim(rows[-1].y + 0.6, -1.2)
    axes.tick_params(axis="y", length=0)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(text_color(scheme_style(row.scheme).color))
    for depth in sorted({row.n_sublayers for row in rows}):
        top = min(row.y for row in rows if row.n_sublayers == depth)
        axes.text(
            -0.02,
            top - 0.75,
            f"{depth} sub-layers",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            size=7,
            weight="bold",
        )


def _label(scheme: str) -> str:
    """The label, its addition in brackets on a line of its own."""
    return get_scheme(scheme).label.replace(" (", "\n(")


def _explain(deciding: Axes, each: Axes, peaks: Sequence[float]) -> None:
    """What the markers are, above the first line of each panel."""
    from matplotlib.lines import Line2D

    ramps = [
        Line2D([], [], marker="o" if peak == peaks[0] else "s", color="#222222", linestyle="none", ms=4, label=f"to {peak:g}")
        for peak in peaks
    ]
    paper = Line2D([], [], marker="D", mfc="white", mec=_PAPER_COLOR, linestyle="none", ms=4, label="paper")
    kinds = [
        Line2D([], [], marker=marker, color="#222222", linestyle="none", ms=4, label=name)
        for marker, name in _CRITERIA.values()
    ]
    for axes, handles in ((deciding, [*ramps, paper]), (each, kinds)):
        axes.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=3,
            borderpad=0.1,
            handlelength=0.8,
            handletextpad=0.3,
            columnspacing=0.8,
            borderaxespad=0.0,
        )


def _caption(frame: pd.DataFrame, peaks: Sequence[float]) -> str:
    parts = []
    for depth, rows in frame.groupby("n_sublayers"):
        seeds = rows["seed"].nunique()
        width, batch, seq_len = (rows[name].iloc[0] for name in ("width", "batch_size", "seq_len"))
        parts.append(
            f"{depth} sub-layers, width {width}, {batch} × {seq_len} bytes per step, n = {seeds} seed{'s'[: seeds != 1]}"
        )
    ramps = ", ".join(
        f"{peak:g} in {int(frame.loc[frame['peak_lr'] == peak, 'steps'].iloc[0])} steps (the upper mark of a line)"
        if i == 0 and len(peaks) > 1
        else f"{peak:g} in {int(frame.loc[frame['peak_lr'] == peak, 'steps'].iloc[0])} steps"
        for i, peak in enumerate(peaks)
    )
    return (
        f"{'; '.join(parts)}; {frame['device'].iloc[0]}. Ramps from 0 to {ramps}. Marks: median, bars: 95 % bootstrap interval "
        "over seeds (best loss: all seeds), arrows: lower bounds (no divergence up to the peak). Hollow: the paper, width "
        "1024, 64 and 512 sub-layers, ramp to 0.05 in 5,000 steps. Degradation is not judged here: it needs a reference run."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
