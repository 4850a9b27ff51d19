"""Captures of the gradient probe as lines of a file: what each step of a run has added."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from probes.gradient_capture import Capture

__all__ = ["Known", "capture_record", "known_so_far", "latest", "restore_capture"]

_K = TypeVar("_K")
_V = TypeVar("_V")

_BY_INDEX = ("stream_grad", "shortcut_grad", "stream_rms", "token_cosine", "branch_rms")

Known: TypeAlias = "dict[str, int]"
"""Table of a capture -> number of its entries."""


def known_so_far(capture: Capture) -> Known:
    """What a capture holds before a step."""
    return {name: len(getattr(capture, name)) for name in (*_BY_INDEX, "parameter_grad", "idle_experts")}


def latest(table: dict[_K, _V], n_before: int) -> dict[_K, _V]:
    """Entries of a dictionary that were added after it had so many; found without going through the older ones."""
    return dict(islice(reversed(table.items()), len(table) - n_before))


def capture_record(
    capture: Capture, before: Known, names: Mapping[nn.Parameter, str], overwritten: Collection[nn.Parameter] = ()
) -> dict[str, Any]:
    """What a step has added to a capture, as JSON has it.

    Args:
        capture: after the step.
        before: what it held before.
        names: of the parameters.
        overwritten: parameters whose norm was there before and has changed.
    """

    def new(table: str) -> dict[Any, Any]:
        return latest(getattr(capture, table), before[table])

    record: dict[str, Any] = {name: {str(i): float(value) for i, value in new(name).items()} for name in _BY_INDEX}
    norms = new("parameter_grad") | {p: capture.parameter_grad[p] for p in overwritten}
    record["parameter_grad"] = {names[p]: float(value) for p, value in norms.items()}
    record["idle_experts"] = {name: value.tolist() for name, value in new("idle_experts").items()}
    record["narrowest_stream"] = str(capture.narrowest_stream).removeprefix("torch.")
    record["n_stream_entries"] = capture.n_stream_entries
    record["loss"] = float(capture.loss)
    return record


def restore_capture(capture: Capture, record: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    """Add a step's record to a capture.

    Args:
        capture: takes it.
        record: from :func:`capture_record`.
        parameters: by name.
    """
    for name in _BY_INDEX:
        getattr(capture, name).update({int(i): _scalar(value) for i, value in record[name].items()})
    capture.parameter_grad.update({parameters[name]: _scalar(value) for name, value in record["parameter_grad"].items()})
    capture.idle_experts.update({name: torch.tensor(value) for name, value in record["idle_experts"].items()})
    capture.narrowest_stream = getattr(torch, record["narrowest_stream"])
    capture.n_stream_entries = record["n_stream_entries"]
    capture.loss = _scalar(record["loss"])


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
