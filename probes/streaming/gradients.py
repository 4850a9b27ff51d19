"""Gradient norms of a checkpoint of any size: the numbers of :mod:`probes.gradient_norms` from two reads of its weights.

Forward, block by block, keeping the stream that enters each block; then backward from the last block to the first, each
block computed again from its input, its parameters' gradients reduced to norms and let go. All batches go through a block
while it is in place.

Shape suffixes: B sequences, T tokens, D width, U different token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from probes.block_runner import BlockRunner
from probes.gradient_capture import Capture, StreamReader, routing_noted, scatter_predicted, tapped
from probes.gradient_norms import as_batch, summarise
from probes.gradient_result import GradientNorms
from probes.head_loss import HeadGradient, head_gradient
from probes.layout import Tap
from probes.norms import l2_norm
from probes.preserve import eager, preserved
from probes.stream_store import StreamStore
from probes.streaming.captures import capture_record, known_so_far, latest, restore_capture
from probes.streaming.model import StreamedCheckpoint
from probes.streaming.run_state import MappedStreams, RunState
from probes.text import IGNORED, TokenBatch

__all__ = ["measure_streamed_gradient_norms"]

Progress: TypeAlias = "Callable[[int, int], None]"
"""(steps done, steps in all); a step is one block in one direction, the head, or the embedding."""


def measure_streamed_gradient_norms(
    streamed: StreamedCheckpoint,
    batches: Sequence[TokenBatch | Tensor],
    *,
    state: RunState | None = None,
    max_memory: int | None = None,
    spill_folder: Path | None = None,
    on_step: Progress | None = None,
) -> GradientNorms:
    """Gradient norms of every block and sub-layer, with one block of weights in memory.

    Args:
        streamed: the checkpoint.
        batches: inputs and targets of shape (B, T), all carried together.
        state: keeps finished steps and block inputs on disk, for a run that can be interrupted.
        max_memory: without a state, bytes that the block inputs may take in memory; beyond that they go to disk.
        spill_folder: where.
        on_step: called after each step.

    Returns:
        The same result as :func:`probes.gradient_norms.measure_gradient_norms` gives, up to rounding.

    Raises:
        ValueError: if there is no batch, or a batch predicts nothing.
        CheckpointError: if a file of the checkpoint changes meanwhile.
        OutputError: if block inputs or state do not fit onto the disk.

    Status: exact.
    """
    data = [as_batch(batch).to(streamed.device) for batch in batches]
    for i, batch in enumerate(data):
        if batch.n_predictions == 0:
            raise ValueError(f"batch {i} predicts no token: all its targets are {IGNORED}")
    if not data:
        raise ValueError("no batch to measure on")
    with eager(), preserved(streamed.model):
        run = _Run(streamed, data, state)
        with run.inputs(max_memory, spill_folder):
            run.all_steps(on_step or (lambda *_: None))
    return summarise(
        streamed.model,
        streamed.layout,
        run.captures,
        sum(batch.inputs.numel() for batch in data),
        max((batch.inputs.shape[0], batch.inputs.shape[1]) for batch in data),
        device=str(streamed.device),
        weight_norms=run.weight_norms,
    )


class _Run:
    """The steps of one run, and what one hands to the next."""

    def __init__(self, streamed: StreamedCheckpoint, batches: Sequence[TokenBatch], state: RunState | None) -> None:
        self.streamed, self.stream, self.layout, self.batches = streamed, streamed.stream, streamed.layout, batches
        self.state = state
        self.runner = BlockRunner(streamed.model, streamed.layout, resident=streamed.stream.resident)
        self.captures = [Capture() for _ in batches]
        self.readers = [
            StreamReader(self.layout, capture, len(batch.inputs)) for capture, batch in zip(self.captures, batches, strict=True)
        ]
        self.taps = [_by_module(reader.taps(), self.layout.blocks) for reader in self.readers]
        self.names = {p: name for name, p in streamed.model.named_parameters()}
        self.parameters = dict(streamed.model.named_parameters())
        self.weight_norms: dict[nn.Parameter, float] = {}
        self.overwritten: set[nn.Parameter] = set()
        self.gradients: list[Tensor] = []
        self.shared_rows: list[dict[str, Tensor]] = [{} for _ in batches]
        self.shared: list[dict[str, Tensor]] = [{} for _ in batches]
        self.in_several = _in_several_blocks(streamed)
        n_blocks = self.layout.n_blocks
        self.entries = [self.runner.enter(batch.inputs) for batch in batches]
        self.steps: list[Callable[[], None]] = [
            *(partial(self.forward, block) for block in range(n_blocks)),
            self.head,
            *(partial(self.backward, block) for block in reversed(range(n_blocks))),
            self.embedding,
        ]

    @contextmanager
    def inputs(self, max_memory: int | None, folder: Path | None) -> Iterator[None]:
        """A place for the stream that enters each block, and for the last one's output."""
        shapes = [tuple(entry.stream_BTD.shape) for entry in self.entries]
        dtype, n_streams = self.entries[0].stream_BTD.dtype, self.layout.n_blocks + 1
        self.streams: StreamStore | MappedStreams
        if self.state is not None:
            self.streams = self.state.streams("block_inputs", shapes, n_streams, dtype)
            yield
            return
        device = self.streamed.device
        with StreamStore(shapes, n_streams, dtype=dtype, device=device, max_memory=max_memory, folder=folder) as store:
            self.streams = store
            yield

    def all_steps(self, report: Progress) -> None:
        """Every step that is not done yet."""
        done = 0 if self.state is None else self.state.n_steps
        self._restore()
        for i, entry in enumerate(self.entries):
            self.streams[i][0] = entry.stream_BTD
        for number, step in enumerate(self.steps[done:], start=done):
            report(number, len(self.steps))
            if self.state is None:
                step()
            else:
                self._recorded(step, self.state)
        report(len(self.steps), len(self.steps))

    def _recorded(self, step: Callable[[], None], state: RunState) -> None:
        before, n_norms = [known_so_far(capture) for capture in self.captures], len(self.weight_norms)
        self.overwritten.clear()
        step()
        added = [
            capture_record(capture, known, self.names, self.overwritten)
            for capture, known in zip(self.captures, before, strict=True)
        ]
        norms = {self.names[p]: norm for p, norm in latest(self.weight_norms, n_norms).items()}
        state.finish_step({"weight_norms": norms, "captures": added}, self._handed_on())

    @torch.no_grad()
    def forward(self, block: int) -> None:
        """One block, its output kept; the norms of its weights."""
        inside = [self.layout.sublayers[i] for i in self.runner.sublayers_of[block]]
        with self.stream.resident((self.layout.blocks[block],)):
            for real, meta in self.stream.in_place.items():
                self.weight_norms[meta] = float(l2_norm(real))
            for i, entry in enumerate(self.entries):
                stream_BTD = self.streams[i][block].to(self.streamed.device)
                with routing_noted(self.streamed.model, inside, self.captures[i]):
                    self.streams[i][block + 1] = self.runner.run(block, stream_BTD, entry.calls)

    def head(self) -> None:
        """Loss, and the gradient at the last block's output."""
        layout = self.layout
        if self.stream.head is not None:
            self.stream.head.measured = True
        with self.stream.resident((*self.runner.tail_modules, *layout.head.modules)):
            self.stream.prefetch(layout.n_blocks - 1)
            self.gradients = [self._head_of(i) for i in range(len(self.batches))]
            for real, meta in self.stream.in_place.items():
                self.weight_norms[meta] = float(l2_norm(real))
            if self.stream.head is not None:
                self.weight_norms[self.stream.head.parameter] = float(self.stream.head.norm())

    def _head_of(self, i: int) -> Tensor:
        batch, capture = self.batches[i], self.captures[i]
        leaf_BTD = self.streams[i][self.layout.n_blocks].to(self.streamed.device).clone().requires_grad_()
        with torch.enable_grad(), tapped(self.streamed.model, self.taps[i][""]):
            hidden_BTD = self.runner.tail(leaf_BTD)
            head = self._head_gradient(i, hidden_BTD)
            capture.loss, capture.n_stream_entries = head.loss, hidden_BTD.numel()
            at_hidden_BTD = scatter_predicted(head.hidden, hidden_BTD, batch)
            if hidden_BTD is leaf_BTD:  # no final norm
                return at_hidden_BTD
            hidden_BTD.backward(at_hidden_BTD)  # type: ignore[no-untyped-call]
        for name in self.runner.tail_modules:
            self._take_all(i, self.streamed.model.get_submodule(name).parameters())
        assert leaf_BTD.grad is not None
        return leaf_BTD.grad

    def _head_gradient(self, i: int, hidden_BTD: Tensor) -> HeadGradient:
        batch, layout = self.batches[i], self.layout
        predicted = (batch.targets != IGNORED).reshape(-1)
        flat_ND = hidden_BTD.detach().reshape(-1, hidden_BTD.shape[-1])
        weight = None if self.stream.head is None else self.stream.head.parameter
        tied = weight is not None and self.stream.reads_by_rows(weight)
        rows_U = torch.unique(batch.inputs) if tied else None
        head = head_gradient(layout.head, flat_ND[predicted], batch.targets.reshape(-1)[predicted], shared_rows=rows_U)
        for key, norm in head.norms.items():
            parameter: Any = weight if key is getattr(layout.head.linear, "weight", None) else key
            self.captures[i].parameter_grad[self.stream.in_place.get(parameter, parameter)] = norm
        if head.rows is not None and weight is not None:
            self.shared_rows[i][self.names[weight]] = head.rows
        self._take_all(i, (p for name in layout.head.modules for p in self.streamed.model.get_submodule(name).parameters()))
        return head

    def backward(self, block: int) -> None:
        """One block again from its input, its gradients reduced to norms, and the gradient at its input."""
        name = self.layout.blocks[block]
        with self.stream.resident((name,)), torch.enable_grad():
            module = self.streamed.model.get_submodule(name)
            below = self.runner.boundaries_of(block)[0]
            for i, entry in enumerate(self.entries):
                leaf_BTD = self.streams[i][block].to(self.streamed.device).clone().requires_grad_()
                with ExitStack() as stack:
                    stack.enter_context(tapped(self.streamed.model, self.taps[i][name]))
                    for parameter in module.parameters():
                        if parameter.requires_grad:
                            take = partial(self._take, i)
                            handle = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                            stack.callback(handle.remove)
                    self.readers[i].hold(below, leaf_BTD)
                    output_BTD = self.runner.run(block, leaf_BTD, entry.calls)
                    output_BTD.backward(self.gradients[i])  # type: ignore[no-untyped-call]
                    self.readers[i].descend(below)  # now: a gate on the shortcut is in place
                assert leaf_BTD.grad is not None
                self.gradients[i] = leaf_BTD.grad

    def embedding(self) -> None:
        """From the first block's input to the embedding; the sum over everything that is tied or shared."""
        model, layout = self.streamed.model, self.layout
        with self.stream.resident(layout.embedding_modules), torch.enable_grad():
            for real, meta in self.stream.in_place.items():
                self.weight_norms[meta] = float(l2_norm(real))
            for i, batch in enumerate(self.batches):
                self.stream.lookups.read.clear()
                with tapped(model, self.taps[i][""]):
                    stream_BTD = self.runner.embedded(batch.inputs)
                    if stream_BTD.requires_grad:
                        stream_BTD.backward(self.gradients[i])  # type: ignore[no-untyped-call]
                self._take_rows(i)
                self._take_all(i, (p for name in layout.embedding_modules for p in model.get_submodule(name).parameters()))
                for name, gradient in self.shared[i].items():
                    self.captures[i].parameter_grad[self.parameters[name]] = l2_norm(gradient)
        for parameter in self.stream.tables:
            if parameter not in self.weight_norms:
                self.weight_norms[parameter] = float(self.stream.head_rows(parameter).norm())

    def _take_rows(self, i: int) -> None:
        """Embeddings that were read row by row; a tied head's share of those rows is added."""
        for table, (_, rows_UD) in self.stream.lookups.read.items():
            assert isinstance(table, nn.Parameter)
            gradient_UD = rows_UD.grad
            if gradient_UD is None:
                continue
            others = self.captures[i].parameter_grad.get(table)
            self.overwritten.add(table)
            share = self.shared_rows[i].get(self.names[table])
            norm = l2_norm(gradient_UD if share is None else gradient_UD + share)
            self.captures[i].parameter_grad[table] = norm if others is None else torch.hypot(norm, others.to(norm.device))

    def _take_all(self, i: int, parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._take(i, parameter)

    @torch.no_grad()
    def _take(self, i: int, parameter: Tensor) -> None:
        """Norm of a gradient, which is then let go."""
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        key = self.stream.in_place.get(parameter, parameter)
        name = self.names[key]
        if key in self.in_several:
            kept = self.shared[i].get(name)
            self.shared[i][name] = gradient if kept is None else kept + gradient
            return
        if self.stream.reads_by_rows(key):  # a tied matrix that the head needed whole
            ids_U = torch.unique(self.batches[i].inputs)
            self.shared_rows[i][name] = gradient[ids_U]
            gradient[ids_U] = 0
        self.captures[i].parameter_grad[key] = l2_norm(gradient)

    def _handed_on(self) -> dict[str, Any]:
        return {
            "gradients": self.gradients,
            "shared_rows": self.shared_rows,
            "shared": self.shared,
            "shortcuts": [reader.shortcut for reader in self.readers],
            "held_streams": [reader.held_stream for reader in self.readers],
            "held_branches": [reader.held_branch for reader in self.readers],
        }

    def _restore(self) -> None:
        """What the finished steps of an interrupted run have left."""
        if self.state is None or not self.state.n_steps:
            return
        with self.state.restoring():
            self._restore_from(self.state)

    def _restore_from(self, state: RunState) -> None:
        for record in state.records:
            self.weight_norms.update({self.parameters[name]: norm for name, norm in record["weight_norms"].items()})
            for capture, delta in zip(self.captures, record["captures"], strict=True):
                restore_capture(capture, delta, self.parameters)
        kept = _on_device(state.tensors, self.streamed.device)
        self.gradients = kept["gradients"]
        self.shared_rows, self.shared = kept["shared_rows"], kept["shared"]
        for i, reader in enumerate(self.readers):
            reader.shortcut = kept["shortcuts"][i]
            reader.held_stream, reader.held_branch = kept["held_streams"][i], kept["held_branches"][i]


def _on_device(value: Any, device: torch.device) -> Any:
    """The same with every tensor in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on_device(inner, device) for key, inner in value.items()}
    return [_on_device(inner, device) for inner in value] if isinstance(value, list) else value


def _by_module(taps: Mapping[Tap, Any], blocks: Sequence[str]) -> dict[str, dict[Tap, Any]]:
    """Taps by the block they lie in; under the empty name those outside."""
    grouped: dict[str, dict[Tap, Any]] = {block: {} for block in ("", *blocks)}
    depth = blocks[0].count(".") + 1
    for tap, function in taps.items():
        block = ".".join(tap.module.split(".")[:depth])
        grouped[block if block in grouped else ""][tap] = function
    return grouped


def _in_several_blocks(streamed: StreamedCheckpoint) -> frozenset[nn.Parameter]:
    """Parameters of more than one block, whose gradient is a sum over them."""
    blocks = (streamed.model.get_submodule(name) for name in streamed.layout.blocks)
    counts = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    return frozenset(parameter for parameter, count in counts.items() if count > 1)
