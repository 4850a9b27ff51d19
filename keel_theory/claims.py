"""The paper's claims about gradients and residual streams as data, each with the check that decides it.

Only what a machine can check is here: equations and inequalities, not benchmarks. A claim is **expected** to hold or to be
refuted: the wrong forms in circulation, and readings that go beyond an equation's assumptions, are claims too, and a run in
which one of them held would be as wrong as one in which Eq. (15) failed. A claim is refuted only where the numbers contradict
it, by five standard errors; one that holds has to exclude a rival, so that agreement means something. Three numbers stand
beside each claim: the derived value, an independent number, and a value measured on a real model
(``probes/claim_measurements.py``; not part of this package, which never imports torch).

Source: Chen & Wei 2026, arXiv:2601.19895 (v2). Equation numbers are the paper's; ``-`` marks what is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from keel_theory import claim_checks as checks
from keel_theory.claim_checks import Evidence
from keel_theory.errors import TheoryError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CLAIMS", "Claim", "ClaimError", "ClaimResult", "Verdict", "claims_frame", "get_claim"]


class ClaimError(TheoryError):
    """A claim that is not in the list."""


class Verdict(str, Enum):
    """What a check decides."""

    HOLDS = "holds"
    REFUTED = "refuted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement.

    Attributes:
        id: short name, starting with the equation's number.
        equation: number in the paper, ``-`` for none.
        statement: what is claimed.
        assumes: under which assumptions; q is the variance of a branch for an input of unit variance.
        expected: whether the statement should hold.
        tolerance: how far the claimed value may be from the derived one, relative to the larger of them and 1.
        check: gives the evidence.
    """

    id: str
    equation: str
    statement: str
    assumes: str
    check: Callable[[], Evidence]
    expected: Verdict = Verdict.HOLDS
    tolerance: float = 1e-9

    def run(self) -> ClaimResult:
        """Check the claim by theory: the derived value against the claimed one, and the independent number against both.

        Returns:
            The evidence and the verdict.

        Example:
            >>> get_claim("9-scale").run().passed
            True
        """
        evidence = self.check()
        agrees = math.isclose(evidence.claimed, evidence.derived, rel_tol=self.tolerance, abs_tol=self.tolerance)
        return ClaimResult(claim=self, evidence=evidence, verdict=Verdict.HOLDS if agrees else Verdict.REFUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """A claim and what its check has decided."""

    claim: Claim
    evidence: Evidence
    verdict: Verdict

    @property
    def excluded(self) -> float | None:
        """The value that the numbers have to contradict: a refuted claim's own, or the rival of one that holds."""
        return self.evidence.claimed if self.claim.expected is Verdict.REFUTED else self.evidence.rival

    @property
    def passed(self) -> bool:
        """Whether the verdict is the expected one, and the independent number confirms the derived value and no other."""
        excluded = self.excluded
        decided = excluded is None or self.evidence.excludes(excluded)
        return self.verdict is self.claim.expected and self.evidence.consistent and decided

    def to_frame(self) -> pd.DataFrame:
        """One row per number, with the claim's id and the verdict."""
        frame = self.evidence.to_frame()
        frame.insert(0, "claim", self.claim.id)
        return frame.assign(verdict=self.verdict.value, expected=self.claim.expected.value, passed=self.passed)


_EQUAL = "equal entries in each weight (g is their common size, and so also ||weight||_inf)"
_NOISE = "q = 1, branches uncorrelated with the stream, unit weights, eps = 0, large width"
_ONE_NORM = "q = 1, x and F uncorrelated, eps = 0, large width"
_SHORTCUT = f"branches held constant; {_NOISE}"
_INDEPENDENT = f"branches independent of each other; {_NOISE}"


def _claim(
    id: str, equation: str, statement: str, assumes: str, check: Callable[[], Evidence], tolerance: float = 1e-9
) -> Claim:
    return Claim(id=id, equation=equation, statement=statement, assumes=assumes, check=check, tolerance=tolerance)


def _wrong(id: str, equation: str, statement: str, assumes: str, check: Callable[[], Evidence]) -> Claim:
    return Claim(id=id, equation=equation, statement=statement, assumes=assumes, check=check, expected=Verdict.REFUTED)


_LIST: tuple[Claim, ...] = (
    _claim("1-carry", "1", "Highway's shortcut keeps (1 - T)^L", f"constant gate; {_SHORTCUT}", checks.highway_product),
    _claim(
        "1-fading-stream",
        "1",
        "a convex mix of variance-keeping parts shrinks the stream: v_L = v_0 (C^2 + T^2)^L",
        f"constant gate; {_INDEPENDENT}",
        checks.highway_variance_decay,
    ),
    _claim("5-alpha", "5", "DeepNorm's a = L^(1/4) is DeepNet's (2M)^(1/4)", "L = 2M", checks.deepnorm_alpha),
    _wrong("5-beta", "5", "DeepNorm's b = L^(-1/4) is DeepNet's (8M)^(-1/4)", "L = 2M", checks.deepnorm_beta),
    _claim(
        "5-initialised",
        "5",
        "DeepNorm keeps its gradient at initialisation: (1 + L^(-3/2))^(-L/2), which tends to 1",
        f"two matrices of each branch scaled by b, so q = b^4 = 1/L; {_SHORTCUT}",
        checks.deepnorm_at_initialisation,
    ),
    _claim(
        "5-drifted",
        "5",
        "once its branches have grown to variance 1, DeepNorm's gradient falls like exp(-sqrt(L)/2)",
        _SHORTCUT,
        checks.deepnorm_drifted,
    ),
    _claim("6-shortcut", "6", "Pre-LN's shortcut loses nothing", "none", checks.pre_ln_product),
    _claim(
        "6-growth", "6", "the variance of a Pre-LN stream grows linearly, v_L = v_0 + q L", _INDEPENDENT, checks.pre_ln_growth
    ),
    _claim(
        "6-fading", "6", "a Pre-LN sub-layer writes a share 1/(l + 2) of its own output", _INDEPENDENT, checks.pre_ln_fading
    ),
    _claim(
        "8-reduces",
        "8",
        "Keel with a = 1 and no inner norm is Post-LN",
        "none: an identity; away from the first block",
        checks.keel_reduces_to_post_ln,
        1e-12,
    ),
    _claim("9-scale", "9", "LN(c x) = LN(x) for c > 0", "eps = 0", checks.scale_invariance, 1e-12),
    _claim("9-radial", "9", "LN's Jacobian annihilates its input: J x = 0", "eps = 0", checks.radial_null_direction, 1e-12),
    _claim("13-chain", "13", "dx'/dx = J_LN(x + F(x)) (I + dF/dx)", "none: an identity", checks.post_ln_chain_rule, 1e-12),
    _wrong(
        "13-neglect",
        "13",
        "the branch's part of the Post-LN Jacobian may be neglected beside the shortcut's",
        f"linear branch; {_NOISE}",
        checks.branch_path_size,
    ),
    _claim(
        "14-gain",
        "14",
        "one Post-LN shortcut has gain g_l / (sqrt(2) g_{l-1})",
        f"{_EQUAL}; branch and stream of equal variance (q = 1 without an inner norm), uncorrelated, eps = 0, large width",
        checks.post_ln_gain,
    ),
    _claim(
        "14-rms",
        "14",
        "a random gradient's mean gain is g_l / (sqrt(2) g_{l-1}) with g the root mean square of the weight's entries",
        f"unequal entries in g_l; {_ONE_NORM}",
        checks.post_ln_gain_rms,
    ),
    _claim(
        "14-largest",
        "14",
        "the spectral norm of one Post-LN shortcut is g_l / (sqrt(2) g_{l-1}) with g = ||weight||_inf: no gradient gains more",
        f"equal entries in g_{{l-1}}, unequal ones in g_l; {_ONE_NORM}",
        checks.post_ln_gain_largest,
    ),
    _wrong(
        "14-bound",
        "14",
        "as a strict bound: no gradient gains more than g_l / (sqrt(2) g_{l-1}) with g = ||weight||_inf, whatever the weights",
        f"unequal entries in g_{{l-1}} as well; {_ONE_NORM}",
        checks.post_ln_gain_bound,
    ),
    _claim("15-product", "15", "Post-LN's shortcut product is 1 / 2^(L/2)", _SHORTCUT, checks.post_ln_product),
    _wrong(
        "15-wrong-base",
        "15",
        "in circulation: Post-LN's shortcut product is 1 / L^(L/2)",
        _SHORTCUT,
        checks.post_ln_product_wrong_base,
    ),
    _wrong(
        "15-full-gradient",
        "15",
        "Post-LN's whole gradient falls like 1 / 2^(L/2) at initialisation",
        f"linear branches, their paths included; {_INDEPENDENT}",
        checks.post_ln_full_gradient,
    ),
    _claim(
        "18-gain",
        "18",
        "one Keel shortcut has gain g_{l,1} a / sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2)",
        f"{_EQUAL}; {_ONE_NORM}",
        checks.keel_gain,
    ),
    _claim(
        "18-rms",
        "18",
        "a random gradient's mean gain is that of Eq. 18 with g the root mean square of the weight's entries",
        f"unequal entries in g_{{l,1}} and g_{{l,2}}; {_ONE_NORM}",
        checks.keel_gain_rms,
    ),
    _claim(
        "18-largest",
        "18",
        "the spectral norm of one Keel shortcut is g_{l,1} a / sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2) with g = ||weight||_inf: no "
        "gradient gains more",
        f"equal entries in g_{{l-1,1}} and g_{{l,2}}, unequal ones in g_{{l,1}}; {_ONE_NORM}",
        checks.keel_gain_largest,
    ),
    _wrong(
        "18-bound",
        "18",
        "as a strict bound: no gradient gains more than Eq. 18 says with g = ||weight||_inf, whatever the weights",
        f"unequal entries in every weight; {_ONE_NORM}",
        checks.keel_gain_bound,
    ),
    _claim(
        "19-product",
        "19",
        "with a = L the product is (1 + 1/L^2)^(-L/2)",
        f"no rule for the first block; {_SHORTCUT}",
        checks.keel_product,
    ),
    _claim(
        "19-limit", "19", "with a = L the product tends to 1", f"no rule for the first block; {_SHORTCUT}", checks.keel_limit
    ),
    _claim(
        "19-rate",
        "19",
        "with a = L the product is 1 - 1/(2L) + O(1/L^2)",
        f"no rule for the first block; {_SHORTCUT}",
        checks.keel_rate,
    ),
    _wrong(
        "19-wrong-no-power",
        "19",
        "in circulation: the product is a / sqrt(a^2 + 1), without the power L",
        f"a = L; {_SHORTCUT}",
        checks.keel_factor_for_product,
    ),
    _wrong(
        "19-wrong-limit",
        "19",
        "in circulation: the product tends to 1 because a / sqrt(a^2 + 1) does",
        f"a = sqrt(L); {_SHORTCUT}",
        checks.keel_limit_without_power,
    ),
    _claim(
        "19-first-block",
        "19",
        "with the paper's rules for the first block the product from the embedding on tends to 1 / sqrt(v_0 + 2 q), the first "
        "block's factor: a loss by the convention of unit variances",
        f"embedding of variance v_0 = 1; {_SHORTCUT}",
        checks.keel_first_block,
    ),
    _claim(
        "19-first-block-initial",
        "19",
        "with the paper's rules for the first block the product from the embedding on tends to 1 / sqrt(v_0 + 2 q), the first "
        "block's factor: a gain at the paper's initialisation",
        f"embedding of variance v_0 = 0.02^2; branches held constant; {_NOISE.replace('q = 1', 'q = 0.04')}",
        checks.keel_first_block_initial,
    ),
    _claim(
        "19-later-blocks",
        "19",
        "with the paper's rules for the first block the product from the second block on tends to 1",
        _SHORTCUT,
        checks.keel_after_first_block,
    ),
    _claim(
        "24-26-shortcut",
        "24-26",
        "the attempts have one shortcut: they differ in what the branch reads",
        _SHORTCUT,
        checks.attempts_share_the_shortcut,
    ),
    _claim(
        "26-merge",
        "26",
        "attempt 3's b merged into the inner norm's weight gives Keel",
        "none: an identity; away from the first block",
        checks.input_gain_merges,
        1e-12,
    ),
    _claim(
        "27-branch-gain",
        "27",
        "the branch of Keel has gain g_{l,1} g_{l,2} |dF| / (g_{l-1,1} sqrt(g_{l-1,1}^2 a^2 + g_{l,2}^2))",
        f"{_EQUAL}; dF acts alike on all directions; {_ONE_NORM}",
        checks.keel_branch_gain,
    ),
    _claim(
        "27-depth",
        "27",
        "with a = L the gain through one branch falls like 1/L",
        f"|dF| = 1; {_NOISE}",
        checks.keel_branch_gain_depth,
    ),
    _claim(
        "34-held-target",
        "31-34",
        "x' = x + G(x) Wo^T is one gradient step on -<x Wo, G(x)>",
        "G(x) held constant when the gradient is taken",
        checks.update_is_held_gradient,
    ),
    _wrong(
        "34-full-gradient",
        "31-34",
        "x' = x + G(x) Wo^T is one gradient step on -<x Wo, G(x)> as a function of x",
        "G(x) differentiated as well; random linear branch, large width",
        checks.update_is_full_gradient,
    ),
    _claim(
        "admin-product",
        "-",
        "Admin's shortcut product at initialisation is 1 / sqrt(1 + q L)",
        f"scales profiled; {_SHORTCUT}",
        checks.admin_product,
    ),
    _claim(
        "layernorm-scaling",
        "-",
        "LayerNorm Scaling's stream grows like a logarithm, v = v_0 + 2 q (1 + 1/2 + ... + 1/M) over M blocks",
        f"F homogeneous of degree one; {_INDEPENDENT}",
        checks.layernorm_scaling_growth,
    ),
    _claim(
        "cosine",
        "-",
        "the shortcut product is also the cosine between the stack's input and its output",
        f"every sub-layer has an output norm, no gate, no rule for the first block, input of variance 1; {_INDEPENDENT}",
        checks.product_is_cosine,
    ),
    _wrong(
        "cosine-pre-ln",
        "-",
        "the shortcut product is the cosine between input and output of a Pre-LN stack too",
        _INDEPENDENT,
        checks.pre_ln_cosine,
    ),
    _wrong("alpha-needed", "-", "the shortcut needs a = L to keep 0.9 of its gradient", _SHORTCUT, checks.alpha_needed),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.id: claim for claim in _LIST})


def get_claim(claim_id: str) -> Claim:
    """The claim of that id.

    Args:
        claim_id: a key of :data:`CLAIMS`.

    Returns:
        The claim.

    Raises:
        ClaimError: if there is none; the message lists the known ids.

    Example:
        >>> get_claim("15-product").statement
        "Post-LN's shortcut product is 1 / 2^(L/2)"
    """
    if claim_id not in CLAIMS:
        raise ClaimError(f"unknown claim '{claim_id}'; known: {', '.join(CLAIMS)}")
    return CLAIMS[claim_id]


def claims_frame() -> pd.DataFrame:
    """The statements as a frame, unchecked: one row per claim.

    Returns:
        Columns id, equation, statement, assumes, expected, tolerance.

    Example:
        >>> claims_frame().set_index("id").loc["15-wrong-base", "expected"]
        'refuted'
    """
    import pandas as pd

    names = ("id", "equation", "statement", "assumes", "tolerance")
    rows = [{name: getattr(claim, name) for name in names} | {"expected": claim.expected.value} for claim in CLAIMS.values()]
    return pd.DataFrame(rows)
