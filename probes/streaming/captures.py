"""Captures of the gradient probe as lines of a file: what each step of a run has added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from probes.gradient_capture import Capture

__all__ = ["Known", "capture_record", "known_so_far", "restore_capture"]

_BY_INDEX = ("stream_grad", "shortcut_grad", "stream_rms", "token_cosine", "branch_rms")

Known: TypeAlias = "dict[str, dict[Any, int]]"
"""Table of a capture -> key -> identity of the value that stood there."""


def known_so_far(capture: Capture) -> Known:
    """What a capture holds before a step."""
    tables = (*_BY_INDEX, "parameter_grad", "idle_experts")
    known = {name: {key: id(value) for key, value in getattr(capture, name).items()} for name in tables}
    return known | {"loss": {"": id(capture.loss)}}


def capture_record(capture: Capture, before: Known, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """What a step has added to a capture, as JSON has it.

    Args:
        capture: after the step.
        before: what it held before.
        names: of the parameters.
    """

    def new(table: str) -> dict[Any, Any]:
        return {k: v for k, v in getattr(capture, table).items() if before[table].get(k) != id(v)}

    record: dict[str, Any] = {name: {str(i): float(value) for i, value in new(name).items()} for name in _BY_INDEX}
    record["parameter_grad"] = {names[p]: float(value) for p, value in new("parameter_grad").items()}
    record["idle_experts"] = {name: value.tolist() for name, value in new("idle_experts").items()}
    record["narrowest_stream"] = str(capture.narrowest_stream).removeprefix("torch.")
    record["n_stream_entries"] = capture.n_stream_entries
    if before["loss"][""] != id(capture.loss):
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
    if "loss" in record:
        capture.loss = _scalar(record["loss"])


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
