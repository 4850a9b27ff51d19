"""What the benchmarks share: interleaved runs in fresh processes, time, peak memory, and the record that is written.

A comparison on a machine that does other work besides is only worth something if the contenders are met by the same
disturbances. So each run is a process of its own, the contenders take turns, the order is reversed from round to round, and
what is reported is the median of the ratios within a round, with their range. Times are wall time and the CPU time of all
threads (user + system), which other processes disturb less.

Memory is read in two ways, both for the measured passes alone (the peak is reset once the model is loaded):

- **peak resident**: ``VmHWM`` of the process, exact. It counts file pages, such as mapped weights, once they were touched.
- **peak anonymous**: the largest ``RssAnon`` that the parent saw, every 10 ms: heap and tensors without file pages.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "MIB",
    "Passes",
    "Ratio",
    "Run",
    "environment",
    "interleaved",
    "ratio",
    "report_run",
    "run_fresh",
    "time_passes",
    "write_json",
]

MIB = 1 << 20
_SAMPLING_SECONDS = 0.01
_MEASURED = "measured passes begin"


@dataclass(frozen=True, slots=True)
class Passes:
    """Times of the passes of one process.

    Attributes:
        wall: seconds of each pass.
        cpu: user + system seconds of all threads, of each pass.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What one fresh process measured.

    Attributes:
        wall_seconds: median over its passes.
        cpu_seconds: median over its passes.
        peak_resident: bytes, ``VmHWM`` over the measured passes; None where the system does not say.
        peak_anonymous: bytes, largest ``RssAnon`` seen from the first measured pass on; None where the system does not say.
        values: what the contender computed, for comparing answers.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_resident: int | None
    peak_anonymous: int | None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the ratios within the rounds, and their range."""

    median: float
    lowest: float
    highest: float


def time_passes(one_pass: Callable[[], object], n_passes: int, *, n_warmup: int = 1) -> Passes:
    """Times of repeated passes, after a warm-up; the process's peak memory is reset before the first one."""
    for _ in range(n_warmup):
        one_pass()
    _reset_peak()
    print(_MEASURED, file=sys.stderr, flush=True)
    wall, cpu = [], []
    for _ in range(n_passes):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        one_pass()
        wall.append(time.perf_counter() - wall_before)
        cpu.append(time.process_time() - cpu_before)
    return Passes(tuple(wall), tuple(cpu))


def report_run(passes: Passes, values: Mapping[str, Any]) -> None:
    """End of a measured process: its last line of stdout is the record that :func:`run_fresh` reads."""
    record = {
        "wall_seconds": statistics.median(passes.wall),
        "cpu_seconds": statistics.median(passes.cpu),
        "peak_resident": _status_bytes("self", "VmHWM"),
        "values": dict(values),
    }
    print(json.dumps(record), flush=True)


def run_fresh(command: Sequence[str], *, threads: int) -> Run:
    """Run one measured process and watch its anonymous memory.

    Args:
        command: what to run; it ends with :func:`report_run`.
        threads: CPU threads it may use.

    Returns:
        Its measurements.

    Raises:
        RuntimeError: if it fails; the message ends with the last lines it wrote to stderr.
    """
    count = str(threads)
    settings = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | settings)
        try:
            peak_anonymous = _watch(process, Path(err.name))
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        lines, complaint = out.read().splitlines(), err.read()
    if process.returncode or not lines:
        raise RuntimeError("\n".join(complaint.strip().splitlines()[-5:]) or f"exit code {process.returncode}")
    return Run(**json.loads(lines[-1]), peak_anonymous=peak_anonymous)


def _watch(process: subprocess.Popen[bytes], stderr: Path) -> int | None:
    """Largest anonymous memory of a process between its first measured pass and its end."""
    peak, measured = None, False
    while process.poll() is None:
        measured = measured or _MEASURED in stderr.read_text(errors="replace")
        if measured:
            now = _status_bytes(str(process.pid), "RssAnon")
            peak = now if peak is None else max(peak, now or 0)
        time.sleep(_SAMPLING_SECONDS)
    return peak


def interleaved(run: Callable[[str], Run], contenders: Sequence[str], n_rounds: int) -> dict[str, list[Run]]:
    """Every contender once a round, the order reversed every other round.

    Args:
        run: measures one contender in a fresh process.
        contenders: their names.
        n_rounds: number of rounds.

    Returns:
        Runs of each contender, in the order of the rounds.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for round_index in range(n_rounds):
        for name in contenders if round_index % 2 == 0 else reversed(contenders):
            print(f"round {round_index + 1} of {n_rounds}: {name}", file=sys.stderr, flush=True)
            runs[name].append(run(name))
    return runs


def ratio(runs: Sequence[Run], reference: Sequence[Run], quantity: str) -> Ratio | None:
    """One quantity of a contender over that of the reference, round by round; None where it was not measured."""
    pairs = [(getattr(a, quantity), getattr(b, quantity)) for a, b in zip(runs, reference, strict=True)]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def environment(*, threads: int, seed: int | None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Where a result came from: versions, processor, threads, load of the machine, seed and command.

    Args:
        threads: CPU threads of the measured processes.
        seed: of what was drawn at random; None where nothing was.
        packages: distributions to name besides the usual ones.

    Returns:
        A record ready for JSON.
    """
    from probes.provenance import provenance

    record = dict(provenance())
    versions = record["versions"]
    assert isinstance(versions, dict)
    record["versions"] = versions | {name: _version(name) for name in packages}
    record |= {"threads": threads, "seed": seed, "processor": _processor(), "cpus": os.cpu_count()}
    with suppress(OSError):
        record["load_average"] = os.getloadavg()
    return record


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record that is either complete or absent; its folder is made if it is missing."""
    from probes.cli._io import write_text_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(record, indent=2, default=_plain) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def _plain(value: object) -> Any:
    if isinstance(value, Run | Ratio | Passes):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _reset_peak() -> None:
    """Set VmHWM back to the present size; where that is not allowed the peak is that of the whole process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(process: str, key: str) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
