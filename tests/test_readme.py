"""The README's terminal output is what the commands print."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from figures import table1_max_lr
from figures.pipeline import stored_frame
from probes.cli import main as entry

README = Path(__file__).parents[1] / "README.md"
SESSION = re.compile(r"```console\n\$ (keel [^\n]+)\n(.*?)\n```", re.DOTALL)
SLOW = ("keel verify", "keel grad-norm", "keel max-lr", "keel layer-removal", "keel train", "keel sweep")
SESSIONS = [(command, output) for command, output in SESSION.findall(README.read_text(encoding="utf-8"))]
FAST = [session for session in SESSIONS if not session[0].startswith(SLOW)]


@pytest.mark.parametrize(("command", "output"), FAST, ids=[command for command, _ in FAST])
def test_terminal_output_in_the_readme_is_real(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with contextlib.suppress(SystemExit):
        entry.main()
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_every_picture_and_file_that_the_readme_names_is_there() -> None:
    targets = re.findall(r"\]\(([\w./:-]+)\)", README.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert local
    assert [target for target in local if not (README.parent / target).exists()] == []


def test_readme_has_fast_sessions_to_check() -> None:
    assert len(FAST) >= 3


def test_table_of_max_lr_in_the_readme_is_that_of_the_committed_frame() -> None:
    stored = stored_frame("table1_max_lr", "cpu")
    assert stored is not None
    text = README.read_text(encoding="utf-8")
    assert table1_max_lr.as_markdown(stored.frame) in text
    found = table1_max_lr.finding(stored.frame)
    assert f"rank correlation of {found['rank_correlation']:.2f}" in text
    assert found["pairs_against_the_paper"] == [["deepnorm", "hybrid_norm"]]
    assert found["order_measured"][-2:] == ["keel", "pre_ln"]
