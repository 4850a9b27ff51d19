"""Probes of a checkpoint larger than the memory they may use: rate, memory, and cost per block.

A random Llama checkpoint (bfloat16, one shard per block, 8 key-value heads) is written into a temporary folder and deleted at
the end. Both probes run on it in processes of their own, whose anonymous memory (``RssAnon``) is sampled from outside. The
wall time is compared with the larger of two limits measured in the same run, right before and after:

- reading: every shard read once with plain reads into one buffer, times the number of reads the probe needs;
- arithmetic: one block of the same shape with its weights in memory, times what the probe computes.

Both are limits for work done alone, while the probe does both at once and writes its state besides. Exit code 1: a checkpoint
of 8 GB or more was probed at less than 70 % of the limit or with 3 GB of anonymous memory, or a block costs more than 1.5 times
as much in a model of 512 blocks as in one of 8.

    python benchmarks/streaming.py -o benchmarks/results/streaming.json
    python benchmarks/streaming.py --width 2048 --ffn 5632 --blocks 12   # 1 GB, in a minute
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from _measure import environment, write_json
from safetensors.torch import save_file

_BUFFER = 8 << 20
_STD = 0.02
_SEED = 20260130
_LARGE = 8e9  # bytes of a checkpoint for which the limits hold
_LEAST_SHARE, _MOST_ANONYMOUS, _MOST_GROWTH = 0.70, 3e9, 1.5
_SCALING_BLOCKS = (8, 32, 128, 512)
_SPANS = 8


def llama_config(args: argparse.Namespace, n_blocks: int) -> transformers.LlamaConfig:
    """Llama with at most eight key-value heads, head and embedding apart."""
    return transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.ffn,
        num_hidden_layers=n_blocks,
        num_attention_heads=args.width // args.head_width,
        num_key_value_heads=min(8, args.width // args.head_width),
        head_dim=args.head_width,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )


def write_checkpoint(folder: Path, config: transformers.LlamaConfig) -> int:
    """Random weights, one block at a time; returns the bytes written."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shards: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        block = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        shards.setdefault(block, []).append(name)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    where: dict[str, str] = {}
    for i, names in enumerate(shards.values()):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {n: torch.ones(shapes[n]) if len(shapes[n]) == 1 else torch.randn(shapes[n]) * _STD for n in names}
        save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time, and CPU time of all threads, which other processes disturb less."""

    wall: float
    cpu: float

    def times(self, n: float) -> Seconds:
        """That many, one after another."""
        return Seconds(n * self.wall, n * self.cpu)


def mean(a: Seconds, b: Seconds) -> Seconds:
    """Of a measurement before and one after."""
    return Seconds((a.wall + b.wall) / 2, (a.cpu + b.cpu) / 2)


def timed(function: Callable[[], object]) -> Seconds:
    """One call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def plain_read(folder: Path) -> Seconds:
    """Every shard read once."""
    buffer = memoryview(bytearray(_BUFFER))

    def read() -> None:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    return timed(read)


