r"""What each block or sub-layer of a model is worth: the loss without it, for every one of them, in one pass over the weights.

Removing a unit puts the identity in its place: the stream after it is the stream before it. For a plain residual (Pre-LN) its
branch is left out; for a Post-LN unit the whole update goes, the norm over the sum included. Everything else stays where it
is: attention patterns and positions of the other blocks, and in a Keel model their α and the first-layer rule (a model that
starts at block 1 keeps block 1's α).

.. math:: \Delta\ell_u = \ell_{\text{without } u} - \ell, \qquad \Delta\mathrm{PPL}_u = e^{\ell_{\text{without } u}} - e^{\ell}

Source: Chen & Wei 2026, arXiv:2601.19895, appendix A (ΔPPL of removing each layer; Figures 6 and 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from probes.block_runner import BlockCall, BlockRunner, Resident, always_resident
from probes.families import describe_model
from probes.layout import ResidualLayout
from probes.measurable import check_ids, check_materialised
from probes.paired_bootstrap import LossDifferences, paired_differences
from probes.preserve import eager, preserved, unwrapped
from probes.removal_estimates import ForwardProxies, RemovalEstimates, estimate_removals
from probes.removal_result import LayerRemoval, UnitCost, cheap_units
from probes.removal_sweep import SweepKeeper, removal_losses
from probes.removal_units import RemovalError, Unit, UnitKind, joint_unit, removal_units
from probes.text import IGNORED, TokenBatch

__all__ = ["measure_layer_removal"]

Progress: TypeAlias = "Callable[[str, int, int], None]"
"""(stage, steps done, steps in all)."""

_FEWEST_SAMPLES = 8
_STRETCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """How a sweep is run."""

    max_memory: int | None
    spill_folder: Path | None
    tokens_per_call: int | None
    together: bool
    keeper: SweepKeeper | None = None
    watcher: ForwardProxies | None = None


def measure_layer_removal(
    model: nn.Module,
    batches: Iterable[TokenBatch],
    *,
    layout: ResidualLayout | None = None,
    unit: UnitKind | str = UnitKind.BLOCK,
    span: int = 1,
    remove: Sequence[int] = (),
    documents: Sequence[Sequence[int]] | None = None,
    threshold: float = 0.1,
    estimates: bool = True,
    taylor: bool = True,
    joint: bool = True,
    may_go: Callable[[Unit], bool] | None = None,
    max_memory: int | None = None,
    spill_folder: Path | None = None,
    tokens_per_call: int | None = None,
    resident: Resident | None = None,
    device: torch.device | None = None,
    keeper: SweepKeeper | None = None,
    joint_keeper: SweepKeeper | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> LayerRemoval:
    """The loss without each unit of a model.

    Dropout is off while measuring; the model, its gradients, buffers, modes and random state are as before afterwards.

    Args:
        model: a causal or masked language model of this toolkit or of a family that ``probes.families`` describes.
        batches: inputs and targets of shape (B, T), without padding inside a sequence's predicted part.
        layout: where the residual stream is; found by the model's family when None.
        unit: what a step is: ``block``, ``sublayer``, ``attn`` or ``ffn``.
        span: consecutive steps removed together, at every place.
        remove: one further set of steps to remove together.
        documents: per batch, the document of each sequence, for the intervals; each sequence is one by default.
        threshold: nats per token, below which a unit is called cheap; finite and not negative.
        estimates: whether to compute the cheap numbers too.
        taylor: whether the first-order estimate is among them, which needs one more forward and one backward pass; the
            others are gathered on the way.
        joint: whether to measure how many of the cheap units can go together (one more pass with those alone).
        may_go: whether a set is wanted among those removed together; a cheap unit that would make it one that is not stays, and
            the next cheapest is tried. All are by default.
        max_memory: bytes that the variants' streams may take in memory; beyond that they go to disk.
        spill_folder: where.
        tokens_per_call: tokens that go through a block at once.
        resident: puts the weights of modules in place where they are not all in memory. All batches are then carried
            through each block together, and blocks are not checked against the model's own forward pass.
        device: where the model computes; its first parameter's by default.
        keeper: keeps the exact sweep on disk, for a run that can be interrupted; with ``resident`` alone.
        joint_keeper: the same for the units removed together.
        n_resamples: of the bootstrap.
        seed: of the bootstrap.
        on_progress: called with a stage, its steps done and its steps in all.

    Returns:
        A frozen result. A variant whose loss is NaN is reported as such and leaves the others as they are.

    Raises:
        ValueError: if there is no batch, nothing is predicted, or a token id is outside the vocabulary.
        RemovalError: if the model has no such units, or the threshold is none.
        OutputError: if the streams fit neither into memory nor onto the disk.
        UnsupportedModelError: if the residual stream cannot be found, blocks exchange more than the stream, or
            weights are on the meta device without ``resident``.

    Status: exact: equal to running the model once per unit with the identity in its place, up to rounding.

    Example:
        >>> import torch
        >>> from probes.config import tiny
        >>> from probes.model import Transformer
        >>> ids = torch.arange(12).view(2, 6)
        >>> result = measure_layer_removal(Transformer(tiny()), [TokenBatch(ids, ids.roll(-1, 1))])
        >>> [cost.unit.name for cost in result.costs]
        ['block 0', 'block 1', 'block 2', 'block 3']
    """
    if not 0 <= threshold < math.inf:  # NaN is refused too
        raise RemovalError(f"a threshold is a finite number of nats per token, 0 or more; got {threshold:g}")
    model = unwrapped(model)
    if resident is None:
        check_materialised(model)
    layout = layout if layout is not None else describe_model(model)
    units, kind = removal_units(layout, unit, span), UnitKind(unit)
    named = (joint_unit(layout, kind, remove),) if remove else ()
    device = next(model.parameters()).device if device is None else device
    data = [batch.to(device) for batch in batches]
    for index, batch in enumerate(data):
        check_ids(model, layout, batch.inputs, index)
    samples = _Samples(data, documents)
    runner = BlockRunner(model, layout, resident=resident or always_resident)
    limits = _Limits(
        max_memory=max_memory, spill_folder=spill_folder, tokens_per_call=tokens_per_call, together=resident is not None
    )
    proxies = ForwardProxies(runner, data, units) if estimates and not taylor else None
    exact = replace(limits, keeper=keeper, watcher=proxies)
    report = on_progress or (lambda *_: None)
    with eager(), preserved(model):
        if resident is None:
            runner.check(data[0].inputs)
        sums = _summed_losses(runner, data, samples, (*units, *named), exact, partial(report, "exact"))
        differences = paired_differences(sums, samples.counts, n_resamples=n_resamples, seed=seed)
        cheap_numbers = None if proxies is None else proxies.estimates
        if estimates and taylor:
            cheap_numbers = estimate_removals(
                runner,
                data,
                units,
                together=limits.together,
                max_memory=max_memory,
                spill_folder=spill_folder,
                on_step=partial(report, "estimates"),
            )
        costs = _costs((*units, *named), differences, cheap_numbers)
        together: tuple[UnitCost, ...] = ()
        nested = _nested(layout, kind, cheap_units(costs[: len(units)], threshold), may_go) if joint else ()
        if nested:
            kept = replace(limits, keeper=joint_keeper)
            sums = _summed_losses(runner, data, samples, nested, kept, partial(report, "together"))
            together = _costs(nested, paired_differences(sums, samples.counts, n_resamples=n_resamples, seed=seed), None)
    return LayerRemoval(
        family=layout.family,
        objective=layout.objective.value,
        n_blocks=layout.n_blocks,
        n_sublayers=len(layout.sublayers),
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        device=str(device),
        unit=kind,
        span=span,
        n_steps=len(units) + span - 1,
        loss=differences.loss,
        perplexity=differences.perplexity,
        n_tokens=sum(batch.inputs.numel() for batch in data),
        n_predictions=sum(batch.n_predictions for batch in data),
        samples=samples.name,
        n_samples=len(samples.counts),
        seed=seed,
        threshold=threshold,
        costs=costs[: len(units)],
        joint=together,
        named=costs[len(units) :],
        warnings=_warnings(differences),
    )


class _Samples:
    """Which of the resampled pieces of text each prediction belongs to.

    Documents, or sequences, where there are at least eight; otherwise stretches of 32 tokens, since a handful of documents
    says nothing about their spread.
    """

    def __init__(self, batches: Sequence[TokenBatch], documents: Sequence[Sequence[int]] | None) -> None:
        if not batches or not sum(batch.n_predictions for batch in batches):
            raise ValueError("no batch to measure on, or none of them predicts a token")
        starts = np.cumsum([0, *(len(batch.inputs) for batch in batches)])
        sequences = [np.arange(a, b) for a, b in pairwise(starts.tolist())]
        owners = sequences if documents is None else [np.asarray(of_batch, dtype=np.int64) for of_batch in documents]
        by_stretch = len(np.unique(np.concatenate(owners))) < _FEWEST_SAMPLES
        keys = [
            self._stretches(batch, of_batch) if by_stretch else owner[_predicted(batch)[0]]
            for batch, of_batch, owner in zip(batches, sequences, owners, strict=True)
        ]
        _, index = np.unique(np.concatenate(keys), return_inverse=True)
        self.of_batch = np.split(index, np.cumsum([len(key) for key in keys])[:-1])
        self.counts = np.bincount(index)
        kind = "sequences" if documents is None else "documents"
        self.name = f"{len(self.counts)} {f'stretches of {_STRETCH} tokens' if by_stretch else kind}"

    @staticmethod
    def _stretches(batch: TokenBatch, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """A number per prediction that is the same within a stretch of one sequence."""
        row, position = _predicted(batch)
        stretches: npt.NDArray[np.int64] = sequences[row] * (1 << 32) + position // _STRETCH
        return stretches

    def summed(self, batch: int, losses_VN: Tensor) -> npt.NDArray[np.float64]:
        """Losses summed per sample, shape (V, n_samples)."""
        sums = losses_VN.new_zeros(len(losses_VN), len(self.counts), dtype=torch.float64)
        sums.index_add_(1, torch.as_tensor(self.of_batch[batch]), losses_VN.double())
        return sums.numpy()


def _predicted(batch: TokenBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and position of every prediction, in the order of the losses."""
    row, position = (batch.targets != IGNORED).cpu().nonzero(as_tuple=True)
    return row.numpy(), position.numpy()


