r"""One residual sub-layer: shortcut gain, branch gain and full Jacobian, from any scheme's spec.

Write A = a and B = b, or A = a (1 - T) and B = b T behind a Highway gate T; z = A x + B f is the sum, f the branch's output
after its own norm. The exact Jacobian is

.. math:: \frac{\partial x'}{\partial x} = J_{out}(z)\left(A\,I + B\,J_{branch}\,J_F\,s\,J_{in}\right)

and its shortcut part, for a random gradient at large width, is a scalar:

.. math:: \rho = \frac{\gamma_{out} A}{\sqrt{A^2 v + B^2 q'}}\ \text{with an output norm},\qquad \rho = A\ \text{without}

where v is the variance of the stream's entries and q' that of the branch's. All variances are per coordinate, about zero
(mean squares), in the ``rms`` convention, and dimensionless.

**The branch's variance.** q (``branch_variance``) is the variance of F's output for an input of unit variance; F is taken as
homogeneous of degree one. Its input has variance s² γ_in² behind an input norm, s² where queries, keys and values are
normalised, s² v otherwise. Behind a branch norm the output has variance γ_branch², whatever q. Initial weights smaller by
β = ``init_gain`` in k = ``scaled_matrices`` consecutive matrices give q β^{2k}: k = 2 for attention (value, output) and for a
two-matrix FFN, k = 3 for a gated FFN in which all three are scaled; k = 0 (the default) takes q as it is now, as after the
scaled initialisation has drifted away.

**What the scalar neglects**: the branch path J_F, the radial projection inside J_out (a share 1/D), and the correlation
x·f. :func:`neglected_terms` computes the size of each for given vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel_theory.errors import DomainError, require_at_least, require_non_negative, require_positive
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.spec import GateKind, NormKind, ResidualSpec

__all__ = [
    "UNIT_WEIGHTS",
    "Branch",
    "NeglectedTerms",
    "NormWeights",
    "ScalarUpdate",
    "branch_gain",
    "neglected_terms",
    "scalar_update",
    "shortcut_gain",
    "sublayer_jacobian",
    "sublayer_output",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """The size of each norm's weight, the paper's γ with all entries equal: positive, dimensionless.

    Attributes:
        norm_in: γ_{l,2} of Keel.
        norm_branch: of the norm on the branch's output.
        norm_out: γ_{l,1} of Keel, γ_l of Post-LN.
    """

    norm_in: float = 1.0
    norm_branch: float = 1.0
    norm_out: float = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive."""
        for name in ("norm_in", "norm_branch", "norm_out"):
            require_positive(f"weight of {name}", getattr(self, name))


UNIT_WEIGHTS = NormWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarUpdate:
    """What one spec does to variances and gradients, as numbers.

    Attributes:
        shortcut: A, on the stream.
        branch_constant: variance that the branch adds to the sum whatever the stream's.
        branch_relative: variance that it adds per unit of the stream's.
        norm_out: weight of the output norm; None without one.
    """

    shortcut: float
    branch_constant: float
    branch_relative: float
    norm_out: float | None

    def added_variance(self, stream_variance: float) -> float:
        """Variance that the branch adds to the sum: B² q'."""
        return self.branch_constant + self.branch_relative * stream_variance

    def sum_variance(self, stream_variance: float) -> float:
        """Variance of z = A x + B f for uncorrelated x and f."""
        return self.shortcut**2 * stream_variance + self.added_variance(stream_variance)

    def next_variance(self, stream_variance: float) -> float:
        """Variance of the stream after the sub-layer."""
        return self.sum_variance(stream_variance) if self.norm_out is None else self.norm_out**2

    def log_gain(self, stream_variance: float) -> float:
        """Natural log of the shortcut gain; accurate where the gain is one up to round-off."""
        if self.norm_out is None:
            return math.log(self.shortcut)
        signal = self.shortcut**2 * stream_variance
        ratio = self.added_variance(stream_variance) / signal
        return math.log(self.norm_out) - 0.5 * (math.log(stream_variance) + math.log1p(ratio))


