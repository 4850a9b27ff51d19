"""Activations that are computed again on the way back: every flavour of torch's checkpointing gives the readings without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keel_theory.schemes import SCHEMES
from probes.families import describe_model
from probes.gradient_capture import Capture, capture
from probes.gradient_norms import measure_gradient_norms
from probes.layout import ResidualLayout
from probes.model import Transformer, residual_layout
from probes.norms import Status
from probes.text import TokenBatch
from tests.probes._models import random_ids, small_config
from tests.probes._tiny import tiny_ids, tiny_model

RELATIVE = 1e-10

Setup = Callable[[Transformer], ResidualLayout]


def batch_of(ids: Tensor) -> TokenBatch:
    targets = ids.roll(-1, dims=1)
    return TokenBatch(ids, targets)


def numbers(reading: Capture, model: nn.Module) -> dict[str, dict[object, float]]:
    """Everything that was read, as plain numbers by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tables = ("stream_grad", "shortcut_grad", "stream_rms", "token_cosine", "branch_rms")
    found: dict[str, dict[object, float]] = {
        table: {index: float(value) for index, value in sorted(getattr(reading, table).items())} for table in tables
    }
    return found | {"parameter_grad": {names[p]: float(value) for p, value in reading.parameter_grad.items()}}


def assert_same_readings(found: Capture, expected: Capture, model: nn.Module) -> None:
    ours, theirs = numbers(found, model), numbers(expected, model)
    for table, values in theirs.items():
        assert ours[table] == pytest.approx(values, rel=RELATIVE), table
    assert not found.without_graph


def recomputed(module: nn.Module, *, reentrant: bool) -> None:
    """Wrap a module's forward pass, as training codes do."""
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)  # type: ignore[method-assign]


def blocks(model: Transformer, *, reentrant: bool) -> ResidualLayout:
    """Each block."""
    for block in model.blocks:
        recomputed(block, reentrant=reentrant)
    return residual_layout(model)


def branches(model: Transformer, *, reentrant: bool) -> ResidualLayout:
    """Each FFN branch, with no boundary inside."""
    for sublayer in model.sublayers():
        recomputed(sublayer.branch, reentrant=reentrant)
    return residual_layout(model)


def nested(model: Transformer, *, reentrant: bool) -> ResidualLayout:
    """Each sub-layer inside each block."""
    for sublayer in model.sublayers():
        recomputed(sublayer, reentrant=reentrant)
    return blocks(model, reentrant=reentrant)


def segment(model: Transformer, *, reentrant: bool) -> ResidualLayout:
    """Two blocks at a time, so that a boundary between blocks is inside; the last block is left alone."""

    def hidden(ids_BT: Tensor) -> Tensor:
        stream_BTD = model.embedding(ids_BT)
        rotary = model.rotary(stream_BTD)
        stream_BTD = checkpoint(
            lambda x: model.blocks[1](model.blocks[0](x, rotary), rotary), stream_BTD, use_reentrant=reentrant
        )
        return model.final_norm(model.blocks[2](stream_BTD, rotary))

    layout = residual_layout(model)
    return replace(layout, head=replace(layout.head, backbone=hidden))


