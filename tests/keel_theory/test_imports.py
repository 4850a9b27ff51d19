from __future__ import annotations

import json
import subprocess
import sys

import pytest

NUMERIC = (
    "keel_theory",
    "keel_theory.errors",
    "keel_theory.layer_norm",
    "keel_theory.notation",
    "keel_theory.propagation",
    "keel_theory.results",
    "keel_theory.schemes",
    "keel_theory.sublayer",
)
SYMBOLIC = ("keel_theory.asymptotics", "keel_theory.derivations", "keel_theory.symbolic_layer_norm")
PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def _modules_after(*names: str) -> set[str]:
    """What a fresh interpreter has loaded once it has imported these."""
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"})
    return set(json.loads(done.stdout))


def test_numeric_modules_load_no_heavy_library() -> None:
    assert not {"torch", "sympy", "pandas", "matplotlib"} & _modules_after(*NUMERIC)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_modules_do_not_load_torch(name: str) -> None:
    modules = _modules_after(name)
    assert "sympy" in modules
    assert "torch" not in modules