def scalar_update(
    spec: ResidualSpec,
    *,
    branch_variance: float = 1.0,
    weights: NormWeights = UNIT_WEIGHTS,
    scaled_matrices: int = 0,
) -> ScalarUpdate:
    """Reduce a spec to its scalars.

    A Highway gate enters by its value at zero gate weights, T = sigmoid(gate_bias): the average over inputs to first order.

    Args:
        spec: the sub-layer's update.
        branch_variance: q >= 0.
        weights: sizes of the norms' weights.
        scaled_matrices: k >= 0, how many consecutive matrices of the branch start ``init_gain`` times smaller.

    Returns:
        The scalars.

    Example:
        >>> scalar_update(ResidualSpec(norm_out=NormKind.RMS)).sum_variance(1.0)
        2.0
    """
    require_non_negative("branch_variance", branch_variance)
    require_at_least("scaled_matrices", scaled_matrices, 0)
    carry, transform = _gate(spec)
    added = (spec.branch_scale * transform) ** 2
    variance = added * branch_variance * spec.init_gain ** (2 * scaled_matrices) * spec.input_scale**2
    constant, relative = 0.0, 0.0
    if spec.norm_branch is not NormKind.NONE:
        constant = added * weights.norm_branch**2
    elif spec.norm_in is not NormKind.NONE:
        constant = variance * weights.norm_in**2
    elif spec.qkv_norm:
        constant = variance
    else:
        relative = variance
    return ScalarUpdate(
        shortcut=spec.shortcut_scale * carry,
        branch_constant=constant,
        branch_relative=relative,
        norm_out=None if spec.norm_out is NormKind.NONE else weights.norm_out,
    )


def shortcut_gain(
    spec: ResidualSpec,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    weights: NormWeights = UNIT_WEIGHTS,
    scaled_matrices: int = 0,
) -> float:
    r"""Factor on a random gradient's norm along the shortcut of one sub-layer.

    .. math:: \rho = \gamma_{out} A / \sqrt{A^2 v + B^2 q'}\quad\text{or, without an output norm,}\quad \rho = A

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (14) (a = 1) and (18), with v = γ_{l-1}².   Status: exact as D grows.
    Assumes: x and f uncorrelated, eps = 0, equal entries in each weight.
    Neglects: the branch path (:func:`branch_gain`), the radial share 1/D, the correlation of x and f.

    Args:
        spec: the sub-layer's update.
        branch_variance: q >= 0, dimensionless.
        stream_variance: v > 0, dimensionless.
        weights: sizes of the norms' weights.
        scaled_matrices: matrices of the branch that start ``init_gain`` times smaller.

    Returns:
        The gain, dimensionless.

    Example:
        >>> round(shortcut_gain(ResidualSpec(norm_out=NormKind.RMS)) ** 2, 12) # Post-LN: 1/sqrt(2)
        0.5
        >>> keel = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=512.0)
        >>> shortcut_gain(keel) == (1 + 512.0**-2) ** -0.5
        True
    """
    require_positive("stream_variance", stream_variance)
    update = scalar_update(spec, branch_variance=branch_variance, weights=weights, scaled_matrices=scaled_matrices)
    return math.exp(update.log_gain(stream_variance))


