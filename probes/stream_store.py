"""Residual streams of many variants of a model: in memory while they fit, else in a file that the system pages in and out."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from probes.errors import OutputError

__all__ = ["StreamStore", "available_memory"]

_GB = 1e9


def available_memory(device: torch.device) -> int:
    """Memory of a device that can be had without swapping, bytes; where the system does not say, 2 GB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration):  # Linux: what the page cache holds can be had too
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2 << 30


class StreamStore:
    """Streams of one group of batches; a context manager that frees memory and disk on the way out.

    Args:
        shapes: (B, T, D) of each batch.
        n_streams: streams per batch: the intact one and one per variant.
        dtype: of the streams.
        device: where the model computes.
        max_memory: bytes that the streams may take in memory; half of what is free by default. Beyond it they go to a file.
        folder: where that file is made; the system's temporary folder by default.

    Raises:
        OutputError: if the streams must go to disk and do not fit there, said before anything is computed.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        n_streams: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_memory: int | None = None,
        folder: Path | None = None,
    ) -> None:
        sizes = [n_streams * torch.Size(shape).numel() for shape in shapes]
        self.n_bytes = sum(sizes) * dtype.itemsize
        self.place = self._place(device, max_memory)
        flat = self._on_disk(sum(sizes), dtype, folder) if self.place == "disk" else self._in_memory(sum(sizes), dtype)
        parts = torch.split(flat, sizes)
        self._streams = [part.view(n_streams, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def __getitem__(self, batch: int) -> Tensor:
        """Streams of a batch, shape (n_streams, B, T, D): a view to read and write."""
        return self._streams[batch]

    def __enter__(self) -> StreamStore:
        """The store itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let the streams go."""
        self._streams = []

    def _place(self, device: torch.device, max_memory: int | None) -> str:
        places = [str(device)] if device.type == "cpu" else [str(device), "cpu"]
        for place in places:
            limit = available_memory(torch.device(place)) // 2 if max_memory is None else max_memory
            if self.n_bytes <= limit:
                return place
        return "disk"

    def _in_memory(self, n_entries: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(n_entries, dtype=dtype, device=self.place)

    def _on_disk(self, n_entries: int, dtype: torch.dtype, folder: Path | None) -> Tensor:
        place = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            free = shutil.disk_usage(place).free
            if free < self.n_bytes:
                raise OSError("no space left")
            descriptor, name = tempfile.mkstemp(prefix="keel-streams-", dir=place)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, self.n_bytes)
                else:
                    os.truncate(descriptor, self.n_bytes)
                return torch.from_file(name, shared=True, size=n_entries, dtype=dtype)
            finally:
                os.close(descriptor)
                Path(name).unlink()  # the mapping keeps the space until it is let go, also if the process is killed
        except OSError as error:
            raise OutputError(
                f"the streams of all variants take {self.n_bytes / _GB:.3g} GB and do not fit into '{place}' "
                f"({error.strerror or error}); free some space, set TMPDIR to another disk, allow more memory, or use "
                "fewer tokens per batch"
            ) from error
