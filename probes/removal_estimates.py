r"""What the field uses instead of removing a unit: cheap numbers from one forward and one backward pass.

With x the stream before a unit, u its update (what it adds, for Post-LN what it changes, norm included) and g the gradient of
the loss with respect to the stream after it:

.. math::

    \Delta\ell \approx -\langle g, u\rangle, \quad
    BI = 1 - \overline{\cos(x, x + u)}, \quad
    d = \tfrac{1}{\pi}\arccos\cos(x_T, x_T + u_T), \quad
    r = \overline{\|u\| / \|x\|}

Sources: first-order Taylor expansion (Molchanov et al. 2017, arXiv:1611.06440); block influence (Men et al. 2024, ShortGPT,
arXiv:2403.03853); angular distance at the last token (Gromov et al. 2024, arXiv:2403.17887); relative contribution (Csordás et
al. 2025, arXiv:2505.13898).

Status: the Taylor term is exact to first order in u, in the loss; the others know nothing of the loss.

The last three need no gradient: :class:`ForwardProxies` gathers them while the intact stream passes the blocks anyway. For all
four, blocks are run one by one in both directions, the backward pass recomputing each from its stored input, so that one
block's activations exist at a time. Shape suffixes: B sequences, T tokens, D width, N predicted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from probes.block_runner import BlockCall, BlockPass, BlockRunner, Entry
from probes.head_loss import head_gradient
from probes.layout import ResidualLayout
from probes.removal_units import Unit
from probes.stream_store import StreamStore
from probes.text import IGNORED, TokenBatch

__all__ = ["ESTIMATES", "ForwardProxies", "RemovalEstimates", "estimate_removals", "n_streams_kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalEstimates:
    """Cheap numbers per unit, in the order of the units. Larger means that the unit seems to matter more.

    Attributes:
        taylor: first-order estimate of the loss difference, nats per token; empty where no backward pass was run.
        block_influence: one minus the mean cosine between the stream before and after, dimensionless, 0 to 2.
        angular_distance: angle between them at the last token over pi, mean over sequences, dimensionless, 0 to 1.
        relative_contribution: norm of the update over that of the stream before it, mean over tokens, dimensionless.
    """

    taylor: tuple[float, ...] = ()
    block_influence: tuple[float, ...]
    angular_distance: tuple[float, ...]
    relative_contribution: tuple[float, ...]

    def of_unit(self, index: int) -> dict[str, float]:
        """The numbers of one unit by name."""
        values = {name: getattr(self, name) for name in ESTIMATES}
        return {name: float(value[index]) for name, value in values.items() if value}


ESTIMATES: tuple[str, ...] = tuple(f.name for f in fields(RemovalEstimates))
"""Names of the estimates."""


def estimate_removals(
    runner: BlockRunner,
    batches: Sequence[TokenBatch],
    units: Sequence[Unit],
    *,
    together: bool = False,
    max_memory: int | None = None,
    spill_folder: Path | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> RemovalEstimates:
    """All estimates from one forward and one backward pass.

    The gradients of the model's parameters are neither computed nor touched.

    Args:
        runner: of the model.
        batches: on the model's device.
        units: what would be removed.
        together: whether all batches go through a block while it is in place (two reads of the weights in all), or one batch
            after another (less memory).
        max_memory: bytes that the streams may take in memory before they go to disk.
        spill_folder: where they go then.
        on_step: called with the number of blocks passed in either direction, and how many that will be.

    Returns:
        Means over the predicted tokens (Taylor), over all tokens, and over the sequences (angular distance) of all batches.

    Raises:
        OutputError: if the streams fit neither into memory nor onto the disk.
    """
    pieces = [_pieces(runner.layout, unit) for unit in units]
    taylor = torch.zeros(len(units), dtype=torch.float64)
    proxies = torch.zeros(len(ESTIMATES) - 1, len(units), dtype=torch.float64)
    n_predicted = sum(batch.n_predictions for batch in batches)
    groups = [list(batches)] if together else [[batch] for batch in batches]
    report = _Steps(on_step, 2 * len(groups) * runner.layout.n_blocks)
    with _frozen(runner.model):
        for group in groups:
            entries = [runner.enter(batch.inputs) for batch in group]
            with _stored(runner, entries, pieces, max_memory, spill_folder) as streams:
                _forward(runner, streams, report)
                for kept in streams:
                    proxies += torch.stack([_proxies(kept, of_unit) for of_unit in pieces], dim=1)
                shares = [batch.n_predictions / n_predicted for batch in group]
                taylor += _taylor(runner, streams, group, shares, pieces, report)
    return _estimates(proxies, batches, tuple(taylor.tolist()))


def _estimates(proxies: Tensor, batches: Sequence[TokenBatch], taylor: tuple[float, ...] = ()) -> RemovalEstimates:
    """Sums as means."""
    n_tokens, n_sequences = (sum(sizes) for sizes in zip(*((b.inputs.numel(), len(b.inputs)) for b in batches), strict=True))
    means = (proxies / torch.tensor([[n_tokens], [n_sequences], [n_tokens]])).tolist()
    return RemovalEstimates(taylor=taylor, **{name: tuple(of) for name, of in zip(ESTIMATES[1:], means, strict=True)})


class _Steps:
    """Counts blocks passed."""

    def __init__(self, on_step: Callable[[int, int], None] | None, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def step(self) -> None:
        self.done += 1
        if self.on_step is not None:
            self.on_step(self.done, self.total)


class ForwardProxies:
    """The proxies that need no gradient, from streams that pass the blocks one after another; nothing is read for them.

    Kept are only streams that a unit which has begun still needs: as many as a unit is long.

    Args:
        runner: of the model.
        batches: whose streams will pass.
        units: what would be removed.
    """

    def __init__(self, runner: BlockRunner, batches: Sequence[TokenBatch], units: Sequence[Unit]) -> None:
        self.runner, self.batches = runner, batches
        self.pieces = [_pieces(runner.layout, unit) for unit in units]
        self.sums = torch.zeros(len(ESTIMATES) - 1, len(units), dtype=torch.float64)
        self._until: dict[_Key, int] = {}
        for of_unit in self.pieces:
            for key in {key for piece in of_unit for key in piece.keys}:
                self._until[key] = max(self._until.get(key, 0), of_unit[-1].after)
        self._kept: list[dict[_Key, Tensor]] = [{} for _ in batches]

    def looks_inside(self, block: int) -> bool:
        """Whether a unit begins or ends inside a block, which is then run once more for its intact stream."""
        return any(key in self._until for key in _inner_keys(self.runner, block))

    @property
    def estimates(self) -> RemovalEstimates:
        """The means, when all streams have passed all blocks."""
        return _estimates(self.sums, self.batches)

    def entered(self, batch: int, stream_BTD: Tensor) -> None:
        """The stream that enters block 0."""
        self._keep(batch, ("at", self.runner.boundaries_of(0)[0]), stream_BTD)

    @torch.no_grad()
    def passed(self, batch: int, block: int, before_BTD: Tensor, after_BTD: Tensor, calls: Sequence[BlockCall]) -> None:
        """The stream before and after a block whose weights are in place; it is run again only to look inside it."""
        first, last = self.runner.boundaries_of(block)
        if self.looks_inside(block):
            for key, stream in _inside(self.runner, block, self.runner.watch(block, before_BTD, calls)).items():
                self._keep(batch, key, stream)
        self._keep(batch, ("at", last), after_BTD)
        kept = {key: stream.to(after_BTD.device) for key, stream in self._kept[batch].items()}  # restored ones are on the CPU
        for unit, of_unit in enumerate(self.pieces):
            if first < of_unit[-1].after <= last:
                self.sums[:, unit] += _proxies(kept, of_unit)
        self._kept[batch] = {key: stream for key, stream in kept.items() if self._until[key] > last}

    def _keep(self, batch: int, key: _Key, stream_BTD: Tensor) -> None:
        if key in self._until:
            self._kept[batch][key] = stream_BTD.detach().clone()

    def state(self) -> dict[str, Any]:
        """What is needed to go on after the block passed last."""
        return {"sums": self.sums, "kept": [[[*key, stream] for key, stream in kept.items()] for kept in self._kept]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self.sums = state["sums"]
        self._kept = [{(str(kind), int(index)): stream for kind, index, stream in kept} for kept in state["kept"]]


_Key: TypeAlias = "tuple[str, int]"
"""``at`` and a boundary, or ``branch`` and a sub-layer."""


class _Streams(Protocol):
    """What a forward pass leaves behind: streams and branches, (B, T, D)."""

    def __getitem__(self, key: _Key, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a unit whose update is known: between two boundaries, or some branches of a parallel block.

    Attributes:
        before: boundary that it reads.
        after: boundary that it writes to.
        branches: sub-layers whose outputs are the update; empty where it is the whole difference of the stream.
    """

    before: int
    after: int
    branches: tuple[int, ...]

    @property
    def keys(self) -> tuple[_Key, ...]:
        """The streams that its update and its own size are read from."""
        updates = tuple(("branch", i) for i in self.branches) or (("at", self.after),)
        return (("at", self.before), *updates)

    def update(self, streams: _Streams) -> Tensor:
        """What it adds to the stream, (B, T, D), in float32 at least."""
        if self.branches:
            return torch.stack([_wide(streams["branch", i]) for i in self.branches]).sum(dim=0)
        return _wide(streams["at", self.after]) - _wide(streams["at", self.before])


