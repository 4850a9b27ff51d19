r"""Products of shortcut gains over depth, in the log domain.

The gain of a stack along its shortcut is :math:`\prod_l \rho_l`. It is kept as a sum of logs, because Post-LN's
:math:`2^{-L/2}` leaves float64 past L = 2,100. Each scheme's real specs are used: first-layer rules, switches and patterns
included. Two numbers are carried from sub-layer to sub-layer:

* v, the variance of the stream: 1 behind an output norm, A² v + B² q' without one. Keel's first attention has no output
  norm, so its first FFN normalises a stream of variance v + q.
* ω², for a scheme that profiles its shortcut scale (Admin): ω² of the next sub-layer is the variance of this one's sum,
  whatever q is, so the gains telescope: :math:`\prod_l \rho_l = \omega_1 / \omega_{L+1}`.

:func:`shortcut_log_product` walks runs of repeating specs (``Scheme.runs``), so its cost does not grow with depth.

**Finite width.** With independent Gaussian branches the draws scatter around the closed form, and their mean log differs
from it by terms of order L/D. Let u_l be the direction of the l-th normalised sum, m its variance, made of a signal part P and
a noise part Q, and r = (number of free dimensions)/D. Then, to first order in 1/D:

* the log of the norm's scale: :math:`-\tfrac12 E\log(|z|^2/D) = -\tfrac12\log m + (4PQ + 2Q^2 r)/(4 D m^2)`;
* the projection: a gradient that has passed the norm above is orthogonal to its direction, and by symmetry uniform in the
  rest, so this norm removes only :math:`E\log\sqrt{1 - \sin^2\theta\,t^2} \approx -\sin^2\theta / (2(D-1))` with
  :math:`\sin^2\theta = Q r / m` of the norm above. The last norm meets an isotropic gradient and removes the full share
  :math:`\tfrac12[\psi(\tfrac{D-1}{2}) - \psi(\tfrac D2)]`, of variance
  :math:`\tfrac14[\psi'(\tfrac{D-1}{2}) - \psi'(\tfrac D2)]` (LayerNorm: D - 2 for D - 1). Between norms the variance is
  :math:`\sin^4\theta / (2D^2)`.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (15), (18), (19) for the infinite-width product; the finite-width terms are
derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, cycle, islice

import numpy as np

from keel_theory.errors import DomainError, require_at_least, require_non_negative, require_positive
from keel_theory.layer_norm import FloatArray, Normalisation
from keel_theory.results import FiniteWidthProduct, MonteCarloProduct, ShortcutPropagation
from keel_theory.spec import NormKind, ProfileKind, ResidualSpec, Scheme, SpecRun, alternating_kinds
from keel_theory.stream_state import StreamState
from keel_theory.sublayer import ScalarUpdate, log_one_plus_ratio, scalar_update

__all__ = [
    "finite_width_product",
    "first_block_log_product",
    "monte_carlo_product",
    "propagate_shortcut",
    "shortcut_log_product",
    "shortcut_product",
    "uniform_log_product",
]

_CHUNK_BYTES = 2**26
_LARGEST_EXPONENT = 700.0
_SHORTCUT_FIELDS = frozenset({"shortcut_scale", "gate", "gate_bias", "norm_out", "profile"})


def uniform_log_product(alpha: float, n_sublayers: int, *, branch_variance: float = 1.0) -> float:
    r"""Natural log of the product when all sub-layers are alike and normalised.

    .. math:: \log\left(\frac{\alpha}{\sqrt{\alpha^2 + q}}\right)^{L} = -\tfrac{L}{2}\log(1 + q/\alpha^2)

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (15) (α = 1) and (19) (α = L).   Status: exact as D grows.
    Assumes: every sub-layer has an output norm with unit weight, a stream of unit variance, x and f uncorrelated.

    Args:
        alpha: shortcut scale, > 0, dimensionless.
        n_sublayers: L >= 1.
        branch_variance: q >= 0.

    Returns:
        Nats.

    Example:
        >>> round(math.exp(uniform_log_product(512.0, 512)), 5)
        0.99902
        >>> uniform_log_product(1.0, 1024) / math.log(2)
        -512.0
    """
    require_positive("alpha", alpha)
    require_at_least("n_sublayers", n_sublayers, 1)
    require_non_negative("branch_variance", branch_variance)
    return -0.5 * n_sublayers * log_one_plus_ratio(branch_variance, math.log(alpha))


def shortcut_log_product(
    scheme: Scheme,
    n_sublayers: int,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> float:
    """Natural log of the product of all shortcut gains, by runs of repeating specs.

    Source: this module's text.   Status: exact as D grows.   Assumes: unit weights, eps = 0, x and f uncorrelated.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately, >= 1.
        branch_variance: q >= 0, see :mod:`keel_theory.sublayer`.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller; 0 takes q as it is.

    Returns:
        Nats; 0 means that nothing is lost.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> shortcut_log_product(get_scheme("pre_ln"), 1_000_000)
        0.0
        >>> keel = get_scheme("keel") # an embedding of variance 1 and q = 1: the first FFN's norm is a factor 1/sqrt(3)
        >>> round(math.exp(shortcut_log_product(keel, 1_000_000)) * math.sqrt(3), 5)
        1.0
    """
    question = _Question.checked(scheme, n_sublayers, branch_variance, stream_variance, scaled_matrices)
    runs = scheme.runs(n_sublayers)
    state = StreamState.entering(stream_variance)
    for i, run in enumerate(runs):
        normed_later = any(spec.norm_out is not NormKind.NONE for later in runs[i + 1 :] for spec in later.period)
        state = _advance(state, run, question, variance_needed=normed_later)
    if not math.isfinite(state.log_product):
        raise DomainError(f"the log of the product over {n_sublayers} sub-layers is past float64; take a smaller depth")
    return state.log_product


def first_block_log_product(
    scheme: Scheme,
    n_sublayers: int,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> float:
    """Natural log of the first two sub-layers' gains, where schemes have rules of their own and the embedding's size counts.

    Source: this module's text.   Status: exact as D grows.   Assumes: unit weights, eps = 0, x and f uncorrelated.

    Args:
        scheme: with its parameters.
        n_sublayers: of the whole stack, >= 1; one alone is the whole block.
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.

    Returns:
        Nats.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> keel = get_scheme("keel") # 1/sqrt(v + 2 q): a loss for unit variances, a gain at the paper's initialisation
        >>> [round(math.exp(first_block_log_product(keel, 512, branch_variance=q, stream_variance=v)), 3)
        ...  for v, q in ((1.0, 1.0), (0.02**2, 0.04))]
        [0.577, 3.527]
    """
    question = _Question.checked(scheme, n_sublayers, branch_variance, stream_variance, scaled_matrices)
    kinds = alternating_kinds(min(n_sublayers, 2))
    specs = [scheme.spec(i, n_sublayers, kind) for i, kind in enumerate(kinds)]
    return _walk(StreamState.entering(stream_variance), specs, question).log_product


def shortcut_product(
    scheme: Scheme,
    n_sublayers: int,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> float:
    """Product of all shortcut gains; 0 where it is below the smallest float64, so prefer the log.

    Source: this module's text.   Status: exact as D grows.   Assumes: unit weights, eps = 0, x and f uncorrelated.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately, >= 1.
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.

    Returns:
        The product, dimensionless.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> post_ln = get_scheme("post_ln")
        >>> bool(np.isclose(shortcut_product(post_ln, 8), 2.0**-4))
        True
    """
    return math.exp(
        shortcut_log_product(
            scheme,
            n_sublayers,
            branch_variance=branch_variance,
            stream_variance=stream_variance,
            scaled_matrices=scaled_matrices,
        )
    )


def propagate_shortcut(
    scheme: Scheme,
    n_sublayers: int,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> ShortcutPropagation:
    """Every sub-layer's gain, scale and variances: the plain recursion, one sub-layer after the other.

    Source: this module's text; :mod:`keel_theory.stream_state` is the recursion.   Status: exact as D grows.
    Assumes: unit weights, eps = 0, x and f uncorrelated.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately, >= 1.
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.

    Returns:
        Arrays over depth.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> propagate_shortcut(get_scheme("pre_ln"), 3).stream_variances
        array([1., 2., 3., 4.])
    """
    question = _Question.checked(scheme, n_sublayers, branch_variance, stream_variance, scaled_matrices)
    state = StreamState.entering(stream_variance)
    rows: list[tuple[float, float, float, float, bool]] = []
    variances = [stream_variance]
    for spec in _specs(scheme, n_sublayers):
        update = question.update(spec, state)
        rows.append(
            (
                update.log_gain(state.variance, state.log_variance),
                update.shortcut,
                update.log_shortcut,
                update.added_variance(state.variance),
                update.norm_out is not None,
            )
        )
        state = state.after(update)
        variances.append(state.variance)
    log_gains, scales, log_scales, added, normalised = (np.array(column) for column in zip(*rows, strict=True))
    return ShortcutPropagation(
        scheme=scheme.name,
        n_sublayers=n_sublayers,
        branch_variance=branch_variance,
        log_gains=log_gains,
        shortcut_scales=scales,
        log_shortcut_scales=log_scales,
        added_variances=added,
        stream_variances=np.array(variances),
        normalised=normalised,
    )


def finite_width_product(
    scheme: Scheme,
    n_sublayers: int,
    *,
    width: int,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
) -> FiniteWidthProduct:
    """Mean and standard deviation of the log product over random branches at a finite width.

    Source: this module's text.   Status: first order in 1/width (mean), leading order (standard deviation).
    Assumes: independent Gaussian branches, an isotropic gradient at the output, a normalised vector times √v as input.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately, >= 1.
        width: D >= 8.
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.

    Returns:
        Mean and standard deviation, nats.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> product = finite_width_product(get_scheme("post_ln"), 1024, width=512)
        >>> round(product.mean / math.log(2), 1), round(product.standard_deviation, 2) # -512 at infinite width
        (-511.6, 0.87)
    """
    require_at_least("width", width, 8)
    trace = propagate_shortcut(
        scheme,
        n_sublayers,
        branch_variance=branch_variance,
        stream_variance=stream_variance,
        scaled_matrices=scaled_matrices,
    )
    free = width - 1 if scheme.norm is NormKind.LAYER else width
    sums = _normalised_sums(trace, free / width)
    mean = math.fsum(trace.log_shortcut_scales)
    variance = 0.0
    for position, each in enumerate(sums):
        above = sums[position + 1] if position + 1 < len(sums) else None
        mean += each.mean_log_scale(width) + _mean_log_projection(above, free, width)
        variance += each.log_scale_variance(width) + _log_projection_variance(above, free, width)
    return FiniteWidthProduct(mean=mean, standard_deviation=math.sqrt(variance))


def monte_carlo_product(
    scheme: Scheme,
    n_sublayers: int,
    *,
    width: int = 512,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
    n_draws: int = 64,
    seed: int = 0,
) -> MonteCarloProduct:
    """Measure the product: draw a stack of independent Gaussian branches, then backpropagate along the shortcut exactly.

    The branches are constants for the gradient, so what is measured is the shortcut alone, with the true normalisations
    at the true sums. The input is a normalised Gaussian vector times √v; the gradient at the output is Gaussian. The scales
    A and the variances of the branches come from :func:`propagate_shortcut`.

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (13)-(19) for what is measured.   Status: a measurement; exact per draw.
    Assumes: independent Gaussian branches, unit weights, eps = 0.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately, >= 1.
        width: D >= 8.
        branch_variance: q >= 0.
        stream_variance: v > 0 of the embedding output.
        scaled_matrices: matrices of a branch that start ``init_gain`` times smaller.
        n_draws: stacks drawn, >= 2.
        seed: of the generator.

    Returns:
        One log product per draw, beside the predictions.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> measured = monte_carlo_product(get_scheme("post_ln"), 64, width=64, n_draws=32)
        >>> abs(measured.deviation(measured.predicted.mean)) < 3
        True
    """
    require_at_least("n_draws", n_draws, 2)
    predicted = finite_width_product(
        scheme,
        n_sublayers,
        width=width,
        branch_variance=branch_variance,
        stream_variance=stream_variance,
        scaled_matrices=scaled_matrices,
    )
    trace = propagate_shortcut(
        scheme,
        n_sublayers,
        branch_variance=branch_variance,
        stream_variance=stream_variance,
        scaled_matrices=scaled_matrices,
    )
    generator = np.random.default_rng(seed)
    norm = Normalisation(kind=scheme.norm)
    chunk = max(1, _CHUNK_BYTES // (8 * width * n_sublayers))
    sizes = [min(chunk, n_draws - start) for start in range(0, n_draws, chunk)]
    return MonteCarloProduct(
        scheme=scheme.name,
        n_sublayers=n_sublayers,
        width=width,
        branch_variance=branch_variance,
        seed=seed,
        log_products=np.concatenate([_draw(trace, norm, (size, width), generator) for size in sizes]),
        predicted=predicted,
        closed_form=trace.log_product,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    scheme: Scheme
    n_sublayers: int
    branch_variance: float
    scaled_matrices: int

    @classmethod
    def checked(
        cls, scheme: Scheme, n_sublayers: int, branch_variance: float, stream_variance: float, scaled_matrices: int
    ) -> _Question:
        require_at_least("n_sublayers", n_sublayers, 1)
        require_non_negative("branch_variance", branch_variance)
        require_positive("stream_variance", stream_variance)
        require_at_least("scaled_matrices", scaled_matrices, 0)
        return cls(scheme=scheme, n_sublayers=n_sublayers, branch_variance=branch_variance, scaled_matrices=scaled_matrices)

    def update(self, spec: ResidualSpec, state: StreamState) -> ScalarUpdate:
        """The spec's scalars, with the profiled shortcut scale where the spec asks for one."""
        return state.resolved(spec, _scalars(spec, self.branch_variance, self.scaled_matrices))


