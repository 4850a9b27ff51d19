"""Whether a checkpoint fits into memory, from the headers of its files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from probes.checkpoint import locate_checkpoint
from probes.gguf_file import read_gguf
from probes.stream_store import available_memory
from probes.weight_files import find_weight_files

__all__ = ["Fit", "checkpoint_fit"]

_SHARE = 0.8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Fit:
    """What the weights need and what there is.

    Attributes:
        needed: bytes of all weights in the dtype they are computed in.
        limit: bytes they may take.
    """

    needed: int
    limit: int

    @property
    def fits(self) -> bool:
        """Whether the weights can be in memory all at once."""
        return self.needed <= self.limit


def checkpoint_fit(
    source: str | Path, *, dtype: torch.dtype | None, device: torch.device, max_memory: int | None = None
) -> Fit:
    """Compare a checkpoint with the memory of a device.

    Args:
        source: as :func:`probes.checkpoint.load_checkpoint` takes it.
        dtype: of the parameters; None for the stored one (float32 for GGUF).
        device: where they would be put.
        max_memory: bytes that they may take; four fifths of what is available by default.

    Raises:
        CheckpointError: if there is no checkpoint, or its files are damaged.
    """
    path = locate_checkpoint(source)
    if path.suffix == ".gguf":
        sizes = [torch.Size(tensor.shape).numel() for tensor in read_gguf(path).tensors.values()]
        needed = sum(sizes) * (4 if dtype is None else dtype.itemsize)
    else:
        files = find_weight_files(path)
        widest = _ITEM_BYTES[files.float_dtypes[0]] if files.float_dtypes else 4
        needed = sum(tensor.size for tensor in files.tensors.values()) * (widest if dtype is None else dtype.itemsize)
    limit = int(_SHARE * available_memory(device)) if max_memory is None else max_memory
    return Fit(needed, limit)
