"""What a GGUF file holds, read from its header alone, with every size checked against the file's length."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probes.errors import CheckpointError
from probes.foreign_files import check_content

__all__ = ["GgufFile", "GgufTensor", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        name: as llama.cpp calls it.
        shape: slowest dimension first, as torch has it.
        type_name: storage type, such as ``F32`` or ``Q4_K``.
        offset: of its data, from the start of the data section, in bytes.
        n_bytes: size of its data.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        architecture: as llama.cpp calls it.
        metadata: scalars and strings by key; an array is kept as its length.
        tensors: by name.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    def setting(self, key: str) -> object:
        """The value of ``<architecture>.<key>``, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


class _Cursor:
    """Reads little-endian values one after another; a read past the end is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise CheckpointError(f"{self.path} is truncated: its header goes on past the end of the file; fetch it again")
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, kind: int) -> int | float | bool:
        layout = f"<{_SCALARS[kind]}"
        value: int | float | bool = struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]
        return value

    def integer(self, layout: str) -> int:
        return int(struct.unpack(f"<{layout}", self.bytes(struct.calcsize(f"<{layout}")))[0])

    def string(self) -> str:
        return self.bytes(self.integer("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise CheckpointError(f"{self.path} has a corrupt header: a metadata value of unknown type {kind}")

    def _array(self) -> int:
        kind, count = self.integer("I"), self.integer("Q")
        if kind in _SCALARS:
            self.bytes(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return count
        for _ in range(count):
            self.value(kind)
        return count


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file.

    Args:
        path: the file.

    Returns:
        Architecture, metadata and tensors.

    Raises:
        CheckpointError: if it is not GGUF, is truncated, is one part of several, or holds a type that cannot be dequantised.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(path, data), len(data))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} has a corrupt header: its arrays are nested too deeply") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} is empty: fetch it again") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    if cursor.bytes(4) != b"GGUF":
        check_content(path)
        raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
    version = cursor.integer("I")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read")
    n_tensors, n_keys = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, object] = {}
    for _ in range(n_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.integer("I"))
    tensors = [_tensor(cursor) for _ in range(n_tensors)]
    _check_whole(path, metadata)
    _check_extent(path, tensors, cursor.position, metadata.get("general.alignment"), size)
    return GgufFile(path, str(metadata["general.architecture"]), metadata, {tensor.name: tensor for tensor in tensors})


def _tensor(cursor: _Cursor) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    shape = tuple(cursor.integer("Q") for _ in range(cursor.integer("I")))[::-1]
    kind, offset = cursor.integer("I"), cursor.integer("Q")
    try:
        storage = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(f"tensor '{name}' in {cursor.path} has unknown quantisation type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[storage]
    _check_readable(cursor.path, name, int(storage), storage.name, block_bytes)
    return GgufTensor(name, shape, storage.name, offset, math.prod(shape) // block * block_bytes)


def _check_readable(path: Path, name: str, kind: int, type_name: str, block_bytes: int) -> None:
    """Refuse a type the ``gguf`` package cannot dequantise, by trying it on one block of zeros."""
    from gguf import GGMLQuantizationType, dequantize

    if type_name in {"F32", "F16"}:
        return
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, block_bytes), dtype=np.uint8), GGMLQuantizationType(kind))
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor '{name}' in {path} is stored as {type_name}, which cannot be dequantised; use F16, Q8_0 or a K-quant"
        ) from error


def _check_whole(path: Path, metadata: Mapping[str, object]) -> None:
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{path} has no 'general.architecture' in its metadata")
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{path} is one of {parts} parts; merge them first (llama-gguf-split --merge)")


def _check_extent(path: Path, tensors: list[GgufTensor], header_end: int, alignment: object, size: int) -> None:
    step = alignment if isinstance(alignment, int) and alignment > 0 else _DEFAULT_ALIGNMENT
    start = -(-header_end // step) * step
    for tensor in tensors:
        if start + tensor.offset + tensor.n_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor '{tensor.name}' ends at byte {start + tensor.offset + tensor.n_bytes}, "
                f"the file has {size}; fetch the file again"
            )