def _summed_losses(
    runner: BlockRunner,
    batches: Sequence[TokenBatch],
    samples: _Samples,
    units: Sequence[Unit],
    limits: _Limits,
    report: Callable[[int, int], None],
) -> npt.NDArray[np.float64]:
    """Summed losses of the intact model and of each removal, shape (1 + n_units, n_samples)."""
    groups = [list(range(len(batches)))] if limits.together else [[i] for i in range(len(batches))]
    total = len(groups) * runner.layout.n_blocks
    sums = np.zeros((1 + len(units), len(samples.counts)))
    for done, group in enumerate(groups):
        watcher = None if limits.watcher is None else _Renumbered(limits.watcher, group[0])
        losses = removal_losses(
            runner,
            [batches[i] for i in group],
            [frozenset(unit.sublayers) for unit in units],
            max_memory=limits.max_memory,
            spill_folder=limits.spill_folder,
            tokens_per_call=limits.tokens_per_call,
            keeper=limits.keeper,
            watcher=watcher,
            on_block=partial(_report_block, report, done * runner.layout.n_blocks, total),
        )
        for i, losses_VN in zip(group, losses, strict=True):
            sums += samples.summed(i, losses_VN)
    return sums


@dataclass(frozen=True, slots=True)
class _Renumbered:
    """A watcher of all batches beside a sweep over some consecutive ones."""

    watcher: ForwardProxies
    first: int

    def entered(self, batch: int, stream_BTD: Tensor) -> None:
        self.watcher.entered(self.first + batch, stream_BTD)

    def passed(self, batch: int, block: int, before_BTD: Tensor, after_BTD: Tensor, calls: Sequence[BlockCall]) -> None:
        self.watcher.passed(self.first + batch, block, before_BTD, after_BTD, calls)

    def state(self) -> Mapping[str, Any]:
        return self.watcher.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.watcher.restore(state)


