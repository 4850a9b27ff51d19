"""Fixtures of the tests of probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.probes._fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The whole set of Slurm's commands, pretended."""
    return FakeSlurm(tmp_path / "slurm_bin", monkeypatch)
