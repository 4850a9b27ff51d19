"""Recomputed blocks: equal gradients, one record per block and step."""

import pytest
import torch
from torch import nn

from probes.activation_checkpointing import activation_checkpointing, is_recomputing, once


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)))


def _step(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_are_bit_equal() -> None:
    plain = _step(_blocks())
    model = _blocks()
    with activation_checkpointing(model):
        recomputed = _step(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_one_record_per_block_and_step_whatever_the_hook_is_on() -> None:
    model = _blocks()
    outer, inner, raw = [], [], []
    for block in model:
        block.register_forward_hook(lambda *_: outer.append(is_recomputing()))
        block[1].register_forward_hook(once(lambda *_: inner.append(is_recomputing())))
        block[1].register_forward_hook(lambda *_: raw.append(is_recomputing()))
    with activation_checkpointing(model):
        _step(model)
    assert outer == [False] * 3
    assert inner == [False] * 3
    assert sorted(raw) == [False] * 3 + [True] * 3


def test_a_shared_block_is_wrapped_once_and_its_method_comes_back_after_an_exception() -> None:
    model = _blocks()

    def fail() -> None:
        with activation_checkpointing([model[0], model[0]]):
            assert "forward" in vars(model[0])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert "forward" not in vars(model[0])


def test_disabled_does_nothing() -> None:
    model = _blocks()
    with activation_checkpointing(model, enabled=False):
        assert "forward" not in vars(model[0])
