r"""One residual sub-layer: shortcut gain, branch gain and full Jacobian, from any scheme's spec.

Write A = a and B = b, or A = a (1 - T) and B = b T behind a Highway gate T; z = A x + B f is the sum, f the branch's output
after its own norm. The exact Jacobian is

.. math:: \frac{\partial x'}{\partial x} = J_{out}(z)\left(A\,I + B\,J_{branch}\,J_F\,s\,J_{in}\right)

and its shortcut part, for a random gradient at large width, is a scalar:

.. math:: \rho = \frac{\gamma_{out} A}{\sqrt{A^2 v + B^2 q'}}\ \text{with an output norm},\qquad \rho = A\ \text{without}

where v is the variance of the stream's entries and q' that of the branch's. All variances are per coordinate, about zero
(mean squares), in the ``rms`` convention, and dimensionless. A weight γ with unequal entries enters a scalar by its root
mean square, which is what a random gradient feels. With ‖γ_out‖_∞ in its place the gain is the spectral norm, the most that any
gradient gains; the paper takes the largest entry of the weights before, too, which is the same where their entries are equal.

**The branch's variance.** q (``branch_variance``) is the variance of F's output for an input of unit variance; F is taken as
homogeneous of degree one, so that an input of variance s² γ_in² (behind an input norm) or s² v (without one) multiplies it.
Two things make F blind to the size of its input. Attention that normalises its queries, keys and values writes variance q
whatever it reads: an input norm's weight, s and v cancel. Behind a branch norm the output has variance γ_branch², whatever q.
Initial weights smaller by β = ``init_gain`` in k = ``scaled_matrices`` consecutive matrices give q β^{2k}: k = 2 for attention
(value, output) and for a two-matrix FFN, k = 3 for a gated FFN in which all three are scaled; behind normalised values only
the output matrix is left, k = 1. k = 0 (the default) takes q as it is now, as after the scaled initialisation has drifted away.

**What the scalar neglects**: the branch path J_F, the directions that J_out removes (a share 1/D each), the correlation x·f,
eps, and how unequal the weight's entries are. :func:`neglected_terms` computes the size of each for given vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
    "log_one_plus_ratio",
    "neglected_terms",
    "scalar_update",
    "shortcut_gain",
    "sublayer_jacobian",
    "sublayer_output",
]


_WEIGHTS = ("norm_in", "norm_branch", "norm_out")
_LARGE_EXPONENT = 300.0


def _rms(weight: float | FloatArray) -> float:
    """Root mean square of a weight; a number is its own."""
    return float(weight) if np.ndim(weight) == 0 else float(np.sqrt(np.mean(np.square(weight))))


def _require_weight(name: str, weight: float | FloatArray) -> None:
    if isinstance(weight, np.ndarray) and weight.ndim:
        if weight.ndim != 1 or not np.isfinite(weight).all() or not weight.any():
            raise DomainError(f"{name} must be one finite vector that is not zero, got shape {weight.shape}")
        return
    require_positive(name, float(weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """Each norm's weight γ, dimensionless: a positive number for equal entries, or a vector as a checkpoint holds it.

    Attributes:
        norm_in: γ_{l,2} of Keel, a number or shape (D,).
        norm_branch: of the norm on the branch's output, a number or shape (D,).
        norm_out: γ_{l,1} of Keel, γ_l of Post-LN, a number or shape (D,).

    Raises:
        DomainError: if a number is not positive, or a vector is not one finite vector with an entry other than zero.

    Example:
        >>> weights = NormWeights(norm_out=np.array([1.0, 7.0]))
        >>> weights.rms.norm_out, weights.largest.norm_out
        (5.0, 7.0)
    """

    norm_in: float | FloatArray = 1.0
    norm_branch: float | FloatArray = 1.0
    norm_out: float | FloatArray = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive, and vectors that are none."""
        for name in _WEIGHTS:
            _require_weight(f"weight of {name}", getattr(self, name))

    @property
    def rms(self) -> NormWeights:
        """The same with the root mean square in place of each vector: what the scalar gains take."""
        return NormWeights(**{name: _rms(getattr(self, name)) for name in _WEIGHTS})

    @property
    def largest(self) -> NormWeights:
        """The same with the largest absolute entry in place of each vector, the paper's ‖γ‖_∞.

        Of the output norm it gives the spectral norm of the shortcut, the most that any gradient gains.
        """
        return NormWeights(**{name: float(np.max(np.abs(getattr(self, name)))) for name in _WEIGHTS})