def _pieces(layout: ResidualLayout, unit: Unit) -> list[_Piece]:
    pieces: list[_Piece] = []

    def places(index: int) -> tuple[int, int]:
        return layout.sublayers[index].boundary_in, layout.sublayers[index].boundary_out

    for (before, after), group in groupby(unit.sublayers, key=places):
        chosen = tuple(group)
        whole = len(chosen) == sum(places(i) == (before, after) for i in range(len(layout.sublayers)))
        last = pieces[-1] if pieces else None
        if whole and last is not None and not last.branches and last.after == before:
            pieces[-1] = _Piece(last.before, after, ())
        else:
            pieces.append(_Piece(before, after, () if whole else chosen))
    return pieces


def _inner_keys(runner: BlockRunner, block: int) -> tuple[_Key, ...]:
    """The streams inside a block; its branches where no stream lies between them (parallel sub-layers)."""
    inside = runner.sublayers_of[block]
    inner = tuple(("at", runner.layout.sublayers[i].boundary_out) for i in inside)
    inner = tuple(key for key in inner if key[1] != runner.boundaries_of(block)[1])
    return inner if inner or len(inside) == 1 else tuple(("branch", i) for i in inside)


def _inside(runner: BlockRunner, block: int, seen: BlockPass) -> dict[_Key, Tensor]:
    """What was seen inside a block, in the shape of its output."""
    tables = {"at": seen.streams, "branch": seen.branches}
    return {(kind, i): tables[kind][i].view_as(seen.output) for kind, i in _inner_keys(runner, block) if i in tables[kind]}


