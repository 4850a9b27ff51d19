# %%
r"""What each block of a trained Pre-LN and a trained Keel model is worth: the paper's Figure 6.

The paper (appendix A): the first layers are critical; past them the cost of removing one grows with depth; Keel's shallow
layers matter more than Pre-LN's. Measured on the models that ``figures/fig5_token_budget.py`` trains on its larger budget, by
the exact probe, on validation text that training never saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures import fig5_token_budget
from figures._curves import ONE_COLUMN, caption
from figures._findings import conclude, every, same_sign, spread_over_seeds
from figures._removal import (
    PAPER_FIRST_LAYERS,
    draw_costs,
    place_of_first_layers,
    removal_frame,
    trend_past_first,
    trend_rises,
)
from figures._style import paper_style, scheme_style
from figures._training_runs import run_columns
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from probes.corpus import Corpus
    from probes.text import TokenBatch
    from probes.trial_folder import TrialFolder

__all__ = ["NAME", "SETTINGS", "compute", "draw", "finding", "main"]

NAME = "fig6_layer_removal"
_SHALLOW = "Keel's shallow half costs more than Pre-LN's"

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"runs": dict(fig5_token_budget.SETTINGS["smoke"]), "n_tokens": 512, "seq_len": 32, "batch_size": 8},
        "cpu": {"runs": dict(fig5_token_budget.SETTINGS["cpu"]), "n_tokens": 16_384, "seq_len": 64, "batch_size": 16},
        "gpu": {"runs": dict(fig5_token_budget.SETTINGS["gpu"]), "n_tokens": 262_144, "seq_len": 256, "batch_size": 64},
    }
)
"""``runs`` are the settings of figure 5. The GPU preset has never been run."""


def compute(
    *, folder: Path | None = None, runs: Mapping[str, Any], n_tokens: int, seq_len: int, batch_size: int, unit: str = "block"
) -> pd.DataFrame:
    """Train what is not trained yet, and measure every model of the larger budget.

    Args:
        folder: of this figure; the runs lie in figure 5's beside it.
        runs: figure 5's settings.
        n_tokens: predictions in all.
        seq_len: tokens per sequence.
        batch_size: sequences per batch.
        unit: what is removed, as ``keel layer-removal`` counts it.

    Returns:
        As :func:`figures._removal.removal_frame`, with the columns of the runs.
    """
    import pandas as pd

    from probes.corpus import build_corpus

    with fig5_token_budget.budget_runs(folder, **runs) as trained:
        models = trained.budgets[max(trained.budgets)]
        corpus = build_corpus(models[0].trial.config.corpus)
        batches = _batches(corpus, n_tokens, seq_len, batch_size)
        parts = [_measured(place, batches, unit) for place in models]
    return pd.concat(parts, ignore_index=True)


def _batches(corpus: Corpus, n_tokens: int, seq_len: int, batch_size: int) -> list[TokenBatch]:
    from probes.text import TokenBatch

    windows = corpus.validation_batches(n_tokens=n_tokens, batch_size=batch_size, seq_len=seq_len)
    return [TokenBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def _measured(place: TrialFolder, batches: Sequence[TokenBatch], unit: str) -> pd.DataFrame:
    import torch

    from probes.checkpoint import load_checkpoint
    from probes.layer_removal import measure_layer_removal

    device = torch.device(place.trial.config.device)
    loaded = load_checkpoint(place.run_path, device=device)
    result = measure_layer_removal(
        loaded.model, batches, layout=loaded.layout, unit=unit, estimates=False, joint=False, device=device
    )
    run = run_columns(place)
    kept = ("scheme", "width", "n_parameters", "seed", "peak_lr", "steps", "tokens_per_step", "validation_loss")
    return removal_frame(result, **{name: run[name] for name in kept})


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether the first blocks are critical, the cost grows with depth, and Keel's shallow blocks matter more.

    Args:
        frame: of :func:`compute`.

    Returns:
        Per scheme, over seeds: the largest Δ perplexity among the first tenth of the blocks, the rank correlation of cost and
        depth past them (and in which seeds it counts as a rise by :data:`figures._removal.TREND_LEVEL`), the median Δ
        perplexity of the shallow half past them; that of Keel minus that of Pre-LN, seed by seed; the parts of the statement,
        each of every scheme and seed; and the verdict: reproduced if every part holds; in direction if Keel's shallow half
        costs more in every seed; not decided if it does in some.
    """
    rows = [
        {"scheme": str(scheme), **_shape(of_model)} for (scheme, _), of_model in frame.groupby(["scheme", "seed"], sort=False)
    ]
    by_scheme = {name: [row for row in rows if row["scheme"] == name] for name in ("pre_ln", "keel")}
    shallow = {name: np.array([row["shallow"] for row in found]) for name, found in by_scheme.items()}
    more = shallow["keel"] - shallow["pre_ln"]
    parts = _parts(rows, more)
    return {
        **{
            name: {
                "first_blocks_delta_perplexity": spread_over_seeds([row["first"] for row in found]),
                "first_block_is_dearest": [row["first_is_dearest"] for row in found],
                "rank_correlation_with_depth_past_first": spread_over_seeds([row["trend"] for row in found]),
                "cost_rises_with_depth": [row["rises"] is True for row in found],
                "shallow_half_delta_perplexity": spread_over_seeds(shallow[name].tolist()),
                "perplexity": _perplexities(frame, name),
            }
            for name, found in by_scheme.items()
        },
        "shallow_half_keel_minus_pre_ln": spread_over_seeds(more.tolist()),
        "parts": parts,
        "verdict": conclude(parts, main=[_SHALLOW]),
    }


