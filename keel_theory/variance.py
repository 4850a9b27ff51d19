r"""Variance along depth: the other side of a gradient that never dies.

A stack that keeps :math:`x' = x + F(N(x))` (Pre-LN) hands every gradient down unchanged and pays with a stream whose variance
grows by q in each sub-layer: a deep branch is a small part of what it is added to. The cures differ in where they put the
factor: LayerNorm Scaling shrinks what deep branches read, Admin grows the shortcut before a norm, Highway averages.

Legend: v variance of the stream (mean square per coordinate), q variance of F's output for an input of unit variance, l
0-based index of a sub-layer, L number of sub-layers. All dimensionless. Throughout: branches uncorrelated with the stream
and with each other, norm weights one, epsilon zero, large width.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (1), (6); Sun et al. 2025, arXiv:2502.05795 (LayerNorm Scaling); Liu et al.
2020, arXiv:2004.08249 (Admin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from keel_theory.errors import DomainError, require_at_least, require_non_negative, require_positive
from keel_theory.layer_norm import FloatArray
from keel_theory.spec import ResidualSpec
from keel_theory.stream_state import StreamState
from keel_theory.sublayer import scalar_update

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "VarianceProfile",
    "admin_omega",
    "admin_shortcut_product",
    "highway_variance",
    "layernorm_scaling_variance",
    "pre_ln_update_share",
    "pre_ln_variance",
    "variance_profile",
]


@dataclass(frozen=True, slots=True)
class VarianceProfile:
    """Variances through a stack and what follows from them.

    Attributes:
        stream: variance of the stream before each sub-layer, and after the last, shape (n_sublayers + 1,).
        kept: variance that the scaled shortcut brings to each sum, shape (n_sublayers,).
        added: variance that the branch adds to it, shape (n_sublayers,).

    Example:
        >>> profile = VarianceProfile(stream=np.array([1.0, 2.0, 4.0]), kept=np.array([1.0, 2.0]), added=np.array([1.0, 2.0]))
        >>> profile.update_share.tolist(), round(profile.input_cosine, 12)
        ([0.5, 0.5], 0.5)
        >>> profile.output_share.round(12).tolist() # the input has the last quarter
        [0.25, 0.5]
    """

    stream: FloatArray
    kept: FloatArray
    added: FloatArray

    @property
    def update_share(self) -> FloatArray:
        """Share of each sub-layer's output variance that its own branch has just written, in [0, 1], shape (n_sublayers,)."""
        return np.asarray(self.added / (self.kept + self.added))

    @property
    def input_cosine(self) -> float:
        """Cosine between the stack's input and its output, dimensionless, in [0, 1]."""
        return float(np.exp(0.5 * np.sum(np.log1p(-self.update_share))))

    @property
    def output_share(self) -> FloatArray:
        """Share of the stack's *output* variance that each branch has written, shape (n_sublayers,).

        What is written early is diluted by all that is written later; with the input's share, the squared
        :attr:`input_cosine`, the shares add up to one.
        """
        diluted = np.concatenate([np.cumsum(np.log1p(-self.update_share)[::-1])[::-1][1:], [0.0]])
        return np.asarray(self.update_share * np.exp(diluted))

    def to_frame(self) -> pd.DataFrame:
        """One row per sub-layer."""
        import pandas as pd

        return pd.DataFrame(
            {
                "sublayer": np.arange(len(self.added)),
                "stream_variance": self.stream[:-1],
                "kept_variance": self.kept,
                "added_variance": self.added,
                "update_share": self.update_share,
                "output_share": self.output_share,
            }
        )


