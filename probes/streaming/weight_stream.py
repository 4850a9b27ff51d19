"""One block of weights in place at a time, the next one read meanwhile.

The model is built on the meta device. Its vectors (norm gains, biases) and what several blocks share stay in memory: they are
a ten-thousandth of the whole. Every other matrix is in place only inside :meth:`WeightStream.resident`, in one of two sets of
buffers that are used in turn; a thread fills the other set with the block that comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from probes.layout import ResidualLayout
from probes.memory import release_free_memory
from probes.streaming.files import FileReader
from probes.streaming.recipes import Recipe
from probes.streaming.rows import HeadRows, RowLookups

__all__ = ["WeightStream"]


@dataclass(slots=True)
class _Owned:
    """A parameter of the model and the places it is seen at."""

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class WeightStream:
    """Puts weights of a model in place and takes them away; :meth:`close` ends its thread.

    Args:
        model: its matrices on the meta device, its vectors in place.
        layout: where its residual stream runs; its blocks are read in order, up or down.
        recipes: parameter name -> how it is read; for every parameter that is on the meta device.
        reader: of the files.
        device: where weights are put.
        head: the head's weight, read by rows; None where the head is no linear map or is not stored by rows.

    Attributes:
        in_place: real parameter -> the meta parameter it stands for, while resident.
        largest_block: the block that takes most memory.
        reads_ahead: whether the next block is read meanwhile.
        lookups: rows of embeddings read by the last entry.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ResidualLayout,
        recipes: Mapping[str, Recipe],
        reader: FileReader,
        device: torch.device,
        head: HeadRows | None,
    ) -> None:
        self.model, self.layout, self.reader, self.device, self.head = model, layout, reader, device, head
        self.in_place: dict[nn.Parameter, nn.Parameter] = {}
        self._block_of = {name: i for i, name in enumerate(layout.blocks)}
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._recipe_of = {self._named[name]: recipe for name, recipe in recipes.items()}
        self._blocks = [self._owned((name,)) for name in layout.blocks]
        self._by_rows = self._row_tables(self._owned(layout.embedding_modules))
        self.largest_block = max(range(layout.n_blocks), key=self.block_memory)
        self.lookups = RowLookups(self._by_rows, device)
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._pending: dict[int, Future[dict[nn.Parameter, Tensor]]] = {}
        self.reads_ahead = True
        self._last_block: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keel-read")

    def close(self) -> None:
        """End the reading thread; what it was reading is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._free.clear()

    @property
    def n_bytes_read(self) -> int:
        """Bytes read from files so far."""
        return self.reader.n_bytes_read

    def block_bytes(self, block: int) -> int:
        """Bytes that one pass over a block reads."""
        return sum(recipe.n_bytes for recipe in self._recipes(self._blocks[block]))

    def block_memory(self, block: int) -> int:
        """Bytes that a block takes in memory."""
        return sum(owned.parameter.nbytes for owned in self._blocks[block])

    @property
    def other_bytes(self) -> dict[nn.Parameter, int]:
        """Bytes in the file of the matrices outside the blocks, by parameter; a tied one once."""
        inside = {owned.parameter for block in self._blocks for owned in block}
        return {p: recipe.n_bytes for p, recipe in self._recipe_of.items() if p.is_meta and p not in inside}

    def row_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes in the file of one row."""
        return self._recipe_of[parameter].n_bytes // len(parameter)

    @property
    def tables(self) -> tuple[nn.Parameter, ...]:
        """Embeddings whose rows are read one by one."""
        return tuple(cast("nn.Parameter", table) for table in self._by_rows)

    def reads_by_rows(self, parameter: nn.Parameter) -> bool:
        """Whether an embedding's rows are read one by one."""
        return parameter in self._by_rows

    def head_rows(self, parameter: nn.Parameter) -> HeadRows:
        """A matrix outside the blocks in windows of rows, as large as the largest block."""
        return HeadRows(parameter, self._recipe_of[parameter], self.device, self.block_memory(self.largest_block))

    @contextmanager
    def resident(self, modules: tuple[str, ...]) -> Iterator[None]:
        """Weights of these modules in place; for a block, the next one in the direction of travel is read meanwhile.

        Embeddings are read row by row as they are looked up, a linear head by windows of rows.

        Args:
            modules: dotted names; one block, or any others.

        Raises:
            CheckpointError: if a file has changed.
        """
        block = self._block_of.get(modules[0]) if len(modules) == 1 else None
        if block is None:
            yield from self._resident_others(modules)
            return
        owned = self._blocks[block]
        loaded = self._take(block)
        following = block + self._direction(block)
        self._last_block = block
        if following != block and following in range(self.layout.n_blocks):
            self.prefetch(following)
        try:
            with self._placed(owned, loaded):
                yield
        finally:
            self._recycle(loaded.values())

    def _direction(self, block: int) -> int:
        """Up or down; the first block read is the start of the way up, or where a run goes on: then nothing is guessed."""
        if self._last_block is None:
            return 1 if block == 0 else 0
        return 1 if block > self._last_block else -1

    def prefetch(self, block: int) -> None:
        """Start to read a block in the background."""
        if self.reads_ahead and block not in self._pending:
            self._pending[block] = self._thread.submit(self._load, self._blocks[block])

    def forget(self) -> None:
        """Drop what was prefetched, and the buffers."""
        for future in self._pending.values():
            if not future.cancel():
                future.exception()
        self._pending.clear()
        self._free.clear()
        release_free_memory()

    def _resident_others(self, modules: Sequence[str]) -> Iterator[None]:
        asked = self._owned(modules)
        owned = [o for o in asked if not self._is_head(o.parameter) and not self._is_table(o)]
        if any(self._is_head(o.parameter) for o in asked):
            self._free.clear()  # the head's window takes the place of the blocks' buffers
        loaded = self._load(owned)
        self.lookups.read.clear()
        try:
            with self._placed(owned, loaded), self.lookups:
                yield
        finally:
            self.lookups.read.clear()
            if self.head is not None:
                self.head.release()

    def _is_head(self, parameter: nn.Parameter) -> bool:
        return self.head is not None and parameter is self.head.parameter

    def _is_table(self, owned: _Owned) -> bool:
        """Whether it is only looked up here, row by row."""
        return owned.parameter in self._by_rows and all(isinstance(module, nn.Embedding) for module, _ in owned.places)

    def _take(self, block: int) -> dict[nn.Parameter, Tensor]:
        for other in [b for b in self._pending if b != block]:  # a guess that was wrong
            self._recycle(self._pending.pop(other).result().values())
        future = self._pending.pop(block, None)
        return self._load(self._blocks[block]) if future is None else future.result()

    def _load(self, owned: Sequence[_Owned]) -> dict[nn.Parameter, Tensor]:
        loaded = {o.parameter: self._buffer(o.parameter) for o in owned}
        for recipe in self._recipes(owned):
            recipe.fill({name: loaded[self._named[name]] for name in recipe.targets})
        return loaded

    def _recipes(self, owned: Sequence[_Owned]) -> list[Recipe]:
        return list({id(recipe): recipe for recipe in (self._recipe_of[o.parameter] for o in owned)}.values())

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        kept = self._free.get((tuple(parameter.shape), parameter.dtype))
        return kept.pop() if kept else torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)

    def _recycle(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)

    @contextmanager
    def _placed(self, owned: Sequence[_Owned], loaded: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
        real = {o.parameter: nn.Parameter(loaded[o.parameter], requires_grad=o.parameter.requires_grad) for o in owned}
        self.in_place = {new: old for old, new in real.items()}
        try:
            for o in owned:
                for module, name in o.places:
                    module._parameters[name] = real[o.parameter]
            yield
        finally:
            for o in owned:
                for module, name in o.places:
                    module._parameters[name] = o.parameter
            self.in_place = {}

    def _owned(self, modules: Sequence[str]) -> list[_Owned]:
        """Parameters of modules that are on the meta device."""
        found: dict[nn.Parameter, _Owned] = {}
        for name in modules:
            for module in self.model.get_submodule(name).modules():
                for attribute, parameter in module._parameters.items():
                    if parameter is not None and parameter.is_meta:
                        found.setdefault(parameter, _Owned(parameter)).places.append((module, attribute))
        return list(found.values())

    def _row_tables(self, embedding: Sequence[_Owned]) -> dict[Tensor, Recipe]:
        """Embeddings whose rows can be read one by one."""
        tables: dict[Tensor, Recipe] = {}
        for owned in embedding:
            recipe = self._recipe_of[owned.parameter]
            if recipe.has_rows and any(isinstance(module, nn.Embedding) for module, _ in owned.places):
                tables[owned.parameter] = recipe
        return tables
