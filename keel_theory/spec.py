r"""Residual schemes as data.

One update covers every scheme of the paper and its neighbours:

.. math:: x' = N_{out}\bigl(a\,x + b\,N_{branch}(F(s\,g \odot N_{in}(x)))\bigr)

with the Highway layer's gate as the one extension, ``x' = b T(x) * F + a (1 - T(x)) * x``. A scheme is a pure function from
(sub-layer index, number of sub-layers, kind) to a frozen :class:`ResidualSpec`; the theory
(``keel_theory/sublayer.py``) and the models (``probes/blocks.py``) read the same spec, so they cannot drift apart.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

__all__ = [
    "GateKind",
    "NormKind",
    "ParameterValue",
    "ProfileKind",
    "ResidualSpec",
    "Scheme",
    "SchemeError",
    "SpecRule",
    "SpecRun",
    "SublayerKind",
    "SwitchRule",
    "alternating_kinds",
    "no_switches",
]

ParameterValue: TypeAlias = "float | str"
SpecRule: TypeAlias = "Callable[..., ResidualSpec]"
SwitchRule: TypeAlias = "Callable[[int, Mapping[str, ParameterValue]], Collection[int]]"
"""(n_sublayers, parameters) -> indices at which the rule starts to give other specs."""

_TRIAL_DEPTHS = (64, 4, 1024)


class SchemeError(ValueError):
    """An unknown scheme, an unknown parameter, or a value outside its domain."""


class SublayerKind(str, Enum):
    """What the branch of a sub-layer computes."""

    ATTENTION = "attention"
    FFN = "ffn"


class NormKind(str, Enum):
    """Which normalisation stands at a place. RMSNorm and LayerNorm are two things: the latter also subtracts the mean."""

    NONE = "none"
    RMS = "rms"
    LAYER = "layer"


class GateKind(str, Enum):
    """How shortcut and branch are mixed."""

    NONE = "none"
    HIGHWAY = "highway"
    """T = sigmoid(W x + bias), elementwise; branch times T, shortcut times C = 1 - T (Eq. 1)."""


class ProfileKind(str, Enum):
    """Whether the shortcut scale is measured on data before training."""

    NONE = "none"
    ADMIN = "admin"
    """From the branch variances of a forward pass at initialisation (Admin, arXiv:2004.08249)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSpec:
    r"""One sub-layer's residual update.

    Attributes:
        norm_in: normalisation of the branch's input; outside the shortcut.
        norm_branch: normalisation of the branch's output, before the sum.
        norm_out: normalisation of the sum (Post-LN); on the shortcut path.
        shortcut_scale: a, dimensionless, > 0; the starting value where it is profiled or learned.
        branch_scale: b, dimensionless, > 0.
        input_scale: s, a fixed scalar on the branch's input, dimensionless, > 0.
        input_gain: whether the branch's input is multiplied by a learned vector g, started at one.
        gate: how shortcut and branch are mixed.
        gate_bias: starting value of the gate's bias (Highway), before the sigmoid.
        qkv_norm: whether queries, keys and values are normalised per head inside attention (HybridNorm).
        init_gain: factor on the initial standard deviation of the value, output and FFN matrices (not query and key).
        profile: whether shortcut_scale is measured before training.
    """

    norm_in: NormKind = NormKind.NONE
    norm_branch: NormKind = NormKind.NONE
    norm_out: NormKind = NormKind.NONE
    shortcut_scale: float = 1.0
    branch_scale: float = 1.0
    input_scale: float = 1.0
    input_gain: bool = False
    gate: GateKind = GateKind.NONE
    gate_bias: float = 0.0
    qkv_norm: bool = False
    init_gain: float = 1.0
    profile: ProfileKind = ProfileKind.NONE

    def __post_init__(self) -> None:
        """Refuse scales that are not positive finite numbers."""
        for name in ("shortcut_scale", "branch_scale", "input_scale", "init_gain"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SchemeError(f"{name} must be a positive finite number, got {value}")
        if not math.isfinite(self.gate_bias):
            raise SchemeError(f"gate_bias must be finite, got {self.gate_bias}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRun:
    """Consecutive sub-layers whose specs repeat: sub-layer i has ``period[(i - start) % len(period)]``.

    Attributes:
        start: 0-based index of the first sub-layer.
        stop: index after the last.
        period: the specs of the first sub-layers; one of each kind at most.
        varying: fields of the spec that differ from sub-layer to sub-layer all the same.
    """

    start: int
    stop: int
    period: tuple[ResidualSpec, ...]
    varying: frozenset[str] = frozenset()


def no_switches(n_sublayers: int, parameters: Mapping[str, ParameterValue]) -> tuple[int, ...]:
    """The switch rule of a scheme that treats all sub-layers of a kind alike.

    Example:
        >>> no_switches(1024, {})
        ()
    """
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A residual scheme: a name, its equation and source, and the rule that gives each sub-layer's spec.

    The rule is ``rule(sublayer_index, n_sublayers, kind, *, parameter=default, ...)``: its keyword-only arguments are the
    scheme's parameters, and their defaults are the values of the paper that defines the scheme.

    Attributes:
        name: identifier, as on the command line.
        label: how figures and tables call it.
        equation: the update as plain text.
        latex: the update as LaTeX.
        source: paper and equation.
        rule: the spec rule.
        parameter_docs: one line per parameter of the rule.
        norm: which normalisation "LN" means; the paper's is RMSNorm.
        switches: where along the depth the rule changes, so that a million sub-layers need a handful of evaluations;
            None where that is not known, and every index is evaluated.
        varying: fields of the spec that change at every index, between the switches too.
    """

    name: str
    label: str
    equation: str
    latex: str
    source: str
    rule: SpecRule
    parameter_docs: Mapping[str, str] = field(default_factory=dict, hash=False)
    norm: NormKind = NormKind.RMS
    switches: SwitchRule | None = None
    varying: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check that every parameter is documented and that the normalisation is one."""
        if set(self.parameter_docs) != set(self.parameters):
            raise SchemeError(f"scheme '{self.name}': parameter_docs and the rule's keyword arguments differ")
        if self.norm is NormKind.NONE:
            raise SchemeError(f"scheme '{self.name}': norm must be rms or layer")

    @property
    def parameters(self) -> Mapping[str, ParameterValue]:
        """The parameters with their present values."""
        signature = inspect.signature(self.rule)
        keywords = (p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY)
        return MappingProxyType({p.name: p.default for p in keywords})

    def with_parameters(self, **values: ParameterValue) -> Scheme:
        """The same scheme with other parameter values.

        Raises:
            SchemeError: if a name is not a parameter of this scheme, or a value is outside its domain.
        """
        unknown = sorted(set(values) - set(self.parameters))
        if unknown:
            known = ", ".join(self.parameters) or "none"
            raise SchemeError(f"scheme '{self.name}' has no parameter '{unknown[0]}'; its parameters: {known}")
        changed = replace(self, rule=partial(self.rule, **values))
        changed._refuse_useless()
        return changed

    def with_norm(self, norm: NormKind) -> Scheme:
        """The same scheme with "LN" read as RMSNorm or as LayerNorm."""
        return replace(self, norm=norm)

    def spec(self, sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
        """The update of one sub-layer.

        Args:
            sublayer_index: 0-based position among all sub-layers.
            n_sublayers: number of sub-layers, attention and FFN counted separately.
            kind: what the branch computes.

        Returns:
            The frozen spec.

        Raises:
            SchemeError: if the index is not in ``range(n_sublayers)``.
        """
        if not 0 <= sublayer_index < n_sublayers:
            raise SchemeError(f"sub-layer index {sublayer_index} is not in 0..{n_sublayers - 1} ({n_sublayers} sub-layers)")
        spec: ResidualSpec = self.rule(sublayer_index, n_sublayers, kind)
        return replace(
            spec,
            norm_in=self._norm(spec.norm_in),
            norm_branch=self._norm(spec.norm_branch),
            norm_out=self._norm(spec.norm_out),
        )

    def specs(self, n_sublayers: int) -> tuple[ResidualSpec, ...]:
        """The updates of a whole decoder, attention and FFN alternating, first to last.

        Raises:
            SchemeError: if n_sublayers is below 1.
        """
        if n_sublayers < 1:
            raise SchemeError(f"a model has at least 1 sub-layer, got {n_sublayers}")
        return tuple(self.spec(i, n_sublayers, kind) for i, kind in enumerate(alternating_kinds(n_sublayers)))

    def _refuse_useless(self) -> None:
        """Raise now if no depth accepts the values; one that only some depths accept (``L - 8``) is refused where it fails."""
        failures = []
        for n_sublayers in _TRIAL_DEPTHS:
            try:
                self.spec(n_sublayers - 2, n_sublayers, SublayerKind.ATTENTION)
                self.spec(n_sublayers - 1, n_sublayers, SublayerKind.FFN)
            except ValueError as error:
                failures.append(error)
        if len(failures) == len(_TRIAL_DEPTHS):
            raise failures[0]

    def runs(self, n_sublayers: int) -> tuple[SpecRun, ...]:
        """The updates of a whole decoder as runs of repeating specs, first to last.

        Raises:
            SchemeError: if n_sublayers is below 1.
        """
        if n_sublayers < 1:
            raise SchemeError(f"a model has at least 1 sub-layer, got {n_sublayers}")
        inside = range(1, n_sublayers) if self.switches is None else self.switches(n_sublayers, self.parameters)
        edges = sorted({0, n_sublayers} | {i for i in inside if 0 < i < n_sublayers})
        return tuple(self._run(start, stop, n_sublayers) for start, stop in pairwise(edges))

    def _run(self, start: int, stop: int, n_sublayers: int) -> SpecRun:
        kinds = (SublayerKind.FFN if i % 2 else SublayerKind.ATTENTION for i in range(start, min(stop, start + 2)))
        period = tuple(self.spec(i, n_sublayers, kind) for i, kind in enumerate(kinds, start))
        return SpecRun(start=start, stop=stop, period=period, varying=self.varying)

    def _norm(self, norm: NormKind) -> NormKind:
        return self.norm if norm is not NormKind.NONE else NormKind.NONE


def alternating_kinds(n_sublayers: int) -> tuple[SublayerKind, ...]:
    """Attention first, then FFN, and so on.

    Example:
        >>> [kind.value for kind in alternating_kinds(3)]
        ['attention', 'ffn', 'attention']
    """
    return tuple(SublayerKind.FFN if i % 2 else SublayerKind.ATTENTION for i in range(n_sublayers))