def variance_profile(
    specs: Sequence[ResidualSpec],
    *,
    branch_variance: ArrayLike = 1.0,
    input_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> VarianceProfile:
    r"""Variances through any stack, sub-layer by sub-layer.

    .. math:: v_{l+1} = A_l^2 v_l + B_l^2 q'_l\quad\text{without an output norm},\qquad v_{l+1} = 1\ \text{with one}

    A scheme that profiles its shortcut scale (Admin) has :math:`A_l^2` = variance of the sum before. The recursion is that of
    :func:`keel_theory.propagation.propagate_shortcut`, :mod:`keel_theory.stream_state`.

    Status: exact at infinite width under the module's assumptions; Highway's gate enters by its value at zero gate weights.
    The branch is homogeneous of degree one in its input, see :mod:`keel_theory.sublayer`.

    Args:
        specs: of the sub-layers, first to last.
        branch_variance: q >= 0, one number or shape (n_sublayers,).
        input_variance: of the embedding, > 0.
        scaled_matrices: matrices of each branch that start ``init_gain`` times smaller.

    Returns:
        The variances.

    Raises:
        DomainError: if there is no sub-layer, or the number of branch variances is neither 1 nor theirs.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> variance_profile(get_scheme("pre_ln").specs(4)).stream.tolist()
        [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    require_positive("input_variance", input_variance)
    q = np.asarray(branch_variance, dtype=np.float64)
    if not specs:
        raise DomainError("a stack has at least 1 sub-layer, got 0")
    if q.ndim > 1 or (q.ndim == 1 and len(q) != len(specs)):
        raise DomainError(f"branch_variance must be one number or {len(specs)} numbers, got shape {q.shape}")
    state, stream, kept, added = StreamState.entering(input_variance), [input_variance], [], []
    for spec, value in zip(specs, np.broadcast_to(q, len(specs)).tolist(), strict=True):
        update = state.resolved(spec, scalar_update(spec, branch_variance=value, scaled_matrices=scaled_matrices))
        kept.append(update.kept_variance(state.variance))
        added.append(update.added_variance(state.variance))
        state = state.after(update)
        stream.append(state.variance)
    return VarianceProfile(stream=np.array(stream), kept=np.array(kept), added=np.array(added))


def pre_ln_variance(sublayer: ArrayLike, branch_variance: float = 1.0, input_variance: float = 1.0) -> FloatArray:
    r"""Variance of a Pre-LN stream before sub-layer l.

    .. math:: v_l = v_0 + q\,l

    Linear, because a normalised input makes every branch write the same variance whatever the stream's. Branches that agree
    with the stream would make it grow faster, up to :math:`(\sqrt{v_0} + \sqrt q\, l)^2`.

    Status: exact under the module's assumptions.   Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (6).

    Args:
        sublayer: l >= 0, 0-based; L for the output of the stack.
        branch_variance: q >= 0.
        input_variance: v_0 > 0.

    Returns:
        Shape of ``sublayer``.

    Example:
        >>> pre_ln_variance([0, 1, 1024]).tolist()
        [1.0, 2.0, 1025.0]
    """
    q, v0 = require_non_negative("branch_variance", branch_variance), require_positive("input_variance", input_variance)
    return v0 + q * _index(sublayer)


def pre_ln_update_share(sublayer: ArrayLike, branch_variance: float = 1.0, input_variance: float = 1.0) -> FloatArray:
    r"""Share of a Pre-LN sub-layer's output variance that its branch has written: the fading of deep sub-layers.

    .. math:: \frac{q}{v_0 + q (l + 1)} \to \frac{1}{l}

    A gradient reaches the branch's output at full strength but its input only through a norm, :math:`1 / \sqrt{v_l}`: both
    faces of deep sub-layers that hardly differ from the identity. In the *output* of the stack all branches weigh the same.

    Status: exact under the module's assumptions.   Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (6).

    Args:
        sublayer: l >= 0, 0-based.
        branch_variance: q >= 0.
        input_variance: v_0 > 0.

    Returns:
        In [0, 1), shape of ``sublayer``.

    Example:
        >>> pre_ln_update_share([0, 1, 999]).tolist()
        [0.5, 0.3333333333333333, 0.000999000999000999]
    """
    return branch_variance / pre_ln_variance(_index(sublayer) + 1, branch_variance, input_variance)


def layernorm_scaling_variance(
    n_blocks: int, branch_variance: float = 1.0, input_variance: float = 1.0, *, degree: float = 1.0
) -> float:
    r"""Variance of a LayerNorm-Scaling stream after M blocks.

    .. math:: x' = x + F\bigl(N(x)/\sqrt{l}\bigr),\qquad v = v_0 + 2 q \sum_{l=1}^{M} l^{-p}
       \approx v_0 + 2 q (\ln M + 0.577)\quad (p = 1)

    Both sub-layers of block l (from 1) read an input of variance 1/l. What they write depends on how F treats the size of
    its input, so p, its degree of homogeneity, is part of the statement: p = 1 for a linear map, ReLU or GELU at large
    inputs, and attention's value path; p = 2 for a gated FFN (SwiGLU) at small inputs. So growth is logarithmic instead of
    linear for p = 1, and bounded by :math:`v_0 + \pi^2 q / 3` for p = 2. It is F's homogeneity, not a norm, that does it:
    a branch norm would undo the factor.

    Status: exact under the module's assumptions for an F with :math:`F(cx) = c^p F(x)`.
    Source: Sun et al. 2025, arXiv:2502.05795 (the scheme); the sum is derived here.

    Args:
        n_blocks: M >= 0; a block has two sub-layers.
        branch_variance: q >= 0, at an input of unit variance.
        input_variance: v_0 > 0.
        degree: p >= 0, degree of homogeneity of the branch.

    Returns:
        The variance.

    Example:
        >>> round(layernorm_scaling_variance(512), 1), float(pre_ln_variance(1024))
        (14.6, 1025.0)
    """
    q, v0 = require_non_negative("branch_variance", branch_variance), require_positive("input_variance", input_variance)
    power = require_non_negative("degree", degree)
    block = np.arange(1, require_at_least("n_blocks", n_blocks, 0) + 1, dtype=np.float64)
    return v0 + 2 * q * float(np.sum(block[::-1] ** -power))


def highway_variance(
    gate: float,
    sublayer: ArrayLike,
    branch_variance: float = 1.0,
    input_variance: float = 1.0,
    *,
    normalised_input: bool = False,
) -> FloatArray:
    r"""Variance of a Highway stream before sub-layer l, for a gate T that is the same everywhere.

    .. math:: v_l = v_0\,(C^2 + T^2 q)^l \quad\text{(Eq. 1)},\qquad
       v_l = v_\infty + (v_0 - v_\infty)\, C^{2l},\ v_\infty = \frac{T^2 q}{1 - C^2} \quad\text{(normalised input)}

    with C = 1 - T. The shortcut keeps :math:`C^L` of a gradient. A convex mix shrinks a variance-keeping branch (q = 1):
    :math:`C^2 + T^2 < 1`, so without a norm the stream itself fades.

    Status: exact under the module's assumptions with T constant; a learned T depends on x.
    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (1); Srivastava et al. 2015, arXiv:1505.00387.

    Args:
        gate: T in (0, 1).
        sublayer: l >= 0, 0-based; L for the output of the stack.
        branch_variance: q >= 0.
        input_variance: v_0 > 0.
        normalised_input: whether the branch reads a normalised stream.

    Returns:
        Shape of ``sublayer``.

    Raises:
        DomainError: if the gate is outside (0, 1).

    Example:
        >>> highway_variance(0.5, [0, 1, 2]).tolist()
        [1.0, 0.5, 0.25]
    """
    if not 0 < gate < 1:
        raise DomainError(f"the gate T must lie between 0 and 1, both excluded, got {gate}")
    q, v0 = require_non_negative("branch_variance", branch_variance), require_positive("input_variance", input_variance)
    index, carry = _index(sublayer), 1.0 - gate
    if not normalised_input:
        return np.asarray(v0 * (carry**2 + gate**2 * q) ** index)
    limit = gate**2 * q / (1 - carry**2)
    return np.asarray(limit + (v0 - limit) * carry ** (2 * index))


def admin_omega(sublayer: ArrayLike, branch_variance: float = 1.0, input_variance: float = 1.0) -> FloatArray:
    r"""Admin's shortcut scale of sub-layer l at initialisation.

    .. math:: \omega_l^2 = v_0 (1 + q) + q\,(l - 1) \quad (l \ge 1),\qquad \omega_0 = 1

    The sum of all variances before. The first branch reads the embedding, of variance v_0, and writes q v_0; all later ones
    read a normalised stream. At v_0 = 1 it is what a Pre-LN stream would have there, 1 + q l.

    Status: exact for equal branch variances.   Source: Liu et al. 2020, arXiv:2004.08249.

    Args:
        sublayer: l >= 0, 0-based.
        branch_variance: q >= 0.
        input_variance: v_0 > 0.

    Returns:
        omega, dimensionless, shape of ``sublayer``.

    Example:
        >>> admin_omega([0, 3, 8]).tolist()
        [1.0, 2.0, 3.0]
        >>> admin_omega([0, 1, 5], 0.5, 2.0).round(6).tolist()
        [1.0, 1.732051, 2.236068]
    """
    q, v0 = require_non_negative("branch_variance", branch_variance), require_positive("input_variance", input_variance)
    index = _index(sublayer)
    return np.where(index == 0, 1.0, np.sqrt(v0 * (1.0 + q) + q * np.maximum(index - 1.0, 0.0)))


def admin_shortcut_product(n_sublayers: ArrayLike, branch_variance: float = 1.0, input_variance: float = 1.0) -> FloatArray:
    r"""Product of Admin's shortcut gains at initialisation.

    .. math:: \prod_{l<L} \frac{\omega_l}{\omega_{l+1}} = \frac{1}{\omega_L} = \frac{1}{\sqrt{v_0 (1 + q) + q (L - 1)}},
       \quad\text{at } v_0 = 1: \frac{1}{\sqrt{1 + q L}}

    It telescopes. The gradient falls like :math:`L^{-1/2}`, a power instead of Post-LN's exponential, and the same number is
    what a Pre-LN stack keeps through its final norm (1 along the stream, :math:`1/\sqrt{v_L}` in the norm): at
    initialisation Admin is Pre-LN written as Post-LN.

    Status: exact under the module's assumptions, at initialisation.
    Source: derived here from Liu et al. 2020, arXiv:2004.08249.

    Args:
        n_sublayers: L >= 0.
        branch_variance: q >= 0.
        input_variance: v_0 > 0.

    Returns:
        Dimensionless, shape of ``n_sublayers``.

    Example:
        >>> float(admin_shortcut_product(1023))
        0.03125
    """
    return 1 / admin_omega(n_sublayers, branch_variance, input_variance)


def _index(sublayer: ArrayLike) -> FloatArray:
    index = np.asarray(sublayer, dtype=np.float64)
    if not (np.isfinite(index) & (index >= 0) & (index == np.floor(index))).all():
        raise DomainError(f"the index of a sub-layer must be a whole number of at least 0, got {sublayer!r}")
    return index
