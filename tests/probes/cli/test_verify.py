"""``keel verify``: tables, exit codes, progress."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from keel_theory import claims as claims_module
from keel_theory.claims import CLAIMS, Verdict
from tests._cli import run_keel

Run = Callable[..., tuple[int, str, str]]
_QUICK = ("5-alpha", "9-radial", "19-wrong-limit")


@pytest.fixture
def keel(monkeypatch, capsys) -> Run:
    """The command in this process: (exit code, stdout, stderr)."""
    return partial(run_keel, monkeypatch, capsys, "verify")


def test_table_has_one_line_per_claim_and_progress_is_not_in_it(keel: Run) -> None:
    code, out, err = keel(*_QUICK)
    assert (code, err) == (0, "checking 3 claims\n")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == list(_QUICK)
    assert "3 of 3 claims as expected" in out


def test_json_holds_derived_numeric_and_measured(keel: Run) -> None:
    code, out, _ = keel(*_QUICK, "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["id"] for row in rows] == list(_QUICK)
    assert [row["verdict"] for row in rows] == ["holds", "holds", "refuted"]
    assert all(isinstance(row[key], float) for row in rows for key in ("derived", "numeric", "measured", "own_branches"))


def test_markdown_to_a_file(keel: Run, tmp_path: Path) -> None:
    code, out, _ = keel(*_QUICK, "--markdown", "-o", str(tmp_path / "claims.md"))
    assert (code, out) == (0, "")
    assert (tmp_path / "claims.md").read_text(encoding="utf-8").count("\n| `") == 3


def test_a_claim_named_twice_is_one_line(keel: Run) -> None:
    code, out, err = keel("5-alpha", "9-radial", "5-alpha")
    assert (code, err) == (0, "checking 2 claims\n")
    assert "2 of 2 claims as expected" in out


def test_a_folder_that_cannot_be_written_to_is_refused(keel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:  # as it is for a user who is not root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    code, out, err = keel("5-alpha", "-o", str(tmp_path / "claims.md"))
    assert (code, out) == (2, "")
    assert "its folder cannot be written to (Permission denied)" in err


def test_a_failing_claim_exits_with_1_and_is_named(keel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(CLAIMS) | {"5-alpha": replace(CLAIMS["5-alpha"], expected=Verdict.REFUTED)}
    monkeypatch.setattr(claims_module, "CLAIMS", MappingProxyType(wrong))
    code, out, err = keel("5-alpha", "9-radial")
    assert code == 1
    assert "holds, NOT AS EXPECTED" in out
    assert "1 of 2 claims as expected" in out
    assert "not as expected: 5-alpha" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("99",), "unknown claim '99'"),
        (("--json", "--markdown"), "exclude each other"),
        (("5-alpha", "-o", "absent/claims.txt"), "its folder does not exist"),
        (("5-alpha", "-o", "."), "it is a folder or a device"),
        (("5-alpha", "-o", "/dev/null"), "it is a folder or a device"),
    ],
)
def test_bad_input(
    keel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = keel(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "checking" not in err, "refused before anything is computed"
    assert list(tmp_path.iterdir()) == []
