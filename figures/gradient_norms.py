# %%
"""Gradient norm against depth: the picture behind the paper's Eqs. (13)-(19), measured on a checkpoint.

Above, the norm of the loss gradient with respect to the residual stream at every sub-layer boundary, full and shortcut-only;
below, the gradient norm of each sub-layer's parameters, attention and FFN marked. Both on a log axis; what has no place
there (exact zero, NaN, infinity, no gradient) stands at the edge with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._style import paper_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SETTINGS", "compute", "draw", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"checkpoint": "smollm2", "n_tokens": 64, "seq_len": 32},
        "cpu": {"checkpoint": "smollm2", "n_tokens": 2048, "seq_len": 512},
        "gpu": {"checkpoint": "smollm2", "n_tokens": 65536, "seq_len": 2048, "device": "cuda"},
    }
)

_COLORS = {"attention": "#0077bb", "ffn": "#ee7733", "block": "#009988", "stream": "#333333", "shortcut": "#cc3311"}
_MARKERS = {"attention": "o", "ffn": "^", "block": "s"}
_NAMES = {"attention": "attention", "ffn": "FFN", "block": "whole block"}
_MANY = 200
_WORDS = {"zero": "exactly 0", "nan": "NaN", "inf": "infinite", "none": "no gradient"}


def compute(
    *,
    folder: Path | None = None,
    checkpoint: str = "smollm2",
    n_tokens: int = 2048,
    seq_len: int = 512,
    device: str = "cpu",
) -> pd.DataFrame:
    """Measure a checkpoint on the default text.

    Args:
        folder: not needed: two passes per batch.
        checkpoint: what ``keel grad-norm`` takes.
        n_tokens: tokens in all.
        seq_len: tokens per sequence.
        device: cpu or cuda.

    Returns:
        The tidy frame of ``GradientNorms.to_frame()``, with checkpoint, tokens, dtype and device in every row.
    """
    from probes.checkpoint import load_checkpoint
    from probes.gradient_norms import measure_gradient_norms
    from probes.text import checkpoint_batches, default_text

    loaded = load_checkpoint(checkpoint)
    batches = checkpoint_batches(loaded, default_text(), n_tokens=n_tokens, seq_len=seq_len)
    result = measure_gradient_norms(loaded.model.to(device), batches, layout=loaded.layout)
    return result.to_frame().assign(checkpoint=checkpoint, n_tokens=result.n_tokens, dtype=result.dtype, device=device)


def draw(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """Two panels over depth.

    Args:
        frame: rows of one model, as :func:`compute` returns them.
        title: what was measured; the model's family and depth by default.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure as NewFigure

    with paper_style():
        figure = NewFigure(figsize=(7.0, 5.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _draw_stream(above, frame)
        _draw_parameters(below, frame)
        first = frame.iloc[0]
        figure.suptitle(title or f"{first.family}: {first.n_blocks} blocks / {first.n_sublayers} sub-layers", fontsize="medium")
        below.set_xlabel("\n".join(["sub-layers passed (0 = embedding output)", *_sample_words(frame)]))
        below.margins(x=0.02)
        figure.draw_without_rendering()  # inside the style, so that it is the style's fonts that the layout sees
    return figure


def _sample_words(frame: pd.DataFrame) -> list[str]:
    """What was measured on what, of frames that know it."""
    if not {"checkpoint", "n_tokens", "dtype", "device"} <= set(frame.columns):
        return []
    first = frame.iloc[0]
    return [
        f"{first.checkpoint} · n = {first.n_batches} batches, {first.n_tokens:,} tokens · whiskers: one standard error · "
        f"{first['dtype']}, {first['device']}"
    ]


def _draw_stream(axes: Axes, frame: pd.DataFrame) -> None:
    boundaries = frame[frame.kind == "boundary"]
    full = boundaries[boundaries.metric == "stream_grad_norm"]
    alone = boundaries[(boundaries.metric == "shortcut_grad_norm") & (boundaries.status != "none")]
    axes.set_yscale("log")
    _line(axes, alone, "index", color=_COLORS["shortcut"], linestyle="--", label="shortcut only (branches held constant)")
    inside = full[full.place != "final norm"]
    _line(axes, inside, "index", color=_COLORS["stream"], linewidth=0.9, label="full gradient")
    size = _marker_size(len(full))
    for kind, marker in _MARKERS.items():
        after = inside[inside.place.str.endswith(f" {kind}")]
        if not after.empty:
            style: dict[str, Any] = {"color": _COLORS[kind], "marker": marker, "linestyle": "none", "mew": 0, "zorder": 3}
            _line(axes, after, "index", markersize=size, label=f"after {_NAMES[kind]}", **style)
    last = full[full.place == "final norm"]
    if not last.empty:
        style = {"color": _COLORS["stream"], "marker": "D", "mfc": "white", "linestyle": "none"}
        _line(axes, last, "index", markersize=4, label="after the final norm", **style)
    axes.set_ylabel("stream gradient norm\n(nats/token per unit)")
    _legend(axes)
    _mark_missing(axes, full, "index")


def _draw_parameters(axes: Axes, frame: pd.DataFrame) -> None:
    rows = frame[(frame.metric == "param_grad_norm") & (frame["sublayer"] >= 0)]
    axes.set_yscale("log")
    size = _marker_size(len(rows))
    for kind, group in rows.groupby("kind", sort=True):
        style: dict[str, Any] = {"color": _COLORS[str(kind)], "marker": _MARKERS[str(kind)], "linestyle": "none", "mew": 0}
        _line(axes, group, "sublayer", markersize=size, label=_NAMES[str(kind)], offset=1, **style)
    axes.set_ylabel("parameter gradient norm\n(nats/token per unit)")
    _legend(axes)
    _mark_missing(axes, rows, "sublayer", offset=1)


def _legend(axes: Axes) -> None:
    """Above the axes, where it covers no point."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, columnspacing=1.2, markerscale=1.5)


def _line(axes: Axes, rows: pd.DataFrame, x: str, *, offset: int = 0, **style: Any) -> None:
    """Points with a place on a log axis; the line breaks where there is none. Whiskers are one standard error."""
    drawable = rows.status.isin(["ok", "underflow"])
    value = rows.value.where(drawable)
    error = rows.standard_error.where(rows.standard_error < rows.value).fillna(0)  # none for a single batch
    faint = len(rows) > _MANY
    axes.errorbar(rows[x] + offset, value, yerr=error, elinewidth=0.2 if faint else 0.6, **style)


def _mark_missing(axes: Axes, rows: pd.DataFrame, x: str, *, offset: int = 0) -> None:
    """Crosses at the edge of the axes for what no log axis can show, and in words how many."""
    for height, statuses in ((0.02, ("zero", "none")), (0.98, ("nan", "inf"))):
        for position, status in enumerate(statuses):
            places = rows.loc[rows.status == status, x] + offset
            if places.empty:
                continue
            axes.plot(
                places, [height] * len(places), "x", color="#ee3377", transform=axes.get_xaxis_transform(), clip_on=False, ms=4
            )
            low = height < 0.5
            axes.text(
                0.25 + 0.5 * position,
                height + (0.06 if low else -0.06),
                f"× {_WORDS[status]}: {len(places)} of {len(rows)}",
                color="#ee3377",
                transform=axes.transAxes,
                ha="center",
                va="bottom" if low else "top",
                fontsize="small",
            )


def _marker_size(n_points: int) -> float:
    """From 6 points to over 1,000: large enough to see, small enough not to merge."""
    return float(max(1.2, min(4.5, 45.0 / max(n_points, 1) ** 0.6)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("gradient_norms", arguments)


# %%
if __name__ == "__main__":
    main()
