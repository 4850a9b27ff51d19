r"""Gradient norms of a Transformer over depth, from one forward and one backward pass per batch.

Measured at every boundary of the residual stream: the norm of the loss gradient, full and shortcut-only, the stream's root
mean square and how alike the tokens are. Measured for every sub-layer: the gradient norm of its parameters, absolute and
relative to the weights, and how much its branch adds to the stream.

The loss is the mean over the predicted tokens of a batch, in nats per token; all gradients are of that mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probes.families import describe_model, effective_gain
from probes.gradient_capture import Capture, capture
from probes.gradient_result import (
    BoundaryReading,
    Estimate,
    GradientNorms,
    ParameterReading,
    PartReading,
    SublayerReading,
    estimate,
)
from probes.layout import NormSite, ResidualLayout, SublayerLayout
from probes.measurable import check_ids, check_materialised
from probes.norms import combine_norms, l2_norm
from probes.preserve import eager, plain_name, preserved, unwrapped
from probes.text import IGNORED, TokenBatch

__all__ = ["as_batch", "measure_gradient_norms", "summarise"]

_NARROW_STREAM_SCALE = 64.0
"""Shortcut scale from which a stream of 8 bits loses a third of the coordinates of a typical branch."""

_FEW = 3  # names in a warning


def measure_gradient_norms(
    model: nn.Module,
    batches: Iterable[TokenBatch | Tensor],
    *,
    layout: ResidualLayout | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> GradientNorms:
    """Gradient norms of every block and sub-layer.

    Dropout is off while measuring. The model, its gradients, buffers, modes and the random state are as before afterwards,
    and all hooks are gone, also after an exception. A model behind ``torch.compile`` is measured by its eager code.

    Args:
        model: a causal or masked language model: of this toolkit, of a family that ``probes.families`` describes, or any
            other for which a layout is given.
        batches: inputs and targets of shape (B, T); a bare tensor of token ids is read as next-token prediction.
        layout: where the residual stream is; found by the model's family when None.
        on_batch: called with the number of batches done, for progress.

    Returns:
        A frozen result with means over the batches and their standard errors; NaN, infinities, exact zeros, underflow and
        missing gradients are statuses of it, never errors.

    Raises:
        ValueError: if there is no batch, a batch is not of shape (B, T) or predicts nothing, or a token id is outside the
            vocabulary.
        UnsupportedModelError: if the residual stream cannot be found, or weights are on the meta device.

    Status: exact (one forward and one backward pass of the loss), norms accumulated in float64.

    Example:
        >>> import torch
        >>> from probes.config import tiny
        >>> from probes.model import Transformer
        >>> result = measure_gradient_norms(Transformer(tiny()), [torch.arange(12).view(2, 6)])
        >>> result.boundaries[0].name, result.boundaries[0].stream_grad.status.value
        ('embedding', 'ok')
    """
    model = unwrapped(model)
    check_materialised(model)
    layout = layout if layout is not None else describe_model(model)
    device = next(model.parameters()).device
    captures: list[Capture] = []
    n_tokens, shape = 0, (0, 0)
    with eager(), preserved(model):
        for batch in map(as_batch, _listed(batches)):
            check_ids(model, layout, batch.inputs, len(captures))
            if batch.n_predictions == 0:
                raise ValueError(f"batch {len(captures)} predicts no token: all its targets are {IGNORED}")
            captures.append(_on_host(capture(model, layout, batch.to(device))))
            n_tokens += batch.inputs.numel()
            shape = max(shape, (batch.inputs.shape[0], batch.inputs.shape[1]))
            if on_batch is not None:
                on_batch(len(captures))
    if not captures:
        raise ValueError("no batch to measure on")
    return summarise(model, layout, captures, n_tokens, shape, device=str(device))


def summarise(
    model: nn.Module,
    layout: ResidualLayout,
    captures: Sequence[Capture],
    n_tokens: int,
    shape: tuple[int, int],
    *,
    device: str,
    weight_norms: Mapping[nn.Parameter, float] | None = None,
) -> GradientNorms:
    """The result of the captures of all batches, on the host.

    Args:
        model: its parameters are the captures' keys.
        layout: of the model.
        captures: one per batch.
        n_tokens: read in all.
        shape: sequences and tokens of the largest batch.
        device: where it ran.
        weight_norms: norms of parameters that are not in memory; the others' are measured.
    """
    return _Summary(model, layout, captures, weight_norms or {}).result(n_tokens, shape, device)


def _listed(batches: Iterable[TokenBatch | Tensor]) -> Iterable[TokenBatch | Tensor]:
    """The batches; a single one in their place is refused, since a tensor is an iterable of its rows."""
    if isinstance(batches, Tensor | TokenBatch):
        raise ValueError(f"a single {type(batches).__name__} was given as batches: give a list of batches, [batch]")
    return batches


def as_batch(batch: TokenBatch | Tensor) -> TokenBatch:
    """A batch as it is; bare token ids as next-token prediction.

    Raises:
        ValueError: if its inputs are not of shape (B, T).
    """
    ids = batch.inputs if isinstance(batch, TokenBatch) else batch
    if ids.ndim != 2:
        raise ValueError(
            f"a batch of token ids has the shape {tuple(ids.shape)}; shape (B, T) is needed, for one sequence ids[None]"
        )
    if isinstance(batch, TokenBatch):
        return batch
    targets = torch.full_like(batch, IGNORED)
    targets[:, :-1] = batch[:, 1:]
    return TokenBatch(batch, targets)


def _on_host(result: Capture) -> Capture:
    """All scalars moved to the host in one transfer."""
    groups: list[dict[Any, Tensor]] = [
        result.stream_grad,
        result.shortcut_grad,
        result.stream_rms,
        result.token_cosine,
        result.branch_rms,
        result.parameter_grad,
    ]
    flat = [value.double().to(result.loss.device) for group in groups for value in group.values()]
    moved = iter(torch.stack([result.loss.double(), *flat]).cpu().unbind())
    result.loss = next(moved)
    for group in groups:
        for key in group:
            group[key] = next(moved)
    return result


class _Summary:
    """Means over batches, by boundary, sub-layer and part of the model."""

    def __init__(
        self,
        model: nn.Module,
        layout: ResidualLayout,
        captures: Sequence[Capture],
        weight_norms: Mapping[nn.Parameter, float],
    ) -> None:
        self.model, self.layout, self.captures, self.weight_norms = model, layout, captures, weight_norms
        self.names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(plain_name(name))
        self.claimed: set[nn.Parameter] = set()
        self.dtype = next(model.parameters()).dtype

    def result(self, n_tokens: int, shape: tuple[int, int], device: str) -> GradientNorms:
        layout = self.layout
        embedding = self._part("embedding", layout.embedding_modules)
        sublayers = tuple(self._sublayer(i, sublayer) for i, sublayer in enumerate(layout.sublayers))
        final_norm = self._part("final norm", () if layout.final_norm is None else (layout.final_norm.module,))
        head = self._part("head", layout.head.modules)
        rest = self._part("other", ("",))
        return GradientNorms(
            family=layout.family,
            objective=layout.objective.value,
            n_blocks=layout.n_blocks,
            n_parameters=sum(parameter.numel() for parameter in self.names),
            dtype=str(self.dtype).removeprefix("torch."),
            device=device,
            loss=self._estimate([float(c.loss) for c in self.captures]),
            n_batches=len(self.captures),
            n_tokens=n_tokens,
            batch_shape=shape,
            boundaries=tuple(self._boundary(i) for i in range(len(layout.boundaries))),
            sublayers=sublayers,
            parts=tuple(part for part in (embedding, final_norm, head, rest) if part.parameters),
            idle_experts=self._idle_experts(),
            warnings=self._warnings(),
        )

    def _boundary(self, index: int) -> BoundaryReading:
        boundary = self.layout.boundaries[index]

        def mean(values: Callable[[Capture], dict[int, Tensor]]) -> Estimate:
            return self._mean([values(c).get(index) for c in self.captures], self.captures[0].n_stream_entries)

        return BoundaryReading(
            index=index,
            name=boundary.name,
            block=boundary.block,
            stream_grad=mean(lambda c: c.stream_grad),
            shortcut_grad=mean(lambda c: c.shortcut_grad),
            stream_rms=mean(lambda c: c.stream_rms),
            token_cosine=mean(lambda c: c.token_cosine),
        )

    def _sublayer(self, index: int, sublayer: SublayerLayout) -> SublayerReading:
        def ratio(c: Capture) -> Tensor | None:
            branch, stream = c.branch_rms.get(index), c.stream_rms.get(sublayer.boundary_in)
            return None if branch is None or stream is None or (branch == 0 and stream == 0) else branch / stream

        part = self._part(f"block {sublayer.block} {sublayer.kind.value}", sublayer.modules)
        return SublayerReading(
            index=index,
            block=sublayer.block,
            kind=sublayer.kind.value,
            boundary_in=sublayer.boundary_in,
            boundary_out=sublayer.boundary_out,
            part=part,
            branch_rms=self._mean([c.branch_rms.get(index) for c in self.captures]),
            branch_ratio=self._mean([ratio(c) for c in self.captures]),
            norm_gains={site.module: self._gain(site) for site in sublayer.norms},
        )

    def _gain(self, site: NormSite) -> float:
        return float(effective_gain(self.model, site).detach().abs().amax())

    def _part(self, name: str, modules: Sequence[str]) -> PartReading:
        """Parameters owned by these modules that no earlier part owns: a tied weight counts once."""
        parameters = []
        for module in modules:
            for parameter in self.model.get_submodule(module).parameters():
                if parameter not in self.claimed:
                    self.claimed.add(parameter)
                    parameters.append(self._parameter(parameter))
        norms = [[p.per_batch[i] for p in parameters] for i in range(len(self.captures))]
        grads = [
            combine_norms(n for n in batch if n is not None) if any(n is not None for n in batch) else None for batch in norms
        ]
        weight = combine_norms(p.weight_norm for p in parameters)
        return PartReading(
            name=name,
            parameters=tuple(parameters),
            grad_norm=self._estimate(grads, sum(p.n_entries for p in parameters)),
            weight_norm=weight,
            grad_to_weight=self._estimate([None if g is None or weight == 0 else g / weight for g in grads]),
        )

    def _parameter(self, parameter: nn.Parameter) -> ParameterReading:
        found = [c.parameter_grad.get(parameter) for c in self.captures]
        values = [None if value is None else float(value) for value in found]
        names = self.names[parameter]
        return ParameterReading(
            name=names[0],
            also_named=tuple(names[1:]),
            n_entries=parameter.numel(),
            weight_norm=norm if (norm := self.weight_norms.get(parameter)) is not None else float(l2_norm(parameter)),
            grad_norm=self._estimate(values, parameter.numel()),
            per_batch=tuple(values),
        )

    def _idle_experts(self) -> dict[str, tuple[int, ...]]:
        """Experts that were sent no token in any batch, by the parameters that hold them."""
        idle = {}
        for name in (name for sublayer in self.layout.sublayers for name in sublayer.expert_parameters):
            found = [c.idle_experts.get(name) for c in self.captures]
            known = [of_batch.cpu() for of_batch in found if of_batch is not None]
            if len(known) == len(found) and (always := torch.stack(known).all(dim=0)).any():
                idle[name] = tuple(always.nonzero().squeeze(1).tolist())
        return dict(sorted(idle.items()))

    def _warnings(self) -> tuple[str, ...]:
        return (*self._without_graph(), *self._narrow_stream())

    def _without_graph(self) -> tuple[str, ...]:
        lost = sorted(set().union(*(capture.without_graph for capture in self.captures)))
        if not lost:
            return ()
        names = ", ".join(self.layout.boundaries[i].name for i in lost[:_FEW]) + (", ..." if len(lost) > _FEW else "")
        return (
            f"the stream gradient at {len(lost)} of {len(self.layout.boundaries)} boundaries ({names}) is not known: the model "
            "computes them without a graph (torch.no_grad, or a recomputation of its own that calls no module); "
            "torch.utils.checkpoint with use_reentrant=False keeps the graph",
        )

    def _narrow_stream(self) -> tuple[str, ...]:
        dtype = self.captures[0].narrowest_stream
        scale = max(sublayer.shortcut_scale for sublayer in self.layout.sublayers)
        if dtype.itemsize >= torch.float32.itemsize or scale < _NARROW_STREAM_SCALE:
            return ()
        return (
            f"the residual stream is {str(dtype).removeprefix('torch.')} at a shortcut scale of {scale:g}: the branch is about "
            f"1/{scale:g} of the sum and is rounded away, so these are gradients of another model; use float32",
        )

    def _mean(self, values: Sequence[Tensor | None], n_entries: int = 1) -> Estimate:
        return self._estimate([None if value is None else float(value) for value in values], n_entries)

    def _estimate(self, values: Sequence[float | None], n_entries: int = 1) -> Estimate:
        return estimate(values, n_entries, self.dtype)
