"""What a folder of safetensors holds, read from headers alone: no tensor is loaded and nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from probes.errors import CheckpointError
from probes.foreign_files import check_content, check_tensor_names, foreign_weights, unwrapped_names

__all__ = ["StoredTensor", "WeightFiles", "find_weight_files", "read_json", "read_safetensors_header"]

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32}
_BITS |= {"U64": 64, "I64": 64, "F64": 64}
_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPARED_BYTES = 8 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the file's header describes it.

    Attributes:
        file: where it is.
        dtype: its type, as safetensors calls it.
        shape: its shape.
        start: position of its first byte in the file.
        stored_as: its name in the file, which may have a wrapper's prefix.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stored_as: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype in _FLOATS

    @property
    def n_bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.size * _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of one checkpoint.

    Attributes:
        tensors: every tensor by name.
        warnings: what was odd but harmless.
    """

    tensors: Mapping[str, StoredTensor]
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in order of name."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    @property
    def float_dtypes(self) -> tuple[str, ...]:
        """Floating types, the one with most elements first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype in _FLOATS:
                counts[tensor.dtype] += tensor.size
        return tuple(dtype for dtype, _ in counts.most_common())

    @property
    def n_values(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: the file.
        what: how messages call it.

    Returns:
        The object.

    Raises:
        CheckpointError: if the file is missing, unreadable, or not a JSON object.
    """
    if path.is_file():
        check_content(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{what} {path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{what} {path} is not readable: its brackets are nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} {path} is not a JSON object but a {type(value).__name__}")
    return value


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, with every size checked against the file's length.

    Args:
        path: a ``.safetensors`` file.

    Returns:
        Its tensors by name.

    Raises:
        CheckpointError: if the file is truncated, its header corrupt, or a type is one this reader does not load.
    """
    if path.is_file():
        check_content(path)
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or (length <= _MAX_HEADER_BYTES and size < 8 + length):
                raise CheckpointError(f"{path} is truncated: {size} bytes, shorter than its header; fetch the file again")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} has a corrupt header (it claims {length} bytes): not a safetensors file")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _entries(path, _header(path, text), 8 + length, size - 8 - length)


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt header ({error}): not a safetensors file, or damaged") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} has a corrupt header: its brackets are nested too deeply") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a corrupt header: a {type(header).__name__} instead of a table of tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} has a corrupt header: its __metadata__ is not a table of strings")
    return header


def _entries(path: Path, header: Mapping[str, Any], data_start: int, available: int) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in header.items():
        tensor = _described(path, name, entry, data_start)
        stop = tensor.start - data_start + tensor.n_bytes
        if stop > available:
            raise CheckpointError(
                f"{path} is truncated: tensor '{name}' ends at byte {stop} of the data, the file holds {available}; "
                "fetch the file again"
            )
        tensors[name] = tensor
    end = _contiguous_end(path, tensors, data_start)
    if end != available:
        raise CheckpointError(f"{path} has a corrupt header: it describes {end} bytes of data, the file holds {available}")
    return tensors


def _described(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """One entry of the header, its types and its number of bytes checked."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a corrupt header: tensor '{name}' is not described") from error
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(_is_count(n) for n in (*shape, start, stop)):
        raise CheckpointError(
            f"{path} has a corrupt header: tensor '{name}' has shape {shape!r} and bytes {start!r} to {stop!r}; "
            "integers of 0 or more are needed"
        )
    if dtype not in _BITS:
        raise CheckpointError(f"tensor '{name}' in {path} has type {dtype}; use an unquantised checkpoint (F32, F16, BF16)")
    if stop - start != math.prod(shape) * _BITS[dtype] // 8:
        raise CheckpointError(f"{path} has a corrupt header: tensor '{name}' {tuple(shape)} {dtype} takes {stop - start} bytes")
    return StoredTensor(path, dtype, tuple(shape), data_start + start, name)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _contiguous_end(path: Path, tensors: Mapping[str, StoredTensor], data_start: int) -> int:
    """Where the data ends, counted from its start; tensors must follow one another without gap or overlap."""
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].n_bytes)):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "does not begin where the one before it ends"
            raise CheckpointError(f"{path} has a corrupt header: tensor '{name}' {what}")
        end += tensor.n_bytes
    return end - data_start


