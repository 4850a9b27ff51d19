"""Memory of the process."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["release_free_memory"]


def release_free_memory() -> None:
    """Hand memory that was freed inside the C heap back to the system; glibc keeps it otherwise. A no-op elsewhere."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