UNIT_WEIGHTS = NormWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarUpdate:
    """What one spec does to variances and gradients, as numbers.

    Attributes:
        log_shortcut: natural log of A, which may lie below the smallest float64.
        shortcut: A, on the stream.
        branch_constant: variance that the branch adds to the sum whatever the stream's.
        branch_relative: variance that it adds per unit of the stream's.
        norm_out: weight of the output norm, its root mean square; None without one.
    """

    log_shortcut: float
    shortcut: float
    branch_constant: float
    branch_relative: float
    norm_out: float | None

    def with_shortcut(self, shortcut: float) -> ScalarUpdate:
        """The same with another A > 0, as a profile measures it."""
        return replace(self, shortcut=shortcut, log_shortcut=math.log(shortcut))

    def added_variance(self, stream_variance: float) -> float:
        """Variance that the branch adds to the sum: B² q'."""
        return self.branch_constant + _times(self.branch_relative, stream_variance)

    def kept_variance(self, stream_variance: float) -> float:
        """Variance that the shortcut brings to the sum: A² v; infinite where it is past float64."""
        return _times(self.shortcut, self.shortcut * stream_variance)

    def sum_variance(self, stream_variance: float) -> float:
        """Variance of z = A x + B f for uncorrelated x and f; infinite where it is past float64."""
        return self.kept_variance(stream_variance) + self.added_variance(stream_variance)

    def next_variance(self, stream_variance: float) -> float:
        """Variance of the stream after the sub-layer; infinite where it is past float64."""
        return self.sum_variance(stream_variance) if self.norm_out is None else self.norm_out**2

    def next_log_variance(self, stream_variance: float, log_variance: float) -> float:
        """Natural log of :meth:`next_variance`, from that of the stream: accurate where the variance is one up to round-off."""
        if self.norm_out is not None:
            return 2.0 * math.log(self.norm_out)
        return log_variance + 2.0 * self.log_shortcut + self._log_growth(stream_variance)

    def log_gain(self, stream_variance: float, log_variance: float | None = None) -> float:
        """Natural log of the shortcut gain; accurate where the gain is one up to round-off.

        Args:
            stream_variance: v > 0.
            log_variance: ln v, where it is known better than from v.

        Raises:
            DomainError: if an output norm divides by a sum whose stream or branch has left float64.
        """
        if self.norm_out is None:
            return self.log_shortcut
        if not (math.isfinite(stream_variance) and math.isfinite(self.added_variance(stream_variance))):
            raise DomainError("a variance of the stream is past float64 (1.8e308); take a smaller branch variance or depth")
        log_kept = math.log(stream_variance) if log_variance is None else log_variance
        return math.log(self.norm_out) - 0.5 * (log_kept + self._log_growth(stream_variance))

    def _log_growth(self, stream_variance: float) -> float:
        """Natural log of the sum's variance over what the shortcut brings to it."""
        return log_one_plus_ratio(self.added_variance(stream_variance), self.log_shortcut, stream_variance)


def log_one_plus_ratio(added: float, log_scale: float, kept: float = 1.0) -> float:
    """ln(1 + added / (A² kept)) from ln A, for any A that a log can hold.

    Status: exact to round-off; the ratio itself may lie outside float64.

    Args:
        added: variance of the branch, >= 0.
        log_scale: ln A.
        kept: variance of the stream, > 0.

    Returns:
        Nats, >= 0.

    Example:
        >>> round(log_one_plus_ratio(1.0, math.log(1e-200)) / math.log(10), 6)
        400.0
    """
    if added == 0.0:
        return 0.0
    exponent = math.log(added) - 2.0 * log_scale - math.log(kept)
    if exponent > _LARGE_EXPONENT:
        return exponent
    scale = math.exp(log_scale) if log_scale > -_LARGE_EXPONENT else 0.0
    ratio = added / scale / scale / kept if 0.0 < scale < math.inf else math.exp(exponent)
    return math.log1p(ratio)


