"""The loss of every variant of a model in one pass over its weights.

Blocks are the outer loop: block k is applied to the intact stream and to every variant that has already left out something,
and a variant is born as a copy of the intact stream at the first block in which it leaves something out. A variant that
leaves out the whole block is carried past it untouched. So block k computes k + 1 streams instead of all of them: half of
the naive loop's arithmetic, and each weight is read once instead of once per variant. Nothing is approximated.

Shape suffixes: V variants and the intact model, B sequences, T tokens, D width, N predicted tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from probes.block_runner import BlockCall, BlockRunner, Entry
from probes.stream_store import StreamStore
from probes.text import IGNORED, TokenBatch
from probes.token_losses import token_losses

__all__ = ["StreamTable", "SweepKeeper", "SweepWatcher", "removal_losses", "variants_per_call", "variants_through"]

_TOKENS_PER_CALL = {"cpu": 1024, "cuda": 16384}
"""Large enough for efficient products, small enough for the activations to stay in the cache (CPU) or in memory (GPU)."""


class StreamTable(Protocol):
    """Streams of each batch, shape (n_streams, B, T, D), by the batch's index: views to read and write."""

    def __getitem__(self, batch: int, /) -> Tensor: ...


class SweepKeeper(Protocol):
    """Keeps a sweep on disk, so that it can go on after an interruption."""

    def open(self, shapes: Sequence[tuple[int, ...]], n_streams: int, dtype: torch.dtype) -> tuple[StreamTable, int]:
        """The streams, and the number of blocks that they have passed already."""

    @property
    def watched(self) -> Mapping[str, Any]:
        """What the watcher knew after the last of those blocks."""

    def before_block(self, streams: StreamTable, n_batches: int, n_alive: int) -> None:
        """Called before a block changes the first ``n_alive`` streams of each batch in place."""

    def after_block(self, watched: Mapping[str, Any]) -> None:
        """Called when all streams have passed it, with what the watcher knows by then."""


