"""Cost of ``keel layer-removal`` beside the naive loop: SmolLM2-135M, every block removed once, float32.

All contenders side by side: the naive loop (one whole forward pass per block), this toolkit's single pass, prefix re-use by
hand, and where they are installed nnsight and transformer-lens. Each runs in a fresh process, in turns; ratios to the naive
loop are taken within a round. Every contender has to find the naive loop's losses, or it is reported as not comparable; for
that comparison, which is not timed, the loss of each contender's logits is taken in float64.

A second part asks whether the cost per block and variant stays the same with depth: a Keel model at rising depth.

Limits: at most 0.55 times the naive loop's time without the language-model head and 0.60 times with it, losses equal to 1e-5
nats, and a block evaluation at most 1.5 times as costly in the deepest model as in the shallowest. Exit code 1 if one is
passed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _gradient_contenders import load_prepared, prepare_checkpoint
from _measure import MIB, Ratio, Run, environment, interleaved, ratio, report_run, run_fresh, time_passes, write_json
from _removal_contenders import CONTENDERS, Text

LIMITS = {"without head": 0.55, "with head": 0.60}
EXACT = 1e-5  # nats
MOST_GROWTH = 1.5
QUANTITIES = ("wall_seconds", "cpu_seconds", "peak_resident", "peak_anonymous")
DEPTH_SEED = 0
DEPTH_TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code says whether the limits are kept."""
    options = _parser().parse_args(arguments)
    if options.measure is not None:
        _measured_process(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare_checkpoint(Path(folder), options.seq_len)
        record: dict[str, Any] = {
            "checkpoint": "smollm2",
            "batch_shape": [1, options.seq_len],
            "passes_per_process": options.passes,
            "rounds": options.rounds,
            "comparisons": {part: _compare(options, Path(folder), part) for part in options.parts},
            "depth": [_depth(options, n_blocks) for n_blocks in options.depths],
            "limits": LIMITS | {"nats": EXACT, "growth": MOST_GROWTH},
            "environment": environment(threads=options.threads, seed=DEPTH_SEED, packages=("nnsight", "transformer-lens")),
        }
    broken = _broken_limits(record["comparisons"]) + _broken_growth(record["depth"])
    write_json(options.output, record | {"limits_broken": broken})
    print(_tables(record))
    for line in broken:
        print(f"limit not kept: {line}", file=sys.stderr)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each contender once [5]")
    parser.add_argument("--passes", type=int, default=1, help="timed passes of a process, after one to warm up [1]")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process [2]")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of the sequence [256]")
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), default=tuple(CONTENDERS), help="[all installed]")
    parser.add_argument("--parts", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS), help="[both]")
    parser.add_argument("--depths", type=int, nargs="*", default=(8, 64, 512), help="blocks of the Keel models [8 64 512]")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/layer_removal.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # from here on: for the measured processes
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compared", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    return parser


def _fresh(options: argparse.Namespace, measure: str, n_passes: int, *more: str) -> Run:
    return run_fresh(
        [sys.executable, __file__, "--measure", measure, "--passes", str(n_passes), *more], threads=options.threads
    )


# The comparison of tools


def _compare(options: argparse.Namespace, folder: Path, part: str) -> dict[str, Any]:
    """All contenders on one checkpoint: their runs, their ratios to the naive loop, and how far their losses are from its."""
    where = ("--folder", str(folder), "--part", part)
    expected = _fresh(options, "naive", 1, "--compared", *where).values["losses"]
    differences, reasons = {"naive": 0.0}, {}
    for name in (name for name in options.contenders if name != "naive"):
        found = _differences(name, options, where, expected)
        if isinstance(found, float) and found <= EXACT:
            differences[name] = found
        else:
            reasons[name] = found if isinstance(found, str) else f"its losses differ by up to {found:.1e} nats"
    runs = interleaved(lambda name: _fresh(options, name, options.passes, *where), list(differences), options.rounds)
    ratios = {
        name: {quantity: ratio(own, runs["naive"], quantity) for quantity in QUANTITIES}
        for name, own in runs.items()
        if name != "naive"
    }
    return {"runs": runs, "ratios": ratios, "differences_nats": differences, "not_comparable": reasons, "losses": expected}


def _differences(name: str, options: argparse.Namespace, where: Sequence[str], expected: Sequence[float]) -> float | str:
    """Largest difference of a contender's losses, nats; or why there is none. This toolkit itself must not fail."""
    contender = CONTENDERS[name]
    if not contender.installed:
        return f"{contender.package} is not installed"
    try:
        found: list[float] = _fresh(options, name, 1, "--compared", *where).values["losses"]
    except RuntimeError as error:
        if contender.package is None:
            raise
        return f"it fails: {error}"
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def _broken_limits(comparisons: Mapping[str, Mapping[str, Any]]) -> list[str]:
    broken = []
    for part, comparison in comparisons.items():
        found = comparison["ratios"].get("keel", {}).get("wall_seconds")
        if found is not None and found.median > LIMITS[part]:
            broken.append(f"{part}: {found.median:.3f} times the naive loop's time, at most {LIMITS[part]} is allowed")
        if "keel" in comparison["not_comparable"]:
            broken.append(f"{part}: {comparison['not_comparable']['keel']}")
    return broken


