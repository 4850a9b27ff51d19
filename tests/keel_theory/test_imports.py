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
import importlib, json, sys, time
start = time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"seconds": time.process_time() - start, "modules": sorted(sys.modules)}))
"""


def _import(*names: str) -> dict[str, object]:
    """Import in a fresh interpreter: CPU seconds, and what was loaded."""
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"})
    loaded: dict[str, object] = json.loads(done.stdout)
    return loaded


def test_numeric_modules_load_neither_torch_nor_sympy_and_start_quickly() -> None:
    loaded = min((_import(*NUMERIC) for _ in range(3)), key=lambda each: each["seconds"])
    assert not {"torch", "sympy", "pandas", "matplotlib"} & set(loaded["modules"])
    assert loaded["seconds"] < 0.7


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_modules_do_not_load_torch(name: str) -> None:
    modules = _import(name)["modules"]
    assert "sympy" in modules
    assert "torch" not in modules
