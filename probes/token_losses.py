"""Cross-entropy of every predicted token, without ever holding the logits of all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from probes.layout import Head

__all__ = ["token_losses"]

_TILE_BYTES = 32 << 20


@torch.no_grad()
def token_losses(head: Head, hidden_ND: Tensor, targets_N: Tensor, *, tile_bytes: int = _TILE_BYTES) -> Tensor:
    """Negative log-probability of each target, nats.

    Args:
        head: the head of a layout, its parameters in place.
        hidden_ND: last hidden states of the predicted positions.
        targets_N: target token ids.
        tile_bytes: upper limit of one tile of logits in float32.

    Returns:
        Shape (N,), float32, or float64 where the hidden states are: NaN for a token whose logits hold one.

    Status: exact; computed in float32 at least, whatever the dtype of the logits.
    """
    if not len(targets_N):
        return hidden_ND.new_empty(0, dtype=_wide(hidden_ND.dtype))
    vocabulary = head.logits(hidden_ND[:1]).shape[-1]
    chunk = max(1, tile_bytes // (4 * vocabulary))
    pieces = zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True)
    return torch.cat([_losses(head.logits(hidden), targets) for hidden, targets in pieces])


def _losses(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    wide = logits_NV.to(_wide(logits_NV.dtype))
    target_logit = wide.gather(1, targets_N[:, None]).squeeze(1)
    return wide.logsumexp(dim=1) - target_logit


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
