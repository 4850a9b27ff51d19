# %%
r"""The full gradient beside the gradient on shortcuts alone, at initialisation. No figure of the paper: it tests its argument.

The paper's Eqs. (13)-(19) keep the shortcut term of every sub-layer's Jacobian and drop the branch's. Real models are measured
here by the toolkit's own probe, with the branches held constant and without: each norm over its value at the top of the stack.
Their depth profiles stand above; what is left below the first block, against the depth of the model, stands below.

The closed form takes the branch sizes measured in the same model, :math:`\rho_l = A_l / \sqrt{A_l^2 r_l^2 + B_l^2 s_l^2}` where
the sum is normalised and :math:`A_l` where it is not, with r and s the root mean squares of stream and branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import TWO_COLUMNS, caption
from figures._findings import spread_over_seeds
from figures._style import label_line_ends, paper_style, scheme_style
from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from numpy.typing import NDArray

    from keel_theory.spec import ResidualSpec
    from probes.config import ModelConfig
    from probes.gradient_result import GradientNorms

__all__ = ["SETTINGS", "bottom_gains", "closed_form_gains", "compute", "draw", "finding", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {
            "schemes": ["post_ln", "pre_ln", "keel"],
            "ffns": ["swiglu", "relu"],
            "blocks": [2, 4],
            "width": 32,
            "seeds": [0, 1, 2],
            "seq_len": 16,
        },
        "cpu": {
            "schemes": ["post_ln", "pre_ln", "keel"],
            "ffns": ["swiglu", "relu"],
            "blocks": [4, 8, 16, 32, 64],
            "width": 512,
            "seeds": [0, 1, 2],
            "seq_len": 64,
        },
        "gpu": {
            "schemes": ["post_ln", "pre_ln", "keel"],
            "ffns": ["swiglu", "relu"],
            "blocks": [4, 8, 16, 32, 64, 128, 256],
            "width": 1024,
            "seeds": [0, 1, 2, 3, 4],
            "seq_len": 512,
            "device": "cuda",
        },
    }
)
_BATCH = 2
_FFN_WORDS = {"swiglu": "SwiGLU (gated)", "relu": "ReLU (not gated)", "gelu": "GELU (not gated)"}
_FIRST_BLOCK = 2
"""Boundary after the first block: the embedding's size, and Keel's rule for the first block, are behind it."""
_CLOSED, _GREY = "#111111", "#555555"


def compute(
    *,
    folder: Path | None = None,
    schemes: Sequence[str] = ("post_ln", "pre_ln", "keel"),
    ffns: Sequence[str] = ("swiglu", "relu"),
    blocks: Sequence[int] = (4, 8, 16, 32, 64),
    width: int = 512,
    seeds: Sequence[int] = (0, 1, 2),
    seq_len: int = 64,
    device: str = "cpu",
) -> pd.DataFrame:
    """Measure fresh models whose matrices all have the standard deviation 1/sqrt(width).

    Args:
        folder: not needed: nothing is trained.
        schemes: names.
        ffns: kinds of FFN.
        blocks: depths, two sub-layers each.
        width: of the residual stream; heads of 64 at most, FFN three times as wide.
        seeds: of the weights and of the text's place.
        seq_len: bytes per sequence, two sequences.
        device: cpu or cuda.

    Returns:
        One row per boundary of the stream: its gradient norms, full and shortcut-only, and the closed form's shortcut gain,
        each over its value at the last boundary before the final norm, dimensionless; and the sizes that the closed form takes.
    """
    import pandas as pd

    from probes.gradient_norms import measure_gradient_norms
    from probes.model import Transformer

    rows: list[dict[str, Any]] = []
    for scheme, ffn, n_blocks, seed in product(schemes, ffns, blocks, seeds):
        config = _config(scheme, ffn, n_blocks, width, seed)
        measured = measure_gradient_norms(Transformer(config).to(device), [_text(seq_len, seed).to(device)])
        constant = {"scheme": scheme, "ffn": ffn, "n_sublayers": config.n_sublayers, "width": width, "seed": seed}
        size = {"init_std": config.init_std, "n_tokens": measured.n_tokens, "device": device}
        rows += [{**constant, **row, **size} for row in _rows(config, measured)]
    return pd.DataFrame(rows)


def _config(scheme: str, ffn: Any, n_blocks: int, width: int, seed: int) -> ModelConfig:
    from probes.config import ModelConfig

    heads = max(2, width // 64)
    return ModelConfig(
        scheme=scheme,
        ffn=ffn,
        n_blocks=n_blocks,
        width=width,
        ffn_width=3 * width,
        n_heads=heads,
        n_kv_heads=heads // 2,
        init_std=width**-0.5,
        seed=seed,
    )


def _text(seq_len: int, seed: int) -> Any:
    """Two sequences of the default text as bytes, another place for every seed."""
    import torch

    from probes.text import default_text

    need = _BATCH * seq_len
    content = default_text().encode()[seed * need : (seed + 1) * need]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long().view(_BATCH, seq_len)


def _rows(config: ModelConfig, measured: GradientNorms) -> Iterator[dict[str, Any]]:
    inside = measured.boundaries[: config.n_sublayers + 1]
    top = inside[-1]
    stream = np.array([boundary.stream_rms.value for boundary in inside])
    branch = np.array([sublayer.branch_rms.value for sublayer in measured.sublayers])
    closed = closed_form_gains(config.specs(), stream[:-1], branch)
    below = np.append(np.exp(np.cumsum(np.log(closed)[::-1])[::-1]), 1.0)
    for i, boundary in enumerate(inside):
        yield {
            "boundary": i,
            "full": boundary.stream_grad.value / top.stream_grad.value,
            "shortcut": boundary.shortcut_grad.value / top.shortcut_grad.value,
            "closed_form": below[i],
            "stream_rms": stream[i],
            "branch_rms": branch[i] if i < len(branch) else np.nan,
        }


def closed_form_gains(
    specs: Sequence[ResidualSpec], stream_rms: NDArray[np.float64], branch_rms: NDArray[np.float64]
) -> NDArray[np.float64]:
    r"""Shortcut gain of each sub-layer from the measured sizes of stream and branch.

    .. math:: \rho = A / \sqrt{A^2 r^2 + B^2 s^2}

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (14) and (18), with measured sizes in the place of unit ones.
    Status: leading order in 1/width.   Assumes: stream and branch uncorrelated, unit weights of the norms, no gate.

    Args:
        specs: of the sub-layers, first to last.
        stream_rms: r of each sub-layer's input, shape (n_sublayers,).
        branch_rms: s of each branch, shape (n_sublayers,).

    Returns:
        Dimensionless, shape (n_sublayers,).

    Example:
        >>> specs = get_scheme("post_ln").specs(2)
        >>> closed_form_gains(specs, np.ones(2), np.ones(2)).round(4).tolist()
        [0.7071, 0.7071]
    """
    shortcut = np.array([spec.shortcut_scale for spec in specs])
    added = np.array([spec.branch_scale for spec in specs]) * branch_rms
    normed = np.array([spec.norm_out is not NormKind.NONE for spec in specs])
    gains: NDArray[np.float64] = np.where(normed, shortcut / np.hypot(shortcut * stream_rms, added), shortcut)
    return gains


def bottom_gains(frame: pd.DataFrame) -> pd.DataFrame:
    """What is left of each gradient below the first block, by model.

    Args:
        frame: of :func:`compute`.

    Returns:
        One row per scheme, FFN, depth and seed: columns full, shortcut, closed_form, dimensionless.
    """
    keys = ["scheme", "ffn", "n_sublayers", "seed"]
    return frame[frame["boundary"] == _FIRST_BLOCK].set_index(keys)[["full", "shortcut", "closed_form"]].reset_index()


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """What is left of both gradients at the bottom of the deepest models.

    Args:
        frame: of :func:`compute`.

    Returns:
        Depth and width, and per FFN and scheme the gradient below the first block over that at the top, over seeds: full,
        shortcut-only, and the closed form of the latter, dimensionless; the last two also per sub-layer, as the geometric mean
        of the median; and what Eq. 15 says for weights of 1, 1 / 2^(L/2) over all sub-layers and 1/sqrt(2) over one.
    """
    deepest = frame[frame["n_sublayers"] == frame["n_sublayers"].max()]
    gains = bottom_gains(deepest)
    kinds = ("full", "shortcut", "closed_form")
    n_sublayers = int(deepest["n_sublayers"].iloc[0])
    return {
        "n_sublayers": n_sublayers,
        "eq_15": 2.0 ** (-n_sublayers / 2),
        "eq_15_per_sublayer": 2.0**-0.5,
        "width": int(deepest["width"].iloc[0]),
        **{
            str(ffn): {
                str(scheme): {
                    **{kind: spread_over_seeds(rows[kind].tolist()) for kind in kinds},
                    **{f"{kind}_per_sublayer": float(rows[kind].median() ** (1 / n_sublayers)) for kind in kinds[1:]},
                }
                for scheme, rows in of_ffn.groupby("scheme", sort=False)
            }
            for ffn, of_ffn in gains.groupby("ffn", sort=False)
        },
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Profiles of the deepest model above, gains against depth below; one column per FFN.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of page width.
    """
    from matplotlib.figure import Figure as NewFigure

    ffns = list(dict.fromkeys(frame["ffn"]))
    deepest = int(frame["n_sublayers"].max())
    with paper_style():
        figure = NewFigure(figsize=(TWO_COLUMNS, 5.6), layout="constrained")
        axes = figure.subplots(2, len(ffns), sharey="row", squeeze=False)
        for column, ffn in enumerate(ffns):
            mine = frame[frame["ffn"] == ffn]
            _profiles(axes[0, column], mine[mine["n_sublayers"] == deepest])
            _against_depth(axes[1, column], bottom_gains(mine))
            axes[0, column].set_title(f"{_FFN_WORDS[ffn]} FFN, {deepest} sub-layers")
            axes[0, column].set_xlabel("sub-layers passed (0 = embedding output)")
            axes[1, column].set_xlabel("depth of the model (sub-layers)")
        axes[0, 0].set_ylabel("gradient norm over its\nvalue at the top")
        axes[1, 0].set_ylabel("gradient norm below the first\nblock over its value at the top")
        figure.legend(handles=_handles(list(dict.fromkeys(frame["scheme"]))), loc="outside upper center", ncols=3)
        caption(figure, _words(frame))
        figure.draw_without_rendering()
        for axis in axes[1]:
            _name(axis)
        figure.draw_without_rendering()
    return figure


