from __future__ import annotations

import subprocess
import sys

import pytest

from probes.memory import peak_memory, release_free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_peak_is_of_this_process_and_not_of_the_parent_that_forked_it() -> None:
    ballast = bytearray(400 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert peak_memory() > len(ballast)
    code = "from probes.memory import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 * 2**20 < int(child.stdout) < 200 * 2**20


def test_peak_rises_with_what_is_used() -> None:
    before = peak_memory()
    ballast = bytearray(before + 50 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert peak_memory() >= before + 40 * 2**20


def test_memory_can_be_released_at_any_time() -> None:
    release_free_memory()
