"""Cross-entropy of every predicted token, without ever holding the logits of all of them.

Shapes: N predicted positions, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from probes.layout import Head

__all__ = ["ROWS_PER_CALL", "token_losses"]

_TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""On a CPU a tile that stays in its cache makes the exponentials nearly free; a GPU wants large products."""
ROWS_PER_CALL = 1024
"""Predictions for which a linear head's weight is gone through at once."""


@torch.no_grad()
def token_losses(head: Head, hidden_ND: Tensor, targets_N: Tensor, *, tile_bytes: int | None = None) -> Tensor:
    """Negative log-probability of each target, nats.

    Args:
        head: the head of a layout, its parameters in place.
        hidden_ND: last hidden states of the predicted positions.
        targets_N: target token ids.
        tile_bytes: upper limit of one tile of logits in float32; chosen for the device by default.

    Returns:
        Shape (N,), float32, or float64 where the hidden states are: not finite for a token whose logits are not.

    Status: exact; computed in float32 at least, whatever the dtype of the logits.
    """
    limit = tile_bytes or _TILE_BYTES.get(hidden_ND.device.type, _TILE_BYTES["cuda"])
    if not len(targets_N):
        return hidden_ND.new_empty(0, dtype=_wide(hidden_ND.dtype))
    if head.linear is not None:
        pieces = zip(torch.split(hidden_ND, ROWS_PER_CALL), torch.split(targets_N, ROWS_PER_CALL), strict=True)
        return torch.cat([_linear(head, hidden, targets, limit) for hidden, targets in pieces])
    vocabulary = head.logits(hidden_ND[:1]).shape[-1]
    rows = max(1, limit // (4 * vocabulary))
    pieces = zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True)
    return torch.cat([_whole(head.logits(hidden), targets) for hidden, targets in pieces])


def _whole(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    wide = logits_NV.to(_wide(logits_NV.dtype))
    return wide.logsumexp(dim=1) - wide.gather(1, targets_N[:, None]).squeeze(1)


def _linear(head: Head, hidden_ND: Tensor, targets_N: Tensor, tile_bytes: int) -> Tensor:
    """One linear map: tiles of the vocabulary, the softmax's denominator summed over them."""
    assert head.linear is not None
    weight_VD: Any = head.linear.weight  # a parameter, or rows that are read when they are sliced
    bias_V = getattr(head.linear, "bias", None)
    wide = _wide(hidden_ND.dtype)
    exact = wide if hidden_ND.device.type == "mps" else torch.float64  # so that many tiles add no rounding
    partition_N = torch.full(targets_N.shape, -torch.inf, dtype=exact, device=hidden_ND.device)
    target_N = torch.zeros_like(partition_N)
    width = max(1, tile_bytes // (4 * len(targets_N)))
    for start in range(0, len(weight_VD), width):
        stop = min(start + width, len(weight_VD))
        linear_NV = F.linear(hidden_ND, weight_VD[start:stop], None if bias_V is None else bias_V[start:stop])
        logits_NV = head.shaped_(linear_NV).to(wide)
        inside = (targets_N >= start) & (targets_N < stop)
        here = logits_NV.gather(1, (targets_N - start).clamp(0, stop - start - 1)[:, None]).squeeze(1)
        target_N = torch.where(inside, here.to(exact), target_N)
        partition_N = torch.logaddexp(partition_N, logits_NV.logsumexp(dim=1).to(exact))
    return (partition_N - target_N).to(wide)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
