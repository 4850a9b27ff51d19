"""Theory and measurement put together."""

from dataclasses import replace

import pytest
import torch

from keel_theory.claims import ClaimError
from probes.verification import Verification, as_markdown, as_row, verifications_frame, verify_claims


def test_verification_fails_if_the_measurement_does() -> None:
    (done,) = verify_claims(["5-alpha"])
    assert done.passed
    off = type(done.measurement)(value=1.0, predicted=2.0, own=1.0, setting="none")
    assert not Verification(done.result, off).passed
    assert "NOT AS EXPECTED" in as_markdown([Verification(done.result, off)])


def _moved(done: Verification, **changes: float) -> Verification:
    return Verification(done.result, replace(done.measurement, **changes))


@pytest.mark.parametrize("claim_id", ["15-product", "19-product", "14-largest", "cosine-pre-ln", "9-radial"])
def test_a_measurement_that_is_off_fails_the_claim(claim_id: str) -> None:
    (done,) = verify_claims([claim_id])
    allowed = 3 * done.measurement.error + done.measurement.tolerance
    assert done.passed
    assert not _moved(done, value=done.measurement.predicted + 1.05 * allowed).passed
    assert not _moved(done, value=done.measurement.predicted - 1.05 * allowed).passed


@pytest.mark.parametrize("claim_id", ["15-wrong-base", "19-wrong-no-power", "14-largest", "19-product", "layernorm-scaling"])
def test_a_measurement_too_noisy_to_exclude_what_is_wrong_fails_the_claim(claim_id: str) -> None:
    (done,) = verify_claims([claim_id])
    distance = abs(done.result.excluded - done.result.evidence.derived)
    exact = _moved(done, value=done.measurement.predicted)
    assert exact.passed
    assert _moved(exact, error=0.19 * distance).passed
    assert not _moved(exact, error=0.21 * distance).passed


def test_a_claim_named_twice_is_checked_once() -> None:
    seen: list[str] = []
    done = verify_claims(["9-radial", "5-alpha", "9-radial"], progress=seen.append)
    assert seen == ["9-radial", "5-alpha"] == [each.result.claim.id for each in done]


def test_frame_holds_every_column_of_the_rows() -> None:
    done = verify_claims(["9-radial", "5-beta"])
    frame = verifications_frame(done)
    assert frame["id"].tolist() == ["9-radial", "5-beta"]
    assert frame.loc[1, "own_branches"] == done[1].measurement.own
    assert done[0].to_frame().equals(frame.iloc[:1].astype(done[0].to_frame().dtypes))


def test_rows_and_markdown_hold_the_same_claims() -> None:
    seen: list[str] = []
    done = verify_claims(["9-radial", "5-beta"], progress=seen.append)
    assert seen == ["9-radial", "5-beta"]
    assert [as_row(each)["id"] for each in done] == seen
    lines = as_markdown(done).splitlines()
    assert len(lines) == 4
    assert {line.count(" | ") for line in lines} == {10}
    assert "refuted" in lines[3]


def test_unknown_claims_are_refused_before_anything_runs() -> None:
    seen: list[str] = []
    with pytest.raises(ClaimError, match="unknown claim 'nonesuch'"):
        verify_claims(["5-alpha", "nonesuch"], progress=seen.append)
    assert seen == []


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    verify_claims(["9-radial"])
    assert torch.get_num_threads() == before
