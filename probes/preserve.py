"""Leave a model as it was found: modes, gradients, buffers and random state, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["eager", "preserved", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules eagerly: hooks added after a first compiled call would otherwise never run."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients, and restore it bit for bit on the way out.

    Restored are each module's training flag, each parameter's ``.grad``, each buffer's content and the random state of the
    CPU and of every CUDA device that holds a parameter.

    Args:
        model: any module; its parameters themselves are never written to.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, content in buffers:
                    buffer.copy_(content)
