"""Options of the commands that read a checkpoint block by block where it does not fit into memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    import torch

    from probes.checkpoint import Checkpoint
    from probes.streaming.forecast import Forecast
    from probes.streaming.model import StreamedCheckpoint
    from probes.streaming.run_state import RunState
    from probes.text import TokenBatch

__all__ = [
    "DryRunOption",
    "MaxMemoryOption",
    "PlacementOption",
    "StreamOption",
    "forecast_streams",
    "kept_run",
    "n_bytes",
    "offloaded",
    "opened",
    "print_forecast",
    "step_progress",
]

StreamOption: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Keep one block of weights in memory at a time. [default: where the weights exceed --max-memory]",
        show_default=False,
    ),
]
MaxMemoryOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="For weights, and for streams before they go to disk, such as 2GB. [default: 80 % of what is available]",
        show_default=False,
    ),
]
PlacementOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help='Spread the blocks over devices by accelerate: auto, balanced, or JSON such as \'{"": "cpu"}\'.',
        show_default=False,
    ),
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Only say what a streamed run will read, hold, compute and take.")
]

_BYTES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", re.IGNORECASE)
_NAMED_PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")


def n_bytes(size: str | None) -> int | None:
    """``500MB``, ``2 gb``, ``1.5K`` or ``0`` as a number of bytes."""
    if size is None:
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise typer.BadParameter(f"'{size}' is no amount of memory; write it as 500MB or 2GB", param_hint="--max-memory")
    return int(float(match[1]) * _BYTES[match[2].upper()])


@contextmanager
def opened(
    checkpoint: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    stream: bool | None,
    max_memory: int | None,
    placement: str | None,
    tokenizer: str | None,
    gradients: bool,
) -> Iterator[tuple[Checkpoint, StreamedCheckpoint | None]]:
    """A checkpoint in memory, or opened for streaming where that is asked for or it does not fit.

    Args:
        checkpoint: as the user names it.
        dtype: of the parameters.
        device: where it computes.
        stream: True or False as asked; None chooses.
        max_memory: bytes that the weights may take.
        placement: of accelerate.
        tokenizer: as the user names it; None for the checkpoint's own.
        gradients: whether a backward pass will be run.

    Yields:
        The checkpoint, and the same opened for streaming or None.
    """
    device_map = _device_map(placement)
    if device_map is not None:
        if stream:
            raise typer.BadParameter("blocks are either streamed or placed; give one of the two", param_hint="--placement")
        loaded = _placed(checkpoint, dtype, device_map, tokenizer)
        _check_placement(loaded, gradients)
        yield loaded, None
        return
    if _chosen(checkpoint, dtype, device, stream, max_memory):
        from probes.streaming.model import open_streamed

        with open_streamed(checkpoint, dtype=dtype, device=device, tokenizer=tokenizer) as streamed:
            yield streamed.checkpoint, streamed
        return
    from probes.checkpoint import load_checkpoint

    yield load_checkpoint(checkpoint, dtype=dtype, device=device, tokenizer=tokenizer), None


def forecast_streams(
    checkpoint: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    stream: bool | None,
    max_memory: int | None,
    placement: str | None,
) -> bool:
    """True, as what --dry-run forecasts is streamed; refuses what is not, and says where a run will not be by itself."""
    other = "--no-stream" if stream is False else "--placement" if placement is not None else None
    if other is not None:
        raise typer.BadParameter(f"a streamed run is what it forecasts: leave out {other}", param_hint="--dry-run")
    if stream is None:
        from probes.streaming.choice import checkpoint_fit

        if checkpoint_fit(checkpoint, dtype=dtype, device=device, max_memory=max_memory).fits:
            print(
                "the weights fit into memory: this is what a run with --stream costs; without it nothing is streamed",
                file=sys.stderr,
            )
    return True


def _chosen(
    checkpoint: str, dtype: torch.dtype | None, device: torch.device, stream: bool | None, max_memory: int | None
) -> bool:
    if stream is not None:
        return stream
    from probes.streaming.choice import checkpoint_fit

    fit = checkpoint_fit(checkpoint, dtype=dtype, device=device, max_memory=max_memory)
    if not fit.fits:
        print(
            f"weights of {fit.needed / 1e9:.3g} GB exceed {fit.limit / 1e9:.3g} GB: one block is in memory at a time",
            file=sys.stderr,
        )
    return not fit.fits


def _device_map(placement: str | None) -> str | dict[str, object] | None:
    if placement is None or placement in _NAMED_PLACEMENTS:
        return placement
    try:
        table = json.loads(placement)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        known = ", ".join(_NAMED_PLACEMENTS)
        raise typer.BadParameter(
            f"'{placement}' is no placement; known: {known}, or a JSON table of modules and devices", param_hint="--placement"
        )
    for device in table.values():
        _check_device(device)
    return table


def _check_device(device: object) -> None:
    from probes.device import resolve_device

    if device == "disk":
        return
    if not isinstance(device, (str, int)) or isinstance(device, bool) or (isinstance(device, int) and device < 0):
        raise typer.BadParameter(
            f"{json.dumps(device)} is no device; write cpu, disk, cuda:1, or the number of a GPU", param_hint="--placement"
        )
    resolve_device(device)


def _placed(
    checkpoint: str, dtype: torch.dtype | None, device_map: str | dict[str, object], tokenizer: str | None
) -> Checkpoint:
    """A checkpoint whose blocks accelerate has spread."""
    from probes.checkpoint import load_checkpoint
    from probes.errors import CheckpointError

    try:
        return load_checkpoint(checkpoint, dtype=dtype, device_map=device_map, tokenizer=tokenizer)
    except CheckpointError as error:
        if "offload_folder" not in str(error):  # accelerate's word for a second copy of the weights
            raise
        raise CheckpointError(
            f"the placement leaves blocks of {checkpoint} on the disk, where accelerate would write them once more; use "
            "--stream, which reads them from where they are"
        ) from error


def offloaded(loaded: Checkpoint) -> list[str]:
    """The places of a model that accelerate has spread so that it takes some weights away after the forward pass."""
    places = {str(place) for place in getattr(loaded.model, "hf_device_map", {}).values()}
    return sorted(places) if len(places) > 1 and places & {"cpu", "disk"} else []


def _check_placement(loaded: Checkpoint, gradients: bool) -> None:
    """Refuse what accelerate cannot do: a backward pass through weights that are taken away after the forward pass."""
    from probes.errors import CheckpointError

    places = offloaded(loaded)
    if gradients and places:
        raise CheckpointError(
            f"the placement puts parts of {loaded.source} on {', '.join(places)}: accelerate takes weights on the CPU "
            "or disk away after the forward pass, and no gradient reaches them; use --stream, which needs one device"
        )


def print_forecast(forecast: Forecast, as_json: bool) -> None:
    """On stdout: it is what was asked for."""
    print(json.dumps(forecast.to_dict(), indent=2) if as_json else "\n".join(forecast.lines()))


@contextmanager
def kept_run(
    streamed: StreamedCheckpoint,
    batches: Sequence[TokenBatch],
    command: str,
    options: Mapping[str, object],
    output: Path | None,
) -> Iterator[RunState]:
    """The state of this command, in the output folder or a cache folder: an interrupted run goes on from it.

    Args:
        streamed: the checkpoint, whose weight files and configuration take part in the run's name.
        batches: so do the tokens.
        command: and the command.
        options: and whatever else decides the result.
        output: where results go; None for none.

    Yields:
        The state; removed at the end, kept after an interruption or an error.
    """
    from probes.cli._io import ended_by_exception
    from probes.streaming.run_state import open_run_state, remove_useless_states

    description = {
        "command": command,
        "options": dict(options),
        "files": {str(path.absolute()): print_of for path, print_of in streamed.stream.reader.fingerprints.items()},
        "configuration": _configuration(streamed),
        "versions": {name: _version(name) for name in ("keel-dynamics", "torch", "transformers")},
        "dtype": str(next(streamed.model.parameters()).dtype),
        "device": str(streamed.device),
        "tokens": _digest(batches),
    }
    place = _cache_folder() if output is None else output
    others = remove_useless_states(place, lambda stored: _has_changed(stored, description))
    with ExitStack() as stack:
        stack.enter_context(ended_by_exception())
        state = stack.enter_context(open_run_state(place, description))
        if state.n_steps:
            print(f"goes on after step {state.n_steps} of an interrupted run ({state.folder})", file=sys.stderr)
        _name_others([folder for folder in others if folder != state.folder])
        try:
            yield state
        except (KeyboardInterrupt, SystemExit) as stop:
            print(_interrupted(state), file=sys.stderr)
            if isinstance(stop, SystemExit):
                raise
            raise typer.Exit(130) from None
        streamed.stream.reader.check_headers()


def _interrupted(state: RunState) -> str:
    if not state.n_steps:
        return "interrupted before the first step was done; nothing is kept"
    return f"interrupted after step {state.n_steps}; the same command goes on from there (state in {state.folder})"


def _name_others(folders: Sequence[Path]) -> None:
    """Say where the states of other runs lie: they may be large, and no other command finds them."""
    if folders:
        size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
        names = ", ".join(str(folder) for folder in folders)
        print(
            f"{len(folders)} other run(s) have left {size / 1e9:.3g} GB to go on from; delete what is not needed: {names}",
            file=sys.stderr,
        )


def _has_changed(stored: Mapping[str, Any], description: Mapping[str, object]) -> bool:
    """Whether a run that was begun earlier can never go on, as a file of its checkpoint, or the configuration, is another."""
    from probes.streaming.files import Fingerprint

    paths = {Path(name): str(print_of) for name, print_of in stored["files"].items()}
    if any(path.exists() and str(Fingerprint.of(path)) != print_of for path, print_of in paths.items()):
        return True
    now = json.loads(json.dumps(description, default=str))
    differing = {name for name in now if stored.get(name) != now[name]}
    asked = ("dtype", "torch_dtype", "compute_dtype")  # on the command line
    return differing == {"configuration"} and all(
        stored["configuration"].get(name) == now["configuration"].get(name) for name in asked
    )


def _configuration(streamed: StreamedCheckpoint) -> dict[str, object]:
    """As it was understood, so that a file that says the same in other words is the same."""
    stored = dict(streamed.model.config.to_dict())  # type: ignore[operator,union-attr]  # of keel's models and of transformers'
    return {name: value for name, value in stored.items() if name != "_name_or_path"}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel-dynamics"


def _digest(batches: Sequence[TokenBatch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for ids in (batch.inputs, batch.targets):
            digest.update(str(tuple(ids.shape)).encode())
            digest.update(ids.cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def step_progress(words: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over steps on stderr, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
