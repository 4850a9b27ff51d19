"""What a streamed run will read, hold, compute and take, before it is started.

Bytes are exact: they follow from the headers and the token ids. Arithmetic is counted on the meta device by running one block
of each shape there. Time is an estimate from one block that is really read and really run.

Shape suffixes: B sequences, T tokens, D width, N predicted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from probes.block_runner import BlockRunner, Entry
from probes.preserve import eager, preserved
from probes.removal_estimates import ForwardProxies, n_streams_kept
from probes.removal_sweep import variants_per_call, variants_through
from probes.removal_units import Unit, UnitKind
from probes.stream_store import available_memory
from probes.streaming.model import StreamedCheckpoint
from probes.text import TokenBatch
from probes.token_losses import ROWS_PER_CALL

__all__ = ["Forecast", "forecast_gradient_norms", "forecast_layer_removal"]

_GB, _TERA = 1e9, 1e12
_TILE_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run will cost.

    Attributes:
        bytes_read: from the files of the checkpoint, vectors that are read at the start included.
        peak_memory: bytes of tensors at the most expensive moment, apart from the interpreter and its libraries.
        bytes_on_disk: of residual streams that a resumable run keeps on disk.
        flops: multiplications and additions of the matrix products.
        exact_flops: False where they depend on the data (experts, what turns out to be cheap), and are an upper limit.
        bytes_per_second: measured on one block; of the page cache where the files are in it; 0 where there is nothing to read.
        flops_per_second: measured on one block; 0 where no operation could be counted.
        seconds: the longer of reading and computing, block by block.
        exact_bytes: False where a part of the run depends on the data, and the bytes read and kept are an upper limit.
    """

    bytes_read: int
    peak_memory: int
    bytes_on_disk: int
    flops: int
    exact_flops: bool
    bytes_per_second: float
    flops_per_second: float
    seconds: float
    exact_bytes: bool = True

    def to_dict(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same in words."""
        most, most_bytes = ("" if exact else "at most " for exact in (self.exact_flops, self.exact_bytes))
        return [
            f"bytes read: {most_bytes}{self.bytes_read} ({self.bytes_read / _GB:.3g} GB)",
            f"peak memory: about {self.peak_memory / _GB:.3g} GB of tensors, one block in use and one being read",
            f"on disk while it runs: {most_bytes}{self.bytes_on_disk / _GB:.3g} GB of residual streams",
            f"arithmetic: {most}{self.flops / _TERA:.3g} TFLOP",
            f"time: {most or 'about '}{_duration(self.seconds)}, at {self._speeds()}, as measured now on one block",
        ]

    def _speeds(self) -> str:
        """Those that there was something to measure on."""
        reading = [f"{self.bytes_per_second / _GB:.2g} GB/s read"] if self.bytes_per_second else []
        return " and ".join([*reading, f"{self.flops_per_second / _GB:.3g} GFLOP/s"])


def forecast_gradient_norms(streamed: StreamedCheckpoint, batches: Sequence[TokenBatch]) -> Forecast:
    """What :func:`probes.streaming.gradients.measure_streamed_gradient_norms` will cost.

    Args:
        streamed: just opened: nothing but vectors has been read.
        batches: of shape (B, T).
    """
    plan = _Plan(streamed, batches)
    stream, n_blocks = streamed.stream, streamed.layout.n_blocks
    tables = sum(stream.other_bytes[p] for p in stream.tables if p not in plan.head_parameters)
    twice = 1 if plan.head_is_one_window else 2 * len(batches)
    others = plan.whole_embedding + sum(entry - plan.whole_embedding for entry in plan.entry_bytes)
    bytes_read = plan.opening + sum(plan.entry_bytes) + 2 * plan.block_bytes + others + tables
    bytes_read += plan.head_whole_bytes + twice * plan.head_row_bytes
    forward, backward = plan.block_flops(), plan.block_flops(_Pass.WITH_PARAMETERS)
    head = sum(plan.head_flops(batch.n_predictions, 3 if plan.head_is_one_window else 4) for batch in batches)
    speed = plan.speed
    seconds = n_blocks * sum(
        max(_seconds(plan.mean_block, speed[0]), _seconds(flops.mean, speed[1])) for flops in (forward, backward)
    )
    largest = stream.block_memory(stream.largest_block)
    gradient = max((p.nbytes for p in streamed.model.parameters() if p.is_meta), default=0)
    carried = 4 * plan.stream_bytes
    in_block = 2 * largest + gradient + plan.saved_bytes
    logits = 4 * max(batch.n_predictions for batch in batches) * (plan.head_flops(1, 1) // (2 * plan.width))
    at_head = largest + plan.window_bytes + 2 * min(logits, _TILE_BYTES) + plan.head_whole_memory
    return Forecast(
        bytes_read=bytes_read,
        peak_memory=plan.vector_bytes + carried + max(in_block, at_head),
        bytes_on_disk=(n_blocks + 1) * plan.stream_bytes,
        flops=forward.total + backward.total + head,
        exact_flops=forward.exact and backward.exact,
        bytes_per_second=speed[0],
        flops_per_second=speed[1],
        seconds=seconds + _seconds(head, speed[1]),
    )


def forecast_layer_removal(
    streamed: StreamedCheckpoint,
    batches: Sequence[TokenBatch],
    units: Sequence[Unit],
    *,
    named: Sequence[Unit] = (),
    estimates: bool = True,
    taylor: bool = False,
    joint: bool = False,
    tokens_per_call: int | None = None,
    max_memory: int | None = None,
) -> Forecast:
    """What :func:`probes.streaming.removal.measure_streamed_layer_removal` will cost.

    Args:
        streamed: just opened: nothing but vectors has been read.
        batches: of shape (B, T).
        units: what is removed.
        named: further sets that are removed, of which nothing is estimated.
        estimates: whether the cheap numbers are computed.
        taylor: whether the first-order estimate is among them.
        joint: whether the cheap units are removed together: as if all of them were cheap.
        tokens_per_call: tokens that go through a block at once.
        max_memory: bytes that streams may take in memory.
    """
    plan = _Plan(streamed, batches)
    removals = [frozenset(unit.sublayers) for unit in (*units, *named)]
    through = variants_through(plan.runner, removals)
    if estimates and not taylor:
        proxies = ForwardProxies(plan.runner, plan.batches, units)
        through = [n + proxies.looks_inside(block) for block, n in enumerate(through)]
    parts = [plan.sweep(through, len(removals), tokens_per_call)]
    if joint:
        parts.append(plan.sweep(_most_together(plan.runner, units), len(units), tokens_per_call))
    if estimates and taylor:
        parts.append(plan.estimates(n_streams_kept(plan.runner, units), max_memory))
    return Forecast(
        bytes_read=plan.opening + sum(part.bytes_read for part in parts),
        peak_memory=plan.vector_bytes + max(part.peak_memory for part in parts),
        bytes_on_disk=sum(part.bytes_on_disk for part in parts),
        flops=sum(part.flops for part in parts),
        exact_flops=plan.block_flops().exact and not joint,
        bytes_per_second=plan.speed[0],
        flops_per_second=plan.speed[1],
        seconds=sum(part.seconds for part in parts),
        exact_bytes=not joint,
    )


def _most_together(runner: BlockRunner, units: Sequence[Unit]) -> list[int]:
    """The most streams that each block can have to compute when ever more units are removed together.

    The sum over the blocks is what counts: of whole blocks, each set leaves out one more than the one before it.
    """
    n_blocks, span = runner.layout.n_blocks, units[0].stop - units[0].start
    whole = units[0].kind is UnitKind.BLOCK
    left = [n_blocks - (min(span + more, n_blocks) if whole else 0) for more in range(len(units))]
    each, rest = divmod(n_blocks + sum(left), n_blocks)
    return [each + (block < rest) for block in range(n_blocks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one part of a run costs."""

    bytes_read: int
    peak_memory: int
    bytes_on_disk: int
    flops: int
    seconds: float


class _Pass(Enum):
    """What a block computes; the value is the number of its products per weight and token."""

    FORWARD = 1
    WITH_STREAM = 2
    """And the gradient of its input."""
    WITH_PARAMETERS = 3
    """And that of its parameters."""


@dataclass(frozen=True, slots=True)
class _Flops:
    """Floating-point operations of each block, for all batches."""

    per_block: list[int]
    exact: bool

    @property
    def total(self) -> int:
        return sum(self.per_block)

    @property
    def mean(self) -> float:
        return self.total / len(self.per_block)


class _Plan:
    """What both probes need to know; reads the embeddings' rows, and one block for the speeds."""

    def __init__(self, streamed: StreamedCheckpoint, batches: Sequence[TokenBatch]) -> None:
        self.streamed, self.stream, self.layout = streamed, streamed.stream, streamed.layout
        self.batches = [batch.to(streamed.device) for batch in batches]
        self.opening = self.stream.n_bytes_read
        self.stream.reads_ahead = False
        self.runner = BlockRunner(streamed.model, self.layout, resident=self.stream.resident)
        with eager(), preserved(streamed.model):
            self.entries, self.entry_bytes = self._entries()
            self._saved = 0
            self._counted: dict[tuple[object, ...], tuple[int, bool]] = {}
            self.block_flops(_Pass.WITH_PARAMETERS)
            self.saved_bytes = self._saved
            self.speed = self._speed()
        self.stream.reads_ahead = True
        model = streamed.model
        self.block_bytes = sum(self.stream.block_bytes(k) for k in range(self.layout.n_blocks))
        self.mean_block = self.block_bytes / self.layout.n_blocks
        self.stream_bytes = sum(entry.stream_BTD.nbytes for entry in self.entries)
        self.width = self.entries[0].stream_BTD.shape[-1]
        self.vector_bytes = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        names = (*self.runner.tail_modules, *self.layout.head.modules)
        self.head_parameters = {p for name in names for p in model.get_submodule(name).parameters() if p.is_meta}
        rows = self.stream.head
        whole = [p for p in self.head_parameters if rows is None or p is not rows.parameter]
        self.head_whole_bytes = sum(self.stream.other_bytes[p] for p in whole)
        self.head_whole_memory = sum(p.nbytes for p in whole)
        self.head_row_bytes = 0 if rows is None else self.stream.other_bytes[rows.parameter]
        self.head_is_one_window = rows is None or rows.rows_at_once == len(rows)
        self.window_bytes = 0 if rows is None else rows.rows_at_once * rows.parameter[0].nbytes
        self.whole_embedding = self._whole_embedding()

    def _entries(self) -> tuple[list[Entry], list[int]]:
        entries, sizes = [], []
        for batch in self.batches:
            before = self.stream.n_bytes_read
            entries.append(self.runner.enter(batch.inputs))
            sizes.append(self.stream.n_bytes_read - before)
        return entries, sizes

    def _whole_embedding(self) -> int:
        """Bytes of the embedding's matrices that are read whole."""
        inside = {p for n in self.layout.embedding_modules for p in self.streamed.model.get_submodule(n).parameters()}
        return sum(n for p, n in self.stream.other_bytes.items() if p in inside and not self.stream.reads_by_rows(p))

    def head_flops(self, n_rows: int, products: int) -> int:
        """Matrix products of N x D x V at the head."""
        matrices = [self.stream.head.parameter] if self.stream.head is not None else list(self.head_parameters)
        return 2 * products * n_rows * sum(p.numel() for p in matrices)

    def tokens_at_once(self, tokens_per_call: int | None) -> int:
        """Most tokens that go through a block at once."""
        sizes = [batch.inputs.numel() for batch in self.batches]
        return max(size * variants_per_call(size, self.streamed.device, tokens_per_call) for size in sizes)

    def loss_calls(self, n_variants: int, tokens_per_call: int | None) -> int:
        """How often the head's weight is gone through."""
        calls = 0
        for batch in self.batches:
            most = variants_per_call(batch.inputs.numel(), self.streamed.device, tokens_per_call)
            groups = [min(most, n_variants - start) for start in range(0, n_variants, most)]
            calls += sum(math.ceil(n * batch.n_predictions / ROWS_PER_CALL) for n in groups)
        return calls

    def sweep(self, through: Sequence[int], n_removals: int, tokens_per_call: int | None) -> _Part:
        """One sweep of variants: so many streams through each block."""
        passes = 1 if self.head_is_one_window else self.loss_calls(n_removals + 1, tokens_per_call)
        rate, speed = self.speed
        per_block = [flops * n for flops, n in zip(self.block_flops().per_block, through, strict=True)]
        head = sum(self.head_flops(batch.n_predictions * (n_removals + 1), 1) for batch in self.batches)
        largest_batch = max(batch.inputs.numel() for batch in self.batches)
        activations = self.saved_bytes * self.tokens_at_once(tokens_per_call) // largest_batch
        largest = self.stream.block_memory(self.stream.largest_block)
        return _Part(
            bytes_read=sum(self.entry_bytes) + self.block_bytes + self.head_whole_bytes + passes * self.head_row_bytes,
            peak_memory=activations + max(2 * largest, self.window_bytes + self.head_whole_memory),
            bytes_on_disk=2 * (n_removals + 1) * self.stream_bytes,
            flops=sum(per_block) + head,
            seconds=_seconds(head, speed)
            + sum(max(_seconds(self.stream.block_bytes(k), rate), _seconds(flops, speed)) for k, flops in enumerate(per_block)),
        )

    def estimates(self, n_streams: int, max_memory: int | None) -> _Part:
        """The pass forward and backward that the first-order estimate needs."""
        reads = 1 if self.head_is_one_window else 2 * len(self.batches)
        forward, both = self.block_flops(), self.block_flops(_Pass.WITH_STREAM)
        head = sum(self.head_flops(batch.n_predictions, 2 if self.head_is_one_window else 3) for batch in self.batches)
        rate, speed = self.speed
        streams = n_streams * self.stream_bytes
        limit = available_memory(self.streamed.device) // 2 if max_memory is None else max_memory
        largest = self.stream.block_memory(self.stream.largest_block)
        at_head = self.window_bytes + self.head_whole_memory + 2 * _TILE_BYTES
        reading = _seconds(self.mean_block, rate)
        return _Part(
            bytes_read=sum(self.entry_bytes) + 2 * self.block_bytes + self.head_whole_bytes + reads * self.head_row_bytes,
            peak_memory=(streams if streams <= limit else 0) + max(2 * largest + self.saved_bytes, at_head),
            bytes_on_disk=0 if streams <= limit else streams,
            flops=forward.total + both.total + head,
            seconds=_seconds(head, speed)
            + self.layout.n_blocks * sum(max(reading, _seconds(flops.mean, speed)) for flops in (forward, both)),
        )

    def block_flops(self, kind: _Pass = _Pass.FORWARD) -> _Flops:
        """Of each block for all batches, blocks of one shape counted once."""
        per_block, exact = [], True
        for block in range(self.layout.n_blocks):
            total = 0
            for entry in self.entries:
                flops, certain = self._flops_of(block, entry, kind)
                total, exact = total + flops, exact and certain
            per_block.append(total)
        return _Flops(per_block, exact)

    def _flops_of(self, block: int, entry: Entry, kind: _Pass) -> tuple[int, bool]:
        module = self.streamed.model.get_submodule(self.layout.blocks[block])
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        key = (shapes, tuple(entry.stream_BTD.shape), kind)
        if key not in self._counted:
            self._counted[key] = self._count(module, block, entry, kind)
        return self._counted[key]

    def _count(self, module: nn.Module, block: int, entry: Entry, kind: _Pass) -> tuple[int, bool]:
        """Run a copy of the block without numbers; data-dependent shapes (experts) cannot be, and are bounded."""
        with_backward = kind is not _Pass.FORWARD
        twin = copy.deepcopy(module).to("meta").requires_grad_(kind is _Pass.WITH_PARAMETERS)
        stream_BTD = entry.stream_BTD.to("meta").requires_grad_(with_backward)
        args, kwargs = entry.calls[block].to("meta").filled(stream_BTD)
        saved: dict[int, int] = {}
        own = {id(p) for p in twin.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if id(tensor) not in own and not isinstance(tensor, nn.Parameter):
                saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        try:
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(with_backward):
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    output: Any = twin(*args, **kwargs)
                output = output if isinstance(output, Tensor) else output[0]
                if with_backward:
                    output.sum().backward()
        except (RuntimeError, NotImplementedError):
            tokens = stream_BTD.shape[0] * stream_BTD.shape[1]
            weights = sum(p.numel() for p in module.parameters())
            self._saved = max(self._saved, 16 * stream_BTD.nbytes)
            return 2 * kind.value * tokens * weights, False
        self._saved = max(self._saved, sum(saved.values()))
        return int(counter.get_total_flops()), True

    def _speed(self) -> tuple[float, float]:
        """Bytes read and operations done per second, on one block and the first batch."""
        block, entry = self.stream.largest_block, self.entries[0]
        started = time.perf_counter()
        with self.stream.resident((self.layout.blocks[block],)), torch.no_grad():
            read = time.perf_counter() - started
            self.runner.run(block, entry.stream_BTD, entry.calls)
            started = time.perf_counter()
            self.runner.run(block, entry.stream_BTD, entry.calls)
            run = time.perf_counter() - started
        flops, _ = self._flops_of(block, entry, _Pass.FORWARD)
        n_bytes = self.stream.block_bytes(block)  # none where all blocks share their weights, which stay in memory
        return n_bytes / max(read, 1e-9), flops / max(run, 1e-9)


def _seconds(amount: float, per_second: float) -> float:
    """At a speed of zero there was nothing to measure it on, and nothing takes no time."""
    return amount / per_second if per_second else 0.0


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
