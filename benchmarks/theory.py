"""How long the theory takes: a closed-form query at a million sub-layers, the import, ``keel --help`` and ``keel verify``.

Run ``python benchmarks/theory.py``; every number is a median, imports and ``import numpy`` alternate in fresh processes.
Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

N_SUBLAYERS = 10**6
TARGETS = {"closed-form query": 1e-3, "import": 0.7, "keel --help": 0.5, "keel verify": 60.0}
"""Seconds."""
_MODULES = ("propagation", "design", "variance", "random_stacks", "claims", "answers")
_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def main() -> None:
    """Measure, print one JSON object, and compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="fresh processes per import")
    parser.add_argument("--skip-verify", action="store_true", help="leave out keel verify")
    options = parser.parse_args()
    queries = query_times()
    numpy, theory = import_times(options.repeats)
    start = statistics.median(command_time("--help") for _ in range(options.repeats))
    verify = None if options.skip_verify else command_time("verify")
    report = {
        "closed-form query at 1e6 sub-layers, seconds": queries,
        "import numpy, seconds": numpy,
        "import keel_theory (all numeric modules), seconds": theory,
        "keel --help, seconds": start,
        "keel verify, seconds": verify,
        "targets, seconds": TARGETS,
    }
    print(json.dumps(report, indent=2))
    measured = {"closed-form query": max(queries.values()), "import": theory, "keel --help": start}
    measured |= {} if verify is None else {"keel verify": verify}
    missed = [name for name, seconds in measured.items() if seconds > TARGETS[name]]
    if missed:
        sys.exit(f"target missed: {', '.join(missed)}")


def query_times() -> dict[str, float]:
    """Median time of the product of every scheme at a million sub-layers, and of the design question."""
    from keel_theory.design import smallest_alpha
    from keel_theory.propagation import shortcut_log_product
    from keel_theory.schemes import SCHEMES

    times = {name: _median(partial(shortcut_log_product, scheme, N_SUBLAYERS)) for name, scheme in SCHEMES.items()}
    return times | {"smallest alpha": _median(lambda: smallest_alpha(0.9, N_SUBLAYERS))}


def import_times(repeats: int) -> tuple[float, float]:
    """Median import time of NumPy alone and of the theory, measured alternately in fresh processes."""
    programs = ("import numpy", "import " + ", ".join(f"keel_theory.{name}" for name in _MODULES))
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for program, found in zip(programs, times, strict=True):
            command = [sys.executable, "-c", _TIMED.format(program)]
            found.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return statistics.median(times[0]), statistics.median(times[1])


def command_time(*arguments: str) -> float:
    """Wall time of a whole command in a fresh process, the interpreter's start included."""
    start = time.perf_counter()
    code = "import sys; sys.argv[0] = 'keel'; from probes.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def _median(query: Callable[[], object], repeats: int = 201) -> float:
    query()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        query()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
