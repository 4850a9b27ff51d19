"""What the theory returns: frozen results with ``to_frame()``, and derivations as lists of checked steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from keel_theory.layer_norm import FloatArray

__all__ = [
    "Derivation",
    "FiniteWidthProduct",
    "MonteCarloProduct",
    "ShortcutPropagation",
    "Step",
    "StepKind",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutPropagation:
    """The shortcut path of a whole stack, sub-layer by sub-layer.

    Attributes:
        scheme: name.
        n_sublayers: attention and FFN counted separately.
        branch_variance: q.
        log_gains: natural log of each sub-layer's shortcut gain, nats, shape (n_sublayers,).
        shortcut_scales: A of each sub-layer, profiled where the scheme profiles, shape (n_sublayers,).
        log_shortcut_scales: natural log of A, which may lie below the smallest float64, shape (n_sublayers,).
        added_variances: variance that each branch adds to the sum, shape (n_sublayers,).
        stream_variances: variance of the stream before each sub-layer and after the last, shape (n_sublayers + 1,).
        normalised: whether the sum of each sub-layer is normalised, shape (n_sublayers,).
    """

    scheme: str
    n_sublayers: int
    branch_variance: float
    log_gains: FloatArray
    shortcut_scales: FloatArray
    log_shortcut_scales: FloatArray
    added_variances: FloatArray
    stream_variances: FloatArray
    normalised: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def log_product(self) -> float:
        """Natural log of the product of all gains, summed without round-off."""
        return math.fsum(self.log_gains)

    @property
    def backward_log_gains(self) -> FloatArray:
        """Natural log of the gain from the stack's output back to the stream before each sub-layer, nats."""
        total: FloatArray = np.cumsum(self.log_gains[::-1])[::-1]
        return total

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows, one per sub-layer and metric."""
        import pandas as pd

        columns = {
            "log gain": (self.log_gains, "nats"),
            "backward log gain": (self.backward_log_gains, "nats"),
            "shortcut scale": (self.shortcut_scales, "dimensionless"),
            "added variance": (self.added_variances, "dimensionless"),
            "stream variance": (self.stream_variances[:-1], "dimensionless"),
        }
        frames = (
            pd.DataFrame({"sublayer": np.arange(self.n_sublayers), "metric": metric, "value": values, "unit": unit})
            for metric, (values, unit) in columns.items()
        )
        frame = pd.concat(frames, ignore_index=True)
        frame.insert(0, "scheme", self.scheme)
        frame.insert(1, "n_sublayers", self.n_sublayers)
        frame.insert(2, "branch_variance", self.branch_variance)
        return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteWidthProduct:
    """Mean and spread of the log of a shortcut product over random branches, predicted at a finite width.

    Attributes:
        mean: nats, to first order in 1/width.
        standard_deviation: nats, to leading order.
    """

    mean: float
    standard_deviation: float


@dataclass(frozen=True, kw_only=True)
class MonteCarloProduct:
    """Shortcut products measured with exact vector-Jacobian products of random stacks.

    Attributes:
        scheme: name.
        n_sublayers: attention and FFN counted separately.
        width: D.
        branch_variance: q.
        seed: of the draws.
        log_products: log of (gradient norm before the first sub-layer / after the last), one per draw, nats, shape (n_draws,).
        predicted: what the theory says at this width.
        closed_form: log of the product at infinite width, nats.
    """

    scheme: str
    n_sublayers: int
    width: int
    branch_variance: float
    seed: int
    log_products: FloatArray
    predicted: FiniteWidthProduct
    closed_form: float

    @property
    def n_draws(self) -> int:
        """Number of draws."""
        return self.log_products.size

    @cached_property
    def mean(self) -> float:
        """Mean log product, nats."""
        return float(self.log_products.mean())

    @cached_property
    def standard_deviation(self) -> float:
        """Standard deviation over draws, nats."""
        return float(self.log_products.std(ddof=1))

    @property
    def standard_error(self) -> float:
        """Of the mean, nats."""
        return self.standard_deviation / math.sqrt(self.n_draws)

    def deviation(self, log_product: float) -> float:
        """(mean - a claimed log product) in standard errors; 0 or infinite where the draws do not differ at all.

        Args:
            log_product: the claim, nats.

        Returns:
            Standard errors, signed.
        """
        difference = self.mean - log_product
        round_off = 1e-14 * self.n_sublayers
        if self.standard_error > round_off:
            return difference / self.standard_error
        return 0.0 if abs(difference) <= 10 * round_off else math.copysign(math.inf, difference)

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows, one per draw."""
        import pandas as pd

        return pd.DataFrame(
            {
                "scheme": self.scheme,
                "n_sublayers": self.n_sublayers,
                "width": self.width,
                "branch_variance": self.branch_variance,
                "seed": self.seed,
                "draw": np.arange(self.n_draws),
                "metric": "log shortcut product",
                "value": self.log_products,
                "unit": "nats",
            }
        )


class StepKind(str, Enum):
    """What a step of a derivation claims."""

    DEFINITION = "definition"
    """The left side is named; nothing to prove."""
    ASSUMPTION = "assumption"
    """The right side replaces the left under a stated assumption; it is not an identity."""
    EXACT = "exact"
    """Both sides are equal for all values of the symbols."""
    BOUND = "bound"
    """One side is at most the other for all values of the symbols."""
    LIMIT = "limit"
    """The left side is a limit, the right its value."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a derivation.

    Attributes:
        text: what is done and why.
        expression: a SymPy relation or expression, as it is read.
        kind: what the step claims.
        proof: what a machine can check in its place: the same relation in components at a small width, or the relations
            that it follows from, all of them; None where the expression is itself checkable.
    """

    text: str
    expression: Any
    kind: StepKind = StepKind.EXACT
    proof: Any = None

    @property
    def checkable(self) -> tuple[Any, ...]:
        """The relations that a machine checks."""
        if self.proof is None:
            return (self.expression,)
        return self.proof if isinstance(self.proof, tuple) else (self.proof,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """An equation with its proof.

    Attributes:
        id: the paper's number, for example ``19``, or a name for a limit.
        title: what it says.
        assumptions: what it needs, one sentence each.
        steps: the proof, in order.
        result: the SymPy relation proved.
        note: what a reader has to know about the number or the name; empty where there is nothing.
    """

    id: str
    title: str
    assumptions: tuple[str, ...]
    steps: tuple[Step, ...]
    result: Any
    note: str = ""

    def to_text(self) -> str:
        """The derivation as plain text."""
        return self._written(str, str)

    def to_latex(self) -> str:
        """The derivation as a LaTeX fragment in ASCII: sentences with formulas in dollars, one display formula per step."""
        from sympy import latex

        from keel_theory.tex_text import tex_text

        return self._written(tex_text, lambda expression: f"\\[{latex(expression)}\\]")

    def to_frame(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        rows = [(self.id, i, step.kind.value, step.text, str(step.expression)) for i, step in enumerate(self.steps, 1)]
        return pd.DataFrame(rows, columns=["id", "step", "kind", "text", "expression"])

    def _written(self, say: Callable[[str], str], show: Callable[[Any], str]) -> str:
        lines = [say(f"Eq. ({self.id}): {self.title}" if self.id[:1].isdigit() else self.title)]
        lines += [say(self.note)] if self.note else []
        lines += [say(f"Assumes: {assumption}") for assumption in self.assumptions]
        for i, step in enumerate(self.steps, 1):
            lines += [f"{i}. {say(step.text)} [{step.kind.value}]", f"   {show(step.expression)}"]
        return "\n".join([*lines, "Result:", f"   {show(self.result)}"])
