"""``keel layer-removal``: what every block or sub-layer of a checkpoint is worth, in one command."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probes.cli._checkpoint_options import TokenizerName, check_sizes, headline, torch_dtype
from probes.cli._io import output_folder
from probes.cli._streaming import (
    DryRunOption,
    MaxMemoryOption,
    PlacementOption,
    StreamOption,
    forecast_streams,
    kept_run,
    n_bytes,
    offloaded,
    opened,
    print_forecast,
)

if TYPE_CHECKING:
    from probes.checkpoint import Checkpoint
    from probes.layout import ResidualLayout
    from probes.removal_result import LayerRemoval, UnitCost
    from probes.removal_units import Unit
    from probes.streaming.model import StreamedCheckpoint
    from probes.streaming.run_state import RunState
    from probes.text import TokenBatch

__all__ = ["register"]

_MOST_ROWS = 64
_SEQ_LEN = 256
_ESTIMATES = {
    "taylor": "first-order estimate of Δ, nats/token",
    "block_influence": "1 minus the mean cosine between the stream before and after the unit",
    "angular_distance": "angle between them at the last token over π",
    "relative_contribution": "norm of the unit's update over that of the stream before it",
}
_MOST_LISTED = 4


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("layer-removal")(layer_removal)


def layer_removal(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="Folder with safetensors, .safetensors or .gguf file, 'smollm2', a folder saved by keel, or a hub id.",
            show_default=False,
        ),
    ],
    unit: Annotated[str, typer.Option(help="What to remove: block, sublayer, attn or ffn.")] = "block",
    span: Annotated[int, typer.Option(help="Consecutive units removed together, at every place.")] = 1,
    text: Annotated[
        str | None,
        typer.Option(help="Text file, - for standard input, or folder of documents. [default: prose of the standard library]"),
    ] = None,
    tokenizer: TokenizerName = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read in all.")] = 2048,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens per sequence, special ones included. [default: {_SEQ_LEN}, or the model's context if shorter]",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per batch.")] = 1,
    threshold: Annotated[float, typer.Option(help="Nats per token below which a unit is called cheap.")] = 0.1,
    estimates: Annotated[
        bool | None,
        typer.Option(
            help="Cheap numbers, and how they rank the units. [default: all; streamed: all but taylor, which needs two more "
            "reads of the weights]",
            show_default=False,
        ),
    ] = None,
    together: Annotated[
        bool | None,
        typer.Option(
            help="Remove the cheap units together, one more at a time. [default: yes; streamed: no, it is one more read]",
            show_default=False,
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(help="Also remove these together, such as 3,5 or 4:8 (0-based, half-open).", show_default=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="New folder for the model without --remove, or without all that can go below the threshold.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64. [default: as stored]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    stream: StreamOption = None,
    max_memory: MaxMemoryOption = None,
    placement: PlacementOption = None,
    dry_run: DryRunOption = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the bootstrap, and of masked positions (masked language models).")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for Parquet, JSON, PNG and SVG.", show_default=False)
    ] = None,
) -> None:
    """The loss without each block or sub-layer of a checkpoint, exact, in one pass over its weights.

    \b
    Example:
      keel layer-removal smollm2 -o out
      keel layer-removal smollm2 --unit attn --span 2
      keel layer-removal smollm2 --remove 12,13 --save smaller
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    check_sizes(tokens, seq_len, batch_size)
    if not 0 <= threshold < math.inf:
        raise typer.BadParameter(f"a finite number of nats per token, 0 or more; got {threshold:g}", param_hint="--threshold")
    from probes.device import resolve_device

    chosen_dtype, chosen_device, memory = torch_dtype(dtype), resolve_device(device), n_bytes(max_memory)
    ranges = _ranges(remove)
    from probes.pruning import check_pruning
    from probes.removal_units import joint_unit, removal_units

    if save is not None and remove is None and unit != "block":
        raise typer.BadParameter(
            "without --remove it needs --unit block: only whole blocks can be saved without", param_hint="--save"
        )
    if save is not None and remove is None and together is False:
        raise typer.BadParameter(
            "without --remove it is what can go together that is saved: leave out --no-together, or name blocks with --remove",
            param_hint="--save",
        )
    if dry_run:
        if save is not None:
            raise typer.BadParameter("nothing is saved by --dry-run: leave out one of the two", param_hint="--save")
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
                gradients=estimates is True,
            )
        )
        if streamed is not None and save is not None:
            raise typer.BadParameter("a model is saved from memory: give --no-stream too", param_hint="--save")
        units = removal_units(loaded.layout, unit, span)  # refused before any text is read
        indices = _indices(ranges, loaded.layout, unit)
        named = joint_unit(loaded.layout, unit, indices) if indices else None
        may_go: Callable[[Unit], bool] | None = None
        notes: list[str] = []
        if save is not None:
            check_pruning(loaded, named, save)
            if named is None:
                may_go, notes = _savable(loaded, units)
        data, documents, text_name = _data(loaded, text, tokens, seq_len, batch_size, seed)
        cheaply = streamed is not None  # what costs more reads is then left out unless it is asked for
        extras = {
            "estimates": estimates is not False,
            "taylor": not (cheaply or offloaded(loaded)) if estimates is None else estimates,
            "joint": not cheaply if together is None else together,
        }
        if dry_run and streamed is not None:
            from probes.streaming.forecast import forecast_layer_removal

            named_too = () if named is None else (named,)
            print_forecast(forecast_layer_removal(streamed, data, units, named=named_too, max_memory=memory, **extras), as_json)
            return
        settings: dict[str, Any] = {
            "unit": unit,
            "span": span,
            "remove": indices,
            "documents": documents,
            "threshold": threshold,
            "seed": seed,
            **extras,
        }
        if streamed is not None:
            state = stack.enter_context(kept_run(streamed, data, "layer-removal", settings, output))
            result = _streamed(streamed, data, settings | {"max_memory": memory}, state)
        else:
            from probes.layer_removal import measure_layer_removal

            with _progress() as report:
                result = measure_layer_removal(
                    loaded.model,
                    data,
                    layout=loaded.layout,
                    may_go=may_go,
                    max_memory=memory,
                    on_progress=report,
                    **settings,
                )
        warnings = [*loaded.warnings, *notes, *result.warnings]
        record = _record(result, loaded, text_name, warnings)
        if folder is not None:
            _write(folder, result, record, loaded)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(record, indent=2, allow_nan=False) if as_json else _table(result, loaded, text_name))
    if output is not None:
        print(f"wrote layer_removal.parquet, .json, .png, .svg to {output}", file=sys.stderr)
    if save is not None:
        _save(loaded, result, save)


