r"""One forward and one backward pass of a model, with everything the gradient-norm probe wants read on the way.

Every number is taken when its tensor passes by and the tensor is let go: a parameter's gradient is released as soon as its
norm is known, so that all gradients never exist together.

The **shortcut-only** gradient is the product of the shortcut Jacobians alone, every branch held constant: the quantity that
the paper's argument (Eqs. 13-19) multiplies over depth. It starts at the last sub-layer's output with the full gradient and
is carried down while the backward pass goes by.

**Activation checkpointing.** What a block computes again on the way back is read once. With ``use_reentrant=True`` the forward
pass inside the block has no graph: the stream is read there all the same, and its gradient during the recomputation. Such
a backward pass may also give a shared parameter's gradient in several pieces, whose norms do not add; then everything is
computed again with all gradients kept to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from probes.head_loss import HeadGradient, head_gradient
from probes.layout import ResidualLayout, Side, SublayerLayout, Tap
from probes.memory import release_free_memory
from probes.norms import l2_norm
from probes.taps import input_of, stream_of
from probes.text import IGNORED, TokenBatch

__all__ = ["Capture", "StreamReader", "capture", "routing_noted", "scatter_predicted", "tapped"]


@dataclass(slots=True)
class Capture:
    """What one pass has read: scalars on the model's device; an index that is missing was never reached.

    Attributes:
        loss: nats per token.
        stream_grad: boundary index -> norm of the loss gradient.
        shortcut_grad: boundary index -> norm of the shortcut-only gradient; missing below a shortcut that is not known.
        stream_rms: boundary index -> root mean square of the stream.
        token_cosine: boundary index -> mean cosine between the stream at different positions of a sequence.
        branch_rms: sub-layer index -> root mean square of what is added to the shortcut.
        parameter_grad: parameter -> norm of its gradient.
        narrowest_stream: dtype of the stream where it is narrowest.
        n_stream_entries: number of entries of the stream.
        idle_experts: expert parameter -> which experts (True) were sent no token, shape (E,).
        without_graph: boundary indices at which the stream was never seen in a graph, so that its gradient is not known.
    """

    loss: Tensor = field(default_factory=lambda: torch.tensor(math.nan))
    stream_grad: dict[int, Tensor] = field(default_factory=dict)
    shortcut_grad: dict[int, Tensor] = field(default_factory=dict)
    stream_rms: dict[int, Tensor] = field(default_factory=dict)
    token_cosine: dict[int, Tensor] = field(default_factory=dict)
    branch_rms: dict[int, Tensor] = field(default_factory=dict)
    parameter_grad: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    narrowest_stream: torch.dtype = torch.float64
    n_stream_entries: int = 1
    idle_experts: dict[str, Tensor] = field(default_factory=dict)
    without_graph: set[int] = field(default_factory=set)


def capture(model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> Capture:
    """Run one forward and one backward pass and read everything.

    Args:
        model: in the mode in which it is to be probed, with no gradients held.
        layout: where its residual stream is.
        batch: inputs and targets, shape (B, T).

    Returns:
        The readings. All hooks are gone and all gradients released, also after an exception.
    """
    result, in_pieces = _capture(model, layout, batch, keep=False)
    return _capture(model, layout, batch, keep=True)[0] if in_pieces else result


def _capture(model: nn.Module, layout: ResidualLayout, batch: TokenBatch, *, keep: bool) -> tuple[Capture, bool]:
    """The readings, and whether a parameter's gradient came in pieces, so that its norm is wrong unless gradients are kept."""
    result = Capture()
    stream = StreamReader(layout, result, len(batch.inputs))
    parameters = _ParameterReader(model, layout, result, keep=keep)
    try:
        with ExitStack() as stack:
            stack.enter_context(parameters.reading())
            with torch.enable_grad():
                with tapped(model, stream.taps()), routing_noted(model, layout.sublayers, result):
                    hidden_BTD = layout.head.backbone(batch.inputs)
                release_free_memory()  # the peak is here: activations of all blocks, and the head on top
                result.n_stream_entries = hidden_BTD.numel()
                head = _head_gradient(layout, hidden_BTD, batch, parameters.shared_rows(batch.inputs))
                parameters.take_head(head)
                result.loss = head.loss
                with tapped(model, stream.recomputation_taps()):
                    hidden_BTD.backward(scatter_predicted(head.hidden, hidden_BTD, batch))  # type: ignore[no-untyped-call]
            parameters.take_rest()
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return result, parameters.in_pieces


