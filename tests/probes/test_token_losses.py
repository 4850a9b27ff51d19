"""Chunked losses of tokens against one loss over all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from probes.layout import Head
from probes.token_losses import token_losses
from tests.probes._tiny import tiny_model


def linear_head(vocab: int, width: int, *, bias: bool = False, softcap: float | None = None, dtype=torch.float64) -> Head:
    linear = nn.Linear(width, vocab, bias=bias, dtype=dtype)

    def logits(hidden: Tensor) -> Tensor:
        plain = linear(hidden)
        return plain if softcap is None else torch.tanh(plain / softcap) * softcap

    return Head(backbone=lambda ids: ids, logits=logits, linear=linear, modules=("head",), softcap=softcap)


def reference(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head.logits(hidden), targets, reduction="none")


@pytest.mark.parametrize("tile_bytes", [1, 1000, 10_000, None])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"softcap": 2.0}], ids=str)
def test_equals_the_unchunked_loss(options: dict[str, object], tile_bytes: int | None) -> None:
    head = linear_head(100, 16, **options)
    hidden, targets = torch.randn(64, 16, dtype=torch.float64) * 5, torch.randint(100, (64,))
    torch.testing.assert_close(token_losses(head, hidden, targets, tile_bytes=tile_bytes), reference(head, hidden, targets))


@pytest.mark.parametrize("tile_bytes", [1, 1000, None])
def test_a_head_of_several_layers(tile_bytes: int | None) -> None:
    cls = tiny_model("bert").cls
    head = Head(backbone=lambda ids: ids, logits=cls, linear=None, modules=("cls",))
    hidden, targets = torch.randn(20, 16, dtype=torch.float64), torch.randint(64, (20,))
    torch.testing.assert_close(token_losses(head, hidden, targets, tile_bytes=tile_bytes), reference(head, hidden, targets))


def test_the_loss_of_narrow_logits_is_computed_in_float32() -> None:
    head = linear_head(5, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        head.linear.weight.zero_()
    losses = token_losses(head, torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([0, 1, 4]))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([math.log(5)] * 3, rel=1e-6)  # bfloat16 would give 1.609375


def test_a_token_without_a_number_leaves_the_others_alone() -> None:
    head = linear_head(100, 16)
    hidden, targets = torch.randn(6, 16, dtype=torch.float64), torch.randint(100, (6,))
    clean = token_losses(head, hidden, targets)
    hidden[2] = math.nan
    losses = token_losses(head, hidden, targets, tile_bytes=1000)
    assert torch.isnan(losses[2])
    keep = [0, 1, 3, 4, 5]
    torch.testing.assert_close(losses[keep], clean[keep])


def test_words_that_are_masked_out_by_minus_infinity_do_not_count() -> None:
    head = linear_head(100, 16, bias=True)
    with torch.no_grad():
        head.linear.bias[50:] = -math.inf  # a padded vocabulary: whole tiles of it
    hidden, targets = torch.randn(6, 16, dtype=torch.float64), torch.randint(50, (6,))
    torch.testing.assert_close(token_losses(head, hidden, targets, tile_bytes=240), reference(head, hidden, targets))


def test_no_prediction_gives_no_loss() -> None:
    nothing = torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    assert token_losses(linear_head(10, 4), *nothing).shape == (0,)


def test_a_large_vocabulary_is_never_held_whole() -> None:
    width = 8
    head = linear_head(128_256, width, dtype=torch.float32)
    hidden, targets = torch.randn(2048, width), torch.randint(128_256, (2048,))
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel() * result.element_size())
            return result

    with Largest():
        losses = token_losses(head, hidden, targets)
    assert largest < 16 << 20, "all logits would be 1 GB"
    assert torch.isfinite(losses).all()


def test_many_tiles_add_no_rounding() -> None:
    head = linear_head(4096, 8, dtype=torch.float32)
    hidden, targets = torch.randn(32, 8) * 4, torch.randint(4096, (32,))
    exact = nn.functional.cross_entropy(head.linear(hidden).detach().double(), targets, reduction="none")
    losses = token_losses(head, hidden, targets, tile_bytes=32 * 4 * 16)  # 256 tiles
    assert float((losses.double() - exact).abs().max()) < 3e-6
