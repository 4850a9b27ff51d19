"""``keel grad-norm``: gradient norms of a checkpoint over depth, in one command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probes.cli._checkpoint_options import (
    BatchSize,
    CheckpointName,
    Device,
    Dtype,
    MaskSeed,
    SequenceLength,
    TextSource,
    TokenCount,
    TokenizerName,
    batch_progress,
    check_sizes,
    headline,
    torch_dtype,
)
from probes.cli._io import output_folder
from probes.cli._streaming import (
    DryRunOption,
    MaxMemoryOption,
    PlacementOption,
    StreamOption,
    forecast_streams,
    kept_run,
    n_bytes,
    opened,
    print_forecast,
    step_progress,
)

if TYPE_CHECKING:
    from probes.checkpoint import Checkpoint
    from probes.gradient_result import BoundaryReading, Estimate, GradientNorms
    from probes.streaming.model import StreamedCheckpoint
    from probes.streaming.run_state import RunState
    from probes.text import TokenBatch

__all__ = ["register"]

_MOST_ROWS = 48


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("grad-norm")(grad_norm)


def grad_norm(
    checkpoint: CheckpointName,
    text: TextSource = None,
    tokenizer: TokenizerName = None,
    tokens: TokenCount = 2048,
    seq_len: SequenceLength = None,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    device: Device = "cpu",
    stream: StreamOption = None,
    max_memory: MaxMemoryOption = None,
    placement: PlacementOption = None,
    dry_run: DryRunOption = False,
    seed: MaskSeed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for Parquet, JSON, PNG and SVG.", show_default=False)
    ] = None,
) -> None:
    """Gradient norms of every block and sub-layer of a checkpoint, from one forward and one backward pass per batch.

    \b
    Example:
      keel grad-norm smollm2 --tokens 2048 -o out
      keel grad-norm llama-70b --stream --dry-run
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    check_sizes(tokens, seq_len, batch_size)
    from probes.device import resolve_device

    chosen_dtype, chosen_device, memory = torch_dtype(dtype), resolve_device(device), n_bytes(max_memory)
    from probes.text import checkpoint_batches, read_text

    content, text_name = read_text(text)
    if dry_run:
        stream = forecast_streams(
            checkpoint, dtype=chosen_dtype, device=chosen_device, stream=stream, max_memory=memory, placement=placement
        )
    with ExitStack() as stack:
        folder = stack.enter_context(output_folder(None if dry_run else output))
        loaded, streamed = stack.enter_context(
            opened(
                checkpoint,
                dtype=chosen_dtype,
                device=chosen_device,
                stream=stream,
                max_memory=memory,
                placement=placement,
                tokenizer=tokenizer,
                gradients=True,
            )
        )
        batches = checkpoint_batches(
            loaded, content, n_tokens=tokens, seq_len=seq_len, batch_size=batch_size, seed=seed, source=text_name
        )
        if dry_run and streamed is not None:
            from probes.streaming.forecast import forecast_gradient_norms

            print_forecast(forecast_gradient_norms(streamed, batches), as_json)
            return
        if streamed is not None:
            state = stack.enter_context(kept_run(streamed, batches, "grad-norm", {}, output))
            result = _streamed(streamed, batches, state)
        else:
            from probes.gradient_norms import measure_gradient_norms

            with batch_progress(len(batches)) as advance:
                result = measure_gradient_norms(loaded.model, batches, layout=loaded.layout, on_batch=advance)
        record = _record(result, loaded, text_name, seed)
        if folder is not None:
            _write(folder, result, record, loaded)
    for warning in [*loaded.warnings, *result.warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(record, indent=2, allow_nan=False) if as_json else _table(result, loaded, text_name))
    if output is not None:
        print(f"wrote grad_norm.parquet, .json, .png, .svg to {output}", file=sys.stderr)


def _streamed(streamed: StreamedCheckpoint, batches: Sequence[TokenBatch], state: RunState) -> GradientNorms:
    from probes.streaming.gradients import measure_streamed_gradient_norms

    with step_progress("blocks forward, head, blocks backward, embedding") as advance:
        return measure_streamed_gradient_norms(streamed, batches, state=state, on_step=advance)


def _record(result: GradientNorms, loaded: Checkpoint, text_name: str, seed: int) -> dict[str, object]:
    from probes.provenance import provenance

    return {
        "checkpoint": str(loaded.source),
        "tokenizer": loaded.tokenizer.name,
        "text": text_name,
        "seed": seed,
        "warnings": [*loaded.warnings, *result.warnings],
        **result.to_dict(),
        "provenance": provenance(),
    }


