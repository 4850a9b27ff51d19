r"""How far each sub-layer of a model is from the gradient step that depth-wise test-time training says it is.

The depth-wise loss of a sub-layer is :math:`\ell(x) = -\langle x W_o, G(x) \rangle = -\langle x, u(x) \rangle`, with u the
branch's output: no look inside the branch is needed, so any model with a layout can be measured. With the target G held
constant the update u is the negative gradient exactly, whatever the weights. What a measurement can tell is how far that is
from the gradient of the loss as a function of the stream, :math:`-\partial\ell/\partial x = u + J_u^\top x`, attention's
mixing of positions included (the loss is summed over positions). One vector-Jacobian product per sub-layer gives it.

Shape suffixes: B batch, T tokens, D width.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (29)-(34); the full gradient is the counter-check of
:mod:`keel_theory.depthwise_training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from probes.errors import UnsupportedModelError
from probes.layout import ResidualLayout, Side, SublayerLayout, Tap
from probes.measurable import check_materialised
from probes.preserve import eager, preserved, unwrapped
from probes.stored_json import json_ready
from probes.taps import input_of, stream_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "METRICS",
    "AlignmentStatus",
    "DepthwiseAlignment",
    "SublayerAlignment",
    "measure_depthwise_alignment",
    "pooled",
]


METRICS = ("alignment", "target_ratio", "target_stream_cosine", "stream_cosine", "step_ratio", "updated_share")
"""What is measured of a sub-layer."""


class AlignmentStatus(str, Enum):
    """What a mean over positions is."""

    MEASURED = "measured"
    NO_UPDATE = "no update"
    """The branch is exactly zero at every position: there is nothing to take a mean over."""
    UNDEFINED = "undefined"
    """A vector of the cosine, or what a size is divided by, is exactly zero at a position that has an update."""
    NAN = "nan"
    INF = "inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerAlignment:
    """One sub-layer; every number but the last is a mean over the positions that have an update, dimensionless.

    None stands for "no update", where the branch is zero at every position and a cosine with it has no meaning, and for
    "undefined", where something that the number is divided by is exactly zero at a position that has an update.

    Attributes:
        sublayer: 0-based position among all sub-layers.
        block: 0-based block.
        kind: ``attention``, ``ffn`` or ``block``.
        alignment: cosine between the update u and the negative full gradient u + J^T x.
        target_ratio: size of the target term J^T x over the size of u: what holding the target constant leaves out.
        target_stream_cosine: cosine between the target term and the stream; 0 behind an input norm without epsilon.
        stream_cosine: cosine between u and the stream x; positive where the depth-wise loss is negative.
        step_ratio: size of u over the size of x, before the shortcut scale.
        updated_share: share of the positions at which the branch is not zero, in [0, 1].
    """

    sublayer: int
    block: int
    kind: str
    alignment: float | None
    target_ratio: float | None
    target_stream_cosine: float | None
    stream_cosine: float | None
    step_ratio: float | None
    updated_share: float

    def status(self, metric: str) -> AlignmentStatus:
        """What the number of that name is."""
        value: float | None = getattr(self, metric)
        if value is None:
            return AlignmentStatus.UNDEFINED if self.updated_share else AlignmentStatus.NO_UPDATE
        if math.isfinite(value):
            return AlignmentStatus.MEASURED
        return AlignmentStatus.NAN if math.isnan(value) else AlignmentStatus.INF

    def to_dict(self) -> dict[str, object]:
        """The row as JSON-ready data: what is no finite number is null, and ``status`` says why."""
        place = {"sublayer": self.sublayer, "block": self.block, "kind": self.kind}
        values: dict[str, object] = json_ready({name: getattr(self, name) for name in METRICS})
        return {**place, **values, "status": {name: self.status(name).value for name in METRICS}}


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseAlignment:
    """All sub-layers of one model whose branch is visible.

    Attributes:
        family: of the model.
        n_tokens: positions measured.
        sublayers: in forward order.
    """

    family: str
    n_tokens: int
    sublayers: tuple[SublayerAlignment, ...]

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows, one per sub-layer and metric; status is a value of :class:`AlignmentStatus`, such as ``measured``."""
        import pandas as pd

        rows = [
            {
                "family": self.family,
                "sublayer": row.sublayer,
                "block": row.block,
                "kind": row.kind,
                "metric": metric,
                "value": math.nan if (value := getattr(row, metric)) is None else value,
                "status": row.status(metric).value,
                "unit": "dimensionless",
            }
            for row in self.sublayers
            for metric in sorted(METRICS)
        ]
        return pd.DataFrame(rows)

    def verdict(self) -> list[str]:
        """What the numbers say: mean alignments of what was measured, and which sub-layers have none and why."""
        return [*self._means(), *self._without_alignment()]

    def _means(self) -> Iterator[str]:
        by_kind: dict[str, list[float]] = {}
        for row in self.sublayers:
            if row.alignment is not None and row.status("alignment") is AlignmentStatus.MEASURED:
                by_kind.setdefault(row.kind, []).append(row.alignment)
        if by_kind:
            means = (f"{kind} {sum(values) / len(values):.3f}" for kind, values in by_kind.items())
            measured = sum(map(len, by_kind.values()))
            of = "" if measured == len(self.sublayers) else f" (over the {measured} sub-layers that have one)"
            yield f"Mean alignment: {', '.join(means)}{of}."

    def _without_alignment(self) -> Iterator[str]:
        for status, words in _WITHOUT.items():
            places = [f"block {row.block} {row.kind}" for row in self.sublayers if row.status("alignment") is status]
            if places:
                shown = ", ".join(places[:_FEW]) + (", ..." if len(places) > _FEW else "")
                yield f"{len(places)} of {len(self.sublayers)} sub-layers {words} ({shown})."


