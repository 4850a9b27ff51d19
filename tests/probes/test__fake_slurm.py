from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from probes.executors import slurm_jobs_alive
from tests.probes._fake_slurm import COMMANDS, FakeSlurm


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that is installed on the machine: each command leaves a trace."""
    folder, trace = tmp_path / "installed", tmp_path / "trace"
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {trace}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    return trace


@pytest.mark.parametrize("command", COMMANDS)
def test_the_fakes_hide_an_installed_slurm(installed: Path, slurm: FakeSlurm, command: str) -> None:
    assert shutil.which(command) == str(slurm.folder / command)
    subprocess.run([command], check=True)
    assert not installed.exists()


def test_without_the_fakes_the_installed_one_answers(installed: Path) -> None:
    assert slurm_jobs_alive({"3"}) == set()
    assert installed.read_text(encoding="utf-8") == "squeue\n"


def test_a_command_says_what_it_was_told_to(slurm: FakeSlurm) -> None:
    slurm.does(squeue="echo 3")
    assert slurm_jobs_alive({"3", "4"}) == {"3"}


def test_a_command_that_slurm_does_not_have_is_refused(slurm: FakeSlurm) -> None:
    with pytest.raises(ValueError, match="'qsub' is no command of Slurm"):
        slurm.does(qsub="exit 0")