@dataclass(frozen=True, slots=True)
class _Slots:
    """Streams of one batch in the slots of a store."""

    entry: Entry
    slots: Mapping[_Key, Tensor]

    def __getitem__(self, key: _Key) -> Tensor:
        return self.slots[key].to(self.entry.stream_BTD.device)

    def put(self, key: _Key, stream_BTD: Tensor) -> None:
        if key in self.slots:
            self.slots[key].copy_(stream_BTD)


def n_streams_kept(runner: BlockRunner, units: Sequence[Unit]) -> int:
    """Streams per batch that :func:`estimate_removals` keeps."""
    return len(_stored_keys(runner, [_pieces(runner.layout, unit) for unit in units]))


def _stored_keys(runner: BlockRunner, pieces: Sequence[Sequence[_Piece]]) -> list[_Key]:
    ends = {("at", boundary) for block in range(runner.layout.n_blocks) for boundary in runner.boundaries_of(block)}
    return sorted(ends | {key for of_unit in pieces for piece in of_unit for key in piece.keys})


@contextmanager
def _stored(
    runner: BlockRunner,
    entries: Sequence[Entry],
    pieces: Sequence[Sequence[_Piece]],
    max_memory: int | None,
    spill_folder: Path | None,
) -> Iterator[list[_Slots]]:
    """Room for the stream at every block's ends, and for what the pieces need of its inside."""
    keys = _stored_keys(runner, pieces)
    shapes = [tuple(entry.stream_BTD.shape) for entry in entries]
    first = entries[0].stream_BTD
    with StreamStore(
        shapes, len(keys), dtype=first.dtype, device=first.device, max_memory=max_memory, folder=spill_folder
    ) as store:
        yield [_Slots(entry, dict(zip(keys, store[i], strict=True))) for i, entry in enumerate(entries)]


@torch.no_grad()
def _forward(runner: BlockRunner, streams: Sequence[_Slots], report: _Steps) -> None:
    for kept in streams:
        kept.put(("at", runner.boundaries_of(0)[0]), kept.entry.stream_BTD)
    for block in range(runner.layout.n_blocks):
        before, after = runner.boundaries_of(block)
        with runner.resident((runner.layout.blocks[block],)):
            for kept in streams:
                seen = runner.watch(block, kept["at", before], kept.entry.calls)
                kept.put(("at", after), seen.output)
                for key, stream in _inside(runner, block, seen).items():
                    kept.put(key, stream)
        report.step()


