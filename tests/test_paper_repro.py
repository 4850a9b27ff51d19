"""The committed report on the paper is what the code and the frames of this commit give, as far as that can be had quickly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from figures.paper_check import check_paper
from figures.paper_tables import PUBLISHED, load_tables
from figures.reproduction import ClaimCells, Row, Sources, Status, as_markdown, collect, rows, summary
from keel_theory.claims import CLAIMS
from probes.cli.paper_check import as_markdown as consistency_markdown
from probes.cli.repro import document
from probes.verification import theory_cells

REPORT = (Path(__file__).parents[1] / "paper_repro.md").read_text(encoding="utf-8")
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)` \|.*$", REPORT, re.MULTILINE)}
FIGURE_PLACES = [f"Figure {name}" for name in ("1a", "1b", "1c", "2", "3", "4", "5", "6", "7", "8a", "8b")]


def _cells(line: str) -> list[str]:
    return [cell.replace("\\|", "|") for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")]


def committed_claims() -> dict[str, ClaimCells]:
    """What the committed table of claims says; measured on models when it was written."""
    found = {}
    for claim_id, line in ROWS.items():
        cells = _cells(line)
        found[claim_id] = ClaimCells(
            statement=CLAIMS[claim_id].statement,
            claimed=cells[4],
            numeric=cells[6],
            measured=cells[7],
            own=cells[9],
            holds=cells[-1].startswith("holds"),
            decided="NOT AS EXPECTED" not in cells[-1],
        )
    return found


@pytest.fixture(scope="module")
def sources() -> Sources:
    return collect(committed_claims(), prove=False)


@pytest.fixture(scope="module")
def items(sources: Sources) -> dict[str, Row]:
    return {row.item: row for group in rows(sources).values() for row in group}


def test_every_claim_has_its_row_in_order() -> None:
    assert list(ROWS) == list(CLAIMS)


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_statement_claimed_and_derived_value_are_current(claim_id: str) -> None:
    result = CLAIMS[claim_id].run()
    cells = _cells(ROWS[claim_id])
    assert cells[:6] == theory_cells(result)
    assert cells[-1] == result.verdict.value


def test_the_rest_of_the_report_is_current(sources: Sources) -> None:
    """Words, items, statuses, frames' numbers and the paper's consistency, character by character."""
    claims = REPORT[REPORT.index("| claim |") : REPORT.index("\n\n## The paper's tables")]
    consistency = consistency_markdown(check_paper(load_tables(PUBLISHED)))
    assert document(as_markdown(sources), claims, consistency) + "\n" == REPORT


@pytest.mark.parametrize("number", range(1, 35))
def test_every_equation_has_one_row(items: dict[str, Row], number: int) -> None:
    numbers = [int(found) for item in items if item.startswith("Eq.") for found in re.findall(r"\d+", item)]
    assert numbers.count(number) == 1


@pytest.mark.parametrize("place", [*FIGURE_PLACES, *(f"Table {number}" for number in range(1, 9))])
def test_every_figure_and_table_has_one_row(items: dict[str, Row], place: str) -> None:
    names = [re.sub(r"\[(.*)\]\(.*\)", r"\1", item) for item in items]
    assert names.count(place) == 1
    assert re.search(rf"^\| \[?{place}[] ]", REPORT, re.MULTILINE)


def test_every_row_has_a_status_and_those_not_attempted_a_reason(items: dict[str, Row]) -> None:
    for row in items.values():
        assert isinstance(row.status, Status)
        assert row.why or row.status is not Status.NOT_ATTEMPTED


def test_readme_has_the_counts_of_the_report(sources: Sources) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert summary(rows(sources)) in " ".join(readme.split())
    assert summary(rows(sources)) in REPORT


@pytest.mark.parametrize("claim_id", ["15-product", "18-gain", "9-scale"])
def test_a_claim_that_fell_would_change_the_report(sources: Sources, claim_id: str) -> None:
    other = {**sources.claims, claim_id: replace(sources.claims[claim_id], holds=False)}
    before, after = rows(sources)["equations"], rows(replace(sources, claims=other))["equations"]
    number = claim_id.split("-")[0]
    changed = {old.item for old, new in zip(before, after, strict=True) if old.status is not new.status}
    assert any(number in re.findall(r"\d+", item) for item in changed)
    assert as_markdown(replace(sources, claims=other)) not in REPORT
