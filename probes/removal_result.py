"""The result of the removal probe: what each unit costs, how certain that is, which cheap numbers agree, and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from probes.norms import Status
from probes.paired_bootstrap import Interval
from probes.removal_estimates import ESTIMATES
from probes.removal_units import Unit, UnitKind
from probes.stored_json import json_ready

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LayerRemoval", "UnitCost", "cheap_units", "perplexity_text"]

_UNITS = {
    "taylor": "nats/token",
    "block_influence": "1",
    "angular_distance": "1",
    "relative_contribution": "1",
}
_NOT_FINITE = {Status.NAN: "NaN", Status.INF: "infinite"}
_FEWEST_RANKED = 3
_FEWEST_BETWEEN = 2
"""Finite costs between the ends from which their median says something of a middle."""
_FEWEST_SAMPLES = 5
"""Pieces of text from which a bootstrap interval is trusted: with n of them the lowest resample has a chance of n to the -n."""
_CRITICAL = 5.0
"""An end is critical that costs more than the threshold and so many times the median between the ends, with confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What the model loses without one unit.

    Attributes:
        unit: what was removed.
        loss: without it, nats per token.
        delta_loss: loss without it minus the loss of the full model, nats per token; negative where the model gains.
        delta_perplexity: the same of the perplexities, dimensionless.
        estimates: the cheap numbers by name; empty where none were computed.
    """

    unit: Unit
    loss: Interval
    delta_loss: Interval
    delta_perplexity: Interval
    estimates: Mapping[str, float] = field(default_factory=dict)


def cheap_units(costs: Sequence[UnitCost], threshold: float) -> tuple[UnitCost, ...]:
    """Units whose cost is below a threshold with confidence (97.5 % quantile), cheapest first.

    Args:
        costs: any.
        threshold: nats per token.
    """
    return tuple(sorted((c for c in costs if c.delta_loss.high < threshold), key=lambda c: c.delta_loss.value))


@dataclass(frozen=True, kw_only=True)
class LayerRemoval:
    """Everything one run of the probe has measured.

    Attributes:
        family: model type.
        objective: ``causal`` or ``masked``.
        n_blocks: Transformer blocks.
        n_sublayers: sub-layers; blocks where no more is known.
        n_parameters: parameters, tied ones counted once.
        dtype: of the parameters.
        device: where it ran.
        unit: what a step of the depth is.
        span: steps removed together.
        n_steps: steps of that kind in the model.
        loss: of the full model, nats per token.
        perplexity: of the full model.
        n_tokens: tokens read.
        n_predictions: tokens predicted.
        samples: what the intervals are resampled over, such as ``16 sequences``.
        n_samples: how many those are; None where it is not known.
        seed: of the resamples.
        threshold: nats per token, below which a unit counts as cheap.
        costs: one per unit, in forward order.
        joint: the cheap units removed together, one more at each step, cheapest first; each an exact measurement.
        named: further sets that were asked for.
        warnings: what a reader of the numbers should know.
    """

    family: str
    objective: str
    n_blocks: int
    n_sublayers: int
    n_parameters: int
    dtype: str
    device: str
    unit: UnitKind
    span: int
    n_steps: int
    loss: Interval
    perplexity: Interval
    n_tokens: int
    n_predictions: int
    samples: str
    seed: int
    threshold: float
    costs: tuple[UnitCost, ...]
    joint: tuple[UnitCost, ...] = ()
    named: tuple[UnitCost, ...] = ()
    warnings: tuple[str, ...] = ()
    n_samples: int | None = None

    @property
    def removable(self) -> UnitCost | None:
        """The largest of the joint removals whose cost is below the threshold with confidence."""
        return next((c for c in reversed(self.joint) if c.delta_loss.high < self.threshold), None)

    @property
    def effective_depth(self) -> int | None:
        """Steps that are left when all that can go together is gone; None where the full model has no loss to compare with."""
        if not math.isfinite(self.loss.value):
            return None
        return self.n_steps - (0 if self.removable is None else len(self.removable.unit.sublayers) // self._sublayers_per_step)

    @property
    def _sublayers_per_step(self) -> int:
        return self.n_sublayers // self.n_blocks if self.unit is UnitKind.BLOCK else 1

    @cached_property
    def rank_correlations(self) -> dict[str, float]:
        """Spearman's rank correlation of each cheap number with the exact cost; NaN below three units or without spread."""
        return {name: self._rank_correlation(name) for name in ESTIMATES if any(name in c.estimates for c in self.costs)}

    def _rank_correlation(self, name: str) -> float:
        from scipy.stats import spearmanr

        pairs = [(c.delta_loss.value, c.estimates[name]) for c in self.costs]
        finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
        exact, cheap = ([pair[i] for pair in finite] for i in range(2))
        if len(finite) < _FEWEST_RANKED or len(set(exact)) == 1 or len(set(cheap)) == 1:
            return math.nan
        return float(spearmanr(exact, cheap).statistic)

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: one value each, with its place, metric, unit, interval and status.

        Returns:
            Columns ``place, kind, index, block, start, stop, metric, value, standard_error, low, high, status, unit`` after
            the constant ones. ``kind`` is ``unit``, ``joint`` or ``named``; start and stop are 0-based and half-open.
        """
        import pandas as pd

        constant = {
            "family": self.family,
            "n_blocks": self.n_blocks,
            "n_sublayers": self.n_sublayers,
            "counted_in": self.unit.value,
            "span": self.span,
        }
        return pd.DataFrame([constant | row for row in self._rows()])

    def _rows(self) -> Iterator[dict[str, object]]:
        whole = {"place": "full model", "kind": "model", "index": -1, "block": -1, "start": 0, "stop": self.n_steps}
        yield whole | _values("loss", self.loss, "nats/token")
        yield whole | _values("perplexity", self.perplexity, "1")
        for kind, costs in (("unit", self.costs), ("joint", self.joint), ("named", self.named)):
            for index, cost in enumerate(costs):
                unit = cost.unit
                place = {"place": unit.name, "kind": kind, "index": index, "block": unit.block}
                place |= {"start": unit.start, "stop": unit.stop}
                yield place | _values("loss_without", cost.loss, "nats/token")
                yield place | _values("delta_loss", cost.delta_loss, "nats/token")
                yield place | _values("delta_perplexity", cost.delta_perplexity, "1")
                for name, value in cost.estimates.items():
                    yield place | _values(name, Interval(value=value), _UNITS[name])
        for name, value in self.rank_correlations.items():
            yield whole | _values(f"rank_correlation_{name}", Interval(value=value), "1")

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
            "span",
            "n_steps",
            "n_tokens",
            "n_predictions",
            "samples",
            "seed",
            "threshold",
            "effective_depth",
        )
        record = {
            **{name: getattr(self, name) for name in constant},
            "unit": self.unit.value,
            "removable": None if self.removable is None else _cost_dict(self.removable),
            "rank_correlations": self.rank_correlations,
            "verdict": self.verdict(),
            "modules": {c.unit.name: list(c.unit.modules) for c in (*self.costs, *self.joint, *self.named)},
            "rows": list(self._rows()),
        }
        ready: dict[str, object] = json_ready(record)
        return ready

    def verdict(self) -> list[str]:
        """What the numbers say, in sentences with numbers."""
        sentences = [
            self._not_finite(),
            self._dearest(),
            self._few_samples(),
            self._ends_and_middle(),
            self._gains(),
            *self._not_numbers(),
            *self._cheap(),
            *(f"Without {c.unit.name}: {_cost(c)}." for c in self.named),
            self._trust(),
        ]
        return [sentence for sentence in sentences if sentence]

    def _finite_costs(self) -> list[UnitCost]:
        return [c for c in self.costs if math.isfinite(c.delta_loss.value)]

    def _not_finite(self) -> str:
        """What can be said where the full model has no loss to compare with."""
        if math.isfinite(self.loss.value):
            return ""
        losses = [f"{c.unit.name}: {c.loss:.3g}" for c in self.costs if math.isfinite(c.loss.value)]
        found = f"it is finite only without {_few(losses)} nats/token" if losses else "no removal gives a finite one"
        return f"The full model's loss is {_NOT_FINITE[self.loss.status]}; {found}."

    def _few_samples(self) -> str:
        """That nothing below is said with confidence, where there is an interval and too little text behind it."""
        if self._is_certain or not any(math.isfinite(c.delta_loss.high) for c in self.costs):
            return ""
        return f"The text is {self.samples}: too little for an interval to be trusted, so nothing is called critical or cheap."

    @property
    def _is_certain(self) -> bool:
        return self.n_samples is None or self.n_samples >= _FEWEST_SAMPLES

    def _dearest(self) -> str:
        costs = sorted(self._finite_costs(), key=lambda c: -c.delta_loss.value)
        if not math.isfinite(self.loss.value):
            return ""
        if not costs:
            return "No removal gives a finite loss."
        if len(costs) == 1:
            return f"Without {costs[0].unit.name}, the only removal with a finite loss: {costs[0].delta_loss:+.2g} nats/token."
        if costs[0].delta_loss.value == costs[-1].delta_loss.value:
            return f"All {len(costs)} removals with a finite loss cost the same: {costs[0].delta_loss:+.2g} nats/token."
        shown = "; ".join(f"{c.unit.name} {c.delta_loss:+.2g}" for c in costs[:3])
        cheapest = costs[-1]
        return f"Most costly (nats/token): {shown}. Least: {cheapest.unit.name} {cheapest.delta_loss:+.2g}."

    def _ends_and_middle(self) -> str:
        """Whether the ends stand out from the middle: with confidence, above the threshold and far above the median."""
        middle = [c.delta_loss.value for c in self.costs[1:-1] if math.isfinite(c.delta_loss.value)]
        first, last = self.costs[0], self.costs[-1]
        known = math.isfinite(first.delta_loss.value) and math.isfinite(last.delta_loss.value)
        if len(middle) < _FEWEST_BETWEEN or not known or not self._is_certain:
            return ""
        median = statistics.median(middle)
        limit = max(_CRITICAL * median, self.threshold, 0.0)
        told = {c.unit.name: f"{c.unit.name} {c.delta_loss.value:+.3g}" for c in (first, last)}
        critical = [c.unit.name for c in (first, last) if c.delta_loss.low > limit]
        numbers = f"median between them {median:+.3g} nats/token"
        if len(critical) == 2:
            return f"First and last are critical ({', '.join(told.values())}), the middle is cheap beside them ({numbers})."
        if critical:
            other = next(name for name in told if name not in critical)
            return f"Of the ends only {told[critical[0]]} is critical, {told[other]} is not ({numbers})."
        return f"Neither end is critical with confidence: {', '.join(told.values())}, {numbers}."

    def _gains(self) -> str:
        names = [c.unit.name for c in self.costs if c.delta_loss.high < 0 and self._is_certain]
        return f"The model gains on this text from removing {_few(names)} (below zero with confidence)." if names else ""

    def _not_numbers(self) -> Iterator[str]:
        if not math.isfinite(self.loss.value):
            return
        for status, word in _NOT_FINITE.items():
            names = [c.unit.name for c in self.costs if c.loss.status is status]
            if names:
                yield f"The loss is {word} without {_few(names)}; the other units are not touched by this."

    def _cheap(self) -> Iterator[str]:
        limit = f"{self.threshold:g} nats/token"
        if not self._finite_costs():
            return
        if not any(math.isfinite(c.delta_loss.high) for c in self.costs):
            yield "Too little text for an interval: nothing can be called cheap with confidence."
            return
        if not self._is_certain:
            return
        names = [c.unit.name for c in cheap_units(self.costs, self.threshold)]
        yield f"{len(names)} of {len(self.costs)} removals cost less than {limit} each with confidence" + (
            f": {_few(names, 8)}." if names else "."
        )
        steps = self.unit.words[1]
        if self.removable is not None:
            yield (
                f"Together {self.removable.unit.name} cost {_cost(self.removable)} (measured): the depth in use on this text "
                f"is {self.effective_depth} of {self.n_steps} {steps}."
            )
        elif self.joint:
            yield f"No set of them stays below {limit} together: the depth in use is {self.n_steps} of {self.n_steps} {steps}."

    def _trust(self) -> str:
        known = {name: value for name, value in self.rank_correlations.items() if math.isfinite(value)}
        if not known:
            return ""
        ranked = sorted(known.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name.replace('_', ' ')} {value:+.2f}" for name, value in ranked)
        return f"Rank correlation of the cheap numbers with the exact cost: {shown}."


def _cost(cost: UnitCost) -> str:
    if not math.isfinite(cost.delta_loss.value):
        return f"a loss of {cost.loss:.3g} nats/token"
    return f"{cost.delta_loss:+.3g} nats/token, perplexity {perplexity_text(cost.delta_perplexity, '+.3g')}"


def perplexity_text(perplexity: Interval, spec: str) -> str:
    """A perplexity, or a difference of two; where it leaves the range of float64, a bound.

    Example:
        >>> perplexity_text(Interval(value=-math.inf), "+.3g"), perplexity_text(Interval(value=2.0), ".3g")
        ('< -1e308', '2')
    """
    if math.isinf(perplexity.value):
        return "> 1e308" if perplexity.value > 0 else "< -1e308"
    return format(perplexity, spec)


def _cost_dict(cost: UnitCost) -> dict[str, object]:
    return {
        "name": cost.unit.name,
        "modules": list(cost.unit.modules),
        "loss": cost.loss.value,
        "delta_loss": cost.delta_loss.value,
        "standard_error": cost.delta_loss.standard_error,
        "delta_perplexity": cost.delta_perplexity.value,
    }


def _values(metric: str, interval: Interval, unit: str) -> dict[str, object]:
    return {
        "metric": metric,
        "value": interval.value,
        "standard_error": interval.standard_error,
        "low": interval.low,
        "high": interval.high,
        "status": interval.status.value,
        "unit": unit,
    }


def _few(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