def _write(folder: Path, result: GradientNorms, record: dict[str, object], loaded: Checkpoint) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from figures._style import save_figure
    from figures.gradient_norms import draw

    frame = result.to_frame()
    frame.to_parquet(folder / "grad_norm.parquet", index=False)
    (folder / "grad_norm.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    figure = draw(frame, headline(result, loaded))
    for suffix in ("png", "svg"):
        save_figure(figure, folder / f"grad_norm.{suffix}")
    plt.close(figure)


def _table(result: GradientNorms, loaded: Checkpoint, text_name: str) -> str:
    from probes.cli._tables import legend, render, shown_columns

    rows = _rows(result)
    columns = shown_columns(_COLUMNS, rows)
    sequences, length = result.batch_shape
    lines = [
        headline(result, loaded),
        f"{result.n_tokens} tokens in {result.n_batches} batch(es) of {sequences} x {length}, {text_name}",
        f"{result.dtype} on {result.device}; loss {_loss(result.loss)}",
        "",
        render(columns, rows, wide=sys.stdout.isatty()),
        "",
        *_omitted(result),
        *legend(_MEANINGS, columns),
        "All are means over batches.",
        "",
        *result.verdict(),
    ]
    return "\n".join(lines)


_COLUMNS = (
    "place",
    "stream_grad",
    "shortcut_only",
    "param_grad",
    "attention",
    "FFN",
    "grad/weight",
    "stream_RMS",
    "attn/stream",
    "FFN/stream",
    "cosine",
)
_MEANINGS = {
    "stream_grad": "norm of the loss gradient with respect to the stream that enters the block",
    "shortcut_only": "the same with every branch held constant",
    "param_grad": "of the block's parameters",
    "attention": "of its attention sub-layer's parameters",
    "FFN": "of its FFN sub-layer's parameters",
    "grad/weight": "param grad over the norm of the parameters",
    "stream_RMS": "of the stream that enters the block",
    "attn/stream": "RMS of what attention adds over that of the stream",
    "FFN/stream": "RMS of what the FFN adds over that of the stream",
    "cosine": "mean between positions of the stream",
}


def _shown_blocks(n_blocks: int) -> list[int]:
    """All blocks, or the first and last sixteen and evenly spaced ones between."""
    if n_blocks <= _MOST_ROWS:
        return list(range(n_blocks))
    third = _MOST_ROWS // 3
    middle = [third + round(i * (n_blocks - 2 * third) / third) for i in range(third)]
    return sorted({*range(third), *middle, *range(n_blocks - third, n_blocks)})


def _omitted(result: GradientNorms) -> list[str]:
    shown = len(_shown_blocks(result.n_blocks))
    hidden = result.n_blocks - shown
    return [f"{hidden} of {result.n_blocks} blocks are not shown; --json and -o give all.", ""] if hidden else []


def _rows(result: GradientNorms) -> list[dict[str, object]]:
    blank: dict[str, object] = dict.fromkeys(_COLUMNS, "")
    parts: list[dict[str, object]] = [
        blank
        | {
            "place": part.name,
            "param_grad": f"{part.grad_norm:.3g}",
            "grad/weight": _ratio(part.grad_to_weight, part.grad_norm),
        }
        for part in result.parts
    ]
    n_first = sum(part.name == "embedding" for part in result.parts)
    blocks = [blank | _block_row(result, block) for block in _shown_blocks(result.n_blocks)]
    return [*parts[:n_first], *blocks, *parts[n_first:]]


def _block_row(result: GradientNorms, block: int) -> dict[str, object]:
    stream = result.block_input(block)
    row: dict[str, object] = {
        "place": f"block {block}",
        "stream_grad": f"{stream.stream_grad:.3g}",
        "shortcut_only": _shortcut_only(stream),
        "param_grad": f"{result.block_grads[block]:.3g}",
        "grad/weight": _ratio(result.block_grads_to_weights[block], result.block_grads[block]),
        "stream_RMS": f"{stream.stream_rms:.3g}",
        "cosine": f"{stream.token_cosine:.3f}",
    }
    for sublayer in (s for s in result.sublayers if s.block == block and s.kind in _SHORT):
        short = _SHORT[sublayer.kind]
        row["attention" if short == "attn" else short] = f"{sublayer.part.grad_norm:.3g}"
        row[f"{short}/stream"] = _ratio(sublayer.branch_ratio, sublayer.branch_rms)
    return row


def _ratio(ratio: Estimate, numerator: Estimate) -> str:
    """A ratio; where there is something to divide and none came of it, it was divided by zero."""
    from probes.norms import Status

    divided = ratio.status is Status.NONE and numerator.status is not Status.NONE
    return "undefined" if divided else f"{ratio:.2g}"


def _shortcut_only(stream: BoundaryReading) -> str:
    """The shortcut-only norm; a gradient that arrives without it comes through a shortcut that is not known."""
    from probes.norms import Status

    if stream.shortcut_grad.status is Status.NONE and stream.stream_grad.status is not Status.NONE:
        return "not known"
    return f"{stream.shortcut_grad:.3g}"


def _loss(loss: Estimate) -> str:
    """The loss, with its standard error where several batches give one."""
    error = "" if math.isnan(loss.standard_error) else f" ± {loss.standard_error:.2g}"
    return f"{loss:.4f}{error} nats/token"


_SHORT = {"attention": "attn", "ffn": "FFN"}
