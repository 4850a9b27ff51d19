"""The README's terminal output is what the commands print."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

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
