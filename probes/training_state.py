"""Borrow someone's model and optimizer for training, and give both back bit for bit, also after an exception or Ctrl-C."""

from __future__ import annotations

import copy
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Scheduler", "borrowed"]

_FLAG = (bool, int, float)


class Scheduler(Protocol):
    """A learning-rate scheduler, as far as its state goes."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...  # noqa: D102


@contextmanager
def borrowed(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None = None) -> Iterator[None]:
    """Restore on the way out all that training changes.

    Restored are parameters, their ``.grad``, buffers, each module's training flag; the optimizer's state, its parameter
    groups (learning rates included); the scheduler's state; and the random state of Python, NumPy, torch's CPU and every
    accelerator in use. Tensors keep their identity. Ctrl-C during the restoration waits until it is complete.

    Args:
        model: any module.
        optimizer: over any of its parameters.
        scheduler: of the optimizer, or None.

    Yields:
        Nothing.
    """
    restorers = [
        _of_model(model, optimizer),
        _of_optimizer(optimizer),
        *([] if scheduler is None else [_of_scheduler(scheduler)]),  # after the optimizer, whose rates some schedulers read
        _of_random_state(),
    ]
    try:
        yield
    finally:
        with _without_interruption():
            for restore in restorers:
                restore()


def _of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    owned = dict.fromkeys([*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])])
    parameters = [(p, p.detach().clone(), p.requires_grad, p.grad, _clone(p.grad)) for p in owned]
    buffers = [(m, name, b, _clone(b)) for m in model.modules() for name, b in m._buffers.items()]
    modes = [(module, module.training) for module in model.modules()]

    @torch.no_grad()
    def restore() -> None:
        for parameter, content, requires_grad, gradient, gradient_content in parameters:
            parameter.copy_(content)
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
            if gradient is not None:
                gradient.copy_(gradient_content)
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(content)
        for module, training in modes:
            module.training = training

    return restore


def _clone(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    state = {parameter: _Kept(values) for parameter, values in optimizer.state.items()}
    groups = [_Kept({name: value for name, value in group.items() if name != "params"}) for group in optimizer.param_groups]
    flags = {name: value for name, value in vars(optimizer).items() if isinstance(value, _FLAG)}

    @torch.no_grad()
    def restore() -> None:
        optimizer.state.clear()
        for parameter, kept in state.items():
            optimizer.state[parameter] = kept.restored()
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters} | kept.restored())
        for name in [n for n, value in vars(optimizer).items() if isinstance(value, _FLAG) and n not in flags]:
            delattr(optimizer, name)
        vars(optimizer).update(flags)

    return restore


class _Kept:
    """A dictionary, the content of its tensors, and copies of its other values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.tensors = {name: (value, value.detach().clone()) for name, value in values.items() if isinstance(value, Tensor)}
        self.others = {name: copy.deepcopy(value) for name, value in values.items() if not isinstance(value, Tensor)}
        self.order = list(values)

    def restored(self) -> dict[str, Any]:
        """The dictionary as it was, with the same tensors."""
        for tensor, content in self.tensors.values():
            tensor.copy_(content)
        return {name: self.tensors[name][0] if name in self.tensors else self.others[name] for name in self.order}


def _of_scheduler(scheduler: Scheduler) -> Callable[[], None]:
    state = copy.deepcopy(scheduler.state_dict())

    def restore() -> None:
        scheduler.load_state_dict(copy.deepcopy(state))

    return restore


def _of_random_state() -> Callable[[], None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002 - users' models draw from it
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.random.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)

    return restore


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)
