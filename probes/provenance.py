"""Where a result came from: versions, platform, time and command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

__all__ = ["provenance"]

_PACKAGES = ("keel-dynamics", "torch", "transformers", "safetensors", "gguf", "numpy", "pandas", "pyarrow")


def provenance() -> Mapping[str, object]:
    """What is needed to repeat a run, ready for JSON: versions, commit, platform, threads, time (UTC) and command line."""
    import torch

    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "commit": _commit(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree this code runs from, with a + where it was changed; None for an installed wheel."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / ".git").exists():
        return None
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")