def find_weight_files(place: Path) -> WeightFiles:
    """The weights of a checkpoint: one safetensors file, or a folder with one or with shards and their index.

    Args:
        place: a folder, or one ``.safetensors`` file.

    Returns:
        Every tensor, from headers alone.

    Raises:
        CheckpointError: if there are no safetensors, a shard is missing whose tensors no other file holds, a tensor of the
            index is in no file, a file is damaged, or the weights are quantised or an adapter.
    """
    files = _found_weight_files(place)
    check_tensor_names(place, files.tensors)
    plain, remark = unwrapped_names(files.tensors)
    if remark is None:
        return files
    return WeightFiles({name: files.tensors[stored] for name, stored in plain.items()}, (*files.warnings, remark))


def _found_weight_files(place: Path) -> WeightFiles:
    if place.is_file():
        return WeightFiles(read_safetensors_header(place))
    present = sorted(place.glob("*.safetensors"))
    index = place / INDEX_NAME
    if index.is_file():
        return _indexed(index, present)
    if not present:
        raise CheckpointError(_nothing_to_read(place))
    if len(present) > 1:
        whole = place / "model.safetensors"
        if whole not in present:
            raise CheckpointError(
                f"{place} holds {len(present)} safetensors files and no {INDEX_NAME} that says how they belong together; "
                "fetch the index, or name one file"
            )
        present = [whole]
    return WeightFiles(read_safetensors_header(present[0]))


def _indexed(index: Path, present: list[Path]) -> WeightFiles:
    wanted = read_json(index, "the index").get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"the index {index} has no 'weight_map'")
    for name, file in wanted.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file:
            raise CheckpointError(f"the index {index} names '{file}' for tensor '{name}': not a file of this folder")
    named = sorted(set(wanted.values()))
    absent = [file for file in named if not (index.parent / file).is_file()]
    used = [path for path in present if path.name in named] + ([p for p in present if p.name not in named] if absent else [])
    headers = {path.name: read_safetensors_header(path) for path in used}
    found: dict[str, StoredTensor] = {}
    for name, file in wanted.items():
        tensor = headers[file].get(name) if file in headers else _first(headers.values(), name)
        if tensor is None:
            why = "is missing" if file in absent else "does not hold it"
            raise CheckpointError(f"tensor '{name}' cannot be read: {file}, named by the index {index}, {why}")
        found[name] = tensor
    for header in headers.values():
        found |= {name: tensor for name, tensor in header.items() if name not in found}
    warnings = _differing_copies(found, list(headers.values()))
    if absent:
        warnings = (
            f"the index names {len(named)} files of which {len(absent)} are absent (first: {absent[0]}), "
            f"but the {len({t.file for t in found.values()})} present files hold every tensor",
            *warnings,
        )
    return WeightFiles(found, warnings)


def _first(headers: Iterable[Mapping[str, StoredTensor]], name: str) -> StoredTensor | None:
    return next((header[name] for header in headers if name in header), None)


def _differing_copies(found: Mapping[str, StoredTensor], headers: Sequence[Mapping[str, StoredTensor]]) -> tuple[str, ...]:
    """A warning for each tensor of which another file holds a copy with other values."""
    copies = ((name, copy) for header in headers for name, copy in header.items() if copy.file != found[name].file)
    return tuple(
        f"tensor '{name}' is read from {found[name].file.name}; {copy.file.name} holds another copy that differs, not used"
        for name, copy in copies
        if not _same_bytes(found[name], copy)
    )


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    try:
        with a.file.open("rb") as first, b.file.open("rb") as second:
            first.seek(a.start)
            second.seek(b.start)
            return all(
                first.read(min(_COMPARED_BYTES, a.n_bytes - done)) == second.read(min(_COMPARED_BYTES, a.n_bytes - done))
                for done in range(0, a.n_bytes, _COMPARED_BYTES)
            )
    except OSError as error:
        raise CheckpointError(f"cannot read {a.file} and {b.file}: {error.strerror}") from error


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds weights only as a pickle ({pickles[0]}); unpickling runs code from the file, so it is never done. "
            "Convert it once where you trust it: load it with transformers and call save_pretrained, which writes safetensors"
        )
    foreign = foreign_weights(folder)
    if foreign is not None:
        return foreign
    return f"{folder} holds no .safetensors file; a checkpoint folder needs config.json and model.safetensors (or shards)"
