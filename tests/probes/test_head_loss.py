"""The head's loss and gradient in tiles against plain autograd over all logits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from probes.head_loss import head_gradient
from probes.layout import Head
from probes.norms import l2_norm

N, D, V = 13, 6, 100


def make_head(linear: nn.Module, *, softcap: float | None = None, known: bool = True) -> Head:
    def logits(hidden: Tensor) -> Tensor:
        plain = linear(hidden)
        return plain if softcap is None else softcap * torch.tanh(plain / softcap)

    return Head(backbone=lambda ids: ids, logits=logits, linear=linear if known else None, modules=("head",), softcap=softcap)


def reference(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = hidden.clone().requires_grad_()
    loss = nn.functional.cross_entropy(head.logits(leaf).to(torch.promote_types(leaf.dtype, torch.float32)), targets)
    loss.backward()
    return loss.detach(), leaf.grad


def problem(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    linear = nn.Linear(D, V, bias=bias, dtype=dtype)
    return linear, torch.randn(N, D, dtype=dtype) * 3, torch.randint(0, V, (N,))


@pytest.mark.parametrize("tile_bytes", [1, 8 * N * 7, 8 * N * 64, 1 << 27])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_agree_with_all_logits(tile_bytes: int, softcap: float | None, bias: bool) -> None:
    linear, hidden, targets = problem(bias=bias)
    head = make_head(linear, softcap=softcap)
    loss, gradient = reference(head, hidden, targets)
    expected = {p: p.grad.clone() for p in linear.parameters()}
    linear.zero_grad(set_to_none=True)
    found = head_gradient(head, hidden, targets, tile_bytes=tile_bytes)
    assert found.loss == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(found.hidden, gradient, rtol=1e-10, atol=1e-14)
    assert {p: float(n) for p, n in found.norms.items()} == pytest.approx(
        {p: float(g.norm()) for p, g in expected.items()}, rel=1e-10
    )
    assert all(p.grad is None for p in linear.parameters())


@pytest.mark.parametrize("tile_bytes", [8 * N * 7, 1 << 27])
def test_shared_rows_are_given_and_left_out_of_the_norm(tile_bytes: int) -> None:
    linear, hidden, targets = problem()
    head = make_head(linear)
    reference(head, hidden, targets)
    gradient = linear.weight.grad.clone()
    rows = torch.tensor([0, 6, 7, 13, 99])
    found = head_gradient(head, hidden, targets, shared_rows=rows, tile_bytes=tile_bytes)
    assert torch.allclose(found.rows, gradient[rows], rtol=1e-10)
    gradient[rows] = 0
    assert float(found.norms[linear.weight]) == pytest.approx(float(gradient.norm()), rel=1e-10)


@pytest.mark.parametrize("tile_bytes", [1, 16 * V * 4, 1 << 27])
def test_any_other_head_goes_through_autograd_in_chunks(tile_bytes: int) -> None:
    linear, hidden, targets = problem()
    body = nn.Sequential(nn.Linear(D, D, dtype=torch.float64), nn.GELU(), linear)
    head = make_head(body, known=False)
    loss, gradient = reference(head, hidden, targets)
    expected = [p.grad.clone() for p in body.parameters()]
    body.zero_grad(set_to_none=True)
    found = head_gradient(head, hidden, targets, tile_bytes=tile_bytes)
    assert float(found.loss) == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(found.hidden, gradient, rtol=1e-10, atol=1e-14)
    assert found.norms == {}
    for parameter, wanted in zip(body.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, wanted, rtol=1e-10, atol=1e-14)


def test_float32_tiles_equal_the_whole_at_64_positions_and_100_words() -> None:
    linear = nn.Linear(D, 100)
    hidden, targets = torch.randn(64, D), torch.randint(0, 100, (64,))
    head = make_head(linear)
    whole, tiled = head_gradient(head, hidden, targets), head_gradient(head, hidden, targets, tile_bytes=4 * 64 * 9)
    assert float(tiled.loss) == pytest.approx(float(whole.loss), abs=1e-6)


def test_loss_of_bfloat16_logits_is_taken_in_float32() -> None:
    linear, hidden, targets = problem(torch.bfloat16)
    found = head_gradient(make_head(linear), hidden, targets)
    expected = nn.functional.cross_entropy(linear(hidden).float(), targets).detach()
    assert found.loss.dtype == torch.float32
    assert float(found.loss) == pytest.approx(float(expected), abs=1e-6)
    assert found.hidden.dtype == torch.bfloat16


def test_a_frozen_head_has_no_norms() -> None:
    linear, hidden, targets = problem()
    linear.requires_grad_(False)
    found = head_gradient(make_head(linear), hidden, targets, shared_rows=torch.tensor([1]))
    assert found.norms == {}
    assert found.rows is None


def test_infinite_and_nan_hidden_states_are_results() -> None:
    linear, hidden, targets = problem()
    hidden[0, 0] = torch.nan
    found = head_gradient(make_head(linear), hidden, targets)
    assert torch.isnan(found.loss)
    assert torch.isnan(l2_norm(found.hidden))


_MEMORY_PROBE = """
import torch
from probes.memory import peak_memory
from torch import nn
from probes.head_loss import head_gradient
from probes.layout import Head
T, V, D = 8192, 128_256, 8
linear = nn.Linear(D, V, bias=False)
hidden, targets = torch.randn(T, D), torch.randint(0, V, (T,))
head = Head(backbone=lambda i: i, logits=linear, linear=linear, modules=("head",))
head_gradient(head, hidden[:64], targets[:64])  # libraries allocate their own at the first call
before = peak_memory()
loss = head_gradient(head, hidden, targets).loss
print(float(loss), (peak_memory() - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is in KiB on Linux")
def test_a_vocabulary_of_128k_costs_less_than_256_mib() -> None:
    """All logits of 8,192 positions would take 4.2 GB in float32."""
    done = subprocess.run([sys.executable, "-c", _MEMORY_PROBE], capture_output=True, text=True, check=True)
    loss, mebibytes = map(float, done.stdout.split())
    assert 11 < loss < 13  # near ln 128,256 = 11.76
    assert mebibytes < 256
