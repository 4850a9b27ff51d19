"""What every test gets: fixed seeds. Nothing heavy is imported here, so that tests of start-up time stay true."""

from __future__ import annotations

import random
import signal
import sys

import numpy as np
import pytest

SEED = 20260130


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seed every generator in use, torch only where the test has imported it."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the global generator is what libraries draw from
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)


def pytest_configure() -> None:
    """Signals as in a foreground shell: a runner in the background ignores Ctrl-C and hang-ups, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
