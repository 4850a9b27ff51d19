"""What is committed says nothing of the machine that made it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from probes.provenance import command_line

ROOT = Path(__file__).parents[1]
_PLACES = ("work", "tmp", "root", "home")
_ABSOLUTE = re.compile(rf"(?<![\w.$}}~])/({'|'.join(_PLACES)})/".encode())


def _committed() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_committed_file_holds_a_path_of_the_machine_that_made_it() -> None:
    found = {
        str(path.relative_to(ROOT)): match.group() for path in _committed() if (match := _ABSOLUTE.search(path.read_bytes()))
    }
    assert found == {}


@pytest.mark.parametrize("place", _PLACES)
def test_a_path_of_a_machine_is_found_in_a_command(place: str) -> None:
    arguments = ["keel", "figures", "--runs", f"/{place}/runs"]
    assert _ABSOLUTE.search(" ".join(arguments).encode())
    assert command_line(arguments) == "keel figures --runs .../runs"
