"""Where a result came from: versions, platform, time and command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

__all__ = ["command_line", "provenance"]

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
        "command": command_line(sys.argv),
    }


def command_line(arguments: Sequence[str]) -> str:
    """A command as it is kept: of an absolute path only the last name, for the others mean nothing on another machine.

    Args:
        arguments: the program first.

    Returns:
        As a shell reads it.

    Example:
        >>> command_line(["/opt/bin/keel", "figures", "--runs", "/data/me/runs", "--output=/out", "data/text"])
        'keel figures --runs .../runs --output=.../out data/text'
    """
    program, *others = arguments
    return shlex.join([Path(program).name, *map(_elided, others)])


def _elided(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return f"{option}{equals}.../{Path(value).name}" if Path(value).is_absolute() else argument


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
