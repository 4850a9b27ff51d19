"""The committed report on the paper is what the code of this commit gives, as far as that can be had without models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from figures.paper_check import check_paper
from figures.paper_tables import PUBLISHED, load_tables
from keel_theory.claims import CLAIMS
from probes.cli.paper_check import as_markdown
from probes.cli.repro import document
from probes.verification import theory_cells

REPORT = (Path(__file__).parents[1] / "paper_repro.md").read_text(encoding="utf-8")
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)` \|.*$", REPORT, re.MULTILINE)}


def _cells(line: str) -> list[str]:
    return [cell.replace("\\|", "|") for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")]


def test_every_claim_has_its_row_in_order() -> None:
    assert list(ROWS) == list(CLAIMS)


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_statement_claimed_and_derived_value_are_current(claim_id: str) -> None:
    result = CLAIMS[claim_id].run()
    cells = _cells(ROWS[claim_id])
    assert cells[:6] == theory_cells(result)
    assert cells[-1] == result.verdict.value


def test_the_rest_of_the_report_is_current() -> None:
    """Words and the paper's consistency, character by character."""
    claims = REPORT[REPORT.index("| claim |") : REPORT.index("\n\n## The paper's tables")]
    consistency = as_markdown(check_paper(load_tables(PUBLISHED)))
    assert document(claims, consistency) + "\n" == REPORT
