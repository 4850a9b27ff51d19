"""What a GGUF file holds, read from its header alone, with every size checked against the file's length."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from probes.errors import CheckpointError
from probes.foreign_files import check_content

__all__ = ["GgufArray", "GgufFile", "GgufTensor", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SHORT_ARRAY = 4096  # longer than any model is deep, shorter than any vocabulary that matters here
_COMPARED_BYTES = 1 << 20
_OTHER_KINDS = {
    "adapter": "a LoRA adapter: merge it into its base model first",
    "mmproj": "the vision or audio part of a model: give the file of its language model",
    "imatrix": "an importance matrix for quantising, not a model",
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata array.

    Attributes:
        count: number of elements.
        values: the elements of a short array of numbers; None for any other.
    """

    count: int
    values: tuple[int | float | bool, ...] | None = None


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
        metadata: scalars, strings and :class:`GgufArray` by key.
        tensors: by name.
        data_start: where the data section starts, in bytes.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    data_start: int

    def setting(self, key: str) -> object:
        """The value of ``<architecture>.<key>``, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a tensor, dequantised, in its shape."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        stored = np.fromfile(self.path, np.uint8, tensor.n_bytes, offset=self.data_start + tensor.offset)
        kind = GGMLQuantizationType[tensor.type_name]
        typed = stored.view({"F32": np.float32, "F16": np.float16}.get(tensor.type_name, np.uint8))
        return np.asarray(dequantize(typed, kind), dtype=np.float32).reshape(tensor.shape)

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors of one size are stored as the same bytes; reading ends at the first difference."""
        first, second = (
            np.memmap(self.path, np.uint8, "r", self.data_start + tensor.offset, (tensor.n_bytes,))
            for tensor in (self.tensors[name], self.tensors[other])
        )
        steps = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(first), _COMPARED_BYTES))
        return all(np.array_equal(first[step], second[step]) for step in steps)


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

    def _array(self) -> GgufArray:
        kind, count = self.integer("I"), self.integer("Q")
        if kind in _SCALARS:
            stored = self.bytes(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            short = count <= _SHORT_ARRAY
            return GgufArray(count, struct.unpack(f"<{count}{_SCALARS[kind]}", stored) if short else None)
        for _ in range(count):
            self.value(kind)
        return GgufArray(count)


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file.

    Args:
        path: the file.

    Returns:
        Architecture, metadata and tensors.

    Raises:
        CheckpointError: if it is not GGUF, is truncated, is one part of several, is something else than a model, or holds a
            type that cannot be dequantised.
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
    _check_kind(path, metadata)
    _check_whole(path, metadata, len(tensors))
    start = _data_start(cursor.position, metadata.get("general.alignment"))
    _check_extent(path, tensors, start, size)
    return GgufFile(path, str(metadata["general.architecture"]), metadata, {tensor.name: tensor for tensor in tensors}, start)


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


def _check_kind(path: Path, metadata: Mapping[str, object]) -> None:
    """Refuse files that are not models; older adapters state no kind but the adapter's settings."""
    stated = str(metadata.get("general.type", "model"))
    kind = "adapter" if any(key.startswith("adapter.") for key in metadata) else stated
    if kind != "model":
        raise CheckpointError(f"{path} is {_OTHER_KINDS.get(kind, f'no model: its general.type is {kind!r}')}")


def _check_whole(path: Path, metadata: Mapping[str, object], n_tensors: int) -> None:
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{path} has no 'general.architecture' in its metadata")
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{path} is one of {parts} parts; merge them first (llama-gguf-split --merge)")
    if not n_tensors:
        raise CheckpointError(f"{path} holds no tensors: it is a vocabulary or a header alone, not a model")


def _data_start(header_end: int, alignment: object) -> int:
    step = alignment if isinstance(alignment, int) and alignment > 0 else _DEFAULT_ALIGNMENT
    return -(-header_end // step) * step


def _check_extent(path: Path, tensors: list[GgufTensor], start: int, size: int) -> None:
    for tensor in tensors:
        if start + tensor.offset + tensor.n_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor '{tensor.name}' ends at byte {start + tensor.offset + tensor.n_bytes}, "
                f"the file has {size}; fetch the file again"
            )
