"""GGUF tensors as parameters, dequantised one by one, in the order and convention of ``transformers``."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from probes.errors import CheckpointError, UnsupportedModelError
from probes.gguf_file import GgufFile
from probes.gguf_rope import ROPE_TENSORS
from probes.streaming.files import FileReader

__all__ = ["GgufRecipe", "gguf_recipes"]

_AS_STORED = ("token_embd.weight", "output.weight")
_CHUNK_BYTES = 64 << 20
# Tensors of transformers that the file holds in two, one after the other along the rows of each expert.
_JOINED = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
# Architectures that llama.cpp's converter treats like another that transformers knows.
_CONVERTED_LIKE = {"gemma": "gemma2", "granite": "llama", "smollm3": "llama"}

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """One parameter from one GGUF tensor, or from several that are joined along their second dimension.

    Attributes:
        reader: of the file.
        sources: tensors as the ``gguf`` package maps them from the file.
        targets: name of the parameter.
        convert: (name of the tensor, its values) -> values as ``transformers`` has them.
    """

    reader: FileReader
    sources: tuple[Any, ...]
    targets: tuple[str, ...]
    convert: Callable[[str, Values], Values]

    @property
    def n_bytes(self) -> int:
        """Bytes of the quantised tensors."""
        return sum(int(source.data.nbytes) for source in self.sources)

    @property
    def has_rows(self) -> bool:
        """Embedding and head are stored row by row as they are used."""
        return self.sources[0].name in _AS_STORED

    def fill(self, outs: Mapping[str, Tensor]) -> None:
        """Dequantise, convert and cast."""
        (out,) = outs.values()
        if self.has_rows:
            self._fill_by_chunks(out)
            return
        self.reader.check()
        parts = [self.convert(source.name, _values(source, source.data)) for source in self.sources]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if _without_ones(values.shape) != _without_ones(out.shape):
            raise CheckpointError(_misfit(self.sources[0].name, values.shape, out.shape))
        out.copy_(torch.from_numpy(np.ascontiguousarray(values)).view(out.shape))
        self.reader.count(self.n_bytes)

    def fill_rows(self, out: Tensor, first_row: int) -> None:
        """Dequantise rows and cast them."""
        self.reader.check()
        (source,) = self.sources
        rows = source.data[first_row : first_row + len(out)]
        out.copy_(torch.from_numpy(_values(source, rows)).view(out.shape))
        self.reader.count(int(rows.nbytes))

    def _fill_by_chunks(self, out: Tensor) -> None:
        n_rows = max(1, _CHUNK_BYTES // max(out[0].numel() * 4, 1))
        for start in range(0, len(out), n_rows):
            self.fill_rows(out[start : start + n_rows], start)


def _values(source: Any, data: Any) -> Values:
    from gguf import dequantize

    return np.array(dequantize(data, source.tensor_type), dtype=np.float32)  # a copy: the file's pages are let go


def gguf_recipes(model: nn.Module, file: GgufFile, reader: FileReader) -> list[GgufRecipe]:
    """How each parameter of a ``transformers`` model comes out of a GGUF file.

    Args:
        model: on the meta device.
        file: its header.
        reader: of the file.

    Returns:
        The recipes, in the order of the file.

    Raises:
        CheckpointError: if a tensor has another size than the header asks for.
        UnsupportedModelError: if the file holds a tensor that the model has no place for.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config: Any = model.config
    processors: dict[str, Any] = TENSOR_PROCESSORS | {name: TENSOR_PROCESSORS[like] for name, like in _CONVERTED_LIKE.items()}
    processor = processors.get(file.architecture, TensorProcessor)(config=config.to_dict())
    with _names_built_once():
        names = get_gguf_hf_weights_map(model, processors["qwen2moe"](), file.architecture)  # it knows joined experts
    convert = partial(_falcon, config) if file.architecture == "falcon" else partial(_processed, processor)
    sources: dict[str, list[Any]] = {}
    for tensor in GGUFReader(str(file.path)).tensors:
        target = names.get(tensor.name, names.get(tensor.name.removesuffix(".weight")))
        twice = tensor.name == "output.weight" and config.tie_word_embeddings
        if target is not None and not twice:
            sources.setdefault(target, []).append(tensor)
        elif not twice and tensor.name not in ROPE_TENSORS:
            raise UnsupportedModelError(
                f"{file.path} holds tensor '{tensor.name}', which {config.model_type} of transformers has no place for: "
                "the numbers would be another model's; use its safetensors"
            )
    _check_sizes(model, file, sources)
    return [GgufRecipe(reader, _in_order(found), (target,), convert) for target, found in sources.items()]


@contextlib.contextmanager
def _names_built_once() -> Iterator[None]:
    """``transformers`` builds the table of names anew for every submodule."""
    import gguf

    build = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(build)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = build


def _check_sizes(model: nn.Module, file: GgufFile, sources: Mapping[str, list[Any]]) -> None:
    expected = model.state_dict(keep_vars=True)
    for target, found in sources.items():
        shapes = [file.tensors[source.name].shape for source in found]
        shape = tuple(expected[target].shape)
        as_stored = found[0].name not in _AS_STORED or shapes[0] == shape
        if sum(math.prod(each) for each in shapes) != math.prod(shape) or not as_stored:
            raise CheckpointError(f"{file.path}: {_misfit(found[0].name, shapes[0], shape)}")


def _misfit(name: str, stored: Sequence[int], asked: Sequence[int]) -> str:
    return f"tensor '{name}' has shape {tuple(stored)}, the header asks for {tuple(asked)}"


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _in_order(tensors: list[Any]) -> tuple[Any, ...]:
    """Gates before what they multiply, as ``transformers`` joins them."""
    return tuple(sorted(tensors, key=lambda tensor: _JOINED[-1] in tensor.name))


def _processed(processor: Any, name: str, values: Values) -> Values:
    converted: Values = processor.process(weights=values, name=name).weights
    return converted


def _falcon(config: Any, name: str, values: Values) -> Values:
    """Queries, keys and values, which llama.cpp keeps one after the other, back into groups of one key each."""
    if not config.new_decoder_architecture or ".attn_qkv." not in name:
        return values
    n_kv, n_heads = config.num_kv_heads, config.num_attention_heads
    width = len(values) // (n_heads + 2 * n_kv)
    ends = np.cumsum([n_heads * width, n_kv * width])
    parts = (part.reshape(n_kv, -1, *values.shape[1:]) for part in np.split(values, ends))
    return np.concatenate(list(parts), axis=1).reshape(values.shape)
