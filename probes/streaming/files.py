"""Reading parts of weight files straight into tensors, and noticing when a file changes meanwhile."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from probes.errors import CheckpointError
from probes.weight_files import StoredTensor

__all__ = ["FileReader", "Fingerprint"]

_CHUNK_BYTES = 8 << 20
_HEADER_BYTES = 1 << 20
_STORED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells one state of a file from another.

    Attributes:
        size: in bytes.
        modified: time of the last modification, nanoseconds.
        header: SHA-256 of its first MiB, which holds the header.
    """

    size: int
    modified: int
    header: str

    @classmethod
    def of(cls, path: Path) -> Fingerprint:
        """Of a file as it is now.

        Raises:
            CheckpointError: if it cannot be read.
        """
        try:
            with path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                return cls(status.st_size, status.st_mtime_ns, hashlib.sha256(stream.read(_HEADER_BYTES)).hexdigest())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class FileReader:
    """Reads tensors of open files; every file must stay as it was when this was made.

    Reading is done by position, so several threads may do it at once. ``n_bytes_read`` counts what was read.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.fingerprints: Mapping[Path, Fingerprint] = {path: Fingerprint.of(path) for path in paths}
        self.n_bytes_read = 0
        self._lock = threading.Lock()

    def count(self, n_bytes: int) -> None:
        """Add to the bytes read."""
        with self._lock:
            self.n_bytes_read += n_bytes

    def check(self, paths: Iterable[Path] | None = None) -> None:
        """Compare files with what they were.

        Args:
            paths: all by default.

        Raises:
            CheckpointError: if one is gone, or has another size or time of modification.
        """
        for path in self.fingerprints if paths is None else paths:
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"{path} has gone while it was in use: {error.strerror}") from error
            self._compare(path, status)

    def _compare(self, path: Path, now: os.stat_result) -> None:
        then = self.fingerprints[path]
        if (now.st_size, now.st_mtime_ns) != (then.size, then.modified):
            raise CheckpointError(
                f"{path} has changed while it was in use ({then.size} bytes then, {now.st_size} now, modification time "
                f"{'the same' if now.st_mtime_ns == then.modified else 'another'}): blocks read before and after it would be "
                "of two models; run again when nothing writes to it"
            )

    def check_headers(self) -> None:
        """As :meth:`check` for all files, their headers compared too.

        Raises:
            CheckpointError: if one has changed.
        """
        self.check()
        for path, then in self.fingerprints.items():
            if Fingerprint.of(path) != then:
                raise CheckpointError(f"{path} has changed while it was in use (another header); run again")

    def read(self, stored: StoredTensor, out: Tensor, first_row: int = 0) -> None:
        """Fill a tensor with consecutive rows of a stored one, cast to its dtype.

        Args:
            stored: where the values are.
            out: contiguous, of the same shape but for its first dimension, on any device.
            first_row: of the stored tensor.

        Raises:
            CheckpointError: if the file has changed, or ends early.
        """
        dtype = _STORED[stored.dtype]
        flat = out.detach().view(-1)
        position = stored.start + first_row * (stored.n_bytes // max(stored.shape[0], 1) if stored.shape else 0)
        if out.dtype == dtype and out.device.type == "cpu":
            self._fill(stored.file, position, flat)
        else:
            staging = torch.empty(min(flat.numel(), _CHUNK_BYTES // dtype.itemsize), dtype=dtype)
            for part in torch.split(flat, max(len(staging), 1)):
                self._fill(stored.file, position, staging[: len(part)])
                part.copy_(staging[: len(part)])
                position += len(part) * dtype.itemsize
        self.count(flat.numel() * dtype.itemsize)

    def _fill(self, path: Path, position: int, flat: Tensor) -> None:
        """Bytes from a position into a flat tensor on the CPU; a read may return less than it was asked for."""
        if not flat.numel():
            return
        view = memoryview(cast("Any", flat.view(torch.uint8).numpy()))
        try:
            with path.open("rb", buffering=0) as stream:
                self._compare(path, os.fstat(stream.fileno()))
                stream.seek(position)
                while view:
                    n_read = stream.readinto(view)
                    if not n_read:
                        raise CheckpointError(f"{path} has changed while it was in use: it ends early; run again")
                    view = view[n_read:]
        except OSError as error:
            raise CheckpointError(f"cannot read {path} at byte {position}: {error.strerror}") from error
