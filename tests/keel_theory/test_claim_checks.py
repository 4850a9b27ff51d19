"""What counts as confirmed; the checks themselves are run claim by claim in test_claims."""

import inspect

import pytest

from keel_theory import claim_checks
from keel_theory.claim_checks import CASE, Evidence
from keel_theory.claims import CLAIMS


def _evidence(numeric: float, error: float = 0.0, tolerance: float = 0.0) -> Evidence:
    return Evidence(
        quantity="x", claimed=1.0, formula="1", derived=1.0, numeric=numeric, numeric_error=error, numeric_tolerance=tolerance
    )


@pytest.mark.parametrize(
    ("evidence", "consistent"),
    [
        (_evidence(1.0), True),
        (_evidence(1.1), False),
        (_evidence(1.1, error=0.04), True),
        (_evidence(1.1, error=0.03), False),
        (_evidence(0.9, tolerance=0.11), True),
        (_evidence(float("nan"), error=1.0), False),
    ],
)
def test_consistent_within_three_errors_and_the_tolerance(evidence: Evidence, consistent: bool) -> None:
    assert evidence.consistent is consistent


def test_gate_is_the_sigmoid_of_its_bias() -> None:
    assert CASE.gate == pytest.approx(0.2689414213699951)


def test_every_check_belongs_to_a_claim() -> None:
    public = {
        function
        for name, function in inspect.getmembers(claim_checks, inspect.isfunction)
        if function.__module__ == claim_checks.__name__ and not name.startswith("_")
    }
    assert public == {claim.check for claim in CLAIMS.values()}


def test_numbers_are_the_same_at_every_run() -> None:
    assert claim_checks.post_ln_product() == claim_checks.post_ln_product()
