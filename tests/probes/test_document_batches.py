"""Documents of different length: only real tokens are read and scored, whatever the padding was."""

from __future__ import annotations

import math

import pytest
import torch

from probes.document_batches import document_batches, unpadded
from probes.errors import TextError
from probes.layout import Head
from probes.text import IGNORED
from probes.token_losses import token_losses

REAL, RARE = 5, 7


def head_of_known_losses() -> Head:
    """Every real token has a loss of ln 2, any other one of ln 100."""
    bias = torch.full((10,), math.log(0.01), dtype=torch.float64)
    bias[REAL] = math.log(0.5)
    bias[0] = math.log(1 - 0.5 - 8 * 0.01)
    linear = torch.nn.Linear(1, 10, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(bias)
    return Head(backbone=lambda ids: ids, logits=linear, linear=linear, modules=())


def padded(side: str, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.full((2, 5), pad), torch.zeros(2, 5, dtype=torch.long)
    for row, length in enumerate((3, 5)):
        place = slice(0, length) if side == "right" else slice(5 - length, 5)
        ids[row, place], mask[row, place] = REAL, 1
    return ids, mask


@pytest.mark.parametrize("prefix", [None, RARE])
@pytest.mark.parametrize("pad", [RARE, REAL])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_perplexity_is_that_of_the_real_tokens(batch_size: int, side: str, pad: int, prefix: int | None) -> None:
    documents = unpadded(*padded(side, pad))
    batches, owners = document_batches(documents, seq_len=8, batch_size=batch_size, prefix=prefix)
    targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch in batches])
    losses = token_losses(head_of_known_losses(), torch.zeros(len(targets), 1, dtype=torch.float64), targets)
    assert float(losses.mean().exp()) == pytest.approx(2.0, abs=1e-12)
    assert len(losses) == (3 + 5 if prefix is not None else 2 + 4)
    assert sorted(owner for of_batch in owners for owner in of_batch) == [0, 1]


def test_equal_lengths_share_a_batch_and_long_documents_become_several_sequences() -> None:
    batches, owners = document_batches([[1, 2, 3], [1, 2, 3, 4, 5, 6], [4, 5, 6]], seq_len=3, batch_size=3)
    assert [tuple(batch.inputs.shape) for batch in batches] == [(3, 3), (1, 3)]
    assert owners == [[0, 1, 1], [2]]


def test_a_document_of_one_token_is_left_out_without_a_prefix_and_kept_with_one() -> None:
    assert document_batches([[1], [2, 3]], seq_len=8)[1] == [[1]]
    assert document_batches([[1], [2, 3]], seq_len=8, prefix=0)[1] == [[1], [0]]


def test_no_prediction_at_all_is_an_error() -> None:
    with pytest.raises(TextError, match=r"none of 2 document\(s\) holds a prediction"):
        document_batches([[1], []], seq_len=8)
