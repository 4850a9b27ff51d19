"""Cost of ``keel grad-norm``: time and memory beside a bare forward and backward pass, and beside other tools.

SmolLM2-135M, one sequence, float32, all contenders side by side: the bare pass, this toolkit, hand-written hooks, and where
they are installed nnsight and transformer-lens. Each runs in a fresh process, in turns; ratios are taken within a round. Every
contender has to find the gradient norms that plain autograd finds, or it is reported as not comparable.

A second part asks whether the cost per block stays the same with depth: the toolkit's own Keel model at rising depth.

Limits: at most 1.05 times the time and 0.85 times the peak memory of the bare pass. Exit code 1 if one is passed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from _gradient_contenders import CONTENDERS, DEPTH_SEED, Norms, depth_pass, load_prepared, prepare_checkpoint
from _measure import MIB, Ratio, Run, environment, interleaved, ratio, report_run, run_fresh, time_passes, write_json

TIMED = ("bare", "keel", "hooks", "nnsight", "transformer-lens")
DEPTH_PASSES = 10
LIMITS = {"wall_seconds": 1.05, "peak_resident": 0.85}
QUANTITIES = ("wall_seconds", "cpu_seconds", "peak_resident", "peak_anonymous")
AGREEMENT = 1e-3  # relative, to plain autograd in float32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code says whether the limits are kept."""
    options = _parser().parse_args(arguments)
    if options.measure is not None:
        _measured_process(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        record: dict[str, Any] = {
            "checkpoint": "smollm2",
            "batch_shape": [1, options.seq_len],
            "passes_per_process": options.passes,
            "rounds": options.rounds,
            "depth_passes_per_process": DEPTH_PASSES,
            "tools": _compare_tools(options, Path(folder)),
            "depth": _compare_depths(options),
            "limits": LIMITS,
            "environment": environment(threads=options.threads, seed=DEPTH_SEED, packages=("nnsight", "transformer-lens")),
        }
    broken = _broken_limits(record["tools"]["ratios"])
    write_json(options.output, record | {"limits_broken": broken})
    print(_tables(record))
    for line in broken:
        print(f"limit not kept: {line}", file=sys.stderr)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each contender once [5]")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of a process, after one to warm up [3]")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process [2]")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of the sequence [512]")
    parser.add_argument("--contenders", nargs="+", choices=TIMED, default=TIMED, help="[all that are installed]")
    parser.add_argument("--depths", type=int, nargs="*", default=(8, 64, 512), help="blocks of the Keel models [8 64 512]")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/grad_norm.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # from here on: for the measured processes
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    return parser


def _fresh(options: argparse.Namespace, measure: str, n_passes: int, *more: str) -> Run:
    settings = ("--measure", measure, "--passes", str(n_passes), "--seq-len", str(options.seq_len))
    return run_fresh([sys.executable, __file__, *settings, *more], threads=options.threads)


# The comparison of tools


def _compare_tools(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All contenders on one checkpoint: their runs, their ratios to the bare pass, and who cannot be compared and why."""
    where = ("--folder", str(folder))
    prepare_checkpoint(folder, options.seq_len)
    expected = _fresh(options, "autograd", 1, *where).values
    reasons = {name: _not_comparable(name, options, where, expected) for name in options.contenders if name != "bare"}
    names = ["bare", *(name for name, reason in reasons.items() if reason is None)]
    runs = interleaved(lambda name: _fresh(options, name, options.passes, *where), names, options.rounds)
    return {
        "runs": runs,
        "ratios": _ratios(runs),
        "not_comparable": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def _not_comparable(name: str, options: argparse.Namespace, where: Sequence[str], expected: Mapping[str, Any]) -> str | None:
    """Why a contender is left out; None where it finds what autograd finds. This toolkit itself must not fail."""
    contender = CONTENDERS[name]
    if not contender.installed:
        return f"{contender.package} is not installed"
    try:
        found = _fresh(options, name, 1, *where).values
    except RuntimeError as error:
        if contender.package is None:
            raise
        return f"it fails: {error}"
    worst = _largest_difference(found, expected)
    if worst <= AGREEMENT:
        return None
    if contender.package is None:
        raise RuntimeError(f"{name}: gradient norms differ from autograd's by up to {worst:.1e}")
    return f"its gradient norms differ from autograd's by up to {worst:.1e}"


def _largest_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Relative, over the stream's norm at every block and the norm of all parameters."""
    pairs = zip([*found["stream"], found["parameters"]], [*expected["stream"], expected["parameters"]], strict=True)
    return float(max(abs(a - b) / b for a, b in pairs))


def _ratios(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Ratio | None]]:
    return {
        name: {quantity: ratio(own, runs["bare"], quantity) for quantity in QUANTITIES}
        for name, own in runs.items()
        if name != "bare"
    }


