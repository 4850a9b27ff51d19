r"""Design questions: which shortcut scale a depth needs, and what it costs.

A stream of unit RMS, the same :math:`\alpha` and the same branch variance q (RMS of the branch squared, per unit of the
stream's variance) in each of L sub-layers :math:`x' = N_{out}(\alpha x + F)`. The shortcut keeps, over the whole stack,

.. math:: g(\alpha, L, q) = \Bigl(\frac{\alpha}{\sqrt{\alpha^2 + q}}\Bigr)^{L}

of a gradient, and the same number is the cosine between the stack's input and its output. That is the trade: what the
shortcut keeps, the branches do not have. L is the number of **sub-layers**, attention and FFN counted separately.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (15), (18), (19), solved for :math:`\alpha`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keel_theory.errors import DomainError
from keel_theory.propagation import shortcut_log_product
from keel_theory.spec import Scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ALIGNED_EXACT_DEPTH",
    "PhaseDiagram",
    "aligned_branch_cosine",
    "aligned_branch_cosine_law",
    "aligned_branch_share",
    "branch_share",
    "log_uniform_product",
    "phase_diagram",
    "smallest_alpha",
    "smallest_alpha_law",
    "smallest_scheme_alpha",
    "uniform_product",
]

FloatArray: TypeAlias = NDArray[np.float64]


def log_uniform_product(alpha: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""Natural logarithm of the product of the shortcut gains of a uniform stack.

    .. math:: \ln g = -\tfrac{L}{2} \ln\Bigl(1 + \frac{q}{\alpha^2}\Bigr)

    Status: exact at infinite width. Exact in float64 for any depth: the product itself underflows past L = 2,100 for Post-LN.
    A value outside its domain is a :class:`~keel_theory.errors.DomainError`, here and in all functions of this module.
    Assumes: unit-RMS stream, branches uncorrelated with it, norm weights one, epsilon zero.

    Args:
        alpha: shortcut scale, dimensionless, > 0; broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        ln g in nats, <= 0, of the broadcast shape.

    Example:
        Post-LN at 64 sub-layers, in powers of two:

        >>> round(float(log_uniform_product(1.0, 64)) / float(np.log(2)), 12)
        -32.0
    """
    alpha_ = _checked("alpha", alpha, positive=True)
    depth = _depth(n_sublayers)
    variance = _checked("branch variance", branch_variance, positive=False)
    with np.errstate(over="ignore", divide="ignore"):  # q / alpha^2 may leave float64; its logarithm does not
        ratio = variance / alpha_ / alpha_
        log_growth = np.where(np.isfinite(ratio), np.log1p(ratio), np.log(variance) - 2 * np.log(alpha_))
    return np.asarray(-0.5 * depth * log_growth)


