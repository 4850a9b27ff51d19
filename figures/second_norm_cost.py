# %%
r"""What Keel's second norm costs, by width: floating-point operations, counted, and time, measured. No figure of the paper.

A sub-layer of Keel has two norms, of Post-LN and of Pre-LN one. Operations of one training step's forward and backward pass are
those that ``torch.utils.flop_counter`` counts (matrix products and attention) plus an exact count of the norms and the scaled
shortcuts, which it leaves out. Times are those of the same passes, the schemes taking turns; what counts is the ratio of two
schemes in one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from figures._curves import ONE_COLUMN, caption
from figures._style import label_line_ends, paper_style, scheme_style
from keel_theory.schemes import get_scheme
from keel_theory.spec import NormKind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from keel_theory.spec import ResidualSpec
    from probes.config import ModelConfig
    from probes.model import Transformer

__all__ = ["SETTINGS", "compute", "draw", "main", "overheads", "uncounted_flops"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smoke": {"widths": [32, 64], "n_blocks": 1, "batch_size": 1, "seq_len": 16, "rounds": 3},
        "cpu": {"widths": [64, 128, 256, 512, 1024], "n_blocks": 2, "batch_size": 2, "seq_len": 128, "rounds": 15},
        "gpu": {
            "widths": [256, 512, 1024, 2048, 4096],
            "n_blocks": 8,
            "batch_size": 8,
            "seq_len": 2048,
            "rounds": 31,
            "device": "cuda",
            "compute_dtype": "bfloat16",
        },
    }
)
_SCHEMES = ("keel", "post_ln", "pre_ln")
_MEASURED = "keel"
_FORWARD_PER_NORM, _BACKWARD_PER_NORM = 4, 8
"""Operations per entry: x², its sum, times the inverse root, times the weight; backward g = w dy, g x̂ and its sum, x̂ times
that mean, the difference, times the inverse root, and dy x̂ and its sum for the weight's gradient."""
_GREY = "#555555"
_PER_SCALE = 2
"""Forward and backward multiplication of the shortcut by its scale."""


def compute(
    *,
    folder: Path | None = None,
    widths: Sequence[int] = (64, 128),
    n_blocks: int = 2,
    batch_size: int = 2,
    seq_len: int = 128,
    rounds: int = 5,
    device: str = "cpu",
    compute_dtype: str = "float32",
) -> pd.DataFrame:
    """Count and time one forward and backward pass of Keel, Post-LN and Pre-LN at every width.

    Args:
        folder: not needed: nothing is trained.
        widths: of the residual stream; heads of 64 at most, FFN three times as wide.
        n_blocks: of each model; the first block, where Keel has a norm and scales less, is counted as it is.
        batch_size: sequences.
        seq_len: tokens per sequence.
        rounds: turns that are timed, after one that is not.
        device: cpu (seconds of one thread's CPU time) or cuda (seconds of wall time, synchronised).
        compute_dtype: of the branches.

    Returns:
        One row per width, scheme and round: seconds; and, the same in every round, operations.
    """
    import pandas as pd

    sizes = {"n_blocks": n_blocks, "batch_size": batch_size, "seq_len": seq_len, "rounds": rounds}
    rows: list[dict[str, Any]] = []
    for width in widths:
        configs = {name: _config(name, width, n_blocks, seq_len, compute_dtype) for name in _SCHEMES}
        steps = {name: _step(config, batch_size, seq_len, device) for name, config in configs.items()}
        counted = {name: _counted(steps[name]) for name in _SCHEMES}
        uncounted = {name: uncounted_flops(config) * batch_size * seq_len for name, config in configs.items()}
        for turn, name, seconds in _timed(steps, rounds, device):
            rows.append(
                {
                    "width": width,
                    "scheme": name,
                    "round": turn,
                    "seconds": seconds,
                    "flops": counted[name] + uncounted[name],
                    "norm_flops": uncounted[name],
                    **sizes,
                    "compute_dtype": compute_dtype,
                    "device": device,
                    "clock": "CPU time of one thread" if device == "cpu" else "wall time",
                }
            )
    return pd.DataFrame(rows)


