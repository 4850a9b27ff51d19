"""What counts as confirmed; the checks themselves are run claim by claim in test_claims."""

import inspect
from types import SimpleNamespace

import pytest

from keel_theory import claim_checks, random_stacks
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
    assert public - {claim_checks.unequal} == {claim.check for claim in CLAIMS.values()}


@pytest.mark.parametrize(
    ("value", "error", "tolerance", "excluded"),
    [(2.0, 0.19, 0.0, True), (2.0, 0.21, 0.0, False), (2.0, 0.1, 0.49, True), (2.0, 0.1, 0.51, False)],
)
def test_excluded_beyond_five_errors_and_the_tolerance(value: float, error: float, tolerance: float, excluded: bool) -> None:
    assert _evidence(1.0, error, tolerance).excludes(value) is excluded


def test_unequal_weights_have_the_largest_entry_named_and_the_rms_that_the_claim_uses() -> None:
    weight = claim_checks.unequal(1.5, 64)
    assert weight.max() == 1.5
    assert (weight**2).mean() == pytest.approx(1.5**2 * 5 / 9)


_FORMULAS = ("shortcut_log_product", "shortcut_gain", "branch_gain", "uniform_product", "smallest_alpha")


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_no_independent_number_uses_what_it_checks(monkeypatch: pytest.MonkeyPatch, claim_id: str) -> None:
    """With the library's formulas spoilt, the independent number does not move."""
    check = CLAIMS[claim_id].check
    before = check().numeric
    for name in _FORMULAS:
        monkeypatch.setattr(claim_checks, name, lambda *_, **__: 3.0)
    monkeypatch.setattr(claim_checks, "variance_profile", lambda *_, **__: SimpleNamespace(stream=[3.0], input_cosine=3.0))
    claim_checks._log_product.cache_clear()
    assert check().numeric == before


@pytest.mark.parametrize(
    ("largest", "mean", "bound"), [("14-largest", "14-rms", "14-bound"), ("18-largest", "18-rms", "18-bound")]
)
def test_the_largest_entry_gives_the_spectral_norm_and_the_root_mean_square_the_mean(
    largest: str, mean: str, bound: str
) -> None:
    """Both numbers of one sub-layer: no gradient gains less on average than the most that one gains, or more than it."""
    norm, gain, unequal = (CLAIMS[each].check() for each in (largest, mean, bound))
    assert norm.claimed == gain.rival == unequal.claimed, "the paper's one form"
    assert norm.numeric == pytest.approx(norm.claimed, abs=3 * norm.numeric_error)
    assert gain.numeric < norm.numeric - 5 * norm.numeric_error
    assert unequal.numeric > unequal.claimed + 5 * unequal.numeric_error, "no strict bound for unequal entries before"


def test_random_stacks_know_no_formula() -> None:
    modules = {getattr(value, "__module__", "") or "" for value in vars(random_stacks).values()}
    assert not modules & {f"keel_theory.{name}" for name in ("propagation", "variance", "sublayer", "design")}


def test_numbers_are_the_same_at_every_run() -> None:
    assert claim_checks.post_ln_product() == claim_checks.post_ln_product()
