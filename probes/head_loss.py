r"""Cross-entropy and its gradient at the last hidden state, in tiles of the vocabulary.

For a linear head the gradient is known in closed form,

.. math:: \partial\ell/\partial h = (p - e_y)\,W / N, \qquad \partial\ell/\partial W = (p - e_y)^T h / N,

so neither the (N, V) logits nor their gradient, nor the (V, D) gradient of the weight, ever need to exist whole: memory is
one tile. The norm of the weight's gradient is summed from its row blocks. Where all logits fit into one tile they are computed
once; otherwise a second time (one more matrix product out of four).

Shapes: N predicted positions, V vocabulary, D width, R rows of the weight that an embedding shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from probes.layout import Head
from probes.norms import l2_norm

__all__ = ["HeadGradient", "head_gradient"]

_MIB = 1 << 20
_TILE_BYTES = 96 * _MIB
_BLOCK_BYTES = 16 * _MIB


@dataclass(frozen=True, slots=True)
class HeadGradient:
    """Loss and gradients at the head.

    Attributes:
        loss: mean cross-entropy over the predicted positions, nats per token, float32 or wider scalar.
        hidden: gradient with respect to the hidden states, shape (N, D), in their dtype.
        norms: per parameter, the float64 norm of its gradient without the rows held in ``rows``; a parameter that is missing
            here has its whole gradient in ``.grad``.
        rows: gradient of the shared rows of the weight, shape (R, D), or None.
    """

    loss: Tensor
    hidden: Tensor
    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None


def head_gradient(
    head: Head, hidden_ND: Tensor, targets_N: Tensor, *, shared_rows: Tensor | None = None, tile_bytes: int = _TILE_BYTES
) -> HeadGradient:
    """Mean cross-entropy and its gradient, without ever holding all logits.

    Args:
        head: the head of a layout.
        hidden_ND: last hidden states of the predicted positions, detached, shape (N, D).
        targets_N: target token ids, shape (N,).
        shared_rows: sorted indices (R,) of the weight's rows whose gradient is wanted itself, since another module (a tied
            embedding) adds to it.
        tile_bytes: upper limit of one tile of logits in float32.

    Returns:
        Loss and gradients.

    Status: exact; the loss is computed in float32 at least, whatever the dtype of the logits.
    """
    if head.linear is None:
        return _by_autograd(head, hidden_ND, targets_N, tile_bytes)
    return _LinearHead(head, hidden_ND, targets_N, tile_bytes).gradient(shared_rows)


def _by_autograd(head: Head, hidden_ND: Tensor, targets_N: Tensor, tile_bytes: int) -> HeadGradient:
    """Any head: chunks of positions through autograd; the parameters' gradients add up in ``.grad``."""
    with torch.no_grad():
        vocabulary = head.logits(hidden_ND[:1]).shape[-1]
    chunk = max(1, tile_bytes // (4 * vocabulary * 4))  # logits, their log-softmax and both gradients, in float32
    losses, gradients = [], []
    for hidden, targets in zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True):
        leaf = hidden.detach().requires_grad_()
        logits = _at_least_float32(head.logits(leaf))
        loss = F.cross_entropy(logits, targets, reduction="sum") / len(targets_N)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return HeadGradient(torch.stack(losses).sum(), torch.cat(gradients))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _LinearHead:
    """Logits that are one linear map, scaled and capped or not, tile by tile."""

    def __init__(self, head: Head, hidden_ND: Tensor, targets_N: Tensor, tile_bytes: int) -> None:
        assert head.linear is not None
        weight: Any = head.linear.weight  # a parameter, or rows that are read when they are sliced
        bias = getattr(head.linear, "bias", None)
        assert bias is None or isinstance(bias, nn.Parameter)
        self.head, self.weight_VD, self.bias_V = head, weight, bias
        self.hidden_ND, self.targets_N = hidden_ND, targets_N
        self.wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        width = min(max(1, tile_bytes // (len(hidden_ND) * self.wide.itemsize)), getattr(weight, "rows_at_once", len(weight)))
        vocabulary = len(weight)
        self.tiles = [(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]

    @torch.no_grad()
    def gradient(self, shared_rows: Tensor | None) -> HeadGradient:
        hidden_ND = torch.zeros(self.hidden_ND.shape, dtype=self.wide, device=self.hidden_ND.device)
        weight_norms, bias_norms, rows = [], [], []
        loss, deltas = self._one_tile() if len(self.tiles) == 1 else self._many_tiles()
        for start, delta_NV in deltas:
            if self.bias_V is not None:
                bias_norms.append(l2_norm(delta_NV.sum(0)))
            delta_NV = delta_NV.to(self.hidden_ND.dtype)
            hidden_ND += delta_NV @ self.weight_VD[start : start + delta_NV.shape[1]]
            for norm, shared_RD in self._weight_blocks(delta_NV, start, shared_rows):
                weight_norms.append(norm)
                rows.append(shared_RD)
            del delta_NV  # or two tiles would live at once
        norms = self._parameter_norms(weight_norms, bias_norms)
        shared = torch.cat(rows) if shared_rows is not None and rows else None
        return HeadGradient(loss, hidden_ND.to(self.hidden_ND.dtype), norms, shared)

    def _one_tile(self) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
        """Loss, and the gradient of all logits: they and their exponentials are computed once, in the same memory."""
        logits_NV = self._logits(*self.tiles[0])
        slope_NV = self._slope(logits_NV)
        target_N = logits_NV.gather(1, self.targets_N[:, None]).squeeze(1)
        largest_N = logits_NV.amax(dim=1)
        delta_NV = logits_NV.sub_(largest_N[:, None]).exp_()
        partition_N = delta_NV.sum(dim=1)
        loss = (partition_N.log() + largest_N - target_N).mean()
        delta_NV /= partition_N[:, None]
        return loss, iter([(0, self._finished(delta_NV, slope_NV, 0))])

    def _many_tiles(self) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
        """Loss, and the gradient of each tile's logits, which are computed a second time for it."""
        log_partition_N, target_N = self._partition()
        return (log_partition_N - target_N).mean(), (self._tile(*tile, log_partition_N) for tile in self.tiles)

    def _tile(self, start: int, stop: int, log_partition_N: Tensor) -> tuple[int, Tensor]:
        logits_NV = self._logits(start, stop)
        slope_NV = self._slope(logits_NV)
        return start, self._finished(logits_NV.sub_(log_partition_N[:, None]).exp_(), slope_NV, start)

    def _logits(self, start: int, stop: int) -> Tensor:
        bias = None if self.bias_V is None else self.bias_V[start:stop]
        return self.head.shaped_(F.linear(self.hidden_ND, self.weight_VD[start:stop], bias)).to(self.wide)

    def _partition(self) -> tuple[Tensor, Tensor]:
        """Log of the softmax's denominator, and the target's logit, both (N,), tile by tile."""
        partition = torch.full(self.targets_N.shape, -torch.inf, dtype=self.wide, device=self.hidden_ND.device)
        target = torch.zeros_like(partition)
        for start, stop in self.tiles:
            logits = self._logits(start, stop)
            groups = torch.split(logits, max(1, _BLOCK_BYTES // (logits.shape[1] * logits.element_size())))
            partition = torch.logaddexp(partition, torch.cat([group.logsumexp(dim=1) for group in groups]))
            here = self._targets_in(start, stop)
            target[here] = logits[here, self.targets_N[here] - start]
            del logits, groups  # or two tiles would live at once
        return partition, target

    def _targets_in(self, start: int, stop: int) -> Tensor:
        return ((self.targets_N >= start) & (self.targets_N < stop)).nonzero().squeeze(1)

    def _slope(self, logits_NV: Tensor) -> Tensor | None:
        """Derivative of the soft cap at the capped logits; None where there is no cap."""
        softcap = self.head.softcap
        return None if softcap is None else (logits_NV / softcap).square_().neg_().add_(1)

    def _finished(self, softmax_NV: Tensor, slope_NV: Tensor | None, start: int) -> Tensor:
        """Gradient of the mean loss with respect to what a tile's linear map returns, in the memory of their softmax."""
        here = self._targets_in(start, start + softmax_NV.shape[1])
        softmax_NV[here, self.targets_N[here] - start] -= 1
        softmax_NV *= self.head.scale / len(self.targets_N)
        return softmax_NV if slope_NV is None else softmax_NV.mul_(slope_NV)

    def _weight_blocks(self, delta_NV: Tensor, start: int, shared_rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Norm of the weight's gradient in row blocks, without the shared rows; and those rows."""
        if not self.weight_VD.requires_grad:
            return
        block = max(1, _BLOCK_BYTES // (self.hidden_ND.shape[1] * self.hidden_ND.element_size()))
        for first in range(0, delta_NV.shape[1], block):
            gradient = delta_NV[:, first : first + block].T @ self.hidden_ND
            if shared_rows is None:
                yield l2_norm(gradient), gradient[:0]
                continue
            low = start + first
            inside = shared_rows[(shared_rows >= low) & (shared_rows < low + len(gradient))] - low
            shared = gradient[inside]
            gradient[inside] = 0
            yield l2_norm(gradient), shared

    def _parameter_norms(self, weight_norms: list[Tensor], bias_norms: list[Tensor]) -> dict[nn.Parameter, Tensor]:
        norms = {}
        if self.weight_VD.requires_grad:
            norms[self.weight_VD] = l2_norm(torch.stack(weight_norms))
        if self.bias_V is not None and self.bias_V.requires_grad:
            norms[self.bias_V] = l2_norm(torch.stack(bias_norms))
        return norms