def scalar_update(
    spec: ResidualSpec,
    *,
    branch_variance: float = 1.0,
    weights: NormWeights = UNIT_WEIGHTS,
    scaled_matrices: int = 0,
) -> ScalarUpdate:
    """Reduce a spec to its scalars.

    Source: this module's text.   Status: exact as D grows.
    Assumes: x and f uncorrelated, eps = 0, F homogeneous of degree one except behind normalised queries, keys and values.
    A Highway gate enters by its value at zero gate weights, T = sigmoid(gate_bias): the average over inputs to first order.

    Args:
        spec: the sub-layer's update.
        branch_variance: q >= 0.
        weights: of the norms; a vector enters by its root mean square.
        scaled_matrices: k >= 0, how many consecutive matrices of the branch start ``init_gain`` times smaller.

    Returns:
        The scalars.

    Raises:
        DomainError: if a number is outside its domain, or the branch's variance is past float64.

    Example:
        >>> scalar_update(ResidualSpec(norm_out=NormKind.RMS)).sum_variance(1.0)
        2.0
    """
    require_non_negative("branch_variance", branch_variance)
    sizes = weights.rms
    log_carry, log_transform = _log_gate(spec)
    written = spec.branch_scale * math.exp(log_transform)
    constant, relative = _raw_variances(spec, branch_variance, sizes, scaled_matrices)
    if spec.norm_branch is not NormKind.NONE:
        constant, relative = _rms(sizes.norm_branch) ** 2, 0.0
    constant, relative = written * written * constant, written * written * relative
    if not (math.isfinite(constant) and math.isfinite(relative)):
        raise DomainError("the variance of the branch is past float64 (1.8e308); take a smaller branch variance or scale")
    return ScalarUpdate(
        log_shortcut=math.log(spec.shortcut_scale) + log_carry,
        shortcut=spec.shortcut_scale * math.exp(log_carry),
        branch_constant=constant,
        branch_relative=relative,
        norm_out=None if spec.norm_out is NormKind.NONE else _rms(sizes.norm_out),
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
    Assumes: x and f uncorrelated, eps = 0; a weight with unequal entries enters by its root mean square.
    Neglects: the branch path (:func:`branch_gain`), the radial share 1/D, the correlation of x and f, eps and the order of
    the weight's entries (:func:`neglected_terms`).

    Args:
        spec: the sub-layer's update.
        branch_variance: q >= 0, dimensionless.
        stream_variance: v > 0, dimensionless.
        weights: of the norms, a number or a vector each.
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
    return _exp(update.log_gain(stream_variance))


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
        weights: of the norms, a number or a vector each.
        scaled_matrices: matrices of the branch that start ``init_gain`` times smaller.

    Returns:
        The gain, dimensionless.

    Example:
        >>> keel = ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS, shortcut_scale=512.0)
        >>> round(branch_gain(keel) * 512, 5)
        1.0
    """
    require_non_negative("branch_jacobian_norm", branch_jacobian_norm)
    require_positive("stream_variance", stream_variance)
    update = scalar_update(spec, branch_variance=branch_variance, weights=weights, scaled_matrices=scaled_matrices)
    log_gain = update.log_gain(stream_variance)
    sizes = weights.rms
    log_carry, log_transform = _log_gate(spec)
    log_ratio = math.log(spec.branch_scale) + log_transform - math.log(spec.shortcut_scale) - log_carry
    gain = _exp(log_gain + log_ratio) * branch_jacobian_norm * spec.input_scale  # the same J_out; B in place of A
    if spec.norm_in is not NormKind.NONE:
        gain *= _rms(sizes.norm_in) / math.sqrt(stream_variance)
    if spec.norm_branch is not NormKind.NONE:
        constant, relative = _raw_variances(spec, branch_variance, sizes, scaled_matrices)
        raw = require_positive("branch_variance before a branch norm", constant + _times(relative, stream_variance))
        gain *= _rms(sizes.norm_branch) / math.sqrt(raw)
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

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (1)-(8) as cases of one update.   Status: exact.

    Args:
        spec: the sub-layer's update; its learned input gain is at its starting value, one.
        x: the stream, shape (D,).
        branch: F.
        eps: of every norm, ``rms`` convention.
        weights: of the norms, a number or a vector each.
        gate_weight: W of the Highway gate T = sigmoid(W x + bias), shape (D, D); None means zero.

    Returns:
        The stream after the sub-layer, shape (D,).

    Example:
        >>> x, same = np.array([1.0, 2.0]), Branch.linear(np.eye(2))
        >>> sublayer_output(ResidualSpec(), x, same) # x + F(x), F the identity
        array([2., 4.])
        >>> sublayer_output(ResidualSpec(norm_out=NormKind.RMS), x, same) * np.sqrt(10) # over the RMS, sqrt(20/2)
        array([2., 4.])
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
        weights: of the norms, a number or a vector each.
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
    r"""How large the parts are that the scalar shortcut gain leaves out; all dimensionless.

    Nothing else is left out of the shortcut's part:

    .. math:: \text{exact}^2 = \text{scalar}^2\,
              \frac{(1 - \text{radial})(1 - \text{eps})(1 + \text{unequal})}{(1 + \text{correlation})(1 - \text{mean})}

    Attributes:
        branch_path: ‖J_out (branch part)‖_F / ‖J_out (shortcut part)‖_F.
        radial_share: share of the shortcut part's squared norm along the directions that J_out removes: 1/D for RMSNorm and
            2/D for LayerNorm at eps = 0, where the shortcut scales all entries alike.
        correlation: 2 A B x·f / (|A x|² + |B f|²), the relative error of the sum's variance.
        mean_share: share of the sum's mean square that LayerNorm subtracts; 0 for RMSNorm.
        eps_share: eps / s², by which eps lowers the squared gain of the norm.
        unequal_weights: what the order of the output weight's entries changes of the squared gain, relative to its mean
            square; 0 for equal entries.
        weight_peak: ‖γ_out‖_∞ over the root mean square of γ_out, >= 1: by how much the spectral norm is above the gain.
        scalar_gain: the shortcut gain from the measured variances of x and f.
        exact_gain: ‖J_out (shortcut part)‖_F / √D, its exact counterpart.
    """

    branch_path: float
    radial_share: float
    correlation: float
    mean_share: float
    eps_share: float
    unequal_weights: float
    weight_peak: float
    scalar_gain: float
    exact_gain: float


def neglected_terms(
    spec: ResidualSpec,
    x: FloatArray,
    branch: Branch,
    *,
    eps: float = 0.0,
    weights: NormWeights = UNIT_WEIGHTS,
    gate_weight: FloatArray | None = None,
) -> NeglectedTerms:
    """Compute what the scalar shortcut gain neglects, at one vector and for one branch.

    Source: this module's text.   Status: exact, at any width.   Assumes: nothing.

    Args:
        spec: the sub-layer's update.
        x: the stream, shape (D,).
        branch: F and its Jacobian.
        eps: of every norm, ``rms`` convention.
        weights: of the norms, a number or a vector each.
        gate_weight: W of the Highway gate, shape (D, D); None means zero.

    Returns:
        The sizes.

    Example:
        >>> x, zero = np.array([1.0, -1.0, 1.0, -1.0]), Branch.linear(np.zeros((4, 4)))
        >>> terms = neglected_terms(ResidualSpec(norm_out=NormKind.RMS), x, zero)
        >>> round(terms.radial_share, 12), terms.branch_path, terms.correlation
        (0.25, 0.0, 0.0)
        >>> round(neglected_terms(ResidualSpec(norm_out=NormKind.RMS), x, zero, eps=1.0).eps_share, 12)
        0.5
    """
    parts = _Evaluated.at(spec, x, branch, eps, weights, gate_weight)
    shortcut = parts.through_output_norm(parts.shortcut_matrix)
    kept, added = parts.kept, parts.added
    energy = float(kept @ kept + added @ added)
    carried = float(np.linalg.norm(parts.shortcut_matrix))
    size = 1.0 if parts.norm_out is None else _rms(weights.norm_out) / math.sqrt(energy / x.size)
    return NeglectedTerms(
        branch_path=float(np.linalg.norm(parts.through_output_norm(parts.branch_matrix)) / np.linalg.norm(shortcut)),
        correlation=2.0 * float(kept @ added) / energy,
        **_neglected_in_norm(parts, weights.norm_out, eps),
        scalar_gain=size * carried / math.sqrt(x.size),
        exact_gain=float(np.linalg.norm(shortcut)) / math.sqrt(x.size),
    )


def _neglected_in_norm(parts: _Evaluated, weight: float | FloatArray, eps: float) -> dict[str, float]:
    """What the output norm does beyond dividing by the root mean square of the sum and multiplying by that of its weight."""
    if parts.norm_out is None:
        return {"radial_share": 0.0, "mean_share": 0.0, "eps_share": 0.0, "unequal_weights": 0.0, "weight_peak": 1.0}
    z = parts.kept + parts.added
    mean_square = float(np.mean(z**2))
    centred = float(np.var(z)) if parts.norm_out.kind is NormKind.LAYER else mean_square
    plain = math.sqrt(centred + eps) * Normalisation(kind=parts.norm_out.kind, eps=eps).jacobian(z) @ parts.shortcut_matrix
    left, carried = float(np.linalg.norm(plain)), float(np.linalg.norm(parts.shortcut_matrix))
    weighted = float(np.linalg.norm(np.broadcast_to(weight, z.shape)[:, None] * plain))
    return {
        "radial_share": 1.0 - (left / carried) ** 2,
        "mean_share": 1.0 - centred / mean_square,
        "eps_share": eps / (centred + eps),
        "unequal_weights": (weighted / (_rms(weight) * left)) ** 2 - 1.0,
        "weight_peak": float(np.max(np.abs(weight))) / _rms(weight),
    }


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


def _norm(kind: NormKind, weight: float | FloatArray, eps: float, width: int) -> Normalisation | None:
    if kind is NormKind.NONE:
        return None
    vector = np.full(width, weight) if np.ndim(weight) == 0 else np.asarray(weight, dtype=np.float64)
    return Normalisation(kind=kind, weight=vector, eps=eps)


def _log_gate(spec: ResidualSpec) -> tuple[float, float]:
    """Logs of the shares (C, T) of shortcut and branch at zero gate weights."""
    if spec.gate is GateKind.NONE:
        return 0.0, 0.0
    return _log_sigmoid(-spec.gate_bias), _log_sigmoid(spec.gate_bias)


def _gate_vectors(spec: ResidualSpec, x: FloatArray, gate_weight: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    if spec.gate is GateKind.NONE:
        if gate_weight is not None:
            raise DomainError("gate_weight belongs to a Highway gate, and this spec has none")
        return np.ones_like(x), np.ones_like(x)
    logits = np.full_like(x, spec.gate_bias) if gate_weight is None else gate_weight @ x + spec.gate_bias
    return np.exp(-np.logaddexp(0.0, logits)), np.exp(-np.logaddexp(0.0, -logits))


def _log_sigmoid(logit: float) -> float:
    """-ln(1 + exp(-logit)) for any logit."""
    return -math.log1p(math.exp(-logit)) if logit >= 0 else logit - math.log1p(math.exp(logit))


def _raw_variances(spec: ResidualSpec, q: float, sizes: NormWeights, scaled_matrices: int) -> tuple[float, float]:
    """Variance of F's output before its own norm: whatever the stream's, and per unit of the stream's."""
    matrices = require_at_least("scaled_matrices", scaled_matrices, 0)
    if spec.qkv_norm:  # what the values were scaled by is normalised away; the output matrix comes after
        return _times(q, _power(spec.init_gain, 2 * min(matrices, 1))), 0.0
    variance = _times(q, _power(spec.init_gain, 2 * matrices) * spec.input_scale * spec.input_scale)
    return (0.0, variance) if spec.norm_in is NormKind.NONE else (variance * _rms(sizes.norm_in) ** 2, 0.0)


def _times(factor: float, variance: float) -> float:
    """The product, where nothing times a variance past float64 is nothing."""
    return factor * variance if factor else 0.0


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _exp(log: float) -> float:
    """The exponential; infinite past float64."""
    return math.exp(log) if log < 709.0 else math.inf
