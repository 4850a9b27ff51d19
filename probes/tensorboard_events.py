"""Scalars of TensorBoard event files, through the ``tensorboard`` package where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from probes.errors import KeelError

__all__ = ["TensorBoardError", "event_rows", "is_event_file"]


class TensorBoardError(KeelError):
    """Event files that cannot be read."""


def is_event_file(path: Path) -> bool:
    """Whether a name is that of an event file.

    Example:
        >>> is_event_file(Path("runs/events.out.tfevents.1700000000.host.1.0"))
        True
    """
    return "tfevents" in path.name


def event_rows(path: Path, choose: Callable[[Iterable[str]], Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """The chosen scalars, one row per step that any of them was written at; a step written twice gives two rows.

    Args:
        path: an event file, or a folder of them.
        choose: from the tags in the files to {quantity: tag}; tags that are not chosen are left out.

    Returns:
        Rows {tag: value, "step": step} in the order of the losses; other tags are named with None. Without losses, one row of
        names.

    Raises:
        TensorBoardError: if the package is missing or the files hold no scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            EventAccumulator,
        )
    except ImportError as error:
        raise TensorBoardError(
            f"reading '{path}' needs the package tensorboard, which is not installed: pip install 'keel-dynamics[logs]', or "
            "pip install tensorboard; or export the scalars as CSV"
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    if not tags:
        raise TensorBoardError(f"'{path}' holds no scalars")
    chosen = {key: tag for key, tag in choose(tags).items() if key != "step"}
    if "loss" not in chosen:
        return [dict.fromkeys(tags)]
    series = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in chosen.values()}
    return [
        {**dict.fromkeys(tags), **{tag: values.get(event.step) for tag, values in series.items()}, "step": event.step}
        | {chosen["loss"]: event.value}
        for event in events.Scalars(chosen["loss"])
    ]
