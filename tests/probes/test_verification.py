"""Theory and measurement put together."""

import pytest
import torch

from keel_theory.claims import ClaimError
from probes.verification import Verification, as_markdown, as_row, verify_claims


def test_verification_fails_if_the_measurement_does() -> None:
    (done,) = verify_claims(["5-alpha"])
    assert done.passed
    off = type(done.measurement)(value=1.0, predicted=2.0, own=1.0, setting="none")
    assert not Verification(done.result, off).passed
    assert "NOT AS EXPECTED" in as_markdown([Verification(done.result, off)])


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
