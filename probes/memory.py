"""Memory of the process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

__all__ = ["peak_memory", "release_free_memory"]


def peak_memory() -> int | None:
    """Largest resident memory that this process has had, in bytes; None where the system does not tell.

    On Linux from the process's own address space: the figure of ``getrusage`` starts at the size of the parent that forked it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_free_memory() -> None:
    """Hand memory that was freed inside the C heap back to the system; glibc keeps it otherwise. A no-op elsewhere."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
