"""Options that every measurement of a checkpoint shares, and what they are turned into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    import torch

    from probes.checkpoint import Checkpoint

__all__ = [
    "BatchSize",
    "CheckpointName",
    "Device",
    "Dtype",
    "MaskSeed",
    "SequenceLength",
    "TextSource",
    "TokenCount",
    "TokenizerName",
    "batch_progress",
    "check_sizes",
    "headline",
    "torch_dtype",
]

_DTYPES = ("float32", "bfloat16", "float16", "float64")

CheckpointName = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="Folder with safetensors, .safetensors or .gguf file, 'smollm2', a folder saved by keel, or a hub id.",
        show_default=False,
    ),
]
TextSource = Annotated[
    str | None, typer.Option("--text", help="Text file, or - for standard input. [default: prose of the standard library]")
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="bytes|PATH",
        help="Folder or file of a tokenizer, or bytes for one token per byte. [default: the checkpoint's own]",
        show_default=False,
    ),
]
TokenCount = Annotated[int, typer.Option("--tokens", help="Tokens to read in all.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--seq-len", help="Tokens per sequence, special ones included. [default: 512, or the model's context if shorter]"
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences per batch; one gradient per batch.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help=f"{', '.join(_DTYPES)}. [default: as stored; float32 for GGUF]")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")]
MaskSeed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the masked positions (masked language models).")
]


class _Sized(Protocol):
    """A result that knows the model it is about."""

    @property
    def family(self) -> str: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def n_sublayers(self) -> int: ...
    @property
    def n_parameters(self) -> int: ...


def check_sizes(tokens: int, seq_len: int | None, batch_size: int) -> None:
    """Refuse sizes that leave nothing to measure.

    Args:
        tokens: to read in all.
        seq_len: tokens per sequence; None for the default.
        batch_size: sequences per batch.

    Raises:
        BadParameter: naming the option.
    """
    for name, value, least in (("--tokens", tokens, 2), ("--seq-len", seq_len, 2), ("--batch-size", batch_size, 1)):
        if value is not None and value < least:
            raise typer.BadParameter(f"must be at least {least}, got {value}", param_hint=name)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None stays None.

    Raises:
        BadParameter: if it is not one of those offered.
    """
    import torch

    if name is None:
        return None
    if name not in _DTYPES:
        raise typer.BadParameter(f"unknown dtype '{name}'; known: {', '.join(_DTYPES)}", param_hint="--dtype")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def batch_progress(n_batches: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("forward + backward"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=n_batches)
        yield lambda done: bar.update(task, completed=done)


def headline(result: _Sized, loaded: Checkpoint) -> str:
    """Name, family and size of the model that a result is about."""
    source = Path(str(loaded.source)).name
    depth = f"{result.n_blocks} blocks / {result.n_sublayers} sub-layers"
    return f"{source} ({result.family}, {depth}, {result.n_parameters / 1e6:,.1f} M parameters)"
