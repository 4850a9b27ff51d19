"""Any single block of a model on any batch of residual streams, outside the model's own loop.

A block needs more than its stream: masks (of another kind in each block where attention patterns alternate), rotary tables,
positions. All of that is what the model's own loop passes to it, so it is recorded from that loop, with every block replaced
by the identity: no block computes and no weight of a block is touched. The loop is run for B and for 2 B sequences, and what
grows with the batch is repeated for as many streams as a call has; nothing is guessed from shapes.

Weights may come from anywhere: ``resident`` is entered with the names of the modules about to be used, and the engine uses a
module only inside it.

Shape suffixes: B sequences, R rows of streams (a multiple of B: variant-major, sequence-minor), T tokens, D width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from probes.errors import UnsupportedModelError
from probes.layout import ResidualLayout, Side, SublayerLayout, Tap
from probes.taps import input_of, same_values, stream_of

__all__ = ["BlockCall", "BlockPass", "BlockRunner", "Entry", "Resident", "always_resident"]

Resident: TypeAlias = "Callable[[tuple[str, ...]], AbstractContextManager[object]]"
"""Dotted module names -> a context in which their parameters are in place."""

_CHECKED_TOKENS = 16
_RETURNS: tuple[Callable[[Tensor], object], ...] = (
    lambda stream: stream,
    lambda stream: (stream,),
    lambda stream: (stream, None),
    lambda stream: (stream, None, None),
)
"""What a loop may expect of a block: the stream, or a tuple that begins with it (attention weights, a cache)."""
_FOREIGN = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""How a loop or block of a family fails on something that is not what it expected."""
_CALLED = ("forward", "_forward_hooks", "_forward_pre_hooks")
"""What runs when a block is called; hooks that someone has set are left out while recording."""


def always_resident(modules: tuple[str, ...]) -> AbstractContextManager[object]:
    """The context of a model whose weights are all in memory: nothing to do."""
    return nullcontext()


class _Stream:
    """Stands for the stream among a block's arguments."""


