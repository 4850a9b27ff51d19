"""The claims by theory alone, and that a wrong claim would be noticed."""

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from keel_theory import variance
from keel_theory.claim_checks import Evidence
from keel_theory.claims import CLAIMS, Claim, ClaimError, ClaimResult, Verdict, claims_frame, get_claim
from keel_theory.spec import ResidualSpec
from keel_theory.sublayer import ScalarUpdate, scalar_update


@cache
def _run(claim: Claim) -> ClaimResult:
    return claim.run()


def _passes(result: ClaimResult, **changes: float) -> bool:
    return replace(result, evidence=replace(result.evidence, **changes)).passed


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_claim_is_as_expected(claim: Claim) -> None:
    result = _run(claim)
    assert result.evidence.consistent, result.evidence
    assert result.verdict is claim.expected, result.evidence
    assert result.passed, result.evidence


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_an_independent_number_that_is_off_fails_the_claim(claim: Claim, side: int) -> None:
    """Just outside the allowed interval fails, well inside passes: neither wider nor narrower than three standard errors."""
    evidence = _run(claim).evidence
    outside = 3.1 * evidence.numeric_error + 1.1 * evidence.numeric_tolerance
    inside = 2.9 * evidence.numeric_error + 0.9 * evidence.numeric_tolerance
    assert not _passes(_run(claim), numeric=evidence.derived + side * outside)
    assert replace(evidence, numeric=evidence.derived + side * inside).consistent


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_the_check_can_tell_the_claim_from_what_is_wrong(claim: Claim) -> None:
    """The whole allowed interval around the derived value is clear of the value to be excluded; an identity is exact."""
    result = _run(claim)
    evidence = result.evidence
    allowed = 3 * evidence.numeric_error + evidence.numeric_tolerance
    if result.excluded is None:
        assert allowed <= 1e-9
        assert evidence.claimed in (0.0, 1.0)
    else:
        assert allowed < 0.5 * abs(evidence.derived - result.excluded)
        assert not _passes(result, numeric=result.excluded)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_wrong_derived_value_fails_a_claim_that_holds(claim: Claim) -> None:
    evidence = _run(claim).evidence
    moved = replace(evidence, derived=evidence.derived + 1e-6 * max(abs(evidence.derived), 1.0))
    verdict = replace(claim, check=lambda: moved).run().verdict
    assert verdict is Verdict.REFUTED


def _wrong_claim(**values: float) -> Claim:
    evidence = Evidence(quantity="x", claimed=1.0, formula="2", derived=2.0, **values)
    return replace(CLAIMS["15-wrong-base"], check=lambda: evidence)


@pytest.mark.parametrize(
    ("numeric", "error", "passed"), [(2.0, 0.19, True), (2.0, 0.21, False), (1.5, 0.2, False), (1.0, 0.4, False)]
)
def test_a_refutation_needs_a_number_that_contradicts_the_claim(numeric: float, error: float, passed: bool) -> None:
    result = _wrong_claim(numeric=numeric, numeric_error=error).run()
    assert result.verdict is Verdict.REFUTED
    assert result.passed is passed


def test_ignoring_the_input_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(spec: ResidualSpec, **values: object) -> ScalarUpdate:
        return scalar_update(replace(spec, input_scale=1.0), **values)

    monkeypatch.setattr(variance, "scalar_update", blind)
    result = get_claim("layernorm-scaling").run()
    assert result.verdict is Verdict.REFUTED
    assert not result.evidence.consistent


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


@pytest.mark.parametrize(("id", "convention"), [("19-first-block", "v_0 = 1"), ("19-first-block-initial", "v_0 = 0.02^2")])
def test_the_first_block_s_factor_says_for_which_embedding_it_is(id: str, convention: str) -> None:
    result = _run(CLAIMS[id])
    assert convention in CLAIMS[id].assumes
    assert result.verdict is Verdict.HOLDS
    assert (result.evidence.derived < 1) is (id == "19-first-block")


@pytest.mark.parametrize("id", ["14-gain", "18-gain", "27-branch-gain"])
def test_gains_with_weights_say_that_the_entries_are_equal(id: str) -> None:
    assert "equal entries in each weight" in CLAIMS[id].assumes


def test_frames_hold_every_claim_and_every_number() -> None:
    frame = claims_frame()
    assert frame["id"].tolist() == list(CLAIMS)
    result = _run(CLAIMS["15-product"])
    numbers = result.to_frame().set_index("metric")
    assert numbers.loc["claimed", "value"] == result.evidence.claimed
    assert numbers.loc["rival", "value"] == result.evidence.rival
    assert set(numbers["claim"]) == {"15-product"}
    assert numbers["passed"].all()


def test_unknown_claim() -> None:
    with pytest.raises(ClaimError, match="unknown claim '99'; known: 1-carry"):
        get_claim("99")


def test_reading_the_claims_loads_neither_torch_nor_sympy() -> None:
    code = "import sys, keel_theory.claims; print([m for m in ('torch', 'sympy', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
