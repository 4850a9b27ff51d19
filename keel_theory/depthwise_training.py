r"""Depth-wise test-time training: a residual update read as one gradient step.

A branch that ends in a linear map writes :math:`G(x) W_o^\top`, with :math:`x, x' \in \mathbb{R}^{D}` rows,
:math:`W_o \in \mathbb{R}^{D \times H}` and hidden units :math:`G(x) \in \mathbb{R}^{H}`. The paper reads it as learning along
depth: the stream is the fast weight, each sub-layer one step on the depth-wise loss

.. math:: \ell(x) = -\langle x W_o,\ G(x) \rangle

**What is held constant decides whether that is true.** The loss holds x twice.

* With the target :math:`G` held constant (a stop-gradient, as in a fast-weight update),
  :math:`-\partial \ell / \partial x = G W_o^\top`: the residual update *is* one step of size 1, for every G. Exact.
* With G differentiated as well, :math:`-\partial \ell / \partial x = G W_o^\top + J_G^\top (W_o^\top x)`. The second term,
  the *target term*, is of the update's own size in a random network, so the update is not the gradient step of the loss as
  a function of x. :class:`DepthwiseStep` computes both and the cosine between them.

What scales and norms do in this picture, for :math:`u = G W_o^\top`:

* :math:`N(\alpha x + u) = N(x + u / \alpha)`: a shortcut scale is the inverse **step size**, and the outer norm a retraction
  to the sphere (projected gradient descent). With :math:`\alpha = L` the steps of a whole stack have total length
  :math:`L \cdot 1/L`.
* an inner norm makes the target a function of the direction of x alone; then the target term is orthogonal to x.
* Highway's carry gate, :math:`x' = (1 - T) x + T u`, is a step of size T on
  :math:`\ell + \tfrac12 \lVert x \rVert^2`: weight decay on the stream.

Legend of shapes: D width, H hidden units of the branch.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (29)-(34).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from keel_theory.errors import DomainError, require_positive
from keel_theory.layer_norm import FloatArray

if TYPE_CHECKING:
    import sympy as sp

__all__ = ["DepthwiseStep", "SymbolicStep", "Target", "depthwise_loss", "depthwise_step", "symbolic_step"]

Target: TypeAlias = Callable[[FloatArray], FloatArray]
"""G: a stream (D,) -> hidden units (H,)."""


def depthwise_loss(stream: FloatArray, target: FloatArray, output_weight: FloatArray) -> float:
    r"""The loss that a sub-layer takes one step on.

    .. math:: \ell = -\langle x W_o,\ G \rangle = -\langle x,\ G W_o^\top \rangle

    The second form needs no look inside the branch: the loss is minus the inner product of stream and update.

    Status: definition.
    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (29)-(34).

    Args:
        stream: x, shape (D,).
        target: G, shape (H,).
        output_weight: Wo, shape (D, H).

    Returns:
        The loss, in the stream's unit squared.

    Example:
        >>> depthwise_loss(np.array([1.0, 2.0]), np.array([3.0]), np.array([[1.0], [1.0]]))
        -9.0
    """
    _require_shapes(stream, target, output_weight)
    return -float(stream @ output_weight @ target)


@dataclass(frozen=True, slots=True)
class DepthwiseStep:
    """A residual update beside the two gradients it can be compared with.

    Attributes:
        update: G(x) Wo^T, what the branch adds to the stream, shape (D,).
        held_gradient: negative gradient of the loss with the target held constant, shape (D,).
        target_term: J_G(x)^T Wo^T x, what holding the target constant leaves out, shape (D,).
        loss: the depth-wise loss before the step.
    """

    update: FloatArray
    held_gradient: FloatArray
    target_term: FloatArray
    loss: float

    @property
    def full_gradient(self) -> FloatArray:
        """Negative gradient of the loss as a function of x in both places, shape (D,)."""
        return self.held_gradient + self.target_term

    @property
    def alignment(self) -> float:
        """Cosine between the update and the full negative gradient, dimensionless; 1 if the target term is parallel."""
        return _cosine(self.update, self.full_gradient)

    @property
    def held_alignment(self) -> float:
        """Cosine between the update and the negative gradient with the target held constant: 1, by Eqs. (29)-(34)."""
        return _cosine(self.update, self.held_gradient)

    @property
    def target_ratio(self) -> float:
        """Size of the target term over the size of the update, dimensionless."""
        return float(np.linalg.norm(self.target_term) / np.linalg.norm(self.update))

    def stream_after(self, stream: FloatArray, step_size: float = 1.0) -> FloatArray:
        """The stream after a plain step, x + eta G Wo^T, shape (D,)."""
        return np.asarray(stream + require_positive("step size", step_size) * self.held_gradient)


def depthwise_step(stream: FloatArray, target: Target, output_weight: FloatArray, *, step: float = 1e-4) -> DepthwiseStep:
    """The update of one sub-layer and its depth-wise gradients, the latter by differences of the loss alone.

    Both gradients come from the loss as a black box (fourth-order central differences), not from the formula that the paper
    derives: their agreement with the update is a result.

    Status: numeric, to about 1e-10 relative.   Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (29)-(34).
    Assumes: the branch ends in a linear map; G is smooth around x.

    Args:
        stream: x, shape (D,).
        target: G, (D,) -> (H,), smooth around x.
        output_weight: Wo, shape (D, H).
        step: of the differences, relative to the RMS of x, dimensionless, > 0.

    Returns:
        The step; gradients are good to about 1e-10 relative for a target of unit scale.

    Example:
        >>> weight = np.array([[2.0, 0.0], [0.0, 1.0]])
        >>> result = depthwise_step(np.array([1.0, 1.0]), np.tanh, weight)
        >>> bool(np.allclose(result.held_gradient, result.update))
        True
    """
    held = target(stream)
    _require_shapes(stream, held, output_weight)
    width = require_positive("step", step) * max(float(np.sqrt(np.mean(stream**2))), np.finfo(float).tiny)
    held_gradient = -_gradient(lambda x: depthwise_loss(x, held, output_weight), stream, width)
    full_gradient = -_gradient(lambda x: depthwise_loss(x, target(x), output_weight), stream, width)
    return DepthwiseStep(
        update=np.asarray(held @ output_weight.T),
        held_gradient=held_gradient,
        target_term=full_gradient - held_gradient,
        loss=depthwise_loss(stream, held, output_weight),
    )


@dataclass(frozen=True, slots=True)
class SymbolicStep:
    """The same in symbols at a small width, with hidden units that are arbitrary functions of the stream.

    Attributes:
        stream: x as a column, D symbols.
        output_weight: Wo, (D, H) symbols.
        target: G as a column, H applied undefined functions of all of x.
        loss: the depth-wise loss.
        update: Wo G, the branch's output as a column.
        held_gradient: negative gradient with G held constant.
        full_gradient: negative gradient with G differentiated.
    """

    stream: sp.Matrix
    output_weight: sp.Matrix
    target: sp.Matrix
    loss: sp.Expr
    update: sp.Matrix
    held_gradient: sp.Matrix
    full_gradient: sp.Matrix

    @property
    def target_term(self) -> sp.Matrix:
        """What holding the target constant leaves out, J_G^T Wo^T x."""
        return self.full_gradient - self.held_gradient


def symbolic_step(width: int = 2, n_hidden: int = 2) -> SymbolicStep:
    """Derive the update as a gradient step, for arbitrary G.

    Status: exact.   Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (29)-(34).   Assumes: the branch ends in a linear map.

    Args:
        width: D, at least 1.
        n_hidden: H, at least 1.

    Returns:
        Unevaluated-function expressions: an identity in them holds for every differentiable G.

    Raises:
        DomainError: if a size is below 1.

    Example:
        >>> import sympy as sp
        >>> step = symbolic_step()
        >>> (step.update - step.held_gradient).is_zero_matrix # Eqs. (29)-(34), G held constant
        True
        >>> step.target_term.has(sp.Derivative) # and only then
        True
    """
    import sympy as sp

    if width < 1 or n_hidden < 1:
        raise DomainError(f"width and number of hidden units must be at least 1, got {width} and {n_hidden}")
    x = sp.Matrix(sp.symbols(f"x1:{width + 1}", real=True))
    weight = sp.Matrix(width, n_hidden, lambda i, j: sp.Symbol(f"W{i + 1}{j + 1}", real=True))
    held = sp.Matrix(sp.symbols(f"G1:{n_hidden + 1}", real=True))
    target = sp.Matrix([sp.Function(f"G{j + 1}", real=True)(*x) for j in range(n_hidden)])
    thaw = dict(zip(held, target, strict=True))
    held_loss = -(x.T * weight * held)[0]
    loss = held_loss.subs(thaw)
    return SymbolicStep(
        stream=x,
        output_weight=weight,
        target=target,
        loss=loss,
        update=weight * target,
        held_gradient=-sp.Matrix([held_loss.diff(xi) for xi in x]).subs(thaw),
        full_gradient=-sp.Matrix([sp.expand(loss.diff(xi)) for xi in x]),
    )


def _gradient(function: Callable[[FloatArray], float], point: FloatArray, width: float) -> FloatArray:
    """Fourth-order central differences along every coordinate."""
    shifts = width * np.eye(len(point))
    near = np.array([function(point + h) - function(point - h) for h in shifts])
    far = np.array([function(point + 2 * h) - function(point - 2 * h) for h in shifts])
    return np.asarray((8 * near - far) / (12 * width))


def _cosine(a: FloatArray, b: FloatArray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _require_shapes(stream: FloatArray, target: FloatArray, output_weight: FloatArray) -> None:
    if output_weight.shape != (*stream.shape, *target.shape) or stream.ndim != 1:
        wanted = (*stream.shape, *target.shape)
        raise DomainError(f"the output weight must have shape (width, hidden units) = {wanted}, got {output_weight.shape}")
