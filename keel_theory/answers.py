"""The theory's answers as frames: the scale that a depth needs with its price, and the limits with their values.

The functions behind them are in :mod:`keel_theory.design` and :mod:`keel_theory.asymptotics`; claims have frames of their own
(:mod:`keel_theory.claims`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keel_theory.design import (
    aligned_branch_share,
    branch_share,
    smallest_alpha,
    smallest_alpha_law,
    uniform_product,
)

if TYPE_CHECKING:
    import pandas as pd

    from keel_theory.results import Derivation

__all__ = ["DesignAnswer", "LimitTable", "design_answer", "limit_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignAnswer:
    """The smallest shortcut scale that keeps a product over a depth, in a stack whose sub-layers are all alike.

    Attributes:
        n_sublayers: L, attention and FFN counted separately.
        min_gain: product wanted, dimensionless.
        branch_variance: q, dimensionless.
        alpha: the smallest scale; 0 where q is 0 and every scale will do.
        alpha_law: its square-root law.
    """

    n_sublayers: int
    min_gain: float
    branch_variance: float
    alpha: float
    alpha_law: float

    def to_frame(self) -> pd.DataFrame:
        """One row per scale: the smallest one where it is above 0, and L.

        Returns:
            Columns n_sublayers, branch_variance, scale, alpha, product (also the cosine between input and output),
            branch_share (of the output's variance, independent branches) and aligned_branch_share (branches that agree).
        """
        import pandas as pd

        scales = {"smallest": self.alpha, "L": float(self.n_sublayers)}
        rows = [self._row(name, alpha) for name, alpha in scales.items() if alpha > 0]
        return pd.DataFrame(rows)

    def _row(self, name: str, alpha: float) -> dict[str, object]:
        case = (alpha, self.n_sublayers, self.branch_variance)
        return {
            "n_sublayers": self.n_sublayers,
            "branch_variance": self.branch_variance,
            "scale": name,
            "alpha": alpha,
            "product": float(uniform_product(*case)),
            "branch_share": float(branch_share(*case)),
            "aligned_branch_share": aligned_branch_share(*case),
        }


def design_answer(n_sublayers: int, min_gain: float, branch_variance: float = 1.0) -> DesignAnswer:
    """Answer the design question.

    Status: exact at infinite width.   Assumes: every sub-layer alike, with an output norm; unit-RMS stream; branches
    uncorrelated with it; no rule for the first block.

    Args:
        n_sublayers: L >= 1.
        min_gain: product to keep, dimensionless, in (0, 1).
        branch_variance: q >= 0, dimensionless.

    Returns:
        The answer.

    Example:
        >>> round(design_answer(1024, 0.9).alpha, 2)
        69.71
        >>> design_answer(1024, 0.9).to_frame()["product"].round(4).tolist()
        [0.9, 0.9995]
    """
    return DesignAnswer(
        n_sublayers=n_sublayers,
        min_gain=min_gain,
        branch_variance=branch_variance,
        alpha=float(smallest_alpha(min_gain, n_sublayers, branch_variance)),
        alpha_law=float(smallest_alpha_law(min_gain, n_sublayers, branch_variance)),
    )


@dataclass(frozen=True, slots=True)
class LimitTable:
    """All limits with their proofs.

    Attributes:
        derivations: one per limit.
    """

    derivations: tuple[Derivation, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per limit.

        Returns:
            Columns name, title, assumptions, n_steps, result (text) and value (the result's right side, text).
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "name": each.id,
                "title": each.title,
                "assumptions": " ".join(each.assumptions),
                "n_steps": len(each.steps),
                "result": str(each.result),
                "value": str(each.result.rhs),
            }
            for each in self.derivations
        )


def limit_table() -> LimitTable:
    """All limits; loads SymPy.

    Status: exact; each derivation holds its proof.

    Returns:
        The table, in the order of ``keel_theory.asymptotics.LIMITS``.

    Example:
        >>> limit_table().to_frame().set_index("name").loc["limit-critical", "value"]
        'exp(-q/(2*c**2))'
    """
    from keel_theory.asymptotics import limits

    return LimitTable(limits())
