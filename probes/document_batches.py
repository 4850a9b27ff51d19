"""Documents of different length as batches without padding, so that nothing but real tokens is read or scored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probes.errors import TextError
from probes.text import TokenBatch, causal_batches

__all__ = ["document_batches", "unpadded"]


def document_batches(
    documents: Sequence[Sequence[int]], *, seq_len: int, batch_size: int = 1, prefix: int | None = None
) -> tuple[list[TokenBatch], list[list[int]]]:
    """Batches for next-token prediction in which all sequences have the same length.

    Args:
        documents: token ids of each; a document longer than a sequence becomes several.
        seq_len: tokens per sequence at the most, prefix included.
        batch_size: sequences per batch at the most.
        prefix: token that starts every sequence (the model's BOS); it is read and never scored.

    Returns:
        Batches, longest sequences first, and per batch the document of each of its sequences.

    Raises:
        TextError: if no document holds a prediction.

    Example:
        >>> batches, owners = document_batches([[5, 6, 7], [1, 2, 3, 4, 5], [8, 9, 5]], seq_len=16, batch_size=2)
        >>> [batch.inputs.shape for batch in batches], owners
        ([torch.Size([1, 5]), torch.Size([2, 3])], [[1], [0, 2]])
    """
    shortest = 2 if prefix is None else 1
    sequences = [
        (owner, batch)
        for owner, ids in enumerate(documents)
        if len(ids) >= shortest
        for batch in causal_batches(ids, n_tokens=len(ids), seq_len=seq_len, prefix=prefix)
    ]
    if not sequences:
        raise TextError(f"none of {len(documents)} document(s) holds a prediction; at least two tokens are needed")
    sequences.sort(key=lambda pair: -pair[1].inputs.shape[1])  # stable: documents keep their order
    batches: list[list[tuple[int, TokenBatch]]] = []
    for owner, batch in sequences:
        last = batches[-1] if batches else []
        if last and len(last) < batch_size and last[0][1].inputs.shape == batch.inputs.shape:
            last.append((owner, batch))
        else:
            batches.append([(owner, batch)])
    joined = [TokenBatch(torch.cat([b.inputs for _, b in rows]), torch.cat([b.targets for _, b in rows])) for rows in batches]
    return joined, [[owner for owner, _ in rows] for rows in batches]


def unpadded(input_ids_BT: Tensor, attention_mask_BT: Tensor) -> list[list[int]]:
    """The documents of a padded batch, whichever side the padding is on and whatever token it uses.

    Args:
        input_ids_BT: token ids.
        attention_mask_BT: 1 for a real token, 0 for padding.

    Returns:
        Token ids of each document.
    """
    return [ids[kept.bool()].tolist() for ids, kept in zip(input_ids_BT, attention_mask_BT, strict=True)]