def _broken_growth(depths: Sequence[Mapping[str, Any]]) -> list[str]:
    if not depths:
        return []
    shallow, deep = (pick(depths, key=lambda row: row["n_blocks"]) for pick in (min, max))
    growth = deep["cpu_seconds_per_evaluation"] / shallow["cpu_seconds_per_evaluation"]
    if growth <= MOST_GROWTH:
        return []
    return [f"a block evaluation costs {growth:.2f} times as much at {deep['n_blocks']} blocks as at {shallow['n_blocks']}"]


# The comparison of depths


def _depth(options: argparse.Namespace, n_blocks: int) -> dict[str, Any]:
    """Time of one sweep over a Keel model, for each of its (blocks x (blocks + 1) / 2) block evaluations."""
    run = interleaved(lambda _: _fresh(options, "depth", 1, "--blocks", str(n_blocks)), ["keel"], options.rounds)["keel"]
    evaluations = n_blocks * (n_blocks + 1) / 2
    return {
        "n_blocks": n_blocks,
        "runs": run,
        "cpu_seconds_per_evaluation": statistics.median(r.cpu_seconds for r in run) / evaluations,
    }


# Inside a measured process


def _measured_process(options: argparse.Namespace) -> None:
    import torch

    if options.measure == "depth":
        one_pass = _depth_pass(options.blocks)
    else:
        model, ids = load_prepared(options.folder)
        text = Text(ids, options.part == "with head", torch.float64 if options.compared else torch.float32)
        one_pass = CONTENDERS[options.measure].prepare(model, text)
    found: list[list[float]] = []

    def keep_last() -> None:
        found[:] = [one_pass()]

    n_warmup = 0 if options.compared else 1
    report_run(time_passes(keep_last, options.passes, n_warmup=n_warmup), {"losses": found[0]})


def _depth_pass(n_blocks: int) -> Any:
    import torch

    from probes.config import ModelConfig
    from probes.layer_removal import measure_layer_removal
    from probes.model import Transformer
    from probes.text import TokenBatch

    config = ModelConfig(scheme="keel", n_blocks=n_blocks, width=16, ffn_width=32, n_heads=2, n_kv_heads=1, seed=DEPTH_SEED)
    model = Transformer(config).eval()
    ids = torch.randint(config.vocab_size, (1, DEPTH_TOKENS), generator=torch.Generator().manual_seed(DEPTH_SEED))
    batch = TokenBatch(ids, ids.roll(-1, 1))

    def one_pass() -> list[float]:
        result = measure_layer_removal(model, [batch], estimates=False, joint=False)
        return [result.loss.value, *(cost.delta_loss.value for cost in result.costs)]

    return one_pass


# What is printed


def _tables(record: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for part, comparison in record["comparisons"].items():
        lines += [f"{part}:", "", "| contender | wall s | CPU s | peak MiB | wall / naive | CPU / naive | largest difference |"]
        lines.append("|---" * 7 + "|")
        lines += [_row(name, runs, comparison) for name, runs in comparison["runs"].items()]
        lines += [f"\nnot comparable: {name}: {reason}" for name, reason in comparison["not_comparable"].items()]
        lines.append("")
    if record["depth"]:
        lines += ["| blocks of a Keel model | CPU ms a block evaluation |", "|---|---|"]
    lines += [f"| {row['n_blocks']} | {1e3 * row['cpu_seconds_per_evaluation']:.3f} |" for row in record["depth"]]
    return "\n".join(lines)


def _row(name: str, runs: Sequence[Run], comparison: Mapping[str, Any]) -> str:
    wall, cpu = (statistics.median(getattr(run, key) for run in runs) for key in ("wall_seconds", "cpu_seconds"))
    peaks = [run.peak_resident for run in runs if run.peak_resident is not None]
    peak = f"{statistics.median(peaks) / MIB:.0f}" if peaks else "unknown"
    ratios = comparison["ratios"].get(name)
    compared = ["1", "1"] if ratios is None else [_shown(ratios[key]) for key in ("wall_seconds", "cpu_seconds")]
    difference = f"{comparison['differences_nats'][name]:.1e} nats"
    return f"| {' | '.join([name, f'{wall:.2f}', f'{cpu:.2f}', peak, *compared, difference])} |"


def _shown(found: Ratio | None) -> str:
    return "unknown" if found is None else f"{found.median:.3f} ({found.lowest:.3f} to {found.highest:.3f})"


if __name__ == "__main__":
    sys.exit(main())
