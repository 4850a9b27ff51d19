"""``keel repro``: what the report is made of, and what stops it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from keel_theory import claims as claims_module
from keel_theory.claims import CLAIMS
from probes import verification
from probes.verification import Verification, verify_claims
from tests._cli import run_keel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process over two quick claims, derivations taken as proved: (exit code, stdout, stderr)."""
    monkeypatch.setattr("keel_theory.derivations.is_proved", lambda derivation: True)
    quick = MappingProxyType({id: CLAIMS[id] for id in ("5-beta", "9-radial")})
    monkeypatch.setattr(claims_module, "CLAIMS", quick)
    monkeypatch.setattr(verification, "verify_claims", lambda progress: verify_claims(quick, progress=progress))
    return partial(run_keel, monkeypatch, capsys, "repro")


def test_report_holds_claims_and_consistency(keel: Run, tmp_path: Path) -> None:
    code, out, err = keel()
    assert (code, err) == (0, "checking 2 claims\n")
    assert out.startswith("# What holds of the paper\n")
    assert out.index("| `5-beta` |") < out.index("| `9-radial` |") < out.index("## The paper's tables")
    assert "**What was checked**" in out
    assert out.index("\n## Every equation, figure and table\n") < out.index("\n## Claims about gradients")
    assert "`9-scale` was not checked in this run" in out
    assert "`5-beta` was not checked" not in out
    path = tmp_path / "report.md"
    assert keel("-o", str(path))[:2] == (0, "")
    assert path.read_text(encoding="utf-8") == out


def test_a_failing_claim_exits_with_1_and_is_marked(keel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verification, "passed", property(lambda self: self.result.claim.id != "5-beta"))
    code, out, err = keel()
    assert code == 1
    assert "refuted (NOT AS EXPECTED)" in out
    assert "not as expected: 5-beta" in err


@pytest.mark.parametrize("place", ["absent/report.md", ".", "/proc/report.md"])
def test_a_bad_place_is_refused_before_any_work(keel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = keel("-o", place)
    assert (code, out) == (2, "")
    assert "cannot write" in err
    assert "checking" not in err
