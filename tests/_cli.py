"""The command line as a test calls it: in this process, with what it printed."""

from __future__ import annotations

import sys

import pytest

from probes.cli import main as entry


def run_keel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``keel ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["keel", *map(str, arguments)])
    code: object = 0
    try:
        entry.main()
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err
