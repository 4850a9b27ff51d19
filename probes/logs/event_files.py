"""Scalars of TensorBoard event files, through the ``tensorboard`` package where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probes.errors import KeelError
from probes.logs.series import rows_of_series
from probes.logs.table import Row

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


def event_rows(files: Sequence[Path]) -> list[Row]:
    """All scalars, file by file in the order of their names, one row per step; a step written twice gives two rows.

    Args:
        files: of one folder.

    Returns:
        Rows {tag: value, "step": step}.

    Raises:
        TensorBoardError: if the package is missing or the files hold no scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            EventAccumulator,
        )
    except ImportError as error:
        raise TensorBoardError(
            f"reading '{files[0]}' needs the package tensorboard, which is not installed: "
            "pip install 'keel-dynamics[logs]', or pip install tensorboard; or export the scalars as CSV"
        ) from error
    rows: list[Row] = []
    for file in sorted(files):
        # all of them, as the default keeps a sample; with what a later start has written over
        guidance = {"scalars": 0, "tensors": 0}
        events = EventAccumulator(str(file), size_guidance=guidance, purge_orphaned_data=False).Reload()
        rows += rows_of_series(_series(events))
    if not rows:
        raise TensorBoardError(f"'{files[0]}' holds no scalars")
    return rows


def _series(events: Any) -> dict[str, list[tuple[float, float]]]:
    """Scalars as PyTorch writes them, and as TensorFlow does: tensors of one element."""
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-not-found, import-untyped, unused-ignore]

    tags = events.Tags()
    series = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        values = [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        if all(value.size == 1 and value.dtype.kind in "fiu" for _, value in values):
            series[tag] = [(step, float(value.item())) for step, value in values]
    return series
