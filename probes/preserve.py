"""Leave a model as it was found: modes, gradients, buffers, attributes and random state, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["eager", "plain_name", "preserved", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def plain_name(name: str) -> str:
    """A parameter's dotted name without the wrappers that ``torch.compile`` puts around single modules.

    Example:
        >>> plain_name("blocks.0._orig_mod.ffn.weight")
        'blocks.0.ffn.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules eagerly: hooks added after a first compiled call would otherwise never run."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients, and restore it bit for bit on the way out.

    Restored are each module's training flag, each parameter's ``.grad``, the buffers (which tensor each is, and its content),
    the modules' other attributes (a dynamic rotary table notes the longest sequence it has seen) and the random state of the
    CPU and of every CUDA device that holds a parameter.

    Args:
        model: any module; its parameters themselves are never written to.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = [_ModuleState(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
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
                for state in states:
                    state.restore()


class _ModuleState:
    """Which tensors a module's buffers are, and what its attributes are; contents only of tensors among the attributes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers = dict(module._buffers)
        self.attributes = dict(vars(module))
        tensors = [value for value in self.attributes.values() if isinstance(value, Tensor) and not value.is_inference()]
        self.contents = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        attributes = vars(self.module)
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        for tensor, version, content in self.contents:
            if tensor._version != version:
                tensor.copy_(content)