_FEW = 3  # names in a sentence
_WITHOUT = {
    AlignmentStatus.NO_UPDATE: "have no update: their branch is zero",
    AlignmentStatus.UNDEFINED: "have no alignment: at a position with an update their own gradient is exactly zero",
    AlignmentStatus.NAN: "are not a number (NaN): nothing can be said of their alignment",
    AlignmentStatus.INF: "are infinite: nothing can be said of their alignment",
}


def measure_depthwise_alignment(model: nn.Module, layout: ResidualLayout, ids_BT: Tensor) -> DepthwiseAlignment:
    r"""Compare every sub-layer's update with its own depth-wise gradient, in one forward pass.

    .. math:: \cos\bigl(u,\ u + J_u^\top x\bigr)

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (31)-(34), with the target differentiated.   Status: exact for the tokens.
    Assumes: nothing of the model; x is the stream that the layout names.

    Args:
        model: measured in evaluation mode; left as it was found, without hooks or gradients.
        layout: where its residual stream and branches are visible.
        ids_BT: token ids, shape (B, T).

    Returns:
        One entry per sub-layer with a visible branch.

    Raises:
        UnsupportedModelError: if no branch is visible, a branch does not depend on the stream that the layout names, or
            weights are on the meta device.

    Example:
        >>> from probes.config import tiny
        >>> from probes.model import Transformer, residual_layout
        >>> model = Transformer(tiny("keel"))
        >>> result = measure_depthwise_alignment(model, residual_layout(model), torch.arange(6)[None])
        >>> len(result.sublayers) == model.config.n_sublayers, result.sublayers[0].updated_share
        (True, 1.0)
    """
    model = unwrapped(model)
    check_materialised(model)
    visible = [(i, s) for i, s in enumerate(layout.sublayers) if s.branch is not None]
    if not visible:
        raise UnsupportedModelError(
            f"the branches of family '{layout.family}' are not visible; their updates cannot be compared"
        )
    rows = []
    with preserved(model), eager(), torch.enable_grad():
        streams, branches = _forward(model, layout, ids_BT)
        for index, sublayer in visible:
            x_BTD = streams[sublayer.boundary_in]
            u_BTD = branches[index].reshape(x_BTD.shape)  # some families flatten positions in their FFN
            target_BTD = _target_term(x_BTD, u_BTD, f"block {sublayer.block} {sublayer.kind.value}")
            place = _Place(sublayer=index, block=sublayer.block, kind=sublayer.kind.value)
            rows.append(_compare(place, x_BTD.detach(), u_BTD.detach(), target_BTD))
    return DepthwiseAlignment(family=layout.family, n_tokens=ids_BT.numel(), sublayers=tuple(rows))


def pooled(model: nn.Module, layout: ResidualLayout, batches: Sequence[Tensor]) -> DepthwiseAlignment:
    """The same over several batches, as the mean over all positions that have an update.

    Status: exact for the tokens.   Assumes: nothing.

    Args:
        model: as in :func:`measure_depthwise_alignment`.
        layout: likewise.
        batches: token ids, each of shape (B, T), at least one.

    Returns:
        One entry per sub-layer with a visible branch.

    Example:
        >>> from probes.config import tiny
        >>> from probes.model import Transformer, residual_layout
        >>> model = Transformer(tiny("keel"))
        >>> pooled(model, residual_layout(model), [torch.arange(4)[None], torch.arange(6)[None]]).n_tokens
        10
    """
    results = [measure_depthwise_alignment(model, layout, ids_BT) for ids_BT in batches]
    rows = zip(*(result.sublayers for result in results), strict=True)
    n_tokens = [result.n_tokens for result in results]
    return DepthwiseAlignment(
        family=layout.family, n_tokens=sum(n_tokens), sublayers=tuple(_pooled_row(row, n_tokens) for row in rows)
    )


