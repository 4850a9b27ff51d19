r"""The recursion along depth that every forward number comes from: what is carried from one sub-layer to the next.

* v, the variance of the stream: γ_out² behind an output norm, A² v + B² q' without one;
* ω², for a scheme that profiles its shortcut scale (Admin): ω² of the next profiled sub-layer is the variance of this one's
  sum, whatever its branch's variance is; the first keeps the scale of its spec, one.

Source: Liu et al. 2020, arXiv:2004.08249 (the profile).   Status: exact as D grows.
Assumes: branches uncorrelated with the stream and with each other, eps = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keel_theory.spec import ProfileKind, ResidualSpec
from keel_theory.sublayer import ScalarUpdate

__all__ = ["StreamState"]


@dataclass(frozen=True, slots=True)
class StreamState:
    """What is carried from sub-layer to sub-layer.

    Attributes:
        variance: of the stream, infinite where it is past float64.
        profile: ω² of the next profiled sub-layer; None before the first sub-layer.
        log_product: natural log of the shortcut gains so far, nats.
        log_variance: natural log of the variance, which tells 1 + 1e-20 from 1.

    Example:
        >>> from keel_theory.schemes import get_scheme
        >>> from keel_theory.sublayer import scalar_update
        >>> state = StreamState.entering(2.0)
        >>> for spec in get_scheme("admin").specs(3):
        ...     state = state.after(state.resolved(spec, scalar_update(spec)))
        >>> round(state.profile, 12) # v_0 (1 + q), then q more from each sub-layer
        6.0
    """

    variance: float
    log_variance: float
    profile: float | None = None
    log_product: float = 0.0

    @classmethod
    def entering(cls, variance: float) -> StreamState:
        """The state of a stream of this variance before the first sub-layer."""
        return cls(variance=variance, log_variance=math.log(variance))

    def resolved(self, spec: ResidualSpec, update: ScalarUpdate) -> ScalarUpdate:
        """The spec's scalars with the profiled shortcut scale, where the spec asks for one."""
        if spec.profile is ProfileKind.NONE or self.profile is None:
            return update
        return update.with_shortcut(math.sqrt(self.profile))

    def after(self, update: ScalarUpdate) -> StreamState:
        """The state behind a sub-layer with these scalars."""
        return StreamState(
            variance=update.next_variance(self.variance),
            log_variance=update.next_log_variance(self.variance, self.log_variance),
            profile=update.sum_variance(self.variance),
            log_product=self.log_product + update.log_gain(self.variance, self.log_variance),
        )