@lru_cache(maxsize=64)
def _scalars(spec: ResidualSpec, branch_variance: float, scaled_matrices: int) -> ScalarUpdate:
    """The scalars of a spec, kept because deep stacks repeat a handful of specs."""
    return scalar_update(spec, branch_variance=branch_variance, scaled_matrices=scaled_matrices)


def _specs(scheme: Scheme, n_sublayers: int) -> Iterator[ResidualSpec]:
    """All specs in order, evaluating the rule once per run where nothing varies."""
    return chain.from_iterable(_run_specs(scheme, run, n_sublayers) for run in scheme.runs(n_sublayers))


def _run_specs(scheme: Scheme, run: SpecRun, n_sublayers: int) -> Iterator[ResidualSpec]:
    if not run.varying:
        return islice(cycle(run.period), run.stop - run.start)
    kinds = alternating_kinds(2)
    return (scheme.spec(i, n_sublayers, kinds[i % 2]) for i in range(run.start, run.stop))


def _advance(state: StreamState, run: SpecRun, question: _Question, *, variance_needed: bool) -> StreamState:
    """Through one run, in closed form where there is one."""
    if all(spec.profile is ProfileKind.ADMIN and spec.norm_out is not NormKind.NONE for spec in run.period):
        return _advance_profiled(state, run, question)
    normed = any(spec.norm_out is not NormKind.NONE for spec in run.period)
    if run.varying and (normed or variance_needed or run.varying & _SHORTCUT_FIELDS):
        return _walk(state, _run_specs(question.scheme, run, question.n_sublayers), question)
    n_periods, rest = divmod(run.stop - run.start, len(run.period))
    if normed:
        state = _walk(state, run.period, question)  # behind its norm the stream no longer depends on what came before
        again = _walk(replace(state, log_product=0.0), run.period, question)  # one period by itself, never a difference of sums
        if n_periods > 1:
            state = replace(again, log_product=state.log_product + (n_periods - 1) * again.log_product)
    else:
        state = _advance_plain(state, run.period, n_periods, question)
    return _walk(state, run.period[:rest], question)