WAYS = [blocks, branches, nested, segment]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch, of a checkpoint in a checkpoint
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("scheme", ["keel", "pre_ln", "highway", "mix_ln"])
def test_what_is_computed_again_is_read_once_and_right(scheme: str, way: Setup, reentrant: bool) -> None:
    model, batch = Transformer(small_config(scheme)), batch_of(random_ids())
    expected = capture(model, residual_layout(model), batch)
    assert_same_readings(capture(model, way(model, reentrant=reentrant), batch), expected, model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read_through_reentrant_blocks(scheme: str) -> None:
    model, batch = Transformer(small_config(scheme)), batch_of(random_ids())
    expected = capture(model, residual_layout(model), batch)
    assert_same_readings(capture(model, blocks(model, reentrant=True), batch), expected, model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_shared_weight_whose_gradient_comes_in_pieces_has_the_norm_of_the_sum(tied: bool) -> None:
    model = Transformer(small_config("keel", shared_blocks=True, tied_embeddings=tied))
    batch = batch_of(random_ids())
    expected = capture(model, residual_layout(model), batch)
    assert_same_readings(capture(model, blocks(model, reentrant=True), batch), expected, model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_checkpoint_of_a_known_family_is_read_through_reentrant_layers() -> None:
    model = tiny_model("llama")
    expected = measure_gradient_norms(model, [tiny_ids()])
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            partial(forward, **kwargs), *args, use_reentrant=True
        )
    found = measure_gradient_norms(model, [tiny_ids()], layout=describe_model(model))
    assert found.warnings == expected.warnings == ()
    for ours, theirs in zip(found.boundaries, expected.boundaries, strict=True):
        assert ours.stream_grad.value == pytest.approx(theirs.stream_grad.value, rel=RELATIVE)
        assert ours.shortcut_grad.value == pytest.approx(theirs.shortcut_grad.value, rel=RELATIVE, nan_ok=True)


def test_no_hook_stays_behind_after_an_error_in_a_recomputation() -> None:
    model = Transformer(small_config("keel"))
    layout = blocks(model, reentrant=True)
    norm = model.blocks[1].ffn.branch.norm_in
    calls = []

    def fail_the_second_time(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("inside the recomputation")

    handle = norm.register_forward_hook(fail_the_second_time)
    with pytest.raises(RuntimeError, match="inside the recomputation"):
        capture(model, layout, batch_of(random_ids()))
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())


class _OwnRecomputation(torch.autograd.Function):
    """Keeps the input and computes again by ``forward``, past every hook on the module."""

    @staticmethod
    def forward(ctx, stream, block, rotary):
        ctx.block, ctx.rotary = block, rotary
        ctx.save_for_backward(stream)
        with torch.no_grad():
            return block(stream, rotary)

    @staticmethod
    def backward(ctx, gradient):
        (stream,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = stream.detach().requires_grad_()
            attention, ffn = ctx.block.attention, ctx.block.ffn
            middle = attention.combine(leaf, attention.branch.forward(leaf, ctx.rotary))
            out = ffn.combine(middle, ffn.branch.forward(middle, ctx.rotary))
            torch.autograd.backward(out, gradient)
        return leaf.grad, None, None


def test_a_recomputation_past_the_modules_is_said_and_spoils_nothing_else() -> None:
    model, ids = Transformer(small_config("keel")), random_ids()
    expected = measure_gradient_norms(model, [ids])
    block = model.blocks[1]

    def hidden(ids_BT: Tensor) -> Tensor:
        stream_BTD = model.embedding(ids_BT)
        rotary = model.rotary(stream_BTD)
        stream_BTD = _OwnRecomputation.apply(model.blocks[0](stream_BTD, rotary), block, rotary)
        return model.final_norm(model.blocks[2](stream_BTD, rotary))

    layout = residual_layout(model)
    layout = replace(layout, head=replace(layout.head, backbone=hidden))
    found = measure_gradient_norms(model, [ids], layout=layout)
    (warning,) = found.warnings
    assert "at 2 of 8 boundaries (block 1 attention, block 1 ffn) is not known" in warning
    assert "use_reentrant=False keeps the graph" in warning
    lost = [3, 4]
    for i, (ours, theirs) in enumerate(zip(found.boundaries, expected.boundaries, strict=True)):
        assert ours.stream_grad.status is (Status.NONE if i in lost else Status.OK)
        if i not in lost:
            assert ours.stream_grad.value == pytest.approx(theirs.stream_grad.value, rel=RELATIVE)
        assert ours.shortcut_grad.status is theirs.shortcut_grad.status
        if theirs.shortcut_grad.status is Status.OK:
            assert ours.shortcut_grad.value == pytest.approx(theirs.shortcut_grad.value, rel=RELATIVE)