class SweepWatcher(Protocol):
    """Sees the intact stream of every batch pass the blocks."""

    def entered(self, batch: int, stream_BTD: Tensor, /) -> None:
        """Called with the stream that enters block 0."""

    def passed(self, batch: int, block: int, before_BTD: Tensor, after_BTD: Tensor, calls: Sequence[BlockCall], /) -> None:
        """Called with the stream before and after a block while its weights are in place."""

    def state(self) -> Mapping[str, Any]:
        """What it needs to go on after an interruption."""

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on from that."""


@torch.no_grad()
def removal_losses(
    runner: BlockRunner,
    batches: Sequence[TokenBatch],
    removals: Sequence[frozenset[int]],
    *,
    max_memory: int | None = None,
    spill_folder: Path | None = None,
    tokens_per_call: int | None = None,
    on_block: Callable[[int], None] | None = None,
    keeper: SweepKeeper | None = None,
    watcher: SweepWatcher | None = None,
) -> list[Tensor]:
    """Losses of the intact model and of every variant.

    All batches are carried together, so that each block is entered once; call it batch by batch to hold less.

    Args:
        runner: of the model.
        batches: on the model's device.
        removals: per variant, the sub-layers (indices of the layout) that it leaves out.
        max_memory: bytes that the streams may take in memory before they go to disk.
        spill_folder: where they go then.
        tokens_per_call: tokens that go through a block at once, at least one variant of a batch.
        on_block: called with the number of blocks done.
        keeper: holds the streams instead, on disk.
        watcher: sees the intact stream on its way.

    Returns:
        Per batch, nats of each predicted token, shape (1 + len(removals), N), on the CPU: row 0 is the intact model, row
        1 + i leaves out ``removals[i]``. A row that holds NaN says nothing about the others.
    """
    entries = [runner.enter(batch.inputs) for batch in batches]
    sweep = _Sweep(runner, removals, tokens_per_call)
    first = entries[0].stream_BTD
    shapes = [tuple(entry.stream_BTD.shape) for entry in entries]
    done = 0
    place: AbstractContextManager[StreamTable]
    if keeper is None:
        place = StreamStore(
            shapes, 1 + len(removals), dtype=first.dtype, device=first.device, max_memory=max_memory, folder=spill_folder
        )
    else:
        kept, done = keeper.open(shapes, 1 + len(removals), first.dtype)
        place = nullcontext(kept)
    with place as store:
        watch = _Watch(watcher)
        if done and keeper is not None:
            watch.restore(keeper.watched)
        for i, entry in enumerate(entries if done == 0 else ()):
            store[i][0] = entry.stream_BTD
            watch.entered(i, entry.stream_BTD)
        for block in range(done, runner.layout.n_blocks):
            if keeper is not None:
                keeper.before_block(store, len(entries), sweep.n_alive(block))
            with runner.resident((runner.layout.blocks[block],)):
                for i, entry in enumerate(entries):
                    with watch.passing(i, block, store[i], entry):
                        sweep.advance(block, store[i], entry.calls, first.device)
            if keeper is not None:
                keeper.after_block(watch.state())
            if on_block is not None:
                on_block(block + 1)
        with runner.resident((*runner.tail_modules, *runner.layout.head.modules)):
            return [sweep.losses(store[i], batch) for i, batch in enumerate(batches)]


def variants_per_call(n_tokens: int, device: torch.device, tokens_per_call: int | None = None) -> int:
    """Variants that go through a block at once.

    Args:
        n_tokens: of a batch.
        device: where they do.
        tokens_per_call: upper limit of tokens at once; what suits the device by default.
    """
    limit = tokens_per_call or _TOKENS_PER_CALL.get(device.type, _TOKENS_PER_CALL["cuda"])
    return max(1, limit // max(1, n_tokens))


def variants_through(runner: BlockRunner, removals: Sequence[frozenset[int]]) -> list[int]:
    """How many streams each block computes, the intact one included."""
    sweep = _Sweep(runner, removals, None)
    return [len(sweep.through(block)) for block in range(runner.layout.n_blocks)]


class _Watch:
    """A watcher, or none, beside a sweep."""

    def __init__(self, watcher: SweepWatcher | None) -> None:
        self.watcher = watcher

    def entered(self, batch: int, stream_BTD: Tensor) -> None:
        if self.watcher is not None:
            self.watcher.entered(batch, stream_BTD)

    @contextmanager
    def passing(self, batch: int, block: int, streams_VBTD: Tensor, entry: Entry) -> Iterator[None]:
        """Around what changes the streams in place."""
        if self.watcher is None:
            yield
            return
        device = entry.stream_BTD.device
        before_BTD = streams_VBTD[0].to(device, copy=True)
        yield
        self.watcher.passed(batch, block, before_BTD, streams_VBTD[0].to(device), entry.calls)

    def state(self) -> Mapping[str, Any]:
        return {} if self.watcher is None else self.watcher.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.watcher is not None:
            self.watcher.restore(state)


class _Sweep:
    """Variants in the order of their birth: those alive at a block are the first ones of the store."""

    def __init__(self, runner: BlockRunner, removals: Sequence[frozenset[int]], tokens_per_call: int | None) -> None:
        self.runner = runner
        births = [_birth(runner, removal) for removal in removals]
        self.order = sorted(range(len(removals)), key=births.__getitem__)
        self.births = [-1, *(births[i] for i in self.order)]
        self.removals = [frozenset(), *(removals[i] for i in self.order)]
        self.tokens_per_call = tokens_per_call

    def n_alive(self, block: int) -> int:
        """Streams that exist before a block: the intact one, and every variant born earlier."""
        return sum(birth < block for birth in self.births)

    def through(self, block: int) -> list[int]:
        """Streams that a block computes: those alive, but for variants that leave the whole block out."""
        inside = frozenset(self.runner.sublayers_of[block])
        return [v for v, birth in enumerate(self.births) if birth <= block and not inside <= self.removals[v]]

    def advance(self, block: int, streams_VBTD: Tensor, calls: Sequence[BlockCall], device: torch.device) -> None:
        """All living variants through one block, in place."""
        inside = frozenset(self.runner.sublayers_of[block])
        self._bear(block, streams_VBTD)
        through = self.through(block)
        for start, stop in self._groups(through, streams_VBTD, device):
            stream = streams_VBTD[start:stop].flatten(0, 1).to(device)
            removed = self._removed_rows(range(start, stop), inside, streams_VBTD.shape[1], device)
            output = self.runner.run(block, stream, calls, removed)
            streams_VBTD[start:stop].copy_(output.view(stop - start, *streams_VBTD.shape[1:]))

    def losses(self, streams_VBTD: Tensor, batch: TokenBatch) -> Tensor:
        """Losses of all variants in the order given by the caller, shape (V, N)."""
        device, head = batch.inputs.device, self.runner.layout.head
        self._bear(self.runner.layout.n_blocks, streams_VBTD)
        predicted = batch.targets != IGNORED
        targets = batch.targets[predicted]
        rows = []
        for start, stop in self._groups(range(len(streams_VBTD)), streams_VBTD, device):
            hidden_RTD = self.runner.tail(streams_VBTD[start:stop].flatten(0, 1).to(device))
            hidden_VND = hidden_RTD.view(stop - start, *predicted.shape, -1)[:, predicted]
            losses = token_losses(head, hidden_VND.flatten(0, 1), targets.repeat(stop - start))
            rows.append(losses.view(stop - start, -1).cpu())
        by_birth = torch.cat(rows)
        given = torch.empty_like(by_birth)
        given[[0, *(1 + i for i in self.order)]] = by_birth
        return given

    def _bear(self, block: int, streams_VBTD: Tensor) -> None:
        newborn = [v for v, birth in enumerate(self.births) if birth == block]
        if newborn:
            streams_VBTD[newborn[0] : newborn[-1] + 1] = streams_VBTD[0]

    def _groups(self, variants: Sequence[int], streams_VBTD: Tensor, device: torch.device) -> Iterator[tuple[int, int]]:
        """Runs of consecutive variants, each of as many as go through a block at once."""
        most = variants_per_call(streams_VBTD.shape[1] * streams_VBTD.shape[2], device, self.tokens_per_call)
        start = 0
        for i in range(1, len(variants) + 1):
            if i == len(variants) or variants[i] != variants[i - 1] + 1 or i - start == most:
                yield variants[start], variants[i - 1] + 1
                start = i

    def _removed_rows(
        self, variants: range, inside: frozenset[int], n_sequences: int, device: torch.device
    ) -> dict[int, Tensor]:
        rows: dict[int, list[int]] = {}
        for position, variant in enumerate(variants):
            for index in sorted(self.removals[variant] & inside):
                rows.setdefault(index, []).extend(range(position * n_sequences, (position + 1) * n_sequences))
        return {index: torch.tensor(rows[index], device=device) for index in sorted(rows)}


def _birth(runner: BlockRunner, removal: frozenset[int]) -> int:
    """The first block in which a variant differs; the number of blocks if it never does."""
    return min((runner.layout.sublayers[i].block for i in removal), default=runner.layout.n_blocks)