def _config(scheme: str, width: int, n_blocks: int, seq_len: int, compute_dtype: Any) -> ModelConfig:
    from probes.config import ModelConfig

    heads = max(2, width // 64)
    return ModelConfig(
        scheme=scheme,
        n_blocks=n_blocks,
        width=width,
        ffn_width=3 * width,
        n_heads=heads,
        n_kv_heads=heads // 2,
        context_length=seq_len,
        compute_dtype=compute_dtype,
    )


def uncounted_flops(config: ModelConfig) -> int:
    """Operations of norms and scaled shortcuts per token, forward and backward, that a counter of matrix products leaves out.

    Status: exact count of the arithmetic of an RMSNorm as written, with its handful of operations per token left out.
    Assumes: RMSNorm; the width is the leading term.

    Args:
        config: of the model.

    Returns:
        A count.

    Example:
        >>> from probes.config import tiny
        >>> keel, post_ln = (uncounted_flops(tiny(name)) for name in ("keel", "post_ln"))
        >>> (keel - post_ln) // 64  # 8 sub-layers: 7 more norms at 12, 6 scaled shortcuts at 2
        96
    """
    per_norm = _FORWARD_PER_NORM + _BACKWARD_PER_NORM
    norms = sum(map(_n_norms, config.specs())) + int(config.final_norm)
    scaled = sum(spec.shortcut_scale != 1.0 for spec in config.specs())
    return config.width * (norms * per_norm + scaled * _PER_SCALE)


def _n_norms(spec: ResidualSpec) -> int:
    return sum(norm is not NormKind.NONE for norm in (spec.norm_in, spec.norm_branch, spec.norm_out))


def _step(config: ModelConfig, batch_size: int, seq_len: int, device: str) -> Callable[[], None]:
    """A forward and a backward pass through the blocks and the final norm."""
    import torch

    from probes.model import Transformer

    model: Transformer = Transformer(config).to(device)
    ids = torch.arange(batch_size * seq_len, device=device).view(batch_size, seq_len) % config.vocab_size

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(model.hidden(ids).square().mean())

    return step


def _counted(step: Callable[[], None]) -> int:
    """Matrix products, with attention as its plain products: the counter does not know the CPU's fused kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _timed(steps: Mapping[str, Callable[[], None]], rounds: int, device: str) -> Iterator[tuple[int, str, float]]:
    """Seconds of every scheme in every round, the order turning; the first round only warms up."""
    names = list(steps)
    with _one_thread():
        for turn in range(-1, rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                seconds = _seconds(steps[name], device)
                if turn >= 0:
                    yield turn, name, seconds


def _seconds(step: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    import torch

    torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def overheads(frame: pd.DataFrame) -> pd.DataFrame:
    """What Keel costs beyond another scheme, by width.

    Args:
        frame: of :func:`compute`.

    Returns:
        One row per width and other scheme: percent of its operations (``flops``), and the median, lower and upper quartile of
        the rounds' percent of its time (``seconds``, ``low``, ``high``).
    """
    import pandas as pd

    times = frame.pivot_table(index=["width", "round"], columns="scheme", values="seconds")
    counts = frame.pivot_table(index="width", columns="scheme", values="flops", aggfunc="first")
    rows = []
    for other in (name for name in _SCHEMES if name != _MEASURED):
        percent = 100 * (times[_MEASURED] / times[other] - 1)
        more_flops = 100 * (counts[_MEASURED] / counts[other] - 1)
        for width, values in percent.groupby(level="width"):
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
            flops = float(more_flops[width])
            rows.append({"width": width, "other": other, "flops": flops, "seconds": middle, "low": low, "high": high})
    return pd.DataFrame(rows)


def draw(frame: pd.DataFrame) -> Figure:
    """Time above, operations below, both in percent of the scheme with one norm.

    Args:
        frame: of :func:`compute`.

    Returns:
        A figure of column width.
    """
    from matplotlib.figure import Figure as NewFigure

    shares = overheads(frame)
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN, 3.9), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _times(above, shares)
        _counts(below, shares)
        widths = sorted(set(shares["width"]))
        below.set_xscale("log", base=2)
        below.set_xticks(widths, [str(width) for width in widths])
        below.minorticks_off()
        below.set_xlabel("width of the residual stream")
        above.set(ylabel="more time (%)")
        below.set(ylabel="more FLOP (%)")
        above.set_title(f"{get_scheme(_MEASURED).label}, two norms, beside one norm")
        caption(figure, _words(frame))
        figure.draw_without_rendering()
        _name(above, shares, "seconds")
        _name(below, shares, "flops")
        figure.draw_without_rendering()
    return figure


def _words(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    blocks = f"{first['n_blocks']} block{'s' if first['n_blocks'] > 1 else ''} (Keel's first sub-layer has one norm)"
    return (
        f"Forward and backward pass; {blocks}, {first['batch_size']} × {first['seq_len']} tokens, "
        f"{first['compute_dtype']}, {first['device']}. Time: {first['clock']}, median and quartiles of n = {first['rounds']} "
        f"interleaved rounds. FLOP: matrix products and attention by PyTorch's counter, norms and scaled shortcuts counted."
    )


def _times(axes: Axes, shares: pd.DataFrame) -> None:
    axes.axhline(0, color="#777777", linewidth=0.6, zorder=0)
    for shift, (other, rows) in zip((0.97, 1.03), shares.groupby("other", sort=False), strict=True):
        errors = [rows["seconds"] - rows["low"], rows["high"] - rows["seconds"]]
        axes.errorbar(
            shift * rows["width"], rows["seconds"], yerr=errors, elinewidth=0.8, capsize=2, **scheme_style(str(other)).line()
        )


def _counts(axes: Axes, shares: pd.DataFrame) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    for other, rows in shares.groupby("other", sort=False):
        axes.plot(rows["width"], rows["flops"], **scheme_style(str(other)).line())


def _name(axes: Axes, shares: pd.DataFrame, column: str) -> None:
    """Name both curves at their ends, together where they are one."""
    curves = {str(other): rows[["width", column]].to_numpy(float) for other, rows in shares.groupby("other", sort=False)}
    first, *others = curves
    same = all(np.allclose(curves[first], curves[other], rtol=1e-6) for other in others)
    groups = [list(curves)] if same else [[other] for other in curves]
    texts = {group[0]: "over " + "\nand ".join(get_scheme(other).label for other in group) for group in groups}
    label_line_ends(
        axes,
        {text: (float(curves[other][-1, 0]), float(curves[other][-1, 1])) for other, text in texts.items()},
        {text: _GREY if same else scheme_style(other).color for other, text in texts.items()},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("second_norm_cost", arguments)


# %%
if __name__ == "__main__":
    main()