def _head_gradient(layout: ResidualLayout, hidden_BTD: Tensor, batch: TokenBatch, shared_rows: Tensor | None) -> HeadGradient:
    predicted = (batch.targets != IGNORED).reshape(-1)
    flat_ND = hidden_BTD.detach().reshape(-1, hidden_BTD.shape[-1])
    return head_gradient(layout.head, flat_ND[predicted], batch.targets.reshape(-1)[predicted], shared_rows=shared_rows)


def scatter_predicted(gradient_ND: Tensor, hidden_BTD: Tensor, batch: TokenBatch) -> Tensor:
    """The gradient at the predicted positions, zero elsewhere, in the shape of the hidden state."""
    whole = torch.zeros_like(hidden_BTD).reshape(-1, hidden_BTD.shape[-1])
    whole[(batch.targets != IGNORED).reshape(-1)] = gradient_ND
    return whole.view_as(hidden_BTD)


@contextmanager
def tapped(model: nn.Module, taps: Mapping[Tap, Callable[[Tensor], None]]) -> Iterator[None]:
    """Call each function with its tensor during the forward pass; every hook is removed at the end, whatever happens."""
    with ExitStack() as stack:
        for tap, read in taps.items():
            handle = _hook(model.get_submodule(tap.module), tap.side, read)
            stack.callback(handle.remove)
        yield


def _hook(module: nn.Module, side: Side, read: Callable[[Tensor], None]) -> RemovableHandle:
    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        read(input_of(args, kwargs))

    def after(_: nn.Module, __: object, output: object) -> None:
        read(stream_of(output))

    if side is Side.INPUT:
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