def _savable(loaded: Checkpoint, units: Sequence[Unit]) -> tuple[Callable[[Unit], bool], list[str]]:
    """Which sets the model can be saved without, so that no other is measured together; and what stays whatever it costs.

    Raises:
        RemovalError: if there is none, before anything is measured.
    """
    from probes.pruning import refusal
    from probes.removal_units import RemovalError

    refused = {unit.name: reason for unit in units if (reason := refusal(loaded, unit)) is not None}
    if len(refused) == len(units):
        raise RemovalError(next(iter(refused.values())))
    notes = [f"--save: {_listed(list(refused))} cannot go alone: {next(iter(refused.values()))}"] if refused else []
    return (lambda unit: refusal(loaded, unit) is None), notes


def _listed(names: Sequence[str]) -> str:
    """A few names, or the first and the last of many and how many there are."""
    return ", ".join(names) if len(names) <= _MOST_LISTED else f"{names[0]} to {names[-1]} ({len(names)} of them)"


def _streamed(
    streamed: StreamedCheckpoint, data: Sequence[TokenBatch], settings: dict[str, Any], state: RunState
) -> LayerRemoval:
    from probes.streaming.removal import measure_streamed_layer_removal

    with _progress() as report:
        return measure_streamed_layer_removal(streamed, data, state=state, on_progress=report, **settings)


def _ranges(text: str | None) -> list[range]:
    """``3,5`` and ``4:8`` as ranges, half-open; those that hold nothing are left out."""
    ranges: list[range] = []
    for part in (text or "").split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?::\s*(\d{1,18})\s*)?", part)
        if text is not None and match is None:
            raise typer.BadParameter(f"'{part}' is no index or range; write 3,5 or 4:8", param_hint="--remove")
        if match is not None:
            ranges.append(range(int(match[1]), int(match[2] or int(match[1]) + 1)))
    ranges = [part for part in ranges if part]
    if text is not None and not ranges:
        raise typer.BadParameter(f"'{text}' names nothing: ranges are half-open, 4:5 is unit 4", param_hint="--remove")
    return ranges


def _indices(ranges: Sequence[range], layout: ResidualLayout, unit: str) -> list[int]:
    """The indices of all ranges; their ends are held against the model before any list is made."""
    from probes.removal_units import joint_unit

    ends = [index for part in ranges for index in (part[0], part[-1])]
    if ends:
        joint_unit(layout, unit, ends)
    return [index for part in ranges for index in part]


def _data(
    loaded: Checkpoint, text: str | None, tokens: int, seq_len: int | None, batch_size: int, seed: int
) -> tuple[list[TokenBatch], list[list[int]] | None, str]:
    """Batches, the document of each sequence where there are documents, and the name of the text."""
    from probes.text import checkpoint_batches, read_text, sequence_length

    length = sequence_length(loaded, seq_len, default=_SEQ_LEN)
    if text is not None and text != "-" and Path(text).is_dir():
        batches, owners = _documents(loaded, text, tokens, length, batch_size)
        return batches, owners, f"documents of {text}"
    content, name = read_text(text)
    batches = checkpoint_batches(
        loaded, content, n_tokens=tokens, seq_len=length, batch_size=batch_size, seed=seed, source=name
    )
    return batches, None, name