def block_seconds(config: transformers.LlamaConfig, dtype: torch.dtype, n_rows: int, n_tokens: int, backward: bool) -> Seconds:
    """One block whose weights are in memory, the median of five."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config._attn_implementation = "sdpa"  # as a whole model chooses it
    block = LlamaDecoderLayer(config, 0).to(dtype)
    for parameter in block.parameters():  # a gradient is let go at once, as the probe does: memory is not what is measured
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: setattr(p, "grad", None)
        )
    stream = torch.randn(n_rows, n_tokens, config.hidden_size, dtype=dtype, requires_grad=backward)
    positions = torch.arange(n_tokens)[None]
    rotary = LlamaRotaryEmbedding(config)(stream, positions)

    def once() -> None:
        with torch.set_grad_enabled(backward):
            output = block(stream, position_embeddings=rotary, position_ids=positions)
        if backward:
            output.backward(torch.ones_like(output))
            stream.grad = None

    once()
    runs = [timed(once) for _ in range(5)]
    return Seconds(statistics.median(run.wall for run in runs), statistics.median(run.cpu for run in runs))


def faster_dtype(config: transformers.LlamaConfig, n_tokens: int) -> str:
    """Of bfloat16 and float32, the one this machine multiplies faster in."""
    seconds = {name: block_seconds(config, getattr(torch, name), 1, n_tokens, True).cpu for name in ("bfloat16", "float32")}
    return min(seconds, key=seconds.__getitem__)


def probe(folder: Path, name: str, dtype: str, n_tokens: int, span: int, keep_state: bool) -> dict[str, Any]:
    """Runs in a process of its own: one probe, timed."""
    from probes.streaming.gradients import measure_streamed_gradient_norms
    from probes.streaming.model import open_streamed
    from probes.streaming.removal import measure_streamed_layer_removal
    from probes.streaming.run_state import RunState
    from probes.text import IGNORED, TokenBatch

    ids = torch.arange(n_tokens)[None] * 7 % 256
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    batches = [TokenBatch(ids, targets)]
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as place,
        open_streamed(folder, dtype=getattr(torch, dtype)) as streamed,
    ):
        state = RunState(Path(place)) if keep_state else None

        def run() -> float:
            if name == "gradients":
                return measure_streamed_gradient_norms(streamed, batches, state=state).loss.value
            return measure_streamed_layer_removal(streamed, batches, span=span, state=state).loss.value

        losses: list[float] = []
        seconds = timed(lambda: losses.append(run()))
        return {
            "wall_seconds": seconds.wall,
            "cpu_seconds": seconds.cpu,
            "loss": losses[0],
            "bytes_read": streamed.stream.n_bytes_read,
        }


def watched(folder: Path, name: str, dtype: str, n_tokens: int, span: int, *, keep_state: bool = True) -> dict[str, Any]:
    """The probe in a fresh process, with the largest RssAnon seen from here."""
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--dtype", dtype]
    command += ["--threads", str(torch.get_num_threads())]
    command += ["--tokens", str(n_tokens), "--span", str(span), *(["--keep-state"] if keep_state else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _anonymous(process.pid))
        time.sleep(0.01)
    assert process.stdout is not None
    out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the {name} probe ended with {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found | {"peak_anonymous": peak}


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def n_computed(n_blocks: int, span: int) -> int:
    """Blocks that removal computes over all variants and the intact stream, each for one batch."""
    return sum(1 + sum(start + span <= block for start in range(n_blocks - span + 1)) for block in range(n_blocks))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both probes on the large checkpoint beside their limits."""
    config = llama_config(args, args.blocks)
    n_bytes = write_checkpoint(folder, config)
    dtype = args.dtype if args.dtype != "auto" else faster_dtype(config, args.tokens)
    real = getattr(torch, dtype)
    at_once = max(1, 1024 // args.tokens)
    results: dict[str, Any] = {"checkpoint_bytes": n_bytes, "dtype": dtype, "tokens": args.tokens, "blocks": args.blocks}
    for name in ("gradients", "removal"):

        def limits(name: str = name) -> tuple[Seconds, Seconds]:
            read = plain_read(folder).times(2 if name == "gradients" else 1)
            if name == "removal":
                many = block_seconds(config, real, at_once, args.tokens, False)
                return read, many.times(n_computed(args.blocks, args.span) / at_once)
            forward, both = (block_seconds(config, real, 1, args.tokens, backward) for backward in (False, True))
            return read, Seconds(forward.wall + both.wall, forward.cpu + both.cpu).times(args.blocks)

        before = limits()
        run = watched(folder, name, dtype, args.tokens, args.span)
        read, arithmetic = (mean(a, b) for a, b in zip(before, limits(), strict=True))
        share = max(read.wall, arithmetic.wall) / run["wall_seconds"]
        cpu_share = max(read.cpu, arithmetic.cpu) / run["cpu_seconds"]
        results[name] = run | {
            "read_limit": asdict(read),
            "arithmetic_limit": asdict(arithmetic),
            "share_of_limit_wall": share,
            "share_of_limit_cpu": cpu_share,
        }
        print(
            f"{name}: {run['wall_seconds']:.1f} s, {share:.0%} of the limit ({cpu_share:.0%} in CPU time); reading "
            f"{read.wall:.1f} s, arithmetic {arithmetic.wall:.1f} s; anonymous memory {run['peak_anonymous'] / 1e9:.2f} GB, "
            f"checkpoint {n_bytes / 1e9:.1f} GB, {dtype}",
            flush=True,
        )
    return results


def scaling(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Milliseconds per block of small models of growing depth; removal of eight spans, so that the variants stay as many."""
    narrow = argparse.Namespace(vocab=512, width=128, ffn=384, head_width=32)
    rows = []
    for n_blocks in _SCALING_BLOCKS:
        place = folder / f"deep-{n_blocks}"
        place.mkdir()
        write_checkpoint(place, llama_config(narrow, n_blocks))
        row: dict[str, Any] = {"blocks": n_blocks}
        for name in ("gradients", "removal"):
            span = n_blocks - _SPANS + 1 if name == "removal" else 1
            run = watched(place, name, "float32", 32, span)
            row[name] = {
                "ms_per_block": 1e3 * run["wall_seconds"] / n_blocks,
                "cpu_ms_per_block": 1e3 * run["cpu_seconds"] / n_blocks,
                "peak_anonymous": run["peak_anonymous"],
            }
        rows.append(row)
        print(
            f"{n_blocks} blocks: gradients {row['gradients']['cpu_ms_per_block']:.1f} CPU ms per block, "
            f"removal of {_SPANS} spans {row['removal']['cpu_ms_per_block']:.1f} CPU ms per block",
            flush=True,
        )
    return rows


def exceeded_limits(record: dict[str, Any]) -> list[str]:
    """What is over its limit, in words."""
    passed = []
    probes = record.get("probes", {})
    for name in ("gradients", "removal"):
        if probes.get("checkpoint_bytes", 0) >= _LARGE:
            run = probes[name]
            if run["share_of_limit_wall"] < _LEAST_SHARE:
                passed.append(f"{name}: {run['share_of_limit_wall']:.0%} of the limit is less than {_LEAST_SHARE:.0%}")
            if run["peak_anonymous"] >= _MOST_ANONYMOUS:
                passed.append(f"{name}: {run['peak_anonymous'] / 1e9:.2f} GB of anonymous memory")
        costs = [row[name]["cpu_ms_per_block"] for row in record.get("scaling", [])]
        if costs and costs[-1] > _MOST_GROWTH * costs[0]:
            passed.append(f"{name}: a block costs {costs[-1] / costs[0]:.2f} times as much in the deepest model")
    return passed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--head-width", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--span", type=int, default=1, help="blocks removed together; longer ones are fewer")
    parser.add_argument("--dtype", default="auto", help="auto: the faster of bfloat16 and float32 here")
    parser.add_argument("--threads", type=int, default=1, help="of the arithmetic; one more reads ahead")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; a temporary folder by default")
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--only-scaling", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--keep-state", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Write the checkpoint, measure, print, and delete it."""
    args = parse()
    torch.manual_seed(_SEED)
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(probe(args.folder, args.child, args.dtype, args.tokens, args.span, args.keep_state)))
        return
    folder = Path(tempfile.mkdtemp(prefix="keel-streaming-", dir=args.folder))
    try:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        large = folder / "large"
        large.mkdir()
        record: dict[str, Any] = {"environment": environment(threads=args.threads, seed=_SEED)}
        if not args.only_scaling:
            record["probes"] = compare(args, large)
        if not args.no_scaling:
            record["scaling"] = scaling(args, folder)
        record["exceeded_limits"] = exceeded_limits(record)
        if args.output is not None:
            write_json(args.output, record)
        if record["exceeded_limits"]:
            raise SystemExit("; ".join(record["exceeded_limits"]))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