def uniform_product(alpha: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""Product of the shortcut gains of a uniform stack; also the cosine between its input and its output.

    .. math:: g = \Bigl(1 + \frac{q}{\alpha^2}\Bigr)^{-L/2}

    The two are one number: with :math:`x_{l+1} = (\alpha x_l + F_l) / \sqrt{\alpha^2 + q}` and branches uncorrelated with
    the input, :math:`\langle x_0, x_L \rangle / d` is multiplied by :math:`\alpha / \sqrt{\alpha^2 + q}` in each step.

    Status: exact at infinite width.
    Assumes: as :func:`log_uniform_product`.
    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (19) for alpha = L, q = 1.

    Args:
        alpha: shortcut scale, dimensionless, > 0; broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        g, dimensionless, in [0, 1]; 0.0 where it is below the smallest float64.

    Example:
        >>> round(float(uniform_product(512, 512)), 5)
        0.99902
    """
    return np.exp(log_uniform_product(alpha, n_sublayers, branch_variance))


def branch_share(alpha: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""Share of the output's variance that all branches together carry.

    .. math:: 1 - g^2 = 1 - \Bigl(1 + \frac{q}{\alpha^2}\Bigr)^{-L}

    At :math:`\alpha = L` it is q/L to leading order: the branches of a deep Keel stack, as initialised, are nearly invisible
    in its output, and have to grow or to align before they count (see :func:`aligned_branch_share`).

    Status: exact at infinite width, for branches uncorrelated with the input **and with each other**.

    Args:
        alpha: shortcut scale, dimensionless, > 0; broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        Share, dimensionless, in [0, 1].

    Example:
        >>> round(1000 * float(branch_share(1000, 1000)), 2)
        1.0
    """
    return -np.expm1(2 * log_uniform_product(alpha, n_sublayers, branch_variance))


def smallest_alpha(min_gain: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""Smallest shortcut scale whose product over L sub-layers is at least ``min_gain``.

    .. math:: \alpha = \sqrt{\frac{q}{g^{-2/L} - 1}} = \frac{\sqrt{q}\, g^{1/L}}{\sqrt{1 - g^{2/L}}}

    The second form neither overflows nor cancels; :math:`1 - g^{2/L}` is taken with ``expm1``.

    Status: exact inverse of :func:`uniform_product`. With q = 0 every scale keeps everything, and the infimum 0 is returned.

    Args:
        min_gain: g, the product wanted, dimensionless, in (0, 1); broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        alpha, dimensionless, >= 0.

    Example:
        >>> round(float(smallest_alpha(0.9, 1024)), 2)
        69.71
    """
    gain = _gain(min_gain)
    depth = _depth(n_sublayers)
    variance = _checked("branch variance", branch_variance, positive=False)
    log_step = np.log(gain) / depth
    return np.asarray(np.sqrt(variance) * np.exp(log_step) / np.sqrt(-np.expm1(2 * log_step)))


def smallest_alpha_law(min_gain: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""The square-root law that :func:`smallest_alpha` follows.

    .. math:: \alpha \approx \sqrt{\frac{q L}{2 \ln(1/g)}}

    So a shortcut that keeps a fixed share needs only :math:`\sqrt{L}`; :math:`\alpha = L` is :math:`\sqrt{L}` times more.

    Status: leading order in 1/L. The exact value squared is lower by q/2 up to O(1/L).

    Args:
        min_gain: g, dimensionless, in (0, 1); broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        alpha, dimensionless, >= 0.

    Example:
        >>> exact, law = smallest_alpha(0.9, 1024), smallest_alpha_law(0.9, 1024)
        >>> round(float(law**2 - exact**2), 3)
        0.5
    """
    variance = _checked("branch variance", branch_variance, positive=False)
    return np.asarray(np.sqrt(variance * _depth(n_sublayers) / (-2 * np.log(_gain(min_gain)))))


def smallest_scheme_alpha(
    scheme: Scheme,
    n_sublayers: int,
    min_gain: float,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> float:
    """Smallest alpha at which a scheme, with its own first-layer rules, keeps a share of the gradient.

    Found by bisection, because a scheme's rules (Keel's first block has no scale) leave no closed form; the product grows with
    alpha.

    Status: numeric, to round-off.   Source: :func:`keel_theory.propagation.shortcut_log_product`.
    Assumes: as there.

    Args:
        scheme: one with a parameter ``alpha``.
        n_sublayers: L, at least 1.
        min_gain: g, the product wanted, dimensionless, in (0, 1).
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.

    Returns:
        alpha, dimensionless; 0.0 where every scale keeps that much.

    Raises:
        DomainError: if the scheme has no alpha, or no alpha keeps that much; the message says how much can be kept.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> keel = get_scheme("keel")
        >>> round(smallest_scheme_alpha(keel, 1024, 0.5), 2)
        59.6
        >>> smallest_scheme_alpha(keel, 1024, 0.9)
        Traceback (most recent call last):
        ...
        keel_theory.errors.DomainError: keel keeps at most 0.57735 of the gradient over 1024 sub-layers, ...
    """
    if "alpha" not in scheme.parameters:
        raise DomainError(f"scheme '{scheme.name}' has no parameter 'alpha', so there is none to choose")
    wanted = float(np.log(_gain(min_gain)))

    def kept(log_alpha: float) -> float:
        return shortcut_log_product(
            scheme.with_parameters(alpha=float(np.exp(log_alpha))),
            n_sublayers,
            branch_variance=branch_variance,
            stream_variance=stream_variance,
            scaled_matrices=scaled_matrices,
        )

    low, high = -_LOG_END, _LOG_END
    if (best := kept(high)) < wanted:
        raise DomainError(
            f"{scheme.name} keeps at most {np.exp(best):.6g} of the gradient over {n_sublayers} sub-layers, however large "
            f"alpha is, from an embedding of variance {stream_variance:g}: {min_gain:g} is out of reach; ask for less"
        )
    if kept(low) >= wanted:
        return 0.0
    while high - low > _LOG_STEP:
        middle = (low + high) / 2
        low, high = (low, middle) if kept(middle) >= wanted else (middle, high)
    return float(np.exp(high))


_LOG_END = 300.0  # e^300 is far past any scale, and its inverse far below
_LOG_STEP = 1e-13


ALIGNED_EXACT_DEPTH = 100_000
"""Sub-layers up to which :func:`aligned_branch_share` walks the stack; beyond, its law is good to 1e-9."""


def aligned_branch_cosine(alpha: float, n_sublayers: int, branch_variance: float = 1.0) -> float:
    r"""Cosine between input and output when every branch writes the same direction, orthogonal to the input.

    .. math:: \cos\theta = 1 / \sqrt{1 + t^2},\qquad t \leftarrow t + \tfrac{\sqrt q}{\alpha}\sqrt{1 + t^2},\qquad t_0 = 0

    t is the tangent of the stream's angle to the input: a sub-layer adds √q to a stream of length α. The opposite extreme of
    independent branches. The cosine is the product of the shortcut gains here as well.

    Status: exact recursion, O(L) time.

    Args:
        alpha: shortcut scale, dimensionless, > 0.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        Cosine, dimensionless, in [0, 1].

    Example:
        >>> round(aligned_branch_cosine(1024, 1024), 2), round(float(uniform_product(1024, 1024)), 4)
        (0.65, 0.9995)
    """
    step, depth = _aligned_step(alpha, n_sublayers, branch_variance)
    return 1.0 / math.hypot(1.0, _aligned_tangent(step, depth))


def aligned_branch_share(alpha: float, n_sublayers: int, branch_variance: float = 1.0) -> float:
    r"""Share of the output's variance that branches carry which all write one direction, orthogonal to the input.

    .. math:: \sin^2\theta = \frac{t^2}{1 + t^2},\qquad \text{past 100,000 sub-layers}\quad
       \tanh^2\Bigl(x - \tfrac h2 \ln\cosh x\Bigr),\quad h = \tfrac{\sqrt q}{\alpha},\ x = h L

    with t of :func:`aligned_branch_cosine`. With t = sinh u a step is :math:`du = h - \tfrac{h^2}{2} \tanh u + O(h^3)`, which
    the law integrates. One branch has none to agree with: its share is that of :func:`branch_share`.

    Status: exact recursion up to 100,000 sub-layers; beyond, to second order in h, off by less than 1e-9 at any scale.

    Args:
        alpha: shortcut scale, dimensionless, > 0.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        Share, dimensionless, in [0, 1].

    Example:
        >>> round(aligned_branch_share(1.0, 1), 12), round(aligned_branch_share(2.0, 1, 3.0), 12)
        (0.5, 0.428571428571)
        >>> round(aligned_branch_share(1024, 1024), 4)
        0.5799
    """
    step, depth = _aligned_step(alpha, n_sublayers, branch_variance)
    if depth > ALIGNED_EXACT_DEPTH:
        return _aligned_share_law(step, depth)
    tangent = _aligned_tangent(step, depth)
    return (tangent / math.hypot(1.0, tangent)) ** 2 if math.isfinite(tangent) else 1.0


def _aligned_step(alpha: float, n_sublayers: int, branch_variance: float) -> tuple[float, int]:
    """√q / α and L."""
    scale = float(_checked("alpha", alpha, positive=True))
    return math.sqrt(float(_checked("branch variance", branch_variance, positive=False))) / scale, int(_depth(n_sublayers))


def _aligned_tangent(step: float, depth: int) -> float:
    tangent = 0.0
    for _ in range(depth):
        tangent += step * math.hypot(1.0, tangent)
    return tangent


_FULL_TURN = 40.0  # tanh is one to round-off from half of it on, and a step turns u by more than half of h


def _aligned_share_law(step: float, depth: int) -> float:
    turn = step * depth
    if turn > _FULL_TURN:
        return 1.0
    log_cosh = turn + math.log1p(math.exp(-2 * turn)) - math.log(2)
    return math.tanh(turn - step / 2 * log_cosh) ** 2


def aligned_branch_cosine_law(alpha: ArrayLike, n_sublayers: ArrayLike, branch_variance: ArrayLike = 1.0) -> FloatArray:
    r"""The law that :func:`aligned_branch_cosine` follows at large alpha.

    .. math:: c \approx \operatorname{sech}\frac{\sqrt{q}\,L}{\alpha}

    With :math:`x = (\cos\theta, \sin\theta)` one step turns the stream by :math:`d\theta = (\sqrt q / \alpha) \cos\theta`,
    whose solution is the Gudermannian of :math:`\sqrt q L / \alpha`. So :math:`\alpha \propto L` is the scale at which branches
    that agree move the output by a fixed angle whatever the depth: that, not the shortcut, is what :math:`\alpha = L` fits.

    Status: leading order in 1/alpha; the share 1 - c² is too large, by at most 0.16 √q/alpha where that is small.

    Args:
        alpha: shortcut scale, dimensionless, > 0; broadcast with the others.
        n_sublayers: L, at least 1.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        Cosine, dimensionless, in [0, 1].

    Example:
        >>> round(float(aligned_branch_cosine_law(1024, 1024)), 2)
        0.65
    """
    variance = _checked("branch variance", branch_variance, positive=False)
    angle = np.sqrt(variance) * _depth(n_sublayers) / _checked("alpha", alpha, positive=True)
    return np.asarray(2 * np.exp(-angle) / (1 + np.exp(-2 * angle)))  # sech without the overflow of cosh


@dataclass(frozen=True, slots=True)
class PhaseDiagram:
    """What the shortcut keeps and what the branches carry, over depth and shortcut scale.

    Attributes:
        n_sublayers: depths, shape (n_depths,).
        alpha: shortcut scales, dimensionless, shape (n_alphas,).
        branch_variance: q, dimensionless.
        log_product: ln of the shortcut product in nats, shape (n_depths, n_alphas).
        branch_share: share of the output's variance that independent branches carry, same shape.
        aligned_cosine: cosine between input and output where branches agree (leading order), same shape.
    """

    n_sublayers: NDArray[np.int64]
    alpha: FloatArray
    branch_variance: float
    log_product: FloatArray
    branch_share: FloatArray
    aligned_cosine: FloatArray

    @property
    def product(self) -> FloatArray:
        """Shortcut product, which is also the cosine between input and output, shape (n_depths, n_alphas)."""
        return np.exp(self.log_product)

    def to_frame(self) -> pd.DataFrame:
        """One row per (depth, alpha), depth-major."""
        import pandas as pd

        depth, alpha = np.meshgrid(self.n_sublayers, self.alpha, indexing="ij")
        return pd.DataFrame(
            {
                "n_sublayers": depth.ravel(),
                "alpha": alpha.ravel(),
                "branch_variance": self.branch_variance,
                "log_product": self.log_product.ravel(),
                "product": self.product.ravel(),
                "branch_share": self.branch_share.ravel(),
                "aligned_cosine": self.aligned_cosine.ravel(),
            }
        )


def phase_diagram(
    n_sublayers: ArrayLike | None = None, alpha: ArrayLike | None = None, branch_variance: float = 1.0
) -> PhaseDiagram:
    """The shortcut product and its price over a grid of depths and scales.

    Status: product and share exact at infinite width, the cosine of agreeing branches to leading order in 1/alpha.
    Assumes: as :func:`log_uniform_product`.

    Args:
        n_sublayers: depths, each at least 1; by default 4 to 4096, log-spaced.
        alpha: shortcut scales, dimensionless, > 0; by default 1 to 4096, log-spaced.
        branch_variance: q, dimensionless, >= 0.

    Returns:
        Arrays of shape (n_depths, n_alphas).

    Example:
        >>> phase_diagram([64], [1.0, 64.0]).product.round(4).tolist()
        [[0.0, 0.9922]]
    """
    depths = np.unique(np.rint(np.geomspace(4, 4096, 121))) if n_sublayers is None else np.atleast_1d(_depth(n_sublayers))
    scales = np.geomspace(1, 4096, 121) if alpha is None else np.atleast_1d(_checked("alpha", alpha, positive=True))
    grid = (scales[None, :], depths[:, None], branch_variance)
    return PhaseDiagram(
        n_sublayers=depths.astype(np.int64),
        alpha=scales,
        branch_variance=branch_variance,
        log_product=log_uniform_product(*grid),
        branch_share=branch_share(*grid),
        aligned_cosine=aligned_branch_cosine_law(*grid),
    )


def _checked(name: str, values: ArrayLike, *, positive: bool) -> FloatArray:
    array = _floats(name, values)
    good = np.isfinite(array) & (array > 0 if positive else array >= 0)
    if not good.all():
        wanted = "> 0" if positive else ">= 0"
        raise DomainError(f"{name} must be a finite number {wanted}, got {array[~good].ravel()[0]:g}")
    return array


def _depth(n_sublayers: ArrayLike) -> FloatArray:
    array = _floats("the number of sub-layers", n_sublayers)
    good = np.isfinite(array) & (array >= 1) & (array == np.floor(array))
    if not good.all():
        raise DomainError(f"the number of sub-layers must be a whole number >= 1, got {array[~good].ravel()[0]:g}")
    return array


def _gain(min_gain: ArrayLike) -> FloatArray:
    array = _floats("the gain to keep", min_gain)
    good = (array > 0) & (array < 1)
    if not good.all():
        raise DomainError(f"the gain to keep must lie between 0 and 1, both excluded, got {array[~good].ravel()[0]:g}")
    return array


def _floats(name: str, values: ArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except OverflowError:
        raise DomainError(f"{name} is past float64 (1.8e308); take a smaller number") from None