def _documents(
    loaded: Checkpoint, folder: str, tokens: int, seq_len: int, batch_size: int
) -> tuple[list[TokenBatch], list[list[int]]]:
    from probes.document_batches import document_batches
    from probes.errors import TextError
    from probes.layout import Objective
    from probes.text_documents import read_documents

    if loaded.layout.objective is not Objective.CAUSAL:
        raise TextError(f"{loaded.source} is a masked language model: give it one text, not a folder of documents")
    left, documents = tokens, []
    for document in read_documents([folder], max_bytes=64 * tokens).documents:
        ids = loaded.tokenizer.encode(document)[:left]
        left -= len(ids)
        documents.append(ids)
        if left <= 0:
            break
    return document_batches(documents, seq_len=seq_len, batch_size=batch_size, prefix=loaded.tokenizer.start_token_id)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    words = {
        "exact": "blocks through which every variant went",
        "estimates": "forward + backward, blocks",
        "together": "cheap units together, blocks",
    }
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words["exact"], total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=words[stage], completed=done, total=total)

        yield report


def _record(result: LayerRemoval, loaded: Checkpoint, text_name: str, warnings: Sequence[str]) -> dict[str, object]:
    from probes.provenance import provenance

    return {
        "checkpoint": str(loaded.source),
        "tokenizer": loaded.tokenizer.name,
        "text": text_name,
        "warnings": list(warnings),
        **result.to_dict(),
        "provenance": provenance(),
    }


def _write(folder: Path, result: LayerRemoval, record: dict[str, object], loaded: Checkpoint) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from figures._style import save_figure
    from figures.layer_removal import draw

    frame = result.to_frame()
    frame.to_parquet(folder / "layer_removal.parquet", index=False)
    (folder / "layer_removal.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    figure = draw(frame, headline(result, loaded))
    for suffix in ("png", "svg"):
        save_figure(figure, folder / f"layer_removal.{suffix}")
    plt.close(figure)


def _table(result: LayerRemoval, loaded: Checkpoint, text_name: str) -> str:
    from probes.cli._tables import legend, render

    shown = _shown(result.costs)
    columns = ["removed", "Δ_nats/token", "Δ_PPL", *(name for name in result.costs[0].estimates)]
    hidden = len(result.costs) - len(shown)
    lines = [
        headline(result, loaded),
        f"{result.n_tokens} tokens, {result.n_predictions} predicted, {text_name}; {result.dtype} on {result.device}",
        f"full model: {result.loss:.4g} nats/token, perplexity {_perplexity(result)}; ± over {result.samples} (bootstrap)",
        "",
        render(columns, [_row(cost) for cost in shown], wide=sys.stdout.isatty()),
        "",
        *([f"{hidden} of {len(result.costs)} removals are not shown; --json and -o give all.", ""] if hidden else []),
        "Δ: without the unit minus with it, identity in its place (in a Post-LN unit the norm over the sum goes too).",
        *legend(_ESTIMATES, columns),
        f"Ranges are 0-based and half-open; modules of {result.costs[0].unit.name}: {_modules(result.costs[0].unit)}; "
        f"of {result.costs[-1].unit.name}: {_modules(result.costs[-1].unit)}.",
        *(f"Modules of {unit.name}: {_modules(unit)}." for unit in _sets(result)),
        "",
        *result.verdict(),
    ]
    return "\n".join(lines)


def _sets(result: LayerRemoval) -> list[Unit]:
    """Units removed together that a reader may want to remove in his own code."""
    return [cost.unit for cost in (*result.named, *([] if result.removable is None else [result.removable]))]


def _modules(unit: Unit) -> str:
    return ", ".join(unit.modules)


def _shown(costs: Sequence[UnitCost]) -> list[UnitCost]:
    """All, or the first and last and the most costly between."""
    if len(costs) <= _MOST_ROWS:
        return list(costs)
    edge = _MOST_ROWS // 4
    middle = sorted(costs[edge:-edge], key=lambda cost: -cost.delta_loss.value)[: _MOST_ROWS - 2 * edge]
    return [*costs[:edge], *sorted(middle, key=lambda cost: cost.unit.start), *costs[-edge:]]


def _perplexity(result: LayerRemoval) -> str:
    from probes.removal_result import perplexity_text

    finite = math.isfinite(result.loss.value)
    return perplexity_text(result.perplexity, ".4g") if finite else f"{result.perplexity:.4g}"


def _row(cost: UnitCost) -> dict[str, object]:
    from probes.paired_bootstrap import Interval
    from probes.removal_result import perplexity_text

    return {
        "removed": cost.unit.name,
        "Δ_nats/token": f"{cost.delta_loss:+.3g}",
        "Δ_PPL": perplexity_text(cost.delta_perplexity, "+.3g"),
        **{name: f"{Interval(value=value):.3g}" for name, value in cost.estimates.items()},
    }


def _save(loaded: Checkpoint, result: LayerRemoval, folder: Path) -> None:
    from probes.pruning import save_pruned
    from probes.removal_units import RemovalError

    chosen = result.named[0] if result.named else result.removable
    if chosen is None:
        raise RemovalError(
            f"nothing to save: no removal costs less than {result.threshold:g} nats/token with confidence; name units with "
            "--remove, or raise --threshold"
        )
    save_pruned(loaded, chosen.unit, folder)
    print(f"saved the model without {chosen.unit.name} ({_modules(chosen.unit)}) to {folder}", file=sys.stderr)
