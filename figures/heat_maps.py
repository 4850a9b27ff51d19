# %%
r"""Gradients over depth and time while training, Post-LN beside Keel. No figure of the paper: it shows why its Fig. 3 happens.

Both train up the same ramp of the learning rate. Each column of pixels is one profile over all sub-layers, measured before
that step's update; the curve above is the loss. Where Post-LN's loss settles at the unigram entropy, its tokens have become
alike in the upper sub-layers, and the gradient that reaches the lower ones has gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from figures._style import paper_style, scheme_style
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    from probes.config import FfnKind
    from probes.training import TrainingResult
    from probes.training_config import TrainingConfig

__all__ = ["SETTINGS", "compute", "draw", "finding", "landmark_rows", "main", "run_config"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"schemes": ["post_ln", "keel"], "n_blocks": 2, "steps": 60, "peak_lr": 5e-2, "n_profiles": 4, "seed": 0},
        "cpu": {"schemes": ["post_ln", "keel"], "n_blocks": 32, "steps": 300, "peak_lr": 5e-2, "n_profiles": 75, "seed": 0},
        "gpu": {
            "schemes": ["post_ln", "keel"],
            "n_blocks": 128,
            "steps": 2000,
            "peak_lr": 5e-2,
            "n_profiles": 200,
            "seed": 0,
            "width": 256,
            "device": "cuda",
        },
    }
)
ALIKE = 0.99
"""Cosine between tokens, dimensionless."""
VANISHED = 1e-3
"""Share of a gradient left at the bottom, dimensionless, below which it is said to have vanished."""
_BELOW_FIRST_BLOCK = 2
_MOST_RANGE = 1e-12
_GATED = "swiglu"
_FFN_WORDS = {"swiglu": "SwiGLU", "relu": "ReLU", "gelu": "GELU"}
_ENTROPIES = {"unigram_entropy": "unigram\nentropy", "bigram_entropy": "bigram\nentropy"}


class _Row(NamedTuple):
    metric: str
    label: str
    cmap: str
    logarithmic: bool


_ROWS = (
    _Row("stream_grad_norm", "gradient of the\nstream, norm", "cividis", True),
    _Row("shortcut_grad_norm", "the same, on\nshortcuts only", "cividis", True),
    _Row("token_cosine", "cosine between\ntokens", "viridis", False),
    _Row("branch_ratio", "branch over\nstream, RMS", "viridis", True),
    _Row("update_to_weight", "update over\nweight, norm", "viridis", True),
)


def compute(
    *,
    folder: Path | None = None,
    schemes: Sequence[str] = ("post_ln", "keel"),
    ffns: Sequence[FfnKind] = ("swiglu",),
    n_blocks: int = 32,
    steps: int = 300,
    peak_lr: float = 5e-2,
    n_profiles: int = 75,
    seed: int = 0,
    width: int = 64,
    device: str = "cpu",
) -> pd.DataFrame:
    """Train every scheme up one ramp over bytes.

    Args:
        folder: of the runs that can be resumed, one folder each; None trains in memory.
        schemes: names.
        ffns: kinds of FFN; each with every scheme, one column of the figure each.
        n_blocks: Transformer blocks, two sub-layers each.
        steps: of the ramp.
        peak_lr: at its end.
        n_profiles: profiles over depth, evenly spaced.
        seed: of weights and data.
        width: of the residual stream; heads of 16, FFN three times as wide.
        device: cpu or cuda.

    Returns:
        Tidy rows of every profile, of loss and learning rate at every step, and of the text's entropies (step 0), with the
        FFN, the tokens per step, the width and the device in every row. Its ``attrs`` hold each run's configuration and
        outcome.
    """
    import pandas as pd

    from probes.corpus import build_corpus
    from probes.training import train

    configs = {
        (ffn, scheme): run_config(
            scheme,
            ffn=ffn,
            n_blocks=n_blocks,
            steps=steps,
            peak_lr=peak_lr,
            n_profiles=n_profiles,
            seed=seed,
            width=width,
            device=device,
        )
        for ffn, scheme in product(ffns, schemes)
    }
    corpus = build_corpus()
    frames, facts = [], []
    for (ffn, scheme), config in configs.items():
        result = train(config, corpus=corpus, folder=None if folder is None else folder / f"{scheme}-{config.key}")
        parts = (result.dynamics().query("sublayer >= 0"), result.to_frame(), landmark_rows(result))
        frames += [part.assign(ffn=ffn, tokens_per_step=config.batch_size * config.seq_len) for part in parts]
        facts.append(result.to_dict())
    frame = pd.concat(frames, ignore_index=True).astype({"value": "float32"}).assign(width=width, device=device)
    frame.attrs["runs"] = facts
    return frame


def run_config(
    scheme: str,
    *,
    ffn: FfnKind,
    n_blocks: int,
    steps: int,
    peak_lr: float,
    n_profiles: int,
    seed: int,
    width: int,
    device: str,
) -> TrainingConfig:
    """What :func:`compute` trains for one scheme and FFN; its arguments, one at a time.

    Raises:
        ConfigError: if there is no such model.
        TrainingConfigError: if the ramp cannot be run, such as one that is too short to be judged.
    """
    from probes.max_learning_rate import cpu_preset
    from probes.training import evenly_spaced

    plain = cpu_preset(scheme)
    heads, kv_heads = width // 16, max(1, width // 32)
    model = replace(
        plain.model, ffn=ffn, n_blocks=n_blocks, width=width, ffn_width=3 * width, n_heads=heads, n_kv_heads=kv_heads
    )
    probe_steps = evenly_spaced(steps, n_profiles)
    return replace(plain, model=model, steps=steps, peak_lr=peak_lr, probe_steps=probe_steps, device=device).with_seed(seed)


def landmark_rows(result: TrainingResult) -> pd.DataFrame:
    """The entropies of a run's text as rows of step 0, nats per token."""
    rows = result.to_frame().head(len(_ENTROPIES))
    values = [result.corpus[name] for name in _ENTROPIES]
    return rows.assign(step=0, metric=list(_ENTROPIES), value=values, unit="nats/token")


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """How far the gradient falls on its way down while training, and whether the tokens are alike by then.

    What is left of a gradient is its norm below the first block over that at the top of the stack. Tokens count as alike where
    the median over depth of their mean cosine is :data:`ALIKE` or more.

    Args:
        frame: of :func:`compute`, one seed; without a column of FFNs it is the gated one's.

    Returns:
        Depth, steps, and per FFN and scheme: what is left of the full and of the shortcut-only gradient at the first profile
        and where the full one is lowest (with that step, that cosine, and the one at the top), the first profile at which it is
        below :data:`VANISHED` with its learning rate and loss (None if none), the first at which tokens are alike (None if
        none), the highest cosine and what is left of the full gradient there, and the mean loss of
        the last twentieth of the steps (nats per token).
    """
    frame = frame if "ffn" in frame.columns else frame.assign(ffn=_GATED)
    return {
        "n_sublayers": int(frame["n_sublayers"].iloc[0]),
        "steps": int(frame["step"].max()),
        "peak_lr": float(frame.loc[frame["metric"] == "lr", "value"].max()),
        "unigram_entropy": float(frame.loc[frame["metric"] == "unigram_entropy", "value"].iloc[0]),
        **{
            str(ffn): {str(scheme): _course(rows) for scheme, rows in of_ffn.groupby("scheme", sort=False)}
            for ffn, of_ffn in frame.groupby("ffn", sort=False)
        },
    }