@dataclass(frozen=True, slots=True)
class _PerSequence:
    """A tensor whose first dimension is the sequence, shape (B, ...)."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What the model's loop passes to one block besides the stream, for any number of rows.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        n_sequences: B, of the batch it was recorded with.
    """

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    n_sequences: int

    def to(self, device: str) -> BlockCall:
        """The same on another device."""
        return BlockCall(_moved(self.args, device), _moved(self.kwargs, device), self.n_sequences)

    def filled(self, stream_RTD: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for these streams.

        Args:
            stream_RTD: row ``v * B + b`` belongs to sequence b.
        """
        n_copies = len(stream_RTD) // self.n_sequences
        args = tuple(_fill(value, stream_RTD, n_copies) for value in self.args)
        return args, {name: _fill(value, stream_RTD, n_copies) for name, value in self.kwargs.items()}


def _moved(value: Any, device: str) -> Any:
    """A template with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, _PerSequence):
        return _PerSequence(value.tensor.to(device))
    if isinstance(value, tuple):
        return tuple(_moved(inner, device) for inner in value)
    if isinstance(value, Mapping):
        return {name: _moved(inner, device) for name, inner in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch on its way into the blocks.

    Attributes:
        stream_BTD: the embedding's output, as block 0 reads it.
        calls: one per block.
    """

    stream_BTD: Tensor
    calls: tuple[BlockCall, ...]


@dataclass(frozen=True, slots=True)
class BlockPass:
    """One block's output and what was seen inside it.

    Attributes:
        output: the stream after the block, (R, T, D).
        streams: boundary index -> the stream there, inside the block.
        branches: sub-layer index -> what is added to the shortcut, its factor included.
    """

    output: Tensor
    streams: dict[int, Tensor] = field(default_factory=dict)
    branches: dict[int, Tensor] = field(default_factory=dict)


class BlockRunner:
    """Runs the blocks of one model, one at a time.

    Args:
        model: in evaluation mode. Parameters of a block may be absent outside ``resident``.
        layout: where its residual stream runs.
        resident: makes the parameters of modules available.
    """

    def __init__(self, model: nn.Module, layout: ResidualLayout, *, resident: Resident = always_resident) -> None:
        self.model, self.layout, self.resident = model, layout, resident
        self.sublayers_of = tuple(
            tuple(i for i, s in enumerate(layout.sublayers) if s.block == block) for block in range(layout.n_blocks)
        )

    @property
    def tail_modules(self) -> tuple[str, ...]:
        """What the backbone runs after the last block, in forward order."""
        final = self.layout.final_norm
        return (*(() if final is None else (final.module,)), *self.layout.head.in_backbone)

    @torch.no_grad()
    def enter(self, inputs_BT: Tensor) -> Entry:
        """The stream that enters block 0, and the arguments of every block.

        Args:
            inputs_BT: token ids.

        Returns:
            Both, recorded from the model's own loop with all blocks replaced by the identity.

        Raises:
            UnsupportedModelError: if the loop does not hand the stream from block to block.
        """
        with self.resident(self.layout.embedding_modules):
            once = self._recorded(inputs_BT)
            twice = self._recorded(torch.cat([inputs_BT, inputs_BT]))
        calls = tuple(
            BlockCall(_template(args, args2, args, kwargs), _template(kwargs, kwargs2, args, kwargs), len(inputs_BT))
            for (args, kwargs), (args2, kwargs2) in zip(once, twice, strict=True)
        )
        return Entry(input_of(*once[0]).detach(), calls)

    def embedded(self, inputs_BT: Tensor) -> Tensor:
        """The stream that enters block 0, with its graph down to the embedding, which must be in place."""
        return input_of(*self._recorded(inputs_BT)[0])

    def run(
        self, block: int, stream_RTD: Tensor, calls: Sequence[BlockCall], removed: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """The stream after a block.

        Args:
            block: 0-based index; its parameters must be in place.
            stream_RTD: the streams before it.
            calls: of the entry.
            removed: sub-layer index -> the rows (1-D indices into R) for which that sub-layer is the identity; at least
                one sub-layer of the block is left to each row. Their streams hold no graph.

        Returns:
            Streams of the same shape and dtype.
        """
        with ExitStack() as stack:
            for index, rows in (removed or {}).items():
                self._remove(stack, index, rows, stream_RTD)
            return self._call(block, stream_RTD, calls)

    def watch(self, block: int, stream_RTD: Tensor, calls: Sequence[BlockCall]) -> BlockPass:
        """As :meth:`run` with nothing removed, and what the layout names inside the block, with its graph."""
        streams: dict[int, Tensor] = {}
        branches: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for index in self.sublayers_of[block]:
                sublayer = self.layout.sublayers[index]
                if sublayer.branch is not None:
                    self._tap(stack, sublayer.branch, partial(_keep, branches, index, sublayer))
                if sublayer.boundary_out != self.boundaries_of(block)[1]:
                    tap = self.layout.boundaries[sublayer.boundary_out].tap
                    self._tap(stack, tap, partial(streams.__setitem__, sublayer.boundary_out))
            output = self._call(block, stream_RTD, calls)
        return BlockPass(output, streams, branches)

    def boundaries_of(self, block: int) -> tuple[int, int]:
        """Indices of the boundaries before and after a block."""
        inside = self.sublayers_of[block]
        return self.layout.sublayers[inside[0]].boundary_in, self.layout.sublayers[inside[-1]].boundary_out

    def tail(self, stream_RTD: Tensor) -> Tensor:
        """The hidden state that the head reads, from the last block's output; ``tail_modules`` must be in place."""
        hidden = stream_RTD
        for name in self.tail_modules:
            hidden = stream_of(self.model.get_submodule(name)(hidden))
        return hidden

    @torch.no_grad()
    def check(self, inputs_BT: Tensor) -> None:
        """Compare block-by-block running with the model's own forward pass on a few tokens; all weights must be in place.

        Raises:
            UnsupportedModelError: if they differ by more than rounding: the blocks are coupled by more than the stream.
        """
        ids = inputs_BT[:1, :_CHECKED_TOKENS]
        own = self.layout.head.backbone(ids).double()
        entry = self.enter(ids)
        hidden = self._last_hidden(entry)
        difference = torch.linalg.vector_norm(hidden.double() - own) / torch.linalg.vector_norm(own)
        tolerance = torch.finfo(hidden.dtype).eps ** 0.5
        if torch.isfinite(own).all() and not difference <= tolerance:
            raise self._not_alone(
                f"its last hidden state differs by {float(difference):.2g} from the model's own (relative, at most "
                f"{tolerance:.1g} is rounding); its blocks exchange more than the residual stream"
            )

    def _last_hidden(self, entry: Entry) -> Tensor:
        """What the head reads, from running the blocks one by one on what was recorded for them."""
        stream = entry.stream_BTD
        try:
            for block in range(self.layout.n_blocks):
                stream = self.run(block, stream, entry.calls)
        except (*_FOREIGN, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._not_alone(f"a block needs more than the loop was seen to give it ({_reason(error)})") from error
        return self.tail(stream)

    def _not_alone(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"family '{self.layout.family}' cannot be run block by block: {why}")

    def _call(self, block: int, stream_RTD: Tensor, calls: Sequence[BlockCall]) -> Tensor:
        args, kwargs = calls[block].filled(stream_RTD)
        output = stream_of(self.model.get_submodule(self.layout.blocks[block])(*args, **kwargs))
        if output.shape != stream_RTD.shape or output.dtype != stream_RTD.dtype:
            raise self._not_alone(
                f"'{self.layout.blocks[block]}' turns a stream of shape {tuple(stream_RTD.shape)}, {stream_RTD.dtype}, into "
                f"{tuple(output.shape)}, {output.dtype}; a residual block keeps both"
            )
        return output

    def _remove(self, stack: ExitStack, index: int, rows: Tensor, stream_RTD: Tensor) -> None:
        """Hooks that make a sub-layer the identity for some rows.

        Where the shortcut is a plain sum, its branch is zero there; where the stream is scaled, gated or normalised on the
        way (Post-LN, Keel), the whole update is left out: the stream after it is the stream before it.
        """
        sublayer, n_rows = self.layout.sublayers[index], len(stream_RTD)
        if sublayer.branch is None:
            raise UnsupportedModelError(
                f"family '{self.layout.family}' is known block by block only: its sub-layers cannot be removed one by one"
            )
        if sublayer.combine is None:
            self._tap(stack, sublayer.branch, lambda t: _by_row(t, n_rows).index_fill_(0, rows, 0))
            return
        before, after = self.layout.boundaries[sublayer.boundary_in], self.layout.boundaries[sublayer.boundary_out]
        held = {}
        if sublayer.boundary_in == self.boundaries_of(sublayer.block)[0]:
            held["rows"] = stream_RTD[rows]
        else:
            self._tap(stack, before.tap, lambda t: held.__setitem__("rows", _by_row(t, n_rows)[rows]))
        assert after.tap.side is Side.OUTPUT  # a norm or gate on the shortcut ends in a module of its own
        self._tap(stack, after.tap, lambda t: _by_row(t, n_rows).index_copy_(0, rows, held["rows"]))

    def _tap(self, stack: ExitStack, tap: Tap, function: Callable[[Tensor], object]) -> None:
        """Call a function with the tensor; it may change it in place."""

        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            function(input_of(args, kwargs))

        def after(_: nn.Module, __: object, output: object) -> None:
            function(stream_of(output))

        module = self.model.get_submodule(tap.module)
        if tap.side is Side.INPUT:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        else:
            stack.callback(module.register_forward_hook(after).remove)

    def _recorded(self, inputs_BT: Tensor) -> list[tuple[tuple[object, ...], dict[str, object]]]:
        """Arguments of every block. A block returns a tensor or a tuple that starts with one: whichever the loop carries on."""
        why = "what a block returns is not what the next one reads"
        for wrap in _RETURNS:
            calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
            with _identity_blocks([self.model.get_submodule(name) for name in self.layout.blocks], calls, wrap):
                try:
                    self.layout.head.backbone(inputs_BT)
                except _AllRecordedError:
                    return calls
                except _BrokenChainError:
                    continue
                except _FOREIGN as error:
                    if not calls:  # before the first block: nothing that a block returns
                        raise
                    why = f"its loop fails where blocks return the stream alone ({_reason(error)})"
        raise self._not_alone(why)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _keep(branches: dict[int, Tensor], index: int, sublayer: SublayerLayout, branch: Tensor) -> None:
    branches[index] = sublayer.added(branch)


class _AllRecordedError(Exception):
    """The last block was reached: the rest of the forward pass is not needed."""


class _BrokenChainError(Exception):
    """A block was not called on what the one before it returned."""


@contextmanager
def _identity_blocks(
    blocks: Sequence[nn.Module],
    calls: list[tuple[tuple[object, ...], dict[str, object]]],
    wrap: Callable[[Tensor], object],
) -> Iterator[None]:
    """Replace every block's forward by one that records its arguments and returns its stream; undone on the way out."""

    def forward(*args: object, **kwargs: object) -> object:
        stream = input_of(args, kwargs)
        if calls:
            last = input_of(*calls[-1])
            if stream is not last and not same_values(stream, last):
                raise _BrokenChainError
        calls.append((args, kwargs))
        if len(calls) == len(blocks):
            raise _AllRecordedError
        return wrap(stream)

    kept = [{name: block.__dict__.get(name) for name in _CALLED} for block in blocks]
    try:
        for block in blocks:
            block.__dict__.update({"forward": forward, "_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()})
        yield
    finally:
        for block, values in zip(blocks, kept, strict=True):
            block.__dict__.update(values)
            if values["forward"] is None:
                del block.__dict__["forward"]  # the class has it


def _template(value: Any, value2: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """A value of the call for B sequences beside its twin for 2 B, with the stream and what grows with the batch marked."""
    if value is input_of(args, kwargs):
        return _Stream()
    if isinstance(value, Tensor):
        if value.shape == value2.shape:
            return value
        if value.shape[1:] == value2.shape[1:] and len(value2) == 2 * len(value):
            return _PerSequence(value)
        raise UnsupportedModelError(
            f"a block's argument has shape {tuple(value.shape)} for one batch and {tuple(value2.shape)} for one twice as large"
        )
    if isinstance(value, (tuple, list)):
        return tuple(_template(a, b, args, kwargs) for a, b in zip(value, value2, strict=True))
    if isinstance(value, dict):
        return {name: _template(inner, value2[name], args, kwargs) for name, inner in value.items()}
    return value


def _fill(value: object, stream_RTD: Tensor, n_copies: int) -> object:
    if isinstance(value, _Stream):
        return stream_RTD
    if isinstance(value, _PerSequence):
        return value.tensor.expand(n_copies, *value.tensor.shape).flatten(0, 1)  # a view where B is 1
    if isinstance(value, tuple):
        return tuple(_fill(inner, stream_RTD, n_copies) for inner in value)
    if isinstance(value, dict):
        return {name: _fill(inner, stream_RTD, n_copies) for name, inner in value.items()}
    return value


def _by_row(tensor: Tensor, n_rows: int) -> Tensor:
    """A view of shape (R, T, D), also of what a model keeps as (R T, D)."""
    return tensor if len(tensor) == n_rows and tensor.ndim == 3 else tensor.view(n_rows, -1, tensor.shape[-1])
