"""The slow, obvious way to gradient norms: retain every gradient, keep everything, one loss over all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from probes.layout import ResidualLayout, Side
from probes.taps import input_of, stream_of
from probes.text import IGNORED, TokenBatch

__all__ = ["plain_autograd", "plain_shortcut"]


def plain_autograd(model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> tuple[float, list[float], dict[str, float]]:
    """Loss, the gradient norm at every boundary, and the gradient norm of every parameter by its first name."""
    streams: dict[int, Tensor] = {}

    def keep(index: int, stream: Tensor) -> None:
        stream.retain_grad()
        streams[index] = stream

    handles = [_hook(model, boundary.tap, lambda t, i=i: keep(i, t)) for i, boundary in enumerate(layout.boundaries)]
    loss = _loss(layout, batch)
    loss.backward()
    for handle in handles:
        handle.remove()
    stream_norms = [float(streams[i].grad.norm()) for i in range(len(layout.boundaries))]
    parameter_norms = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), stream_norms, parameter_norms


def plain_shortcut(model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> list[float]:
    """Shortcut-only gradient norms: every branch is replaced by itself, detached, below the last sub-layer's output."""
    streams: dict[int, Tensor] = {}
    handles = [
        _hook(model, boundary.tap, lambda t, i=i: streams.__setitem__(i, t)) for i, boundary in enumerate(layout.boundaries)
    ]
    handles += [
        model.get_submodule(sublayer.branch.module).register_forward_hook(lambda _, __, output: _detached(output))
        for sublayer in layout.sublayers
    ]
    loss = _loss(layout, batch)
    top = layout.sublayers[-1].boundary_out
    wanted = [streams[i] for i in range(top + 1)]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    for handle in handles:
        handle.remove()
    return [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]


def _detached(output: object) -> object:
    if isinstance(output, Tensor):
        return output.detach()
    assert isinstance(output, tuple)
    return (output[0].detach(), *output[1:])


def _hook(model: nn.Module, tap: object, read: Callable[[Tensor], object]) -> object:
    module = model.get_submodule(tap.module)
    if tap.side is Side.INPUT:
        return module.register_forward_pre_hook(lambda _, args, kwargs: read(input_of(args, kwargs)) and None, with_kwargs=True)
    return module.register_forward_hook(lambda _, __, output: read(stream_of(output)) and None)


def _loss(layout: ResidualLayout, batch: TokenBatch) -> Tensor:
    hidden = layout.head.backbone(batch.inputs)
    logits = layout.head.logits(hidden.reshape(-1, hidden.shape[-1]))
    return nn.functional.cross_entropy(logits, batch.targets.reshape(-1), ignore_index=IGNORED)
