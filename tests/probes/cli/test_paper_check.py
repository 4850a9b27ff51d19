"""``keel paper-check``: pages, exit codes, another copy of the tables."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from figures import paper_check as library
from figures.paper_check import PaperCheck, Verdict, check_paper
from figures.paper_tables import PUBLISHED
from tests._cli import run_keel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: (exit code, stdout, stderr)."""
    return partial(run_keel, monkeypatch, capsys, "paper-check")


@cache
def _published() -> PaperCheck:
    return check_paper()


def _ids(verdict: Verdict) -> list[str]:
    return [result.check.id for result in _published().of(verdict)]


HEADINGS = {
    Verdict.CONTRADICTION: "Contradictions of arithmetic\n",
    Verdict.CONSEQUENCE: "What follows from them\n",
    Verdict.WORDING: "Wording\n",
    Verdict.TENSION: "Tensions: contradictions if the premise holds, which the paper does not print\n",
}


def test_lists_each_finding_under_its_verdict_with_both_values_and_exits_with_1(keel: Run) -> None:
    code, out, err = keel()
    assert (code, err) == (1, "")
    starts = [out.index(heading) for heading in HEADINGS.values()]
    assert starts == sorted(starts)
    for verdict, start, stop in zip(HEADINGS, starts, [*starts[1:], out.index("\nkind ")], strict=True):
        listed = [line.split(":")[0] for line in out[start:stop].splitlines()[1:] if ": " in line and line[0] != " "]
        assert listed == _ids(verdict)
    assert "    61.5  Table 4, Average, Keel, 10B tokens\n    61.617 (61.567 to 61.667 within rounding)  mean of the 6" in out
    *_, total, empty, summary = out.splitlines()
    assert total.split()[:2] == ["all", str(len(_published().results))]
    assert (empty, summary) == ("", _published().summary())


def test_says_nothing_of_what_is_consistent(keel: Run) -> None:
    _, out, _ = keel()
    assert [i for i in _ids(Verdict.CONSISTENT) if f"\n{i}: " in out] == []


def test_exits_with_0_without_a_contradiction(keel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {Verdict.CONTRADICTION, Verdict.CONSEQUENCE}
    harmless = [r.check for r in _published().results if r.verdict not in numbers]
    monkeypatch.setattr(library, "check_paper", lambda tables: check_paper(tables, harmless))
    code, out, _ = keel()
    assert code == 0
    assert out.startswith("Wording\n")
    assert "5 contradictions: 5 of wording; 9 tensions under a premise." in out


def test_json_holds_every_comparison(keel: Run) -> None:
    code, out, _ = keel("--json")
    assert code == 1
    page = json.loads(out)
    assert page["counts"][-1]["comparisons"] == sum(len(check["comparisons"]) for check in page["checks"])
    found = {check["id"] for check in page["checks"] if check["verdict"] == "contradiction"}
    assert found == set(_ids(Verdict.CONTRADICTION))


def test_markdown_to_a_file(keel: Run, tmp_path: Path) -> None:
    code, out, _ = keel("--markdown", "-o", str(tmp_path / "consistency.md"))
    assert (code, out) == (1, "")
    page = (tmp_path / "consistency.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in rows} == {5, 6}
    assert page.count("\n|---|") == len(HEADINGS) + 1
    assert page.startswith(_published().summary())


def test_checks_another_copy_of_the_tables(keel: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PUBLISHED, tmp_path / "tables"))
    path = folder / "table7_sft.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("Average,,keel,54.8", "Average,,keel,59.8"), encoding="utf-8")
    _, out, _ = keel("--tables", str(folder))
    assert "table7-average-keel: " in out
    assert "59.8  Table 7, Average, Keel" in out


def test_a_folder_without_tables_is_a_usage_error(keel: Run, tmp_path: Path) -> None:
    code, out, err = keel("--tables", str(tmp_path))
    assert (code, out) == (2, "")
    assert "table1_max_lr.csv" in err
    assert "Table 1 is expected there" in err


def test_formats_exclude_each_other(keel: Run) -> None:
    code, _, err = keel("--json", "--markdown")
    assert code == 2
    assert "exclude each other" in err