def _course(run: pd.DataFrame) -> dict[str, Any]:
    """What one run says."""
    full, shortcut = (_left(run, metric) for metric in ("stream_grad_norm", "shortcut_grad_norm"))
    cosines = run[run["metric"] == "token_cosine"]
    cosine = cosines.groupby("step")["value"].median()
    at_top = cosines[cosines["sublayer"] == cosines["sublayer"].max()].set_index("step")["value"]
    lowest, closest = int(full.index.to_numpy()[full.argmin()]), int(cosine.index.to_numpy()[cosine.argmax()])
    alike = cosine.index[cosine >= ALIKE]
    losses = run[(run["metric"] == "loss") & (run["sublayer"] == -1)].sort_values("step")["value"]
    return {
        "start_full": float(full.iloc[0]),
        "start_shortcut": float(shortcut.iloc[0]),
        "lowest_full": float(full.loc[lowest]),
        "lowest_step": lowest,
        "shortcut_there": float(shortcut.loc[lowest]),
        "cosine_there": float(cosine.loc[lowest]),
        "top_cosine_there": float(at_top.loc[lowest]),
        "vanishes": _first_below(full, run),
        "alike_from": int(alike[0]) if len(alike) else None,
        "highest_cosine": float(cosine.loc[closest]),
        "highest_cosine_step": closest,
        "full_at_highest_cosine": float(full.loc[closest]),
        "last_loss": float(losses.iloc[-max(1, len(losses) // 20) :].mean()),
    }


def _first_below(full: pd.Series[float], run: pd.DataFrame) -> dict[str, float | int] | None:
    """The first profile at which what is left of the full gradient is below :data:`VANISHED`."""
    below = full.index[full < VANISHED]
    if not len(below):
        return None
    here = run[(run["step"] == below[0]) & (run["sublayer"] == -1)].set_index("metric")["value"]
    step = int(below[0])
    return {"step": step, "left": float(full.loc[step]), "lr": float(here["lr"]), "loss": float(here["loss"])}


def _left(run: pd.DataFrame, metric: str) -> pd.Series[float]:
    """Gradient norm below the first block over that at the top, by step."""
    rows = run[run["metric"] == metric]
    table = rows.pivot_table(index="step", columns="sublayer", values="value", dropna=False).astype(float)
    top = int(run["sublayer"].max())
    left: pd.Series[float] = table[min(_BELOW_FIRST_BLOCK, top)] / table[top]
    return left


def draw(frame: pd.DataFrame) -> Figure:
    """One column per FFN and scheme, one row per metric, one colour scale per row.

    Args:
        frame: of :func:`compute`, or ``dynamics()``, ``to_frame()`` and :func:`landmark_rows` of any runs together.

    Returns:
        A figure of page width.
    """
    from matplotlib.figure import Figure as NewFigure

    runs = _runs(frame)
    with paper_style():
        figure = NewFigure(figsize=(7.0, 7.8), layout="constrained")
        axes = figure.subplots(1 + len(_ROWS), len(runs), sharex=True, squeeze=False, height_ratios=[1.1] + [1] * len(_ROWS))
        for column, run in enumerate(runs):
            _loss_curve(axes[0, column], run, words=column == len(runs) - 1)
            axes[0, column].set_title(_title(run, len(runs)))
        _share_y(axes[0])
        for i, row in enumerate(_ROWS, start=1):
            _heat_maps(figure, axes[i], runs, row)
        figure.supxlabel(f"{_step_words(frame)}\n{_size_words(frame)}", size=8)
        for left in axes[1:, 0]:
            left.set_ylabel("sub-layer")
        for other in axes[:, 1:].flat:
            other.tick_params(labelleft=False)
        figure.draw_without_rendering()  # inside the style, so that it is the style's fonts that the layout sees
    return figure


def _runs(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """One frame per FFN and scheme, in order; frames of ``keel train`` do not name the FFN."""
    keys = ["ffn", "scheme"] if "ffn" in frame.columns else ["scheme"]
    return [rows for _, rows in frame.groupby(keys, sort=False)]


def _title(run: pd.DataFrame, n_runs: int) -> str:
    """Scheme and depth, or scheme and FFN where there is little room."""
    label = get_scheme(str(run["scheme"].iloc[0])).label
    if n_runs > 2:
        return f"{label}, {_FFN_WORDS[run['ffn'].iloc[0]]}"
    return f"{label}, {int(run['n_sublayers'].iloc[0])} sub-layers"


def _loss_curve(axes: Axes, frame: pd.DataFrame, *, words: bool) -> None:
    """The loss beside the text's entropies, which the last column names outside its axes."""
    scheme = str(frame["scheme"].iloc[0])
    loss = frame[(frame["metric"] == "loss") & (frame["sublayer"] == -1)].sort_values("step")
    axes.plot(loss["step"], loss["value"], color=scheme_style(scheme).color, linewidth=0.9)
    for metric, name in _ENTROPIES.items():
        level = frame.loc[frame["metric"] == metric, "value"]
        if len(level):
            axes.axhline(float(level.iloc[0]), color="#444444", linewidth=0.8, linestyle=(0, (4, 2)))
            if words:
                label = axes.text(1.02, float(level.iloc[0]), name, transform=axes.get_yaxis_transform(), size=7, va="center")
                label.set_in_layout(False)  # there is room above the colour bars
    axes.set_ylabel("loss\n(nats/token)")
    axes.label_outer()


def _step_words(frame: pd.DataFrame) -> str:
    rates = frame[frame["metric"] == "lr"].sort_values("step")["value"]
    return f"optimizer step (learning rate {'rises from 0' if rates.is_monotonic_increasing else 'up'} to {rates.max():g})"


def _size_words(frame: pd.DataFrame) -> str:
    """Size, seeds and device, of frames that know them."""
    seeds = sorted(set(frame["seed"]))
    words = [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", "n = 1 run per scheme"]
    if {"width", "device"} <= set(frame.columns):
        words = [f"width {int(frame['width'].iloc[0])}", *words, str(frame["device"].iloc[0])]
    if "tokens_per_step" in frame.columns:
        words.insert(-1, f"{int(frame['tokens_per_step'].iloc[0])} tokens (bytes) per step")
    if "ffn" in frame.columns:
        words.insert(0, f"{' and '.join(_FFN_WORDS[ffn] for ffn in frame['ffn'].unique())} FFN")
    return " · ".join(words)


def _share_y(row: np.ndarray) -> None:
    limits = np.array([axes.get_ylim() for axes in row])
    for axes in row:
        axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())


def _heat_maps(figure: Figure, row: np.ndarray, runs: Sequence[pd.DataFrame], what: _Row) -> None:
    tables = [_table(run, what.metric) for run in runs]
    norm = _scale([values for _, _, values in tables], what)
    for axes, (steps, depth, values) in zip(row, tables, strict=True):
        image = axes.pcolormesh(_edges(steps), _edges(depth), values, cmap=what.cmap, norm=norm, rasterized=True)
        axes.set_facecolor("#cccccc")  # where nothing is measurable: zero, or not a number
        axes.grid(visible=False)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(depth[0] - 0.5, depth[-1] + 0.5)
    figure.colorbar(image, ax=list(row), label=what.label, extend="both", pad=0.01, aspect=9)


def _table(run: pd.DataFrame, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, sub-layers and values (sub-layer by step) of one metric."""
    found = run[run["metric"] == metric]
    table = found.pivot_table(index="sublayer", columns="step", values="value")
    return table.columns.to_numpy(float), table.index.to_numpy(float), table.to_numpy(float)


def _scale(values: list[np.ndarray], what: _Row) -> Normalize:
    """One scale for the whole row, from the first to the last percentile, logarithmic ones over twelve decades at most."""
    from matplotlib.colors import LogNorm
    from matplotlib.colors import Normalize as Linear

    joined = np.concatenate([v.ravel() for v in values])
    known = joined[np.isfinite(joined) & ((joined > 0) if what.logarithmic else True)]
    if not len(known):
        return Linear(0.0, 1.0)  # the row stays grey
    if not what.logarithmic:
        return Linear(min(0.0, float(np.quantile(known, 0.01))), 1.0)
    low, high = np.quantile(known, [0.01, 0.99])
    return LogNorm(float(max(low, high * _MOST_RANGE)), float(max(high, 1.01 * low)))


def _edges(centres: np.ndarray) -> np.ndarray:
    """Borders half way between neighbours; a single one is one wide."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the heat maps; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("heat_maps", arguments)


# %%
if __name__ == "__main__":
    main()
