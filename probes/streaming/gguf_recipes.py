"""GGUF tensors as parameters, dequantised one by one, in the order and convention of ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probes.gguf_file import GgufFile
from probes.streaming.files import FileReader

__all__ = ["GgufRecipe", "gguf_recipes"]

_AS_STORED = ("token_embd.weight", "output.weight")
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """One parameter from one GGUF tensor.

    Attributes:
        reader: of the file.
        name: of the tensor.
        tensor: as the ``gguf`` package maps it from the file.
        targets: name of the parameter.
        processor: the family's conversion, of ``transformers``.
    """

    reader: FileReader
    name: str
    tensor: Any
    targets: tuple[str, ...]
    processor: Any

    @property
    def n_bytes(self) -> int:
        """Bytes of the quantised tensor."""
        return int(self.tensor.data.nbytes)

    @property
    def has_rows(self) -> bool:
        """Embedding and head are stored row by row as they are used."""
        return self.name in _AS_STORED

    def fill(self, outs: Mapping[str, Tensor]) -> None:
        """Dequantise, convert and cast."""
        (out,) = outs.values()
        if self.has_rows:
            self._fill_by_chunks(out)
            return
        self.reader.check()
        values = self.processor.process(weights=self._values(self.tensor.data), name=self.name).weights
        out.copy_(torch.from_numpy(np.ascontiguousarray(values)).view(out.shape))
        self.reader.count(self.n_bytes)

    def fill_rows(self, out: Tensor, first_row: int) -> None:
        """Dequantise rows and cast them."""
        self.reader.check()
        rows = self.tensor.data[first_row : first_row + len(out)]
        out.copy_(torch.from_numpy(self._values(rows)).view(out.shape))
        self.reader.count(int(rows.nbytes))

    def _fill_by_chunks(self, out: Tensor) -> None:
        n_rows = max(1, _CHUNK_BYTES // max(out[0].numel() * 4, 1))
        for start in range(0, len(out), n_rows):
            self.fill_rows(out[start : start + n_rows], start)

    def _values(self, data: Any) -> Any:
        from gguf import dequantize

        return np.array(dequantize(data, self.tensor.tensor_type))  # a copy: the file's pages are let go


def gguf_recipes(model: nn.Module, file: GgufFile, reader: FileReader) -> tuple[list[GgufRecipe], list[str]]:
    """How each parameter of a ``transformers`` model comes out of a GGUF file.

    Args:
        model: on the meta device.
        file: its header.
        reader: of the file.

    Returns:
        The recipes, and the names of tensors that belong to no part of the model.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    settings = load_gguf_checkpoint(str(file.path), return_tensors=False)["config"]  # type: ignore[no-untyped-call]
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=settings)  # type: ignore[no-untyped-call]
    names = get_gguf_hf_weights_map(model, processor)
    recipes, unused = [], []
    for tensor in GGUFReader(str(file.path)).tensors:
        target = names.get(tensor.name)
        if target is None:
            unused.append(tensor.name)
        else:
            recipes.append(GgufRecipe(reader, tensor.name, tensor, (target,), processor))
    return recipes, unused
