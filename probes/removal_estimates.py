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

Blocks are run one by one in both directions, the backward pass recomputing each from its stored input, so that one block's
activations exist at a time. Shape suffixes: B sequences, T tokens, D width, N predicted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import groupby

import torch
from torch import Tensor, nn

from probes.block_runner import BlockRunner, Entry
from probes.head_loss import head_gradient
from probes.layout import ResidualLayout
from probes.removal_units import Unit
from probes.text import IGNORED, TokenBatch

__all__ = ["ESTIMATES", "RemovalEstimates", "estimate_removals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalEstimates:
    """Four cheap numbers per unit, in the order of the units. Larger means that the unit seems to matter more.

    Attributes:
        taylor: first-order estimate of the loss difference, nats per token.
        block_influence: one minus the mean cosine between the stream before and after, dimensionless, 0 to 2.
        angular_distance: angle between them at the last token over pi, mean over sequences, dimensionless, 0 to 1.
        relative_contribution: norm of the update over that of the stream before it, mean over tokens, dimensionless.
    """

    taylor: tuple[float, ...]
    block_influence: tuple[float, ...]
    angular_distance: tuple[float, ...]
    relative_contribution: tuple[float, ...]


ESTIMATES: tuple[str, ...] = tuple(f.name for f in fields(RemovalEstimates))
"""Names of the estimates."""


def estimate_removals(
    runner: BlockRunner,
    batches: Sequence[TokenBatch],
    units: Sequence[Unit],
    *,
    on_batch: Callable[[int], None] | None = None,
) -> RemovalEstimates:
    """All estimates from one forward and one backward pass per batch.

    The gradients of the model's parameters are neither computed nor touched.

    Args:
        runner: of the model.
        batches: on the model's device.
        units: what would be removed.
        on_batch: called with the number of batches done.

    Returns:
        Means over the predicted tokens (Taylor), over all tokens, and over the sequences (angular distance) of all batches.
    """
    pieces = [_pieces(runner.layout, unit) for unit in units]
    sums = torch.zeros(len(ESTIMATES), len(units), dtype=torch.float64)
    n_predicted = sum(batch.n_predictions for batch in batches)
    n_tokens = sum(batch.inputs.numel() for batch in batches)
    n_sequences = sum(len(batch.inputs) for batch in batches)
    with _frozen(runner.model):
        for i, batch in enumerate(batches):
            streams = _forward(runner, runner.enter(batch.inputs))
            sums[0] += _taylor(runner, streams, batch, pieces) * (batch.n_predictions / n_predicted)
            proxies = torch.stack([_proxies(streams, unit_pieces) for unit_pieces in pieces], dim=1)
            sums[1:] += proxies / torch.tensor([[n_tokens], [n_sequences], [n_tokens]])
            if on_batch is not None:
                on_batch(i + 1)
    return RemovalEstimates(**{name: tuple(values.tolist()) for name, values in zip(ESTIMATES, sums, strict=True)})


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


@dataclass(slots=True)
class _Streams:
    """What a forward pass leaves behind: the stream at every boundary, and every branch of parallel blocks."""

    entry: Entry
    at: dict[int, Tensor]
    branches: dict[int, Tensor] = field(default_factory=dict)

    def update(self, piece: _Piece) -> Tensor:
        """What a piece adds to the stream, (B, T, D), in float32 at least."""
        if piece.branches:
            return torch.stack([_wide(self.branches[i]) for i in piece.branches]).sum(dim=0)
        return _wide(self.at[piece.after]) - _wide(self.at[piece.before])


@torch.no_grad()
def _forward(runner: BlockRunner, entry: Entry) -> _Streams:
    streams = _Streams(entry, {runner.boundaries_of(0)[0]: entry.stream_BTD})
    stream_BTD = entry.stream_BTD
    for block in range(runner.layout.n_blocks):
        with runner.resident((runner.layout.blocks[block],)):
            seen = runner.watch(block, stream_BTD, entry.calls)
        stream_BTD = seen.output
        streams.at[runner.boundaries_of(block)[1]] = stream_BTD
        streams.at.update({index: stream.view_as(stream_BTD) for index, stream in seen.streams.items()})
        if len(runner.sublayers_of[block]) > 1 and not seen.streams:  # parallel: no stream between its sub-layers
            streams.branches.update({index: branch.view_as(stream_BTD) for index, branch in seen.branches.items()})
    return streams


def _taylor(runner: BlockRunner, streams: _Streams, batch: TokenBatch, pieces: Sequence[Sequence[_Piece]]) -> Tensor:
    """First-order estimates of the batch's mean loss, nats per token, one per unit."""
    ending: dict[int, list[tuple[int, _Piece]]] = {}
    for unit, unit_pieces in enumerate(pieces):
        for piece in unit_pieces:
            ending.setdefault(piece.after, []).append((unit, piece))
    estimates = torch.zeros(len(pieces), dtype=torch.float64)
    for boundary, gradient_BTD in _stream_gradients(runner, streams, batch):
        for unit, piece in ending.get(boundary, ()):
            estimates[unit] -= float((_wide(gradient_BTD) * streams.update(piece)).sum(dtype=torch.float64))
    return estimates


def _stream_gradients(runner: BlockRunner, streams: _Streams, batch: TokenBatch) -> Iterator[tuple[int, Tensor]]:
    """Boundaries with the gradient of the batch's mean loss with respect to the stream there, last to first."""
    layout = runner.layout
    with runner.resident((*runner.tail_modules, *layout.head.modules)):
        gradient_BTD = _head_gradient(runner, streams.at[runner.boundaries_of(layout.n_blocks - 1)[1]], batch)
    for block in reversed(range(layout.n_blocks)):
        before, after = runner.boundaries_of(block)
        yield after, gradient_BTD
        leaf = streams.at[before].detach().requires_grad_()
        with runner.resident((layout.blocks[block],)), torch.enable_grad():
            seen = runner.watch(block, leaf, streams.entry.calls)
            inner = list(seen.streams)
            *inner_gradients, gradient_BTD = torch.autograd.grad(
                seen.output, [*(seen.streams[i] for i in inner), leaf], gradient_BTD
            )
        for index, inner_gradient in zip(inner, inner_gradients, strict=True):
            yield index, inner_gradient.view_as(leaf)


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
    before_BTD = _wide(streams.at[pieces[0].before])
    update_BTD = torch.stack([streams.update(piece) for piece in pieces]).sum(dim=0)
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
