"""Trade memory for time: keep only each block's input, and compute the block again during the backward pass.

Hooks on a block run once per step all the same, since the block is called once. Hooks on what is inside run once more during
the recomputation, over the same numbers; :func:`once` leaves that second call out, so that a probe has one record per block
and step whatever the wrapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["activation_checkpointing", "is_recomputing", "once"]

_P = ParamSpec("_P")
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def activation_checkpointing(blocks: Iterable[nn.Module], *, enabled: bool = True) -> Iterator[None]:
    """Recompute these modules in every backward pass; gradients are bit-equal to those without.

    Args:
        blocks: modules that map tensors to a tensor and draw no random numbers. One that occurs twice is wrapped once.
        enabled: False does nothing.
    """
    wrapped = list(dict.fromkeys(blocks)) if enabled else []
    try:
        for block in wrapped:
            block.forward = _recomputed(block.forward)
        yield
    finally:
        for block in wrapped:
            block.__dict__.pop("forward", None)  # the class's own method shows again


def is_recomputing() -> bool:
    """Whether the code that asks runs inside a recomputation rather than in the forward pass."""
    return _recomputing.get()


def once(hook: Callable[_P, None]) -> Callable[_P, None]:
    """The hook without its calls during recomputation."""

    @wraps(hook)
    def first_time(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if not is_recomputing():
            hook(*args, **kwargs)

    return first_time


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def lean(*args: object) -> Tensor:
        out: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)
        return out

    return lean


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _marked()


@contextmanager
def _marked() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)
