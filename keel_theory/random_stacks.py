r"""Random stacks run forward and backward: numbers that owe nothing to the closed forms they are compared with.

Specs are read one by one. Each branch is Gaussian noise whose variance comes from the branch's **actual** input, as
:class:`~keel_theory.spec.ResidualSpec` describes a sub-layer; norms are applied, and a gradient goes back along the shortcut by
exact vector-Jacobian products. No gain, no variance recursion and no finite-width formula is used.

The gradient that enters at the end is orthogonal to the stream that leaves, as it is behind any norm (J x = 0): a final norm is
blind to the radial direction, and without this the last norm alone would cost a share 1/(2 D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from keel_theory.errors import require_at_least
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.spec import GateKind, NormKind, ProfileKind, ResidualSpec

__all__ = ["RandomStack", "extrapolated", "random_stack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStack:
    """One forward and one backward pass of independent draws.

    Attributes:
        log_gains: natural log of each sub-layer's shortcut gain, nats, shape (n_sublayers, n_draws).
        input_cosines: cosine between the stream that enters and the one that leaves, shape (n_draws,).
        last_variances: mean square of the stream that leaves, dimensionless, shape (n_draws,).
        last_shares: share of the last sum's mean square that the last branch has written, shape (n_draws,).
    """

    log_gains: FloatArray
    input_cosines: FloatArray
    last_variances: FloatArray
    last_shares: FloatArray

    @property
    def log_products(self) -> FloatArray:
        """Natural log of the product of all gains, nats, shape (n_draws,)."""
        total: FloatArray = self.log_gains.sum(axis=0)
        return total


def random_stack(
    specs: Sequence[ResidualSpec],
    *,
    width: int,
    n_draws: int,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
    seed: int = 0,
) -> RandomStack:
    """Draw stacks whose branches have one variance for an input of variance one.

    Args:
        specs: of the sub-layers, first to last; a Highway gate is held at its value for zero weights, a profiled scale is
            profiled on the draws.
        width: D.
        n_draws: independent draws, >= 2.
        branch_variance: q >= 0, of a branch for an input of unit variance.
        stream_variance: v > 0 of the stream that enters.
        scaled_matrices: matrices of each branch that start ``init_gain`` times smaller.
        seed: of the generator.

    Returns:
        Gains and streams of every draw; the stream that enters is Gaussian, normalised to one RMS.

    Example:
        >>> post_ln = [ResidualSpec(norm_out=NormKind.RMS)] * 4
        >>> products = np.exp(random_stack(post_ln, width=256, n_draws=64).log_products)
        >>> bool(abs(products.mean() - 2.0**-2) < 3 * products.std() / 8)
        True
    """
    require_at_least("n_draws", n_draws, 2)
    rng, shape = np.random.default_rng(seed), (n_draws, width)
    first = stream = math.sqrt(stream_variance) * Normalisation()(rng.standard_normal(shape))
    tape: list[tuple[float, FloatArray, Normalisation | None]] = []
    omega, share = 1.0, np.zeros(n_draws)
    for spec in specs:
        scale, transform = _shares(spec, omega)
        kept = scale * stream
        added = spec.branch_scale * transform * _branch(spec, stream, branch_variance, scaled_matrices, rng)
        total = kept + added
        omega = math.sqrt(_mean_square(kept) + _mean_square(added))
        norm = None if spec.norm_out is NormKind.NONE else Normalisation(kind=spec.norm_out)
        share = np.sum(added**2, axis=1) / (np.sum(added**2, axis=1) + np.sum(kept**2, axis=1))
        tape.append((scale, total, norm))
        stream = total if norm is None else norm(total)
    return RandomStack(
        log_gains=_backward(tape, _tangent(stream, rng)),
        input_cosines=np.sum(_unit(first) * _unit(stream), axis=1),
        last_variances=np.mean(stream**2, axis=1),
        last_shares=share,
    )


def extrapolated(
    measure: Callable[[int, int], Sequence[float] | FloatArray], *, width: int, seed: int = 0
) -> tuple[float, float]:
    r"""A mean at infinite width from two finite ones, without knowing the finite-width terms.

    .. math:: m_\infty \approx 2 m_D - m_{D/2}

    Status: terms of order 1/D cancel, whatever they are; 1/D² is left.

    Args:
        measure: (width, seed) -> independent values.
        width: D, even; the other width is D/2.
        seed: of the first call; the second has another.

    Returns:
        Mean and its standard error.

    Example:
        >>> mean, error = extrapolated(lambda width, seed: [1 + 3 / width, 1 + 3 / width], width=64)
        >>> mean, error
        (1.0, 0.0)
    """
    fine, coarse = (np.asarray(measure(size, seed + i), dtype=np.float64) for i, size in enumerate((width, width // 2)))
    errors = [float(np.std(values, ddof=1)) / math.sqrt(len(values)) for values in (fine, coarse)]
    return float(2 * fine.mean() - coarse.mean()), math.hypot(2 * errors[0], errors[1])


def _shares(spec: ResidualSpec, omega: float) -> tuple[float, float]:
    """Factor on the shortcut, with its profiled scale and its gate, and the gate's factor on the branch."""
    scale = omega if spec.profile is ProfileKind.ADMIN else spec.shortcut_scale
    if spec.gate is GateKind.NONE:
        return scale, 1.0
    transform = 1.0 / (1.0 + math.exp(-spec.gate_bias))
    return scale * (1.0 - transform), transform


def _branch(
    spec: ResidualSpec, stream: FloatArray, branch_variance: float, scaled_matrices: int, rng: np.random.Generator
) -> FloatArray:
    """Noise as large as F's output would be for what F reads here."""
    read = stream if spec.norm_in is NormKind.NONE else Normalisation(kind=spec.norm_in)(stream)
    size = 1.0 if spec.qkv_norm else np.sqrt(np.mean((spec.input_scale * read) ** 2, axis=1, keepdims=True))
    n_scaled = min(scaled_matrices, 1) if spec.qkv_norm else scaled_matrices  # normalised values do not feel their matrix
    written = math.sqrt(branch_variance) * size * spec.init_gain**n_scaled * rng.standard_normal(stream.shape)
    return written if spec.norm_branch is NormKind.NONE else Normalisation(kind=spec.norm_branch)(written)


def _backward(tape: Sequence[tuple[float, FloatArray, Normalisation | None]], gradient: FloatArray) -> FloatArray:
    log_gains = []
    for scale, total, norm in reversed(tape):
        gradient = scale * (gradient if norm is None else norm.vjp(total, gradient))
        size = np.linalg.norm(gradient, axis=1)
        log_gains.append(np.log(size))
        gradient = gradient / size[:, None]
    return np.array(log_gains[::-1])


def _tangent(stream: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Random unit gradients orthogonal to a stream."""
    gradient, direction = rng.standard_normal(stream.shape), _unit(stream)
    return _unit(gradient - np.sum(gradient * direction, axis=1, keepdims=True) * direction)


def _unit(vectors: FloatArray) -> FloatArray:
    unit: FloatArray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _mean_square(vectors: FloatArray) -> float:
    return float(np.mean(vectors**2))