@contextmanager
def routing_noted(model: nn.Module, sublayers: Iterable[SublayerLayout], result: Capture) -> Iterator[None]:
    """While active, note which experts are sent no token; every hook is removed at the end, whatever happens."""
    with ExitStack() as stack:
        for sublayer in sublayers:
            if sublayer.experts is not None:
                experts = model.get_submodule(sublayer.experts)
                note = partial(_note_idle, result, sublayer.expert_parameters)
                stack.callback(experts.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def _note_idle(
    result: Capture, names: Sequence[str], experts: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    n_experts = len(next(experts.parameters(recurse=False)))
    integers = (t.flatten() for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point())
    chosen = next(integers, None)
    if chosen is None:
        return
    idle = torch.ones(n_experts, dtype=torch.bool, device=chosen.device)
    idle[chosen[chosen < n_experts]] = False  # a router may send a token nowhere, to the index after the last
    result.idle_experts.update(dict.fromkeys(names, idle))


def _rms(tensor: Tensor) -> Tensor:
    return l2_norm(tensor) / math.sqrt(max(tensor.numel(), 1))


def _token_cosine(stream: Tensor, n_sequences: int) -> Tensor:
    r"""Mean cosine between different positions, :math:`(\|\sum_t \hat x_t\|^2 - T) / (T (T - 1))`, averaged over sequences.

    A position at which the stream is exactly zero has no direction and is left out; NaN where fewer than two are left in every
    sequence. The stream may be flat, (B T, D), as some models keep it inside a block.
    """
    x_BTD = stream.detach().reshape(n_sequences, -1, stream.shape[-1])
    x_BTD = x_BTD if x_BTD.dtype == torch.float64 else x_BTD.float()
    length_BT = torch.linalg.vector_norm(x_BTD, dim=-1)
    total_BD = torch.einsum("btd,bt->bd", x_BTD, torch.where(length_BT != 0, 1 / length_BT, 0))
    n_B = (length_BT != 0).sum(dim=1)  # NaN is not zero
    mean_B = (total_BD.double().square().sum(-1) - n_B) / (n_B * (n_B - 1))
    mean: Tensor = torch.where(n_B > 1, mean_B, 0).sum() / (n_B > 1).sum()
    return mean


class StreamReader:
    """Reads the stream at every boundary, forward and backward, and carries the shortcut-only gradient down.

    Gradients must arrive from the last boundary to the first, in one backward pass or in one per block.

    Args:
        layout: where the stream is.
        result: takes the readings.
        n_sequences: of the batch.

    Attributes:
        shortcut: the shortcut-only gradient at the boundary reached last.
        held_stream: boundary index -> stream that its sub-layer's shortcut Jacobian is taken at.
        held_branch: sub-layer index -> branch there.
    """

    def __init__(self, layout: ResidualLayout, result: Capture, n_sequences: int) -> None:
        self.layout, self.result, self.n_sequences = layout, result, n_sequences
        self.sublayers = layout.sublayers
        self.top = self.sublayers[-1].boundary_out
        self.below: dict[int, tuple[int, SublayerLayout]] = {s.boundary_in: (i, s) for i, s in enumerate(self.sublayers)}
        self.held_stream: dict[int, Tensor] = {}
        self.held_branch: dict[int, Tensor] = {}
        self.shortcut: Tensor | None = None

    def taps(self) -> dict[Tap, Callable[[Tensor], None]]:
        """What is to be called with the tensor of each tap in the forward pass."""
        readers: dict[Tap, list[Callable[[Tensor], None]]] = {}
        for i, boundary in enumerate(self.layout.boundaries):
            readers.setdefault(boundary.tap, []).append(partial(self._read_stream, i))
        for j, sublayer in enumerate(self.sublayers):
            if sublayer.branch is not None:
                readers.setdefault(sublayer.branch, []).append(partial(self._read_branch, j))
        return {tap: partial(_call_all, functions) for tap, functions in readers.items()}

    def recomputation_taps(self) -> dict[Tap, Callable[[Tensor], None]]:
        """What is to be called during the backward pass, where it computes again what had no graph in the forward pass."""
        readers: dict[Tap, list[Callable[[Tensor], None]]] = {}
        for i in sorted(self.result.without_graph):
            readers.setdefault(self.layout.boundaries[i].tap, []).append(partial(self._await_gradient, i))
        return {tap: partial(_call_all, functions) for tap, functions in readers.items()}

    def _read_stream(self, index: int, stream_BTD: Tensor) -> None:
        self.result.stream_rms[index] = _rms(stream_BTD)
        self.result.narrowest_stream = min(self.result.narrowest_stream, stream_BTD.dtype, key=lambda dtype: dtype.itemsize)
        self.result.token_cosine[index] = _token_cosine(stream_BTD, self.n_sequences)
        self.hold(index, stream_BTD)
        self.result.without_graph.add(index)
        self._await_gradient(index, stream_BTD)

    def _await_gradient(self, index: int, stream_BTD: Tensor) -> None:
        """Read the gradient when it comes, if the tensor is part of a graph and no other one of this boundary was."""
        if index == 0 and torch.is_grad_enabled() and not stream_BTD.requires_grad:
            stream_BTD.requires_grad_()  # every parameter below is frozen
        if stream_BTD.requires_grad and index in self.result.without_graph:
            self.result.without_graph.remove(index)
            stream_BTD.register_hook(partial(self._read_gradient, index))  # type: ignore[no-untyped-call]

    def hold(self, index: int, stream_BTD: Tensor) -> None:
        """Keep the stream at a boundary for the shortcut Jacobian that starts there, unless that is done already."""
        if index in self.below and self.below[index][1].combine is not None and index not in self.result.shortcut_grad:
            self.held_stream[index] = stream_BTD.detach()

    def descend(self, index: int) -> None:
        """Carry the shortcut-only gradient down to a boundary, if it is not there yet, through all that lie between."""
        way = []
        while index < self.top and index not in self.result.shortcut_grad and self.shortcut is not None:
            way.append(index)
            index = self.below[index][1].boundary_out
        for place in reversed(way):
            if self.shortcut is not None:
                self._descend(place)

    def _read_branch(self, index: int, branch_BTD: Tensor) -> None:
        self.result.branch_rms[index] = _rms(branch_BTD) * abs(self.sublayers[index].branch_scale)
        if self.sublayers[index].combine is not None:
            self.held_branch[index] = branch_BTD.detach()

    def _read_gradient(self, index: int, gradient_BTD: Tensor) -> None:
        self.result.stream_grad[index] = l2_norm(gradient_BTD)
        if index == self.top:
            self.shortcut = gradient_BTD
            self.result.shortcut_grad[index] = self.result.stream_grad[index]
        else:
            self.descend(index)

    def _descend(self, index: int) -> None:
        """Through one sub-layer's shortcut, from the boundary above to this one."""
        j, sublayer = self.below[index]
        if not sublayer.shortcut_known:
            self.shortcut = None
            return
        above = self.result.shortcut_grad.get(sublayer.boundary_out)
        if sublayer.combine is None:
            if above is not None:
                self.result.shortcut_grad[index] = above
            return
        stream, branch = self.held_stream.pop(index, None), self.held_branch.pop(j, None)
        if stream is None or branch is None or self.shortcut is None:
            self.shortcut = None
            return
        with torch.enable_grad():
            leaf = stream.requires_grad_()
            (self.shortcut,) = torch.autograd.grad(sublayer.combine(leaf, branch), leaf, self.shortcut)
        self.result.shortcut_grad[index] = l2_norm(self.shortcut)


def _call_all(functions: list[Callable[[Tensor], None]], tensor: Tensor) -> None:
    for function in functions:
        function(tensor)


class _ParameterReader:
    """Takes the norm of each parameter's gradient when it is complete, and releases the gradient; or keeps all to the end."""

    def __init__(self, model: nn.Module, layout: ResidualLayout, result: Capture, *, keep: bool) -> None:
        self.model, self.layout, self.result, self.keep = model, layout, result, keep
        self.taken: set[nn.Parameter] = set()
        self.in_pieces = False
        self.head_parameters = {p for name in layout.head.modules for p in model.get_submodule(name).parameters()}
        self.head: HeadGradient | None = None
        self.rows: Tensor | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        with ExitStack() as stack:
            for parameter in self.model.parameters():
                if parameter.requires_grad and not self._waits(parameter):
                    handle = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            yield

    def _waits(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient comes in several pieces (a head that runs chunk by chunk) and is read at the end."""
        return self.keep or (self.layout.head.linear is None and parameter in self.head_parameters)

    def shared_rows(self, inputs_BT: Tensor) -> Tensor | None:
        """Rows of the head's weight to which the embedding's lookups add a gradient: those of the input ids, if tied."""
        linear = self.layout.head.linear
        weight = None if linear is None else linear.weight
        embeddings = (p for name in self.layout.embedding_modules for p in self.model.get_submodule(name).parameters())
        self.rows = torch.unique(inputs_BT) if any(parameter is weight for parameter in embeddings) else None
        return self.rows

    def take_head(self, head: HeadGradient) -> None:
        self.head = head
        self.result.parameter_grad.update(head.norms)

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        if gradient is None:
            return
        if parameter in self.taken:
            self.in_pieces = True
            parameter.grad = None
            return
        self.taken.add(parameter)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        earlier = self.result.parameter_grad.get(parameter)  # the head's share of a tied weight
        if earlier is not None and self.head is not None and self.head.rows is not None and self.rows is not None:
            gradient[self.rows] += self.head.rows
        norm = l2_norm(gradient)
        self.result.parameter_grad[parameter] = norm if earlier is None else torch.hypot(norm, earlier)
        parameter.grad = None

    def take_rest(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._take(parameter)
