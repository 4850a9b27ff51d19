"""The result of the gradient-norm probe: frozen readings, a tidy frame, and a verdict in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from probes.norms import Status, combine_norms, reading_of
from probes.stored_json import json_ready

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BoundaryReading",
    "Estimate",
    "GradientNorms",
    "ParameterReading",
    "PartReading",
    "SublayerReading",
    "estimate",
]

_SMALL_SHARE = 0.01
_ALIKE = 0.95
_FEWEST_BLOCKS = 2
_GRADIENT_UNIT = "nats/token per unit"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over batches.

    Attributes:
        value: the mean; NaN where the status is nan or none.
        standard_error: of the mean; NaN for a single batch.
        status: ok, zero, underflow, nan, inf or none.
    """

    value: float
    standard_error: float
    status: Status

    def __format__(self, spec: str) -> str:
        """The value, or the status where it is no ordinary number."""
        words = {Status.ZERO: "0 (exact)", Status.NAN: "NaN", Status.INF: "Inf", Status.NONE: "no gradient"}
        if self.status in words:
            return words[self.status]
        return format(self.value, spec) + (" (underflow)" if self.status is Status.UNDERFLOW else "")


def estimate(values: Sequence[float | None], n_entries: int = 1, dtype: torch.dtype = torch.float64) -> Estimate:
    """Mean over batches with its standard error, and the status of the mean.

    Args:
        values: one per batch; None where nothing was measured.
        n_entries: entries behind each norm, for the underflow status.
        dtype: of the entries.

    Returns:
        The estimate; the standard error is NaN for a single batch.
    """
    present = [value for value in values if value is not None]
    if not present:
        return Estimate(math.nan, math.nan, Status.NONE)
    mean = math.fsum(present) / len(present) if all(map(math.isfinite, present)) else sum(present)
    reading = reading_of(abs(mean), n_entries, dtype)
    if len(present) < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan, reading.status)
    variance = math.fsum((value - mean) ** 2 for value in present) / (len(present) - 1)
    return Estimate(mean, math.sqrt(variance / len(present)), reading.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReading:
    """The residual stream at one boundary.

    Attributes:
        index: position in forward order; 0 is the embedding output.
        name: for example ``block 3 attention``: the stream after that sub-layer.
        block: block that the stream leaves here, -1 for the embedding output.
        stream_grad: norm of the loss gradient with respect to the stream, nats per token and unit of stream.
        shortcut_grad: the same with every branch (and gate) held constant below the last sub-layer's output;
            status ``none`` where a shortcut on the way is not known (a family read block by block).
        stream_rms: root mean square of the stream, dimensionless.
        token_cosine: mean cosine between different positions of a sequence, dimensionless.
    """

    index: int
    name: str
    block: int
    stream_grad: Estimate
    shortcut_grad: Estimate
    stream_rms: Estimate
    token_cosine: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReading:
    """One parameter.

    Attributes:
        name: dotted name.
        also_named: other names of the same (tied or shared) parameter.
        n_entries: number of entries.
        weight_norm: Euclidean norm, dimensionless.
        grad_norm: norm of the loss gradient, nats per token and unit of weight.
        per_batch: the norm in each batch; None where there was no gradient.
    """

    name: str
    also_named: tuple[str, ...]
    n_entries: int
    weight_norm: float
    grad_norm: Estimate
    per_batch: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReading:
    """The parameters of one part of the model, each counted in the first part that owns it.

    Attributes:
        name: ``embedding``, ``block 3 ffn``, ``final norm``, ``head``.
        parameters: its parameters.
        grad_norm: root of the sum of squares over them.
        weight_norm: likewise of the weights.
        grad_to_weight: their ratio.
    """

    name: str
    parameters: tuple[ParameterReading, ...]
    grad_norm: Estimate
    weight_norm: float
    grad_to_weight: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerReading:
    """One sub-layer.

    Attributes:
        index: 0-based position among all sub-layers.
        block: 0-based block.
        kind: ``attention``, ``ffn``, or ``block`` where a family is known at block level only.
        boundary_in: boundary that the branch reads.
        boundary_out: boundary after the sum.
        part: its parameters.
        branch_rms: root mean square of what is added to the shortcut.
        branch_ratio: that over the root mean square of the stream at ``boundary_in``.
        norm_gains: per normalisation, the largest absolute effective gain (1 + w where a family stores w).
    """

    index: int
    block: int
    kind: str
    boundary_in: int
    boundary_out: int
    part: PartReading
    branch_rms: Estimate
    branch_ratio: Estimate
    norm_gains: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Everything one run of the probe has measured.

    Attributes:
        family: model type.
        objective: ``causal`` or ``masked``.
        n_blocks: Transformer blocks.
        n_parameters: parameters, tied ones counted once.
        dtype: of the parameters.
        device: where it ran.
        loss: nats per token.
        n_batches: batches averaged over.
        n_tokens: tokens read in all.
        batch_shape: sequences and tokens per sequence of the largest batch.
        boundaries: in forward order.
        sublayers: in forward order.
        parts: parameters outside the blocks: embedding, final norm, head.
        idle_experts: per expert parameter, the experts that were sent no token in any batch.
        warnings: what a reader of the numbers should know, such as a stream too narrow for its shortcut scale.
    """

    family: str
    objective: str
    n_blocks: int
    n_parameters: int
    dtype: str
    device: str
    loss: Estimate
    n_batches: int
    n_tokens: int
    batch_shape: tuple[int, int]
    boundaries: tuple[BoundaryReading, ...]
    sublayers: tuple[SublayerReading, ...]
    parts: tuple[PartReading, ...]
    idle_experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def n_sublayers(self) -> int:
        """Number of sub-layers; of blocks where no more is known."""
        return len(self.sublayers)

    @property
    def parameters(self) -> tuple[ParameterReading, ...]:
        """Every parameter, once."""
        parts = [sublayer.part for sublayer in self.sublayers] + list(self.parts)
        return tuple(parameter for part in parts for parameter in part.parameters)

    @cached_property
    def block_grads(self) -> tuple[Estimate, ...]:
        """Gradient norm of each block's parameters: root of the sum of squares over its sub-layers."""
        dtype = getattr(torch, self.dtype)
        return tuple(estimate(_joint(part), sum(p.n_entries for p in part), dtype) for part in self._block_parameters)

    @cached_property
    def block_grads_to_weights(self) -> tuple[Estimate, ...]:
        """The same over the norm of the block's weights."""
        weights = [combine_norms(p.weight_norm for p in part) for part in self._block_parameters]
        joint = [_joint(part) for part in self._block_parameters]
        return tuple(
            estimate([None if g is None or w == 0 else g / w for g in grads]) for w, grads in zip(weights, joint, strict=True)
        )

    @cached_property
    def _block_parameters(self) -> list[list[ParameterReading]]:
        return [[p for s in self.sublayers if s.block == b for p in s.part.parameters] for b in range(self.n_blocks)]

    def block_input(self, block: int) -> BoundaryReading:
        """The boundary at which the stream enters a block."""
        return self.boundaries[next(s.boundary_in for s in self.sublayers if s.block == block)]

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: one value each, with its place, metric, unit, standard error and status.

        Returns:
            Columns ``place, index, block, sublayer, kind, metric, value, standard_error, status, unit`` after the constant
            ones ``family, n_blocks, n_sublayers, n_batches``. ``index`` is the boundary's or sub-layer's.
        """
        import pandas as pd

        constant = {
            "family": self.family,
            "n_blocks": self.n_blocks,
            "n_sublayers": self.n_sublayers,
            "n_batches": self.n_batches,
        }
        return pd.DataFrame([constant | row for row in self._rows()])

    def _rows(self) -> Iterator[dict[str, object]]:
        yield _row("model", -1, -1, -1, "model", "loss", self.loss, "nats/token")
        for boundary in self.boundaries:
            place = (boundary.name, boundary.index, boundary.block, -1, "boundary")
            yield _row(*place, "stream_grad_norm", boundary.stream_grad, _GRADIENT_UNIT)
            yield _row(*place, "shortcut_grad_norm", boundary.shortcut_grad, _GRADIENT_UNIT)
            yield _row(*place, "stream_rms", boundary.stream_rms, "1")
            yield _row(*place, "token_cosine", boundary.token_cosine, "1")
        for sublayer in self.sublayers:
            place = (sublayer.part.name, sublayer.index, sublayer.block, sublayer.index, sublayer.kind)
            yield from _part_rows(place, sublayer.part)
            yield _row(*place, "branch_rms", sublayer.branch_rms, "1")
            yield _row(*place, "branch_ratio", sublayer.branch_ratio, "1")
        for block, grad in enumerate(self.block_grads):
            yield _row(f"block {block}", block, block, -1, "block", "param_grad_norm", grad, _GRADIENT_UNIT)
        for part in self.parts:
            yield from _part_rows((part.name, -1, -1, -1, part.name), part)

    def to_dict(self) -> dict[str, object]:
        """The result as JSON-ready data; values that are not finite are null, their status says why."""
        constant = (
            "family",
            "objective",
            "n_blocks",
            "n_sublayers",
            "n_parameters",
            "dtype",
            "device",
            "n_batches",
            "n_tokens",
        )
        parameters = [
            {
                "name": p.name,
                "also_named": list(p.also_named),
                "n_entries": p.n_entries,
                "weight_norm": p.weight_norm,
                "grad_norm": p.grad_norm.value,
                "status": p.grad_norm.status.value,
            }
            for p in self.parameters
        ]
        record = {
            **{name: getattr(self, name) for name in constant},
            "batch_shape": list(self.batch_shape),
            "verdict": self.verdict(),
            "idle_experts": {name: list(experts) for name, experts in self.idle_experts.items()},
            "norm_gains": {name: gain for s in self.sublayers for name, gain in s.norm_gains.items()},
            "rows": list(self._rows()),
            "parameters": parameters,
        }
        ready: dict[str, object] = json_ready(record)
        return ready

    def verdict(self) -> list[str]:
        """What the numbers say, in sentences with numbers."""
        sentences = [
            self._across_depth(),
            self._small_blocks(),
            self._shortcut_against_full(),
            self._alike_tokens(),
            *self._not_numbers(),
            *self._experts(),
        ]
        return [sentence for sentence in sentences if sentence]

    def _across_depth(self) -> str:
        first, last = self.block_input(0).stream_grad, self.block_input(self.n_blocks - 1).stream_grad
        if self.n_blocks == 1:
            return f"Stream gradient at the input of the only block: {first:.3g}."
        if not (_ordinary(first) and _ordinary(last)):
            return f"Stream gradient at the input of block 0: {first:.3g}; at the input of the last block: {last:.3g}."
        return f"Stream gradient at the input of block 0 is {_factor(first.value / last.value)}x that at the last block."

    def _small_blocks(self) -> str:
        grads = self.block_grads
        finite = [grad.value for grad in grads if math.isfinite(grad.value)]
        median = statistics.median(finite) if len(finite) >= _FEWEST_BLOCKS else 0.0
        if not median:  # of too few, or zero: nothing is small beside it
            return ""
        small = [b for b, grad in enumerate(grads) if math.isfinite(grad.value) and grad.value < _SMALL_SHARE * median]
        over = "blocks" if len(finite) == len(grads) else f"the {len(finite)} blocks of {len(grads)} that have a finite one"
        if not small:
            none = "No block's parameter gradient is" if len(finite) == len(grads) else "No finite parameter gradient is"
            return f"{none} below {_SMALL_SHARE:.0%} of the median over {over} ({median:.3g})."
        return f"Parameter gradient below {_SMALL_SHARE:.0%} of the median over {over} ({median:.3g}) in {_blocks(small)}."

    def _shortcut_against_full(self) -> str:
        top = self.boundaries[self.sublayers[-1].boundary_out]
        bottom = self.block_input(0)
        if not (_ordinary(top.stream_grad) and _ordinary(bottom.stream_grad)):
            return ""
        changes = f"the full gradient is multiplied by {_factor(bottom.stream_grad.value / top.stream_grad.value)}"
        if bottom.shortcut_grad.status is Status.NONE:
            return f"From the last block's output down to block 0 {changes}."
        if not _ordinary(bottom.shortcut_grad):
            return f"From the last block's output down to block 0 {changes}; shortcut-only: {bottom.shortcut_grad:.3g}."
        alone = bottom.shortcut_grad.value / top.stream_grad.value
        return f"From the last block's output down to block 0 {changes}, the shortcut-only one by {_factor(alone)}."

    def _alike_tokens(self) -> str:
        stream = self.boundaries[: self.sublayers[-1].boundary_out + 1]
        known = [b for b in stream if math.isfinite(b.token_cosine.value)]
        if not known:
            return ""
        most = max(known, key=lambda b: b.token_cosine.value)
        largest = f"the largest mean cosine between positions is {most.token_cosine.value:.3f} ({most.name})"
        if most.token_cosine.value > _ALIKE:
            return f"Tokens are nearly alike: {largest}."
        if len(known) == len(stream):
            return f"Tokens stay apart: {largest}."
        return f"At the {len(known)} of {len(stream)} boundaries with a cosine {largest}; at the others none is known."

    def _not_numbers(self) -> Iterator[str]:
        for status, words in (
            (Status.NAN, "NaN"),
            (Status.INF, "infinite"),
            (Status.UNDERFLOW, "below the smallest normal number of its dtype (underflow)"),
            (Status.ZERO, "exactly zero"),
            (Status.NONE, "missing (no gradient reached it)"),
        ):
            names = [p.name for p in self.parameters if p.grad_norm.status is status]
            places = [b.name for b in self.boundaries if b.stream_grad.status is status]
            if names:
                yield f"Gradient is {words} in {len(names)} of {len(self.parameters)} parameters: {_few(names)}."
            if places:
                yield f"Stream gradient is {words} at {len(places)} of {len(self.boundaries)} boundaries: {_few(places)}."

    def _experts(self) -> Iterator[str]:
        holders: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, experts in self.idle_experts.items():
            holders.setdefault((name.rpartition(".")[0], experts), []).append(name)
        for (_, experts), names in holders.items():
            yield f"Experts without tokens in {' and '.join(names)}: {', '.join(map(str, experts))}."


def _joint(parameters: list[ParameterReading]) -> list[float | None]:
    """Per batch, the norm over several parameters."""
    batches = zip(*(p.per_batch for p in parameters), strict=True)
    present = ([norm for norm in batch if norm is not None] for batch in batches)
    return [combine_norms(norms) if norms else None for norms in present]


def _row(
    place: str, index: int, block: int, sublayer: int, kind: str, metric: str, estimate: Estimate, unit: str
) -> dict[str, object]:
    return {
        "place": place,
        "index": index,
        "block": block,
        "sublayer": sublayer,
        "kind": kind,
        "metric": metric,
        "value": estimate.value,
        "standard_error": estimate.standard_error,
        "status": estimate.status.value,
        "unit": unit,
    }


def _part_rows(place: tuple[str, int, int, int, str], part: PartReading) -> Iterator[dict[str, object]]:
    weight = Estimate(part.weight_norm, 0.0, reading_of(part.weight_norm, 1, torch.float64).status)
    yield _row(*place, "param_grad_norm", part.grad_norm, _GRADIENT_UNIT)
    yield _row(*place, "weight_norm", weight, "1")
    yield _row(*place, "grad_to_weight", part.grad_to_weight, _GRADIENT_UNIT)


def _ordinary(estimate: Estimate) -> bool:
    return estimate.status in (Status.OK, Status.UNDERFLOW)


def _factor(ratio: float) -> str:
    return f"{ratio:.3g}" if 1e-3 <= ratio < 1e4 else f"{ratio:.1e}"


def _blocks(blocks: list[int]) -> str:
    return f"{len(blocks)} block(s): {_few([str(b) for b in blocks])}"


def _few(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
