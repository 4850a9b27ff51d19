"""Slurm's commands as small shell scripts: no test needs a Slurm, and none reaches one that is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["COMMANDS", "FakeSlurm"]

COMMANDS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo"),
    *("sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
"""Every command of a Slurm client."""


class FakeSlurm:
    """A folder with all of Slurm's commands, first on the PATH; each does nothing until it is told what to do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        self.does(**dict.fromkeys(COMMANDS, "exit 0"))
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")

    def does(self, **bodies: str) -> None:
        """Give commands new bodies, as lines of ``sh``."""
        for name, body in bodies.items():
            if name not in COMMANDS:
                raise ValueError(f"'{name}' is no command of Slurm")
            script = self.folder / name
            script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
            script.chmod(0o755)
