"""Embedding and head matrices that are never whole in memory: rows are read when they are looked up or multiplied with.

Shapes: V vocabulary, D width, U different ids among those looked up, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from probes.norms import l2_norm
from probes.streaming.recipes import Recipe

__all__ = ["HeadRows", "RowHead", "RowLookups"]


class RowLookups(TorchFunctionMode):
    """While active, ``embedding(ids, weight)`` reads just the rows of those ids, for the weights it was given.

    Args:
        recipes: meta parameter -> how its rows are read.
        device: where rows are put.

    Attributes:
        read: per parameter, the different ids (U,) and their rows (U, D): a leaf that wants a gradient as the parameter does.
    """

    def __init__(self, recipes: Mapping[Tensor, Recipe], device: torch.device) -> None:
        super().__init__()
        self.recipes, self.device = recipes, device
        self.read: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.embedding:
            return self._embedding(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _embedding(self, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if weight not in self.recipes:
            return F.embedding(ids, weight, padding_idx, *args, **kwargs)
        different_U, index_N = torch.unique(ids, return_inverse=True)
        rows_UD = self._rows(weight, different_U)
        inside = (different_U == padding_idx).nonzero().view(-1).tolist() if padding_idx is not None else []
        return F.embedding(index_N, rows_UD, inside[0] if inside else None, *args, **kwargs)

    def _rows(self, weight: Tensor, ids_U: Tensor) -> Tensor:
        known = self.read.get(weight)
        if known is not None and torch.equal(known[0], ids_U):
            return known[1]
        rows = torch.empty(len(ids_U), *weight.shape[1:], dtype=weight.dtype)
        start = 0
        wanted = ids_U.tolist()
        for i in range(1, len(wanted) + 1):  # consecutive ids are read together
            if i == len(wanted) or wanted[i] != wanted[i - 1] + 1:
                self.recipes[weight].fill_rows(rows[start:i], wanted[start])
                start = i
        leaf = rows.to(self.device).requires_grad_(weight.requires_grad)
        self.read[weight] = (ids_U, leaf)
        return leaf


class HeadRows:
    """The weight of a linear head as its consumers see it: ``len``, and slices of rows, read in windows.

    Args:
        weight: the meta parameter.
        recipe: how its rows are read.
        device: where they are put.
        window_bytes: how much of it may be in memory.

    Attributes:
        rows_at_once: rows of one window; the number of rows where all fit.
        measured: whether the norm of each window is taken when it is read.
    """

    def __init__(self, weight: nn.Parameter, recipe: Recipe, device: torch.device, window_bytes: int) -> None:
        self.parameter, self.recipe, self.device = weight, recipe, device
        self.rows_at_once = min(len(weight), max(1, window_bytes // (weight[0].numel() * weight.element_size())))
        self.measured = False
        self._window: tuple[int, Tensor] | None = None
        self._norms: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """V."""
        return len(self.parameter)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter asks for a gradient."""
        return self.parameter.requires_grad

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows start to stop, shape (stop - start, D): a view where they lie in one window."""
        start, stop = rows.start or 0, len(self) if rows.stop is None else rows.stop
        first = start // self.rows_at_once * self.rows_at_once
        if stop > first + self.rows_at_once:
            head = self[start : first + self.rows_at_once].clone()  # so that its window can go
            return torch.cat([head, self[first + self.rows_at_once : stop]])
        window = self._load(first)
        return window[start - first : stop - first]

    def release(self) -> None:
        """Let the window go."""
        self._window = None

    def norm(self) -> Tensor:
        """Euclidean norm of the whole weight; windows that were read already are not read again."""
        for first in range(0, len(self), self.rows_at_once):
            if first not in self._norms:
                self._norms[first] = l2_norm(self._load(first))
        return l2_norm(torch.stack([self._norms[first] for first in sorted(self._norms)]))

    def _load(self, first: int) -> Tensor:
        if self._window is None or self._window[0] != first:
            self._window = None  # before the next one is made
            n_rows = min(self.rows_at_once, len(self) - first)
            window = torch.empty(n_rows, *self.parameter.shape[1:], dtype=self.parameter.dtype, device=self.device)
            self.recipe.fill_rows(window, first)
            self._window = (first, window)
            if self.measured and first not in self._norms:
                self._norms[first] = l2_norm(window)
        return self._window[1]


class RowHead(nn.Module):
    """Stands for the head's linear map in a layout: its weight is :class:`HeadRows`."""

    def __init__(self, weight: HeadRows, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.__dict__["weight"] = weight
        self.__dict__["bias"] = bias

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V), window by window."""
        weight: HeadRows = self.__dict__["weight"]
        step = weight.rows_at_once
        logits_NV = torch.cat([F.linear(hidden_ND, weight[i : i + step]) for i in range(0, len(weight), step)], dim=-1)
        bias: nn.Parameter | None = self.__dict__["bias"]
        return logits_NV if bias is None else logits_NV + bias