def _handles(schemes: Sequence[str]) -> list[Line2D]:
    """What colours and kinds of curve mean; one column each, so that there are two rows."""
    from matplotlib.lines import Line2D

    hollow: dict[str, Any] = {"marker": "o", "markersize": 3.2, "markerfacecolor": "white", "linestyle": "none"}
    dashes: dict[str, Any] = {"color": _CLOSED, "linewidth": 0.7, "linestyle": (0, (4, 2))}
    kinds = [
        Line2D([], [], color=_GREY, linewidth=1.6, label="full gradient"),
        Line2D([], [], color=_GREY, label="shortcut only, measured", **hollow),
        Line2D([], [], label="shortcut only, closed form", **dashes),
    ]
    names = [Line2D([], [], color=scheme_style(name).color, linewidth=3, label=get_scheme(name).label) for name in schemes]
    return [handle for pair in zip_longest(names, kinds) for handle in pair if handle is not None]


def _words(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    seeds = sorted(set(frame["seed"]))
    return (
        f"At initialisation, all matrices with standard deviation 1/√width; width {first['width']}, {first['n_tokens']} bytes "
        f"of text per model, loss in nats per token. Lines and markers: median of n = {len(seeds)} seeds; bands and whiskers: "
        f"smallest to "
        f"largest. Closed form: from the measured sizes of stream and branches; {first['device']}."
    )


def _profiles(axes: Axes, frame: pd.DataFrame) -> None:
    axes.set_yscale("log")
    for scheme, rows in frame.groupby("scheme", sort=False):
        color = scheme_style(str(scheme)).color
        grouped = rows.groupby("boundary")
        full, alone, closed = (grouped[name] for name in ("full", "shortcut", "closed_form"))
        x = np.array(sorted(set(rows["boundary"])))
        axes.fill_between(x, full.min(), full.max(), color=color, alpha=0.2, linewidth=0)
        axes.plot(x, full.median(), color=color, linewidth=1.6, label=f"full {scheme}")
        axes.plot(x, closed.median(), color=_CLOSED, linewidth=0.7, linestyle=(0, (4, 2)), zorder=3, label=f"closed {scheme}")
        some = np.unique(np.linspace(0, len(x) - 1, 14).round().astype(int))
        _whiskers(axes, alone.agg(["median", "min", "max"]).iloc[some], str(scheme))


def _against_depth(axes: Axes, gains: pd.DataFrame) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for scheme, rows in gains.groupby("scheme", sort=False):
        color = scheme_style(str(scheme)).color
        grouped = rows.groupby("n_sublayers")
        full, alone, closed = (grouped[name] for name in ("full", "shortcut", "closed_form"))
        x = np.array(sorted(set(rows["n_sublayers"])))
        axes.fill_between(x, full.min(), full.max(), color=color, alpha=0.2, linewidth=0)
        axes.plot(x, full.median(), color=color, linewidth=1.6, label=f"full {scheme}")
        axes.plot(x, closed.median(), color=_CLOSED, linewidth=0.7, linestyle=(0, (4, 2)), zorder=3, label=f"closed {scheme}")
        _whiskers(axes, alone.agg(["median", "min", "max"]), str(scheme))
    depths = sorted(set(gains["n_sublayers"]))
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()


def _whiskers(axes: Axes, spread: pd.DataFrame, scheme: str) -> None:
    """Hollow markers at the median, whiskers from the smallest to the largest; the index is x."""
    style = scheme_style(scheme)
    errors = [(spread["median"] - spread["min"]).clip(lower=0.0), (spread["max"] - spread["median"]).clip(lower=0.0)]
    axes.errorbar(
        spread.index,
        spread["median"],
        yerr=errors,
        color=style.color,
        marker=style.marker,
        markersize=3.2,
        markerfacecolor="white",
        markeredgewidth=0.8,
        elinewidth=0.6,
        linestyle="none",
        zorder=4,
        label=f"shortcut {scheme}",
    )


def _name(axes: Axes) -> None:
    """Name every scheme at the right end of its full gradient."""
    places, colors = {}, {}
    for line in axes.lines:
        kind, _, scheme = str(line.get_label()).partition(" ")
        if kind == "full":
            name = get_scheme(scheme).label
            places[name] = (float(np.asarray(line.get_xdata())[-1]), float(np.asarray(line.get_ydata())[-1]))
            colors[name] = scheme_style(scheme).color
    label_line_ends(axes, places, colors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("full_and_shortcut", arguments)


# %%
if __name__ == "__main__":
    main()