def _broken_limits(ratios: Mapping[str, Mapping[str, Ratio | None]]) -> list[str]:
    broken = []
    for quantity, limit in LIMITS.items():
        found = ratios.get("keel", {}).get(quantity)
        if found is not None and found.median > limit:
            broken.append(f"{quantity} is {found.median:.3f} times that of the bare pass, at most {limit} is allowed")
    return broken


# The comparison of depths


def _compare_depths(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time of the bare pass and of this toolkit on Keel models of rising depth, and what measuring adds for each block."""
    rows = []
    for n_blocks in options.depths:
        runs = interleaved(partial(_fresh_depth, options, n_blocks), ("bare", "keel"), options.rounds)
        pairs = zip(runs["keel"], runs["bare"], strict=True)
        added = [(keel.cpu_seconds - bare.cpu_seconds) / n_blocks for keel, bare in pairs]
        rows.append(
            {
                "n_blocks": n_blocks,
                "runs": runs,
                "ratios": _ratios(runs)["keel"],
                "added_cpu_seconds_per_block": statistics.median(added),
            }
        )
    return rows


def _fresh_depth(options: argparse.Namespace, n_blocks: int, name: str) -> Run:
    return _fresh(options, f"depth-{name}", DEPTH_PASSES, "--blocks", str(n_blocks))


# Inside a measured process


def _measured_process(options: argparse.Namespace) -> None:
    if options.measure.startswith("depth-"):
        one_pass = depth_pass(options.measure.removeprefix("depth-"), options.blocks)
    else:
        one_pass = CONTENDERS[options.measure].prepare(*load_prepared(options.folder))
    found: list[Norms | None] = []

    def keep_last() -> None:
        found[:] = [one_pass()]

    passes = time_passes(keep_last, options.passes)
    report_run(passes, asdict(found[0]) if found[0] is not None else {})


# What is printed


def _tables(record: Mapping[str, Any]) -> str:
    tools = record["tools"]
    measured = "wall s | CPU s | peak MiB | anonymous MiB"
    lines = [f"| contender | {measured} | wall / bare | CPU / bare | peak / bare | anonymous / bare |", "|---" * 9 + "|"]
    lines += [_row(name, runs, tools["ratios"].get(name)) for name, runs in tools["runs"].items()]
    lines += [f"\nnot comparable: {name}: {reason}" for name, reason in tools["not_comparable"].items()]
    if record["depth"]:
        lines += ["", "| blocks of a Keel model | wall / bare | CPU / bare | added CPU ms a block |", "|---" * 4 + "|"]
    for row in record["depth"]:
        wall, cpu = (_shown(row["ratios"][quantity]) for quantity in ("wall_seconds", "cpu_seconds"))
        lines.append(f"| {row['n_blocks']} | {wall} | {cpu} | {1e3 * row['added_cpu_seconds_per_block']:.2f} |")
    return "\n".join(lines)


def _row(name: str, runs: Sequence[Run], ratios: Mapping[str, Ratio | None] | None) -> str:
    seconds = [f"{statistics.median(getattr(run, key) for run in runs):.2f}" for key in ("wall_seconds", "cpu_seconds")]
    memory = [_mebibytes([getattr(run, key) for run in runs]) for key in ("peak_resident", "peak_anonymous")]
    compared = ["1" if ratios is None else _shown(ratios[quantity]) for quantity in QUANTITIES]
    return f"| {' | '.join([name, *seconds, *memory, *compared])} |"


def _mebibytes(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return f"{statistics.median(known) / MIB:.0f}" if known else "unknown"


def _shown(found: Ratio | None) -> str:
    return "unknown" if found is None else f"{found.median:.3f} ({found.lowest:.3f} to {found.highest:.3f})"


if __name__ == "__main__":
    sys.exit(main())