def _advance_plain(state: StreamState, period: Sequence[ResidualSpec], n_periods: int, question: _Question) -> StreamState:
    """Whole periods without a norm on the stream: gains multiply, and the variance iterates v -> slope v + offset."""
    updates = [question.update(spec, state) for spec in period]
    log_slope, offset = 0.0, 0.0
    for update in updates:
        log_growth = 2.0 * update.log_shortcut + log_one_plus_ratio(update.branch_relative, update.log_shortcut)
        log_slope, offset = log_slope + log_growth, (offset * _exp(log_growth) if offset else 0.0) + update.branch_constant
    per_period = math.fsum(update.log_shortcut for update in updates)
    variance, log_variance = _iterate_affine(state, log_slope, offset, n_periods)
    log_product = state.log_product + n_periods * per_period
    return replace(state, variance=variance, log_variance=log_variance, log_product=log_product)


def _iterate_affine(state: StreamState, log_slope: float, offset: float, times: int) -> tuple[float, float]:
    """The stream's variance and its log after v -> slope v + offset a number of times; infinite where float64 ends."""
    value, exponent = state.variance, times * log_slope
    if offset == 0.0:
        return value * _exp(exponent), state.log_variance + exponent
    if log_slope == 0.0:
        return value + times * offset, state.log_variance + math.log1p(times * offset / value)
    if exponent > _LARGEST_EXPONENT:
        return math.inf, math.inf
    grown = value * math.exp(exponent) + offset * math.expm1(exponent) / math.expm1(log_slope)
    return grown, math.log(grown)


