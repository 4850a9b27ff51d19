"""Opening a checkpoint without reading its matrices: the model's structure, its vectors, and a plan for the rest."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from probes.checkpoint import Checkpoint, Loaders, read_checkpoint
from probes.device import resolve_device
from probes.errors import CheckpointError, UnsupportedModelError
from probes.families import OWN_FAMILY, SUPPORTED_FAMILIES
from probes.gguf_file import GgufFile
from probes.layout import Head, ResidualLayout
from probes.loading import (
    Loaded,
    check_complete,
    check_fits,
    drop_unavailable_attention,
    folder_config,
    gguf_config,
    language_model_class,
    model_options,
    stale_duplicate,
    unused_tensors,
)
from probes.streaming.files import FileReader
from probes.streaming.gguf_recipes import gguf_recipes
from probes.streaming.recipes import Recipe, SafetensorsRecipe, safetensors_recipes
from probes.streaming.rows import HeadRows, RowHead
from probes.streaming.weight_stream import WeightStream
from probes.weight_files import StoredTensor, WeightFiles

if TYPE_CHECKING:
    from probes.config import ComputeDtype

__all__ = ["StreamedCheckpoint", "open_streamed"]

_COMPARED_BYTES = 8 << 20
_LEAST_WINDOW = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCheckpoint:
    """A checkpoint whose matrices stay on disk until they are needed; a context manager that ends its reading thread.

    Attributes:
        checkpoint: as a loaded one, but every matrix of its model is on the meta device.
        stream: puts weights in place.
        device: where they are put.
    """

    checkpoint: Checkpoint
    stream: WeightStream
    device: torch.device

    def __enter__(self) -> StreamedCheckpoint:
        """The checkpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the reading thread."""
        self.stream.close()

    @property
    def layout(self) -> ResidualLayout:
        """Where the residual stream runs; the head is read by rows where it can be."""
        return self.checkpoint.layout

    @property
    def model(self) -> nn.Module:
        """The model, its matrices on the meta device."""
        return self.checkpoint.model


def open_streamed(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    window_bytes: int | None = None,
    tokenizer: str | Path | None = None,
) -> StreamedCheckpoint:
    """Open a checkpoint of any size.

    Args:
        source: as :func:`probes.checkpoint.load_checkpoint` takes it.
        dtype: of the parameters while they are in place; None keeps the stored one (float32 for GGUF).
        device: where they are put.
        window_bytes: how much of the head's matrix may be in place at once; as much as the largest block by default.
        tokenizer: to read in place of its own, as there.

    Returns:
        The checkpoint; nothing but vectors has been read.

    Raises:
        CheckpointError: as when it is loaded whole.
        UnsupportedModelError: if the family is none of the table, whose stream can be found without running the model.
        DeviceError: if this machine does not have the device.

    Example:
        >>> import tempfile
        >>> from probes.config import tiny
        >>> from probes.model import Transformer
        >>> from probes.saving import save_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(Transformer(tiny()), folder)
        ...     with open_streamed(folder) as streamed:
        ...         print(streamed.layout.n_blocks, streamed.model.embedding.weight.is_meta)
        4 True
    """
    opened = _Opened(resolve_device(device))
    loaders = Loaders(safetensors=opened.safetensors, gguf=opened.gguf, own=opened.own)
    checkpoint = read_checkpoint(source, loaders, dtype=dtype, tokenizer=tokenizer)
    head = opened.head_rows(checkpoint.layout, window_bytes)
    if head is not None:
        layout = replace(checkpoint.layout, head=_by_rows(checkpoint.layout.head, head))
        checkpoint = replace(checkpoint, layout=layout)
    stream = WeightStream(checkpoint.model, checkpoint.layout, opened.streamed, opened.reader, opened.device, head)
    return StreamedCheckpoint(checkpoint=checkpoint, stream=stream, device=opened.device)


def _by_rows(head: Head, rows: HeadRows) -> Head:
    bias = getattr(head.linear, "bias", None)
    row_head = RowHead(rows, bias)
    return replace(head, linear=row_head, logits=lambda hidden: head.shaped_(row_head(hidden)))


class _Opened:
    """What opening a checkpoint leaves: the reader of its files and how each matrix is read."""

    reader: FileReader

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streamed: dict[str, Recipe] = {}
        self.model: nn.Module

    def safetensors(self, folder: Path, files: WeightFiles, dtype: torch.dtype) -> Loaded:
        config = folder_config(folder)
        attention = drop_unavailable_attention(config)
        check_fits(folder, config, language_model_class(config), files)
        model = self._skeleton(config, dtype)
        self.reader = FileReader(files.files)
        files, noticed = _without_duplicates(model, config, files, self.reader)
        recipes, unused = safetensors_recipes(model, files, self.reader)
        self._fill(str(folder), model, recipes, config)
        return Loaded(model, attention + noticed + unused_tensors(folder, model, unused))

    def gguf(self, file: GgufFile, dtype: torch.dtype) -> Loaded:
        config = gguf_config(file)
        model = self._skeleton(config, dtype)
        self.reader = FileReader([file.path])
        self._fill(str(file.path), model, gguf_recipes(model, file, self.reader), config)
        return Loaded(model)

    def own(self, folder: Path, files: WeightFiles, compute_dtype: ComputeDtype | None) -> Loaded:
        from safetensors import SafetensorError, safe_open

        from probes.config import ModelConfig
        from probes.model import Transformer
        from probes.saving import check_origin, check_stored, read_config

        stored = read_config(folder)
        config = stored if compute_dtype is None else ModelConfig.from_dict(stored.to_dict() | {"compute_dtype": compute_dtype})
        for path in files.files:
            try:
                with safe_open(path, framework="pt") as file:
                    check_origin(file.metadata() or {}, stored, path)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        check_stored({name: (tensor.dtype, tensor.size) for name, tensor in files.tensors.items()}, config, folder)
        with torch.device("meta"):
            model = Transformer(config, initialise=False)
        self.reader = FileReader(files.files)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        unknown = sorted(set(files.tensors) - set(parameters))
        if unknown:
            raise CheckpointError(f"{folder} holds unknown tensor(s): {', '.join(unknown[:3])}")
        recipes = [SafetensorsRecipe(self.reader, ((name, stored),), (name,)) for name, stored in files.tensors.items()]
        for name, tensor in files.tensors.items():
            if tensor.shape != tuple(parameters[name].shape):
                raise CheckpointError(
                    f"{folder}: {name} has shape {tensor.shape}, the configuration needs {tuple(parameters[name].shape)}"
                )
        self._fill(str(folder), model, recipes, config)
        return Loaded(model)

    def head_rows(self, layout: ResidualLayout, window_bytes: int | None) -> HeadRows | None:
        """The head's weight in windows of rows, where the head is one linear map stored as it is used."""
        if layout.head.linear is None:
            return None
        weight = cast("nn.Parameter", layout.head.linear.weight)
        named = self.model.named_parameters(remove_duplicate=False)
        recipe = next((self.streamed[name] for name, p in named if p is weight and name in self.streamed), None)
        if recipe is None or not recipe.has_rows:
            return None
        if window_bytes is None:
            blocks = (self.model.get_submodule(name) for name in layout.blocks)
            largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
            window_bytes = max(_LEAST_WINDOW, largest)
        return HeadRows(weight, recipe, self.device, window_bytes)

    def _skeleton(self, config: Any, dtype: torch.dtype) -> nn.Module:
        """The model with its parameters on the meta device; buffers such as rotary tables are computed as usual."""
        import accelerate

        if config.model_type not in SUPPORTED_FAMILIES:
            raise UnsupportedModelError(
                f"family '{config.model_type}' cannot be streamed: its residual stream is found by running the whole model; "
                f"streamed families: {', '.join((*SUPPORTED_FAMILIES, OWN_FAMILY))}"
            )
        options = {name: value for name, value in model_options(dtype).items() if name != "ignore_mismatched_sizes"}
        model_class = language_model_class(config)
        with accelerate.init_empty_weights(include_buffers=False):
            model = model_class._from_config(copy.deepcopy(config), dtype=dtype, **options)
        model.tie_weights()  # moving parameters to the meta device has parted them
        _as_loaded(model, dtype)
        return cast("nn.Module", model)

    def _fill(self, place: str, model: nn.Module, recipes: Sequence[Recipe], config: Any) -> None:
        """Read what stays in memory, and keep the recipes of the rest."""
        self.model = model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers())
        known = {name for recipe in recipes for name in recipe.targets}
        _check_all_there(place, parameters, known, config)
        stays = _staying(model)
        for recipe in recipes:
            chosen = [name for name in recipe.targets if name in parameters and parameters[name] in stays]
            if chosen and len(chosen) == len(recipe.targets):
                outs = {name: torch.empty(parameters[name].shape, dtype=parameters[name].dtype) for name in chosen}
                recipe.fill(outs)
                for name, value in outs.items():
                    _put(model, parameters[name], nn.Parameter(value.to(self.device)))
            elif recipe.targets[0] in buffers:
                recipe.fill({name: buffers[name] for name in recipe.targets})
            else:
                self.streamed.update(dict.fromkeys(recipe.targets, recipe))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)


