"""Every claim decided three ways: derived, by an independent number, and measured on real models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keel_theory.claims import CLAIMS, ClaimResult, get_claim
from probes.claim_measurements import Measurement, measure_claim

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Verification", "as_markdown", "as_row", "theory_cells", "verifications_frame", "verify_claims"]


@dataclass(frozen=True, slots=True)
class Verification:
    """One claim, decided by theory and measured.

    Attributes:
        result: what theory says.
        measurement: what real models say.
    """

    result: ClaimResult
    measurement: Measurement

    @property
    def passed(self) -> bool:
        """Whether independent number and measurement confirm the derived form and contradict what they have to contradict.

        A refuted claim, or the rival of one that holds, is moved to the measurement's width and depth as the derived form is.
        """
        return self.result.passed and self.measurement.agrees and self._excludes

    @property
    def _excludes(self) -> bool:
        excluded = self.result.excluded
        if excluded is None:
            return True
        return self.measurement.excludes(excluded + self.measurement.predicted - self.result.evidence.derived)

    def to_frame(self) -> pd.DataFrame:
        """One row with everything about the claim."""
        import pandas as pd

        return pd.DataFrame([as_row(self)])


def verify_claims(ids: Iterable[str] = CLAIMS, *, progress: Callable[[str], None] = lambda _: None) -> tuple[Verification, ...]:
    """Check and measure claims.

    Args:
        ids: which; all of them by default. An unknown one is a ClaimError before anything runs; one named twice runs once.
        progress: called with each claim's id before it is checked.

    Returns:
        One verification per claim, in the order given.

    Example:
        >>> (done,) = verify_claims(["9-radial"])
        >>> done.passed
        True
    """
    done = []
    for claim in [get_claim(claim_id) for claim_id in dict.fromkeys(ids)]:
        progress(claim.id)
        done.append(Verification(claim.run(), measure_claim(claim.id)))
    return tuple(done)


def as_row(verification: Verification) -> dict[str, Any]:
    """Everything about one claim as a flat record."""
    result, measurement = verification.result, verification.measurement
    claim, evidence = result.claim, result.evidence
    return {
        "id": claim.id,
        "equation": claim.equation,
        "statement": claim.statement,
        "assumes": claim.assumes,
        "quantity": evidence.quantity,
        "claimed": evidence.claimed,
        "formula": evidence.formula,
        "derived": evidence.derived,
        "tolerance": claim.tolerance,
        "numeric": evidence.numeric,
        "numeric_error": evidence.numeric_error,
        "numeric_tolerance": evidence.numeric_tolerance,
        "excluded": result.excluded,
        "measured": measurement.value,
        "measured_error": measurement.error,
        "measured_tolerance": measurement.tolerance,
        "measured_predicted": measurement.predicted,
        "own_branches": measurement.own,
        "setting": measurement.setting,
        "verdict": result.verdict.value,
        "expected": claim.expected.value,
        "passed": verification.passed,
    }


def verifications_frame(verifications: Iterable[Verification]) -> pd.DataFrame:
    """Verifications as a frame.

    Returns:
        The columns of :func:`as_row`, one row per claim.
    """
    import pandas as pd

    return pd.DataFrame([as_row(each) for each in verifications])


def as_markdown(verifications: Iterable[Verification]) -> str:
    """The claims as one Markdown table.

    Returns:
        A heading line, a rule, and one line per claim, without a final newline.
    """
    heading = [
        "claim",
        "Eq.",
        "statement",
        "quantity",
        "claimed",
        "derived",
        "numeric",
        "measured",
        "predicted there",
        "own branches",
        "verdict",
    ]
    lines = [heading, ["---"] * len(heading)]
    for verification in verifications:
        row = as_row(verification)
        lines.append(
            [
                *theory_cells(verification.result),
                with_error(row["numeric"], row["numeric_error"]),
                with_error(row["measured"], row["measured_error"]),
                number(row["measured_predicted"]),
                number(row["own_branches"]),
                f"{row['verdict']}{'' if row['passed'] else ' (NOT AS EXPECTED)'}",
            ]
        )
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def theory_cells(result: ClaimResult) -> list[str]:
    """The cells of :func:`as_markdown` that need no measurement: claim, equation, statement, quantity, claimed, derived."""
    claim, evidence = result.claim, result.evidence
    derived = number(evidence.derived)
    return [
        f"`{claim.id}`",
        claim.equation,
        f"{claim.statement}. *Assumes: {claim.assumes}.*",
        evidence.quantity,
        number(evidence.claimed),
        derived if evidence.formula == "0" else f"{derived}: {evidence.formula}",
    ]


def number(value: float) -> str:
    """Five significant digits; round-off is zero.

    Example:
        >>> number(0.9921875), number(3e-17), number(-8.7070605999)
        ('0.99219', '0', '-8.7071')
    """
    return "0" if abs(value) < 1e-11 else f"{value:.5g}"


def with_error(value: float, error: float) -> str:
    """A value with its standard error, both to the error's second digit.

    Example:
        >>> with_error(-9.604612, 0.01234), with_error(64.0, 0.0), with_error(64.8, 12.3)
        ('-9.605 ± 0.012', '64', '65 ± 12')
    """
    if error < 1e-11:
        return number(value)
    import math

    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"