def _exp(exponent: float) -> float:
    """The exponential; infinite where float64 ends."""
    return math.exp(exponent) if exponent <= _LARGEST_EXPONENT else math.inf


def _advance_profiled(state: StreamState, run: SpecRun, question: _Question) -> StreamState:
    """Profiled scales telescope: each gain is ω/ω', with ω'² the variance of the sum."""
    update = question.update(run.period[0], state)
    first = state.after(update)
    summed = update.sum_variance(state.variance)
    later = [question.update(spec, state).added_variance(1.0) for spec in run.period]
    shifted = [*later[1:], later[0]]  # the second sub-layer comes first among the later ones
    cycles, rest = divmod(run.stop - run.start - 1, len(shifted))
    added = cycles * sum(shifted) + sum(shifted[:rest])
    if not math.isfinite(summed + added):
        raise DomainError("the profiled scale is past float64 (1.8e308); take a smaller branch variance or depth")
    log_product = first.log_product - 0.5 * math.log1p(added / summed)
    return replace(first, profile=summed + added, log_product=log_product)


def _walk(state: StreamState, specs: Iterator[ResidualSpec] | Sequence[ResidualSpec], question: _Question) -> StreamState:
    for spec in specs:
        state = state.after(question.update(spec, state))
    return state


@dataclass(frozen=True, slots=True)
class _NormalisedSum:
    """The sum at one output norm, in logs: variance P of the signal, and ratio Q r / P of the noise in the free dimensions."""

    log_signal: float
    log_ratio: float
    free_share: float

    @property
    def log_growth(self) -> float:
        """ln(m / P), m the variance of the sum."""
        return float(np.logaddexp(0.0, self.log_ratio))

    @property
    def relative_fluctuation(self) -> float:
        """D times the variance of |z|²/D, over its squared mean: (4 P Q + 2 Q² r) / m²."""
        noise = self.sine_squared
        return (4 * math.exp(-self.log_growth) * noise + 2 * noise**2) / self.free_share

    @property
    def sine_squared(self) -> float:
        """Of the angle between this sum and the normalised one below."""
        return -math.expm1(-self.log_growth)

    def mean_log_scale(self, width: int) -> float:
        return -0.5 * self.log_signal - 0.5 * self.log_growth + self.relative_fluctuation / (4 * width)

    def log_scale_variance(self, width: int) -> float:
        return self.relative_fluctuation / (4 * width)