def _report_block(report: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    report(before + done, total)


def _costs(units: Sequence[Unit], differences: LossDifferences, estimates: RemovalEstimates | None) -> tuple[UnitCost, ...]:
    """Costs in the order of the units; the first ones have estimates."""
    known = 0 if estimates is None else len(estimates.block_influence)
    return tuple(
        UnitCost(
            unit=unit,
            loss=differences.variant_loss[i],
            delta_loss=differences.delta_loss[i],
            delta_perplexity=differences.delta_perplexity[i],
            estimates=estimates.of_unit(i) if estimates is not None and i < known else {},
        )
        for i, unit in enumerate(units)
    )


def _nested(
    layout: ResidualLayout, kind: UnitKind, cheap: Sequence[UnitCost], may_go: Callable[[Unit], bool] | None
) -> tuple[Unit, ...]:
    """The cheapest unit, the cheapest two, and so on; growing sets of steps, up to the last that leaves something."""
    steps: set[int] = set()
    nested = []
    for cost in cheap:
        grown = steps | set(range(cost.unit.start, cost.unit.stop))
        together = joint_unit(layout, kind, sorted(grown))
        if len(together.sublayers) == len(layout.sublayers):
            break
        if may_go is None or may_go(together):
            steps = grown
            nested.append(together)
    return tuple(nested)


def _warnings(differences: LossDifferences) -> tuple[str, ...]:
    if np.isfinite(differences.loss.value):
        return ()
    return ("the full model's own loss is not finite on this text: no removal can be compared with it; try float32",)
