"""``keel alignment``: how far each sub-layer of a checkpoint is from its own depth-wise gradient step."""

from __future__ import annotations

import json
import sys
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
    check_sizes,
    torch_dtype,
)
from probes.cli._io import output_folder

if TYPE_CHECKING:
    from probes.checkpoint import Checkpoint
    from probes.depthwise_alignment import DepthwiseAlignment, SublayerAlignment

__all__ = ["register"]

_COLUMNS = ("sub-layer", "alignment", "target/update", "target_along_stream", "update_along_stream", "update/stream", "updated")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("alignment")(alignment)


def alignment(
    checkpoint: CheckpointName,
    text: TextSource = None,
    tokenizer: TokenizerName = None,
    tokens: TokenCount = 512,
    seq_len: SequenceLength = None,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    device: Device = "cpu",
    seed: MaskSeed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for Parquet and JSON.", show_default=False)
    ] = None,
) -> None:
    """Alignment of every sub-layer's update with its own depth-wise gradient (Eqs. 31 to 34), on a checkpoint.

    \b
    Example:
      keel alignment smollm2 --tokens 256 -o out
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    check_sizes(tokens, seq_len, batch_size)
    from probes.device import resolve_device

    chosen_dtype, chosen_device = torch_dtype(dtype), resolve_device(device)
    from probes.checkpoint import load_checkpoint
    from probes.text import checkpoint_batches, read_text

    content, text_name = read_text(text)
    with output_folder(output) as folder:
        loaded = load_checkpoint(checkpoint, dtype=chosen_dtype, device=chosen_device, tokenizer=tokenizer)
        batches = checkpoint_batches(
            loaded, content, n_tokens=tokens, seq_len=seq_len, batch_size=batch_size, seed=seed, source=text_name
        )
        from probes.depthwise_alignment import pooled

        result = pooled(loaded.model, loaded.layout, [batch.to(chosen_device).inputs for batch in batches])
        record = _record(result, loaded, text_name, seed)
        if folder is not None:
            result.to_frame().to_parquet(folder / "alignment.parquet", index=False)
            (folder / "alignment.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(record, indent=2, allow_nan=False) if as_json else _table(result, loaded, text_name))
    if output is not None:
        print(f"wrote alignment.parquet, .json to {output}", file=sys.stderr)


def _record(result: DepthwiseAlignment, loaded: Checkpoint, text_name: str, seed: int) -> dict[str, object]:
    from probes.provenance import provenance

    return {
        "checkpoint": loaded.source,
        "tokenizer": loaded.tokenizer.name,
        "text": text_name,
        "seed": seed,
        "warnings": list(loaded.warnings),
        "family": result.family,
        "n_tokens": result.n_tokens,
        "verdict": result.verdict(),
        "sublayers": [row.to_dict() for row in result.sublayers],
        "provenance": provenance(),
    }


def _table(result: DepthwiseAlignment, loaded: Checkpoint, text_name: str) -> str:
    from probes.cli._tables import render

    size = f"{len(result.sublayers)} sub-layers, {loaded.n_parameters / 1e6:,.1f} M parameters"
    lines = [
        f"{Path(loaded.source).name} ({result.family}, {size})",
        f"{result.n_tokens} tokens, {text_name}",
        "",
        render(_COLUMNS, [_row(row) for row in result.sublayers], wide=sys.stdout.isatty()),
        "",
        "alignment: mean cosine of the update u with u + J^T x, the negative gradient of -<x, u(x)>; with the target held",
        "constant it is 1 whatever the weights. target/update: size of J^T x, which holding it leaves out, over that of u;",
        "along stream: cosine with x; updated: share of the positions at which u is not zero.",
    ]
    return "\n".join([*lines, *result.verdict()])


def _row(row: SublayerAlignment) -> dict[str, object]:
    return {
        "sub-layer": f"block {row.block} {row.kind}",
        "alignment": _number(row, "alignment", "+.3f"),
        "target/update": _number(row, "target_ratio", ".3g"),
        "target_along_stream": _number(row, "target_stream_cosine", "+.3f"),
        "update_along_stream": _number(row, "stream_cosine", "+.3f"),
        "update/stream": _number(row, "step_ratio", ".3g"),
        "updated": f"{row.updated_share:.0%}",
    }


def _number(row: SublayerAlignment, metric: str, form: str) -> str:
    """The value, or what it is where it is no number."""
    from probes.depthwise_alignment import AlignmentStatus

    status = row.status(metric)
    words = {AlignmentStatus.NAN: "NaN", AlignmentStatus.INF: "Inf"}
    return format(getattr(row, metric), form) if status is AlignmentStatus.MEASURED else words.get(status, status.value)