def _normalised_sums(trace: ShortcutPropagation, free_share: float) -> list[_NormalisedSum]:
    """Signal and noise at every output norm; sub-layers without one add to the noise of the next."""
    sums = []
    log_signal, log_ratio = math.log(trace.stream_variances[0]), -math.inf
    for log_scale, added, normalised in zip(
        trace.log_shortcut_scales.tolist(), trace.added_variances.tolist(), trace.normalised, strict=True
    ):
        log_signal += 2 * log_scale
        fresh = math.log(added) - log_signal + math.log(free_share) if added > 0 else -math.inf
        log_ratio = float(np.logaddexp(log_ratio, fresh))
        if normalised:
            sums.append(_NormalisedSum(log_signal, log_ratio, free_share))
            log_signal, log_ratio = 0.0, -math.inf
    return sums


def _mean_log_projection(above: _NormalisedSum | None, free: int, width: int) -> float:
    if above is None:
        from scipy.special import digamma  # here: SciPy is not needed for a closed form, and costs a third of a second

        return 0.5 * float(digamma((free - 1) / 2) - digamma(width / 2))
    first, second = above.sine_squared / (free - 1), 3 * above.sine_squared**2 / ((free - 1) * (free + 1))
    return -0.5 * (first + second / 2)


def _log_projection_variance(above: _NormalisedSum | None, free: int, width: int) -> float:
    if above is None:  # what is left of an isotropic gradient's square is Beta-distributed
        from scipy.special import polygamma

        return 0.25 * float(polygamma(1, (free - 1) / 2) - polygamma(1, width / 2))
    return above.sine_squared**2 / (2 * free**2)


