"""Reading the stream from what a module receives and returns, whatever the wrapping.

A layer may return a tensor, a 1-tuple, a (tensor, cache) pair or a dataclass, and which of them has changed between
library versions. Indexing a bare tensor with [0] silently takes the first element of the batch; these two functions
never index a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from probes.errors import UnsupportedModelError

__all__ = ["input_of", "same_values", "stream_of"]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same values; NaN is the same as NaN.

    Example:
        >>> import torch
        >>> same_values(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def stream_of(value: object) -> Tensor:
    """The first tensor of a module's output.

    Args:
        value: a tensor, or a tuple, list, mapping or dataclass of which some member is a tensor.

    Returns:
        The tensor itself, of the shape it has, (B, T, D) for a residual stream.

    Raises:
        UnsupportedModelError: if there is no tensor in it.

    Example:
        >>> import torch
        >>> stream_of((torch.zeros(2, 3, 4), None)).shape
        torch.Size([2, 3, 4])
    """
    if isinstance(value, Tensor):
        return value
    for member in _members(value):
        if isinstance(member, Tensor):
            return member
    raise UnsupportedModelError(f"a module's output holds no tensor: {type(value).__name__}")


def input_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """The tensor a module was called on: its first positional tensor, else its ``hidden_states`` keyword.

    Args:
        args: positional arguments, as a forward hook receives them.
        kwargs: keyword arguments.

    Returns:
        The tensor itself, (B, T, D) for a residual stream.

    Raises:
        UnsupportedModelError: if neither is there.
    """
    for argument in args:
        if isinstance(argument, Tensor):
            return argument
    named = kwargs.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    raise UnsupportedModelError(
        f"a module was called without a hidden state: {len(args)} positional arguments, keywords {sorted(kwargs) or 'none'}"
    )


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):  # ModelOutput is one
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return ()