def _taylor(
    runner: BlockRunner,
    streams: Sequence[_Slots],
    batches: Sequence[TokenBatch],
    shares: Sequence[float],
    pieces: Sequence[Sequence[_Piece]],
    report: _Steps,
) -> Tensor:
    """First-order estimates of the mean loss, nats per token, one per unit; each batch's mean counts by its share."""
    ending: dict[int, list[tuple[int, _Piece]]] = {}
    for unit, of_unit in enumerate(pieces):
        for piece in of_unit:
            ending.setdefault(piece.after, []).append((unit, piece))
    estimates = torch.zeros(len(pieces), dtype=torch.float64)
    for i, boundary, gradient_BTD in _stream_gradients(runner, streams, batches, report):
        for unit, piece in ending.get(boundary, ()):
            product = (_wide(gradient_BTD) * piece.update(streams[i])).sum(dtype=torch.float64)
            estimates[unit] -= shares[i] * float(product)
    return estimates


def _stream_gradients(
    runner: BlockRunner, streams: Sequence[_Slots], batches: Sequence[TokenBatch], report: _Steps
) -> Iterator[tuple[int, int, Tensor]]:
    """Batches and boundaries with the gradient of that batch's mean loss with respect to the stream there, last to first."""
    layout = runner.layout
    top = runner.boundaries_of(layout.n_blocks - 1)[1]
    with runner.resident((*runner.tail_modules, *layout.head.modules)):
        gradients = [_head_gradient(runner, kept["at", top], batch) for kept, batch in zip(streams, batches, strict=True)]
    for block in reversed(range(layout.n_blocks)):
        before, after = runner.boundaries_of(block)
        with runner.resident((layout.blocks[block],)), torch.enable_grad():
            for i, kept in enumerate(streams):
                yield i, after, gradients[i]
                leaf = kept["at", before].detach().clone().requires_grad_()
                seen = runner.watch(block, leaf, kept.entry.calls)
                inner = list(seen.streams)
                *inner_gradients, gradients[i] = torch.autograd.grad(
                    seen.output, [*(seen.streams[j] for j in inner), leaf], gradients[i]
                )
                for index, inner_gradient in zip(inner, inner_gradients, strict=True):
                    yield i, index, inner_gradient.view_as(leaf)
        report.step()


def _head_gradient(runner: BlockRunner, stream_BTD: Tensor, batch: TokenBatch) -> Tensor:
    """Gradient with respect to the last block's output."""
    leaf = stream_BTD.detach().requires_grad_()
    with torch.enable_grad():
        hidden_BTD = runner.tail(leaf)
        predicted = batch.targets != IGNORED
        head = head_gradient(runner.layout.head, hidden_BTD.detach()[predicted], batch.targets[predicted])
        gradient_BTD = torch.zeros_like(hidden_BTD)
        gradient_BTD[predicted] = head.hidden
        if hidden_BTD is leaf:  # no final norm
            return gradient_BTD
        (result,) = torch.autograd.grad(hidden_BTD, leaf, gradient_BTD)
    return result


def _proxies(streams: _Streams, pieces: Sequence[_Piece]) -> Tensor:
    """Sums of block influence and relative contribution over tokens, of the angular distance over sequences, float64 (3,)."""
    before_BTD = _wide(streams["at", pieces[0].before])
    update_BTD = torch.stack([piece.update(streams) for piece in pieces]).sum(dim=0)
    a, b = (nn.functional.normalize(x, dim=-1) for x in (before_BTD, before_BTD + update_BTD))
    apart = torch.linalg.vector_norm(a - b, dim=-1)  # 1 - cos = |a - b|^2 / 2, without cancellation
    together = torch.linalg.vector_norm((a + b)[:, -1], dim=-1)
    angle = 2 * torch.atan2(apart[:, -1], together) / math.pi
    ratio = torch.linalg.vector_norm(update_BTD, dim=-1) / torch.linalg.vector_norm(before_BTD, dim=-1)
    return torch.stack([(apart.double().square() / 2).sum(), angle.double().sum(), ratio.double().sum()]).cpu()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient: only the stream's are computed."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)
