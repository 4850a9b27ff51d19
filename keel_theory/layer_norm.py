r"""Jacobian of RMSNorm and of LayerNorm: value, products, spectrum.

With :math:`c = x` (RMSNorm) or :math:`c = x - \bar x` (LayerNorm), :math:`n = D` in the ``rms`` convention or :math:`n = 1`
in the paper's ``unit`` convention, and :math:`s = \sqrt{|c|^2 / n + \epsilon}`:

.. math:: N(x) = \gamma \odot c / s, \qquad
          J = \frac{1}{s}\,\mathrm{diag}(\gamma)\left(I - \frac{c c^\top}{n s^2}\right) C

where C is the identity (RMSNorm) or the projection that removes the mean (LayerNorm). The conventions differ by a factor:
``rms`` with eps is :math:`\sqrt{D}` times ``unit`` with D eps.

The radial direction c is annihilated only at eps = 0; with eps > 0 it is damped by eps / s² relative to the others.
LayerNorm annihilates the constant vector as well, whatever eps: its null space at eps = 0 has dimension 2, RMSNorm's 1.

Legend of shapes: D width, ``...`` any batch. Everything is float64 and exact.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (9), (23) for the unit convention without eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from keel_theory.errors import DomainError, require_non_negative
from keel_theory.spec import NormKind

__all__ = ["Convention", "FloatArray", "Normalisation"]

FloatArray: TypeAlias = npt.NDArray[np.float64]

_ROUND_OFF = 4 * float(np.finfo(np.float64).eps)


class Convention(str, Enum):
    """What a normalised vector measures one in."""

    UNIT = "unit"
    """Euclidean length one: x / ||x||, the paper's notation."""
    RMS = "rms"
    """Root mean square one: sqrt(D) x / ||x||, what models compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """RMSNorm or LayerNorm as a map on float64 vectors, with its exact derivative.

    Attributes:
        kind: which normalisation.
        weight: learned gain, shape (D,); None means all ones.
        eps: added under the square root, in the convention's own unit, >= 0.
        convention: ``rms`` or ``unit``.

    Raises:
        DomainError: if kind is ``none``, eps is negative, the weight is not one finite vector, or, when applied, a vector
            is not finite, or has no direction and eps is 0, or a length or a derivative is past float64.

    Example:
        >>> norm = Normalisation(kind=NormKind.RMS)
        >>> x = np.array([3.0, 4.0])
        >>> norm(x) * np.sqrt(2) # rms is sqrt(12.5)
        array([1.2, 1.6])
        >>> bool(np.allclose(norm.jacobian(x) @ x, 0))
        True
    """

    kind: NormKind = NormKind.RMS
    weight: FloatArray | None = None
    eps: float = 0.0
    convention: Convention = Convention.RMS

    def __post_init__(self) -> None:
        """Refuse what is not a normalisation."""
        if self.kind is NormKind.NONE:
            raise DomainError("kind must be rms or layer, got none")
        require_non_negative("eps", self.eps)
        if self.weight is not None and (self.weight.ndim != 1 or not np.isfinite(self.weight).all()):
            raise DomainError(f"weight must be one finite vector, got shape {self.weight.shape}")

    def __call__(self, x: FloatArray) -> FloatArray:
        """Normalise.

        Args:
            x: vectors, shape (..., D).

        Returns:
            Normalised vectors, same shape.
        """
        direction, _ = self._parts(x)
        return self._weighted(direction * np.sqrt(self._count(x.shape[-1])))

    def jvp(self, x: FloatArray, tangent: FloatArray) -> FloatArray:
        """J(x) times a vector, without building J.

        Args:
            x: where the derivative is taken, shape (..., D).
            tangent: shape (..., D).

        Returns:
            Shape (..., D).
        """
        direction, scale = self._parts(x)
        return self._weighted(_over(_project(direction, self._centre(tangent)), scale))

    def vjp(self, x: FloatArray, cotangent: FloatArray) -> FloatArray:
        """J(x) transposed times a vector, without building J: what backpropagation does.

        Args:
            x: where the derivative is taken, shape (..., D).
            cotangent: gradient with respect to the output, shape (..., D).

        Returns:
            Gradient with respect to x, shape (..., D).
        """
        direction, scale = self._parts(x)
        return _over(self._centre(_project(direction, self._weighted(cotangent))), scale)

    def jacobian(self, x: FloatArray) -> FloatArray:
        """The full matrix dN_i/dx_j.

        Args:
            x: shape (..., D).

        Returns:
            Shape (..., D, D).
        """
        columns = np.broadcast_to(np.eye(x.shape[-1]), (*x.shape, x.shape[-1]))
        return np.swapaxes(self.jvp(x[..., None, :], columns), -1, -2)

    def singular_values(self, x: FloatArray) -> FloatArray:
        """All D singular values, largest first.

        Without weight, the closed form: 1/s for every direction orthogonal to c (and to the constant vector, for
        LayerNorm), (1/s)(eps/s²) for c, 0 for the constant vector. With a weight, numerical.

        Args:
            x: shape (..., D).

        Returns:
            Shape (..., D).
        """
        if self.weight is not None:
            return np.asarray(np.linalg.svd(self.jacobian(x), compute_uv=False), dtype=np.float64)
        _, scale = self._parts(x)
        relative = np.ones_like(x, dtype=np.float64)
        radial = x.shape[-1] - self._mean_directions - 1
        relative[..., radial : radial + 1] = (np.sqrt(self.eps) / scale) ** 2
        relative[..., radial + 1 :] = 0.0
        return _over(relative, scale)

    def null_dimension(self, x: FloatArray) -> int:
        """Dimension of the null space of J at one vector x of shape (D,): 1 for RMSNorm and 2 for LayerNorm at eps = 0.

        With a weight the rank is numerical: m zero weights (m > 0) leave m null directions to RMSNorm, because x and the
        zeroed axes overlap in one.
        """
        values = self.singular_values(x)
        return int(np.count_nonzero(values <= values.max(initial=0.0) * x.shape[-1] * np.finfo(np.float64).eps))

    def rms_gain(self, x: FloatArray) -> FloatArray:
        r"""Root mean square of the singular values, :math:`\|J\|_F / \sqrt{D}`: the gain of a random gradient.

        At large width it is 1/s: one or two of the D directions are lost, a factor sqrt(1 - 1/D) or sqrt(1 - 2/D).

        Args:
            x: shape (..., D).

        Returns:
            Shape (...).
        """
        width = x.shape[-1]
        direction, scale = self._parts(x)
        length = np.sum(direction**2, axis=-1, keepdims=True)
        row = 1.0 - self._mean_directions / width - direction**2 * (2.0 - length)  # squared norms of the rows of s J
        squared: FloatArray = np.mean(self._weighted(self._weighted(row)), axis=-1, keepdims=True)
        gain: FloatArray = _over(np.sqrt(squared), scale)[..., 0]
        return gain

    @property
    def _mean_directions(self) -> int:
        return 1 if self.kind is NormKind.LAYER else 0

    def _count(self, width: int) -> int:
        return width if self.convention is Convention.RMS else 1

    def _centre(self, x: FloatArray) -> FloatArray:
        return x - x.mean(axis=-1, keepdims=True) if self.kind is NormKind.LAYER else x

    def _weighted(self, x: FloatArray) -> FloatArray:
        return x if self.weight is None else self.weight * x

    def _parts(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Direction u = c / (sqrt(n) s), whose squared length is 1 - eps/s², and s; no unscaled number is squared."""
        width = x.shape[-1]
        if self.weight is not None and self.weight.shape != (width,):
            raise DomainError(f"weight has {self.weight.shape[0]} entries, the vectors have width {width}")
        if not np.all(np.isfinite(x)):
            raise DomainError("a vector with a NaN or infinite entry cannot be normalised")
        x = np.asarray(x, dtype=np.float64)
        largest = np.max(np.abs(x), axis=-1, keepdims=True, initial=0.0)
        unit = np.maximum(largest, np.sqrt(self.eps))  # everything is measured in it: x may sit at either end of float64
        unit = np.where(unit > 0, unit, 1.0)
        centred = self._centre(x / unit)
        length = np.sqrt(np.sum(centred**2, axis=-1, keepdims=True))
        length = np.where(length > _ROUND_OFF * np.sqrt(width) * (largest / unit), length, 0.0)  # a constant is not quite 0
        count = self._count(width)
        relative = np.hypot(length / np.sqrt(count), np.sqrt(self.eps) / unit)
        if not np.all(relative > 0):
            raise DomainError("a vector without direction (zero, constant under LayerNorm) has no derivative at eps = 0")
        with np.errstate(over="ignore"):
            scale = relative * unit
        if not np.all(np.isfinite(scale)):
            raise DomainError("the length of a vector is past float64 (1.8e308); scale it down")
        return centred / relative / np.sqrt(count), scale


def _over(vector: FloatArray, scale: FloatArray) -> FloatArray:
    """The vector over the scale; at a vector of 1e-308 or less a derivative, its inverse, is past float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        quotient: FloatArray = vector / scale
    if not np.all(np.isfinite(quotient)) and np.all(np.isfinite(vector)):
        raise DomainError("the derivative at so small a vector is past float64 (1.8e308); scale the vector up or take eps > 0")
    return quotient


def _project(direction: FloatArray, vector: FloatArray) -> FloatArray:
    """(I - u uᵀ) times a vector."""
    along: FloatArray = np.sum(direction * vector, axis=-1, keepdims=True)
    return vector - along * direction
