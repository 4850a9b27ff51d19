"""The claims by theory alone, and that a wrong claim would be noticed."""

import subprocess
import sys
from dataclasses import replace

import pytest

from keel_theory.claims import CLAIMS, Claim, ClaimError, Verdict, get_claim


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_claim_is_as_expected(claim: Claim) -> None:
    result = claim.run()
    assert result.evidence.consistent, result.evidence
    assert result.verdict is claim.expected, result.evidence


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_wrong_derived_value_would_be_noticed(claim: Claim) -> None:
    """The independent number decides: move the derived value by what the claim is about and the claim fails."""
    evidence = claim.run().evidence
    moved = replace(evidence, derived=evidence.derived + 0.7 * max(abs(evidence.derived), 1.0))
    assert not replace(claim, check=lambda: moved).run().passed


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_the_opposite_expectation_fails(claim: Claim) -> None:
    opposite = Verdict.REFUTED if claim.expected is Verdict.HOLDS else Verdict.HOLDS
    assert not replace(claim, expected=opposite).run().passed


def test_the_independent_number_separates_right_and_wrong_forms_of_eq_15() -> None:
    right, wrong = get_claim("15-product").run().evidence, get_claim("15-wrong-base").run().evidence
    assert abs(right.numeric - right.claimed) < 3 * right.numeric_error
    assert abs(wrong.numeric - wrong.claimed) > 1000 * wrong.numeric_error


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_claim_says_what_it_is(claim: Claim) -> None:
    assert claim.statement
    assert claim.assumes
    assert not claim.statement.endswith(".")
    assert claim.id.startswith(claim.equation.split("-")[-1]) or claim.equation in ("-", "24-26")


def test_the_wrong_forms_in_circulation_are_there() -> None:
    assert {id for id, claim in CLAIMS.items() if "in circulation" in claim.statement} == {
        "15-wrong-base",
        "19-wrong-no-power",
        "19-wrong-limit",
    }


def test_unknown_claim() -> None:
    with pytest.raises(ClaimError, match="unknown claim '99'; known: 1-carry"):
        get_claim("99")


def test_reading_the_claims_loads_neither_torch_nor_sympy() -> None:
    code = "import sys, keel_theory.claims; print([m for m in ('torch', 'sympy', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