def _parts(rows: Sequence[Mapping[str, Any]], more: np.ndarray) -> dict[str, bool | None]:
    return {
        "a first block is the dearest": all(row["first_is_dearest"] for row in rows),
        f"without a first block the perplexity is above {PAPER_FIRST_LAYERS:g}": all(
            row["perplexity_without_a_first_block"] > PAPER_FIRST_LAYERS for row in rows
        ),
        "past the first the cost rises with depth": every(row["rises"] for row in rows),
        _SHALLOW: same_sign(more),
    }


def _perplexities(frame: pd.DataFrame, scheme: str) -> dict[str, float | int]:
    values = frame.loc[(frame["metric"] == "perplexity") & (frame["scheme"] == scheme), "value"]
    return spread_over_seeds(values.tolist())


def _shape(rows: pd.DataFrame) -> dict[str, Any]:
    """What one model's costs say."""
    perplexity = float(rows.loc[rows["metric"] == "perplexity", "value"].iloc[0])
    costs = rows.loc[rows["metric"] == "delta_perplexity", "value"].to_numpy(float)
    first = place_of_first_layers(len(costs))
    return {
        "first": float(costs[:first].max()),
        "perplexity_without_a_first_block": perplexity + float(costs[:first].max()),
        "first_is_dearest": bool(np.argmax(costs) < first),
        "trend": trend_past_first(costs.tolist()),
        "rises": trend_rises(costs.tolist()),
        "shallow": float(np.median(costs[first : max(first + 1, len(costs) // 2)])),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Δ perplexity against the block removed, log axis.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.ticker import MaxNLocator

    units = frame[frame["metric"] == "delta_perplexity"]
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.set_yscale("log")
        positive = units["value"][units["value"] > 0]
        axes.set_ylim(float(positive.min()) / 2.5, float(units["high"].max()) * 1.6)
        for scheme, rows in units.groupby("scheme", sort=False):
            _draw_scheme(axes, str(scheme), rows)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="block removed (0 = first)", ylabel="Δ perplexity", xlim=(-0.8, units["start"].max() + 0.8))
        axes.legend(loc="upper center", ncols=2)
        first = frame.iloc[0]
        intact = frame[frame["metric"] == "perplexity"].groupby("scheme", sort=False)["value"].median()
        words = ", ".join(f"{get_scheme(str(scheme)).label} {value:.2f}" for scheme, value in intact.items())
        seeds = frame["seed"].nunique()
        caption(
            figure,
            f"{first['n_sublayers']} sub-layers ({first['n_blocks']} blocks), width {first['width']}, trained on "
            f"{first['steps'] * first['tokens_per_step'] / 1e3:,.0f} thousand bytes; perplexity per byte of the full models "
            f"(median): {words}. n = {first['n_predictions']:,} predictions of validation text, bars: 95 % over "
            f"{first['samples']}, first seed; thin: the other seeds ({seeds} in all); hollow, on the edge: not above 0; "
            f"{first['device']}. Paper, without its first blocks: Pre-LN's perplexity exceeds 1e4, beyond this axis.",
        )
    return figure


def _draw_scheme(axes: Axes, scheme: str, rows: pd.DataFrame) -> None:
    style = scheme_style(scheme)
    for number, (_, of_seed) in enumerate(rows.groupby("seed")):
        label = get_scheme(scheme).label if number == 0 else ""
        draw_costs(axes, of_seed, color=style.color, marker=style.marker, bars=number == 0, label=label)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw this figure from the command line."""
    from figures.pipeline import run_main

    run_main(NAME, arguments)


# %%
if __name__ == "__main__":
    main()