def branch_gain(
    spec: ResidualSpec,
    *,
    branch_jacobian_norm: float = 1.0,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    weights: NormWeights = UNIT_WEIGHTS,
    scaled_matrices: int = 0,
) -> float:
    r"""Factor on a gradient's norm through the branch of one sub-layer.

    .. math:: \rho_F = \frac{\gamma_{out}}{\sqrt{A^2 v + B^2 q'}}\; B\,\frac{\gamma_{branch}}{\sqrt{q_F}}\,
              \|J_F\|\; s\,\frac{\gamma_{in}}{\sqrt{v}}

    each norm's factor present only where the spec has that norm. With an input and an output norm, B = s = 1 and
    v = γ_{l-1,1}² it is Eq. (27): γ_{l,1} γ_{l,2} ‖J_F‖ / (γ_{l-1,1} √(γ_{l-1,1}² a² + γ_{l,2}² q)).

    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (27).   Status: order of magnitude; exact where J_F acts alike on
    all directions.
    Assumes: as for :func:`shortcut_gain`; a Highway gate held constant.
    Neglects: the radial shares 1/D of all norms and the alignment of J_F's singular vectors with the gradient.

    Args:
        spec: the sub-layer's update.
        branch_jacobian_norm: ‖dF/d(input)‖ >= 0 in the norm of interest, dimensionless.
        branch_variance: q >= 0; with a branch norm it must be positive.
        stream_variance: v > 0.
        weights: sizes of the norms' weights.
        scaled_matrices: matrices of the branch that start ``init_gain`` times smaller.

    Returns:
        The gain, dimensionless.

    Example:
        >>> keel = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=512.0)
        >>> round(branch_gain(keel) * 512, 5)
        1.0
    """
    require_non_negative("branch_jacobian_norm", branch_jacobian_norm)
    gain = shortcut_gain(
        spec,
        branch_variance=branch_variance,
        stream_variance=stream_variance,
        weights=weights,
        scaled_matrices=scaled_matrices,
    )
    carry, transform = _gate(spec)
    gain *= spec.branch_scale * transform / (spec.shortcut_scale * carry)  # the same J_out; B in place of A
    gain *= branch_jacobian_norm * spec.input_scale
    if spec.norm_in is not NormKind.NONE:
        gain *= weights.norm_in / math.sqrt(stream_variance)
    if spec.norm_branch is not NormKind.NONE:
        gain *= weights.norm_branch / math.sqrt(_raw_variance(spec, branch_variance, stream_variance, weights, scaled_matrices))
    return gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch F as a map with its Jacobian, for exact numbers at small width.

    Attributes:
        value: (D,) -> (D,).
        jacobian: (D,) -> (D, D), entry (i, j) = dF_i/dx_j.
    """

    value: Callable[[FloatArray], FloatArray]
    jacobian: Callable[[FloatArray], FloatArray]

    @classmethod
    def linear(cls, matrix: FloatArray) -> Branch:
        """The branch x -> M x; its Jacobian is M everywhere."""
        return cls(value=lambda x: matrix @ x, jacobian=lambda _: matrix)


def sublayer_output(
    spec: ResidualSpec,
    x: FloatArray,
    branch: Branch,
    *,
    eps: float = 0.0,
    weights: NormWeights = UNIT_WEIGHTS,
    gate_weight: FloatArray | None = None,
) -> FloatArray:
    """The stream x' after one sub-layer.

    Args:
        spec: the sub-layer's update; its learned input gain is at its starting value, one.
        x: the stream, shape (D,).
        branch: F.
        eps: of every norm, ``rms`` convention.
        weights: sizes of the norms' weights.
        gate_weight: W of the Highway gate T = sigmoid(W x + bias), shape (D, D); None means zero.

    Returns:
        The stream after the sub-layer, shape (D,).
    """
    return _Evaluated.at(spec, x, branch, eps, weights, gate_weight).output


def sublayer_jacobian(
    spec: ResidualSpec,
    x: FloatArray,
    branch: Branch,
    *,
    eps: float = 0.0,
    weights: NormWeights = UNIT_WEIGHTS,
    gate_weight: FloatArray | None = None,
) -> FloatArray:
    r"""dx'/dx of one sub-layer, exact.

    .. math:: J = J_{out}(z)\left(a\,\mathrm{diag}(1 - T) + b\,\mathrm{diag}(T)\,J_{branch}J_F\,s\,J_{in}
              + \mathrm{diag}\bigl((b f - a x)\,T (1 - T)\bigr) W\right)

    Source: Chen & Wei 2026, arXiv:2601.19895: Eq. (13) is the case of Post-LN, Eq. (7) that of Pre-LN.   Status: exact.
    Neglects: nothing.

    Args:
        spec: the sub-layer's update; its learned input gain is at its starting value, one.
        x: the stream, shape (D,).
        branch: F and its Jacobian.
        eps: of every norm, ``rms`` convention.
        weights: sizes of the norms' weights.
        gate_weight: W of the Highway gate, shape (D, D); None means zero.

    Returns:
        Shape (D, D), entry (i, j) = dx'_i/dx_j.

    Example:
        >>> x = np.array([1.0, 2.0, 2.0])
        >>> zero = Branch.linear(np.zeros((3, 3)))
        >>> J = sublayer_jacobian(ResidualSpec(norm_out=NormKind.RMS), x, zero) # RMSNorm alone
        >>> bool(np.allclose(J @ x, 0.0))
        True
    """
    parts = _Evaluated.at(spec, x, branch, eps, weights, gate_weight)
    return parts.through_output_norm(parts.shortcut_matrix + parts.branch_matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeglectedTerms:
    """How large the parts are that the scalar shortcut gain leaves out; all dimensionless.

    Attributes:
        branch_path: ‖J_out (branch part)‖_F / ‖J_out (shortcut part)‖_F.
        radial_share: 1 minus the squared Frobenius gain of J_out over that of its scale alone: 1/D at eps = 0.
        correlation: 2 A B x·f / (|A x|² + |B f|²), the relative error of the sum's variance.
        scalar_gain: the shortcut gain from the measured variances of x and f.
        exact_gain: ‖J_out (shortcut part)‖_F / √D, its exact counterpart.
    """

    branch_path: float
    radial_share: float
    correlation: float
    scalar_gain: float
    exact_gain: float


def neglected_terms(
    spec: ResidualSpec,
    x: FloatArray,
    branch: Branch,
    *,
    weights: NormWeights = UNIT_WEIGHTS,
    gate_weight: FloatArray | None = None,
) -> NeglectedTerms:
    """Compute what the scalar shortcut gain neglects, at one vector and for one branch.

    Args:
        spec: the sub-layer's update.
        x: the stream, shape (D,).
        branch: F and its Jacobian.
        weights: sizes of the norms' weights.
        gate_weight: W of the Highway gate, shape (D, D); None means zero.

    Returns:
        The sizes.

    Example:
        >>> x = np.array([1.0, -1.0, 1.0, -1.0])
        >>> terms = neglected_terms(ResidualSpec(norm_out=NormKind.RMS), x, Branch.linear(np.zeros((4, 4))))
        >>> round(terms.radial_share, 12), terms.branch_path, terms.correlation
        (0.25, 0.0, 0.0)
    """
    parts = _Evaluated.at(spec, x, branch, 0.0, weights, gate_weight)
    shortcut = parts.through_output_norm(parts.shortcut_matrix)
    kept, added = parts.kept, parts.added
    energy = float(kept @ kept + added @ added)
    scale = 1.0 if parts.norm_out is None else weights.norm_out / math.sqrt(energy / x.size)
    exact_scale = 1.0 if parts.norm_out is None else weights.norm_out / float(np.sqrt(np.mean((kept + added) ** 2)))
    carried = float(np.linalg.norm(parts.shortcut_matrix))
    return NeglectedTerms(
        branch_path=float(np.linalg.norm(parts.through_output_norm(parts.branch_matrix)) / np.linalg.norm(shortcut)),
        radial_share=1.0 - float(np.linalg.norm(shortcut) / (exact_scale * carried)) ** 2,
        correlation=2.0 * float(kept @ added) / energy,
        scalar_gain=scale * carried / math.sqrt(x.size),
        exact_gain=float(np.linalg.norm(shortcut)) / math.sqrt(x.size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluated:
    """All vectors and matrices of one sub-layer at one x."""

    kept: FloatArray
    added: FloatArray
    shortcut_matrix: FloatArray
    branch_matrix: FloatArray
    norm_out: Normalisation | None

    @classmethod
    def at(
        cls,
        spec: ResidualSpec,
        x: FloatArray,
        branch: Branch,
        eps: float,
        weights: NormWeights,
        gate_weight: FloatArray | None,
    ) -> _Evaluated:
        if x.ndim != 1:
            raise DomainError(f"the stream must be one vector of shape (D,), got shape {x.shape}")
        norm_in = _norm(spec.norm_in, weights.norm_in, eps, x.size)
        norm_branch = _norm(spec.norm_branch, weights.norm_branch, eps, x.size)
        read = spec.input_scale * (x if norm_in is None else norm_in(x))
        raw = branch.value(read)
        written = raw if norm_branch is None else norm_branch(raw)
        matrix = spec.input_scale * branch.jacobian(read)
        matrix = matrix if norm_in is None else matrix @ norm_in.jacobian(x)
        matrix = matrix if norm_branch is None else norm_branch.jacobian(raw) @ matrix
        carry, transform = _gate_vectors(spec, x, gate_weight)
        kept, added = spec.shortcut_scale * carry * x, spec.branch_scale * transform * written
        gate_slope = (spec.branch_scale * written - spec.shortcut_scale * x) * transform * carry
        through_gate = np.zeros((x.size, x.size)) if gate_weight is None else gate_slope[:, None] * gate_weight
        return cls(
            kept=kept,
            added=added,
            shortcut_matrix=np.diag(spec.shortcut_scale * carry),
            branch_matrix=(spec.branch_scale * transform)[:, None] * matrix + through_gate,
            norm_out=_norm(spec.norm_out, weights.norm_out, eps, x.size),
        )

    @property
    def output(self) -> FloatArray:
        return self.kept + self.added if self.norm_out is None else self.norm_out(self.kept + self.added)

    def through_output_norm(self, matrix: FloatArray) -> FloatArray:
        return matrix if self.norm_out is None else self.norm_out.jacobian(self.kept + self.added) @ matrix


def _norm(kind: NormKind, weight: float, eps: float, width: int) -> Normalisation | None:
    return None if kind is NormKind.NONE else Normalisation(kind=kind, weight=np.full(width, weight), eps=eps)


def _gate(spec: ResidualSpec) -> tuple[float, float]:
    """Shares (C, T) of shortcut and branch at zero gate weights."""
    if spec.gate is GateKind.NONE:
        return 1.0, 1.0
    return _sigmoid(-spec.gate_bias), _sigmoid(spec.gate_bias)


def _gate_vectors(spec: ResidualSpec, x: FloatArray, gate_weight: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    if spec.gate is GateKind.NONE:
        if gate_weight is not None:
            raise DomainError("gate_weight belongs to a Highway gate, and this spec has none")
        return np.ones_like(x), np.ones_like(x)
    logits = np.full_like(x, spec.gate_bias) if gate_weight is None else gate_weight @ x + spec.gate_bias
    transform = np.exp(-np.logaddexp(0.0, -logits))
    return 1.0 - transform, transform


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1.0 + math.exp(logit))


def _raw_variance(spec: ResidualSpec, q: float, v: float, weights: NormWeights, scaled_matrices: int) -> float:
    """Variance of F's output before its own norm."""
    plain = 1.0 if spec.qkv_norm else v
    source = plain if spec.norm_in is NormKind.NONE else weights.norm_in**2
    variance = q * spec.init_gain ** (2 * scaled_matrices) * spec.input_scale**2 * source
    return require_positive("branch_variance before a branch norm", variance)