def _as_loaded(model: Any, dtype: torch.dtype) -> None:
    """What loading does beside reading: tables are computed in float32 in any dtype, and some parameters stay in float32."""
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)) and not any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)
    kept = model._get_dtype_plan(dtype)
    for name, parameter in list(model.named_parameters()):
        wide = next((kept[part] for part in kept if re.search(part.replace("*", ".*"), name)), parameter.dtype)
        if wide != parameter.dtype:
            _put(model, parameter, nn.Parameter(torch.empty_like(parameter, dtype=wide)))


def _staying(model: nn.Module) -> set[nn.Parameter]:
    """Vectors, and what several blocks of a model of the toolkit share."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.split(".")[1] if name.startswith("blocks.") else ""
        owners.setdefault(parameter, set()).add(block)
    return {p for p, blocks in owners.items() if p.ndim < 2 or len(blocks) > 1}


def _put(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _check_all_there(place: str, parameters: dict[str, nn.Parameter], known: set[str], config: Any) -> None:
    filled = {parameters[name] for name in known if name in parameters}
    missing = {name for name, parameter in parameters.items() if parameter not in filled}
    check_complete(Path(place), {"mismatched_keys": (), "missing_keys": missing}, config)


def _without_duplicates(
    model: nn.Module, config: Any, files: WeightFiles, reader: FileReader
) -> tuple[WeightFiles, tuple[str, ...]]:
    """The files without second copies of tied weights, and a warning where a copy differs."""
    if not getattr(config, "tie_word_embeddings", False):
        return files, ()
    tied = cast("dict[str, str]", getattr(model, "_tied_weights_keys", None) or {})
    tensors, noticed = dict(files.tensors), []
    for duplicate, kept in tied.items():
        if duplicate in tensors and kept in tensors:
            second = tensors.pop(duplicate)
            if not _equal(second, tensors[kept], reader):
                noticed.append(stale_duplicate(duplicate, kept))
    return replace(files, tensors=tensors), tuple(noticed)


def _equal(a: StoredTensor, b: StoredTensor, reader: FileReader) -> bool:
    """Whether two stored tensors hold the same values, compared piece by piece."""
    if a.shape != b.shape:
        return False
    n_rows = max(1, _COMPARED_BYTES // max(1, 4 * a.size // max(1, a.shape[0])))
    with ExitStack() as stack:
        before = reader.n_bytes_read
        stack.callback(lambda: reader.count(before - reader.n_bytes_read))  # opening is not part of a run
        for start in range(0, a.shape[0], n_rows):
            pieces = [torch.empty(min(n_rows, a.shape[0] - start), *a.shape[1:]) for _ in (a, b)]
            for stored, piece in zip((a, b), pieces, strict=True):
                reader.read(stored, piece, start)
            if not torch.equal(*pieces):
                return False
    return True