def _pooled_row(rows: Sequence[SublayerAlignment], n_tokens: Sequence[int]) -> SublayerAlignment:
    n_updated = [row.updated_share * n for row, n in zip(rows, n_tokens, strict=True)]

    def mean(name: str) -> float | None:
        values = [(getattr(row, name), n) for row, n in zip(rows, n_updated, strict=True) if n]
        numbers = [value for value, _ in values if value is not None]
        if any(map(math.isnan, numbers)):
            return math.nan
        if not values or len(numbers) < len(values):
            return None
        return float(sum(value * n for value, n in values) / sum(n for _, n in values))

    return SublayerAlignment(
        sublayer=rows[0].sublayer,
        block=rows[0].block,
        kind=rows[0].kind,
        alignment=mean("alignment"),
        target_ratio=mean("target_ratio"),
        target_stream_cosine=mean("target_stream_cosine"),
        stream_cosine=mean("stream_cosine"),
        step_ratio=mean("step_ratio"),
        updated_share=sum(n_updated) / sum(n_tokens),
    )


def _target_term(x_BTD: Tensor, u_BTD: Tensor, place: str) -> Tensor:
    """J_u(x)^T x: the part of the full gradient that the held target leaves out."""
    (term,) = torch.autograd.grad(u_BTD, x_BTD, x_BTD.detach().to(u_BTD.dtype), retain_graph=True, allow_unused=True)
    if term is None:
        raise UnsupportedModelError(f"{place}: the branch does not depend on the stream that the layout names for it")
    return term


def _compare(place: _Place, x_BTD: Tensor, u_BTD: Tensor, target_BTD: Tensor) -> SublayerAlignment:
    x, u, target = (t.double() for t in (x_BTD, u_BTD, target_BTD))
    updated = (u != 0).any(dim=-1)  # NaN is not zero
    x, u, target = x[updated], u[updated], target[updated]
    return SublayerAlignment(
        **place,
        alignment=_mean(*_cosine(u, u + target)),
        target_ratio=_mean(*_ratio(target, u)),
        target_stream_cosine=_mean(*_cosine(target, x)),
        stream_cosine=_mean(*_cosine(u, x)),
        step_ratio=_mean(*_ratio(u, x)),
        updated_share=float(updated.double().mean()),
    )


class _Place(TypedDict):
    sublayer: int
    block: int
    kind: str


def _mean(values_P: Tensor, undefined_P: Tensor) -> float | None:
    """Over P positions; None if there is none or the number is undefined at one, NaN if it is NaN at another."""
    if values_P[~undefined_P].isnan().any():
        return math.nan
    return None if undefined_P.any() or not len(values_P) else float(values_P.mean())


def _cosine(a_PD: Tensor, b_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Per position, and whether one of the two is exactly zero there."""
    (a_PD, size_a), (b_PD, size_b) = _scaled(a_PD), _scaled(b_PD)
    return (a_PD * b_PD).sum(-1) / (a_PD.norm(dim=-1) * b_PD.norm(dim=-1)), (size_a == 0) | (size_b == 0)


def _ratio(a_PD: Tensor, b_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Size of a over that of b per position, and whether b is exactly zero there."""
    (a_PD, size_a), (b_PD, size_b) = _scaled(a_PD), _scaled(b_PD)
    return a_PD.norm(dim=-1) / b_PD.norm(dim=-1) * (size_a / size_b), size_b == 0


def _scaled(a_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Each vector over its largest entry, so that no square leaves the range of float64; and that entry, (P,)."""
    largest_P = a_PD.abs().amax(dim=-1)
    return a_PD / torch.where(largest_P > 0, largest_P, 1)[:, None], largest_P


def _forward(model: nn.Module, layout: ResidualLayout, ids_BT: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Streams by boundary and branches by sub-layer, with their graph."""
    streams: dict[int, Tensor] = {}
    branches: dict[int, Tensor] = {}
    with _reading(model) as read:
        for i, boundary in enumerate(layout.boundaries):
            read(boundary.tap, partial(_keep, streams, i))
        for j, sublayer in enumerate(layout.sublayers):
            if sublayer.branch is not None:
                read(sublayer.branch, partial(_keep_branch, branches, j, sublayer))
        layout.head.backbone(ids_BT)
    return streams, branches


def _keep(kept: dict[int, Tensor], index: int, tensor: Tensor) -> None:
    """The tensor itself, made part of the graph where every parameter below it is frozen."""
    kept[index] = tensor if tensor.requires_grad else tensor.requires_grad_()


def _keep_branch(kept: dict[int, Tensor], index: int, sublayer: SublayerLayout, branch: Tensor) -> None:
    kept[index] = sublayer.added(branch)


@contextmanager
def _reading(model: nn.Module) -> Iterator[Callable[[Tap, Callable[[Tensor], object]], None]]:
    """Attach hooks, and remove every one at the end, whatever happens.

    Yields:
        A function that sends a tap's tensor somewhere.
    """
    with ExitStack() as stack:

        def read(tap: Tap, send: Callable[[Tensor], object]) -> None:
            stack.callback(_hook(model.get_submodule(tap.module), tap.side, send).remove)

        yield read


def _hook(module: nn.Module, side: Side, send: Callable[[Tensor], object]) -> RemovableHandle:
    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        send(input_of(args, kwargs))

    def after(_: nn.Module, __: object, output: object) -> None:
        send(stream_of(output))

    if side is Side.INPUT:
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