def _draw(
    trace: ShortcutPropagation, norm: Normalisation, shape: tuple[int, int], generator: np.random.Generator
) -> FloatArray:
    """Log products of a batch of stacks: forward with fresh noise, backward with exact vector-Jacobian products."""
    x = math.sqrt(trace.stream_variances[0]) * norm(generator.standard_normal(shape))
    sums: list[FloatArray | None] = []
    log_scales = trace.log_shortcut_scales.tolist()
    added_variances = trace.added_variances.tolist()
    for i, (log_scale, added, normalised) in enumerate(zip(log_scales, added_variances, trace.normalised, strict=True)):
        noise = math.sqrt(added) * generator.standard_normal(shape)
        if normalised and log_scale > 0.0:  # N(A x + f) = N(x + f / A), and A J(A z) = J(z): no scale leaves float64
            noise, log_scales[i] = noise / trace.shortcut_scales[i], 0.0
        z = math.exp(log_scales[i]) * x + noise
        sums.append(z if normalised else None)
        x = norm(z) if normalised else z
    gradient, log_norm = _split(generator.standard_normal(shape))
    log_product = np.zeros_like(log_norm)
    for log_scale, each in zip(reversed(log_scales), reversed(sums), strict=True):
        gradient, log_norm = _split(gradient if each is None else norm.vjp(each, gradient))
        log_product += log_norm + log_scale
    return log_product


def _split(gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Unit vectors and the logs of the lengths, so that no depth underflows."""
    largest = np.max(np.abs(gradient), axis=-1, keepdims=True)
    gradient = gradient / largest  # whose square may lie outside float64
    length = np.linalg.norm(gradient, axis=-1, keepdims=True)
    return gradient / length, np.log(length[..., 0]) + np.log(largest[..., 0])
