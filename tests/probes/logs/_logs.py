"""Small logs for the tests: one run of ten steps in every format, and rows of other runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from probes.logs import RunLog

SAMPLES = Path(__file__).parent / "samples"
STEPS = range(1, 11)
RATES = [0.005 * k for k in STEPS]


def rows(loss: str = "loss", lr: str = "lr", step: str = "step", grad: str = "grad_norm") -> list[dict[str, Any]]:
    return [{step: k, loss: 5.0 - 0.1 * k, lr: 0.005 * k, grad: 1.0 + k} for k in STEPS]


def write_csv(path: Path, table: list[dict[str, Any]], delimiter: str = ",") -> Path:
    lines = [delimiter.join(table[0]), *(delimiter.join(map(str, row.values())) for row in table)]
    path.write_text("\n".join(lines) + "\n")
    return path


def assert_is_the_run(log: RunLog) -> None:
    np.testing.assert_array_equal(log.steps, STEPS)
    np.testing.assert_allclose(log.losses, [5.0 - 0.1 * k for k in STEPS])
    np.testing.assert_allclose(log.learning_rates, RATES)
    assert log.known.all()
    assert log.grad_norms == tuple(1.0 + k for k in STEPS)


def micro_batches(n_steps: int = 10, per_step: int = 4, last: int = 4) -> list[dict[str, Any]]:
    """Learning rate k * 0.005 within step k; losses whose mean is 6 - 0.1 k (full steps)."""
    table = [
        {"step": k, "loss": 6 - 0.1 * k + 0.2 * (i - (per_step - 1) / 2), "lr": 0.005 * k}
        for k in range(1, n_steps + 1)
        for i in range(per_step)
    ]
    return table[: len(table) - per_step + last]


def log_of(tmp_path: Path, steps: Any, rates: Any) -> Path:
    table = [{"step": k, "loss": 5.0 - 0.001 * i, "lr": rate} for i, (k, rate) in enumerate(zip(steps, rates, strict=True))]
    return write_csv(tmp_path / "log.csv", table)


def write_lines(path: Path, table: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, table)) + "\n")
    return path


FORMATS = ("csv", "tsv", "semicolon", "space", "markdown", "jsonl", "json", "columns", "frame", "split", "parquet")
FORMATS += ("trainer_state", "tidy")


def write_as(form: str, folder: Path, table: list[dict[str, Any]]) -> Path:
    """A table in one of :data:`FORMATS`; None is a cell that is not known, or a key that is left out."""
    path = folder / f"log.{form}"
    frame = pd.DataFrame(table)
    if form in ("csv", "tsv", "semicolon", "space"):
        delimiter = {"csv": ",", "tsv": "\t", "semicolon": ";", "space": " "}[form]
        frame.astype(object).where(frame.notna(), "NaN" if form == "space" else "").to_csv(path, sep=delimiter, index=False)
    elif form == "jsonl":
        write_lines(path, table)
    elif form == "json":
        path.write_text(json.dumps(table))
    elif form == "columns":
        path.write_text(json.dumps({name: [row.get(name) for row in table] for name in frame}))
    elif form == "frame":
        frame.to_json(path)
    elif form == "split":
        path.write_text(json.dumps({"columns": list(frame), "data": [[row.get(name) for name in frame] for row in table]}))
    elif form == "markdown":
        lines = [list(frame), ["---"] * len(frame.columns), *([row.get(name) for name in frame] for row in table)]
        path.write_text("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))
    elif form == "parquet":
        frame.to_parquet(path)
    elif form == "trainer_state":
        path.write_text(json.dumps({"global_step": len(table), "log_history": table}))
    else:
        frame.melt("step", var_name="metric").to_csv(path, index=False)
    return path


def printed(program: str, *, bad_from: int = 99, rates: bool = True) -> str:
    """The run as a program prints it, its losses not finite from a step on."""
    lines = ["loading the data ...", "number of parameters: 0.80M"]
    for row in rows():
        k, loss, rate, norm = row.values()
        loss, norm = (math.nan, math.nan) if k >= bad_from else (loss, norm)
        lines += _PROGRAMS[program](k, loss, rate, norm)
    return "\n".join([*lines, "saving checkpoint to out", ""])


def _megatron(k: int, loss: float, rate: float, norm: float) -> list[str]:
    told = "" if math.isnan(loss) else f" lm loss: {loss:.6E} |"  # it prints no loss that is not above 0
    return [
        f" [2025-05-27] iteration {k:8d}/{600:8d} | consumed samples: {64 * k:12d} | elapsed time per iteration (ms): 12.3"
        f" | learning rate: {rate:.6E} | global batch size:    64 |{told} loss scale: 1.0 | grad norm: {norm:.3f} | number of "
        "skipped iterations:   0 | number of nan iterations:   0 |",
        f" validation loss at iteration {k} | lm loss value: 9.000000E+00 | lm loss PPL: 8.1E+03 | ",
    ]


def _torchtitan(k: int, loss: float, rate: float, norm: float) -> list[str]:
    head = "\x1b[31m[titan] 2025-05-27 15:23:07,123 - root - INFO - \x1b[31m"
    return [
        f"{head}step: {k:2}  \x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[36mmemory:  1.50GiB"
        f"(1.88%)  \x1b[34mtps: 12,345  \x1b[36mtflops: 1,234.56  \x1b[35mmfu: 12.34%\x1b[39m",
        f"{head}\x1b[33mvalidate step: {k:2}  \x1b[32mloss: 9.0000  \x1b[39m",
    ]


_PROGRAMS = {
    "nanoGPT": lambda k, loss, rate, norm: [
        *([f"step {k}: train loss 9.0000, val loss 9.1000"] if k % 5 == 0 else []),
        f"iter {k}: loss {loss:.4f}, time 12.34ms, mfu 1.23%",
    ],
    "nanoGPT's estimates": lambda k, loss, rate, norm: [f"step {k}: train loss {loss:.4f}, val loss 9.1000"],
    "Megatron-LM": _megatron,
    "torchtitan": _torchtitan,
    "Trainer 5": lambda k, loss, rate, norm: [
        f"{{'loss': '{loss:.4g}', 'grad_norm': '{norm:.4g}', 'learning_rate': '{rate:.4g}', 'epoch': '{k / 10}'}}",
        f"{{'eval_loss': '9.0', 'epoch': '{k / 10}'}}",
    ],
    "Trainer 4": lambda k, loss, rate, norm: [
        f" 10%|█   | {k}/600 [00:01<00:09, 9.9it/s]\r{{'loss': {loss:.4f}, 'grad_norm': {norm}, 'learning_rate': {rate}}}",
        f"{{'train_runtime': 12.3, 'train_loss': 9.0, 'epoch': {k / 10}}}",
    ],
    "llm.c": lambda k, loss, rate, norm: [
        f"step {k:4d}/600 | loss {loss:.6f} (+1.0z)| norm {norm:.4f} | lr {rate:.2e} | 12.3 ms"
    ],
    "modded-nanogpt": lambda k, loss, rate, norm: [
        f"step:{k}/600 train_loss:{loss:.4f} train_time:{100 * k}ms step_avg:100.00ms",
        f"step:{k}/600 val_loss:9.0000 train_time:{100 * k}ms step_avg:100.00ms",
    ],
    "litgpt": lambda k, loss, rate, norm: [
        f"Epoch 1 | iter {4 * k} step {k} | loss train: {loss:.3f}, val: n/a | iter time: 300.00 ms (step)"
    ],
    "JSON after text": lambda k, loss, rate, norm: [
        "INFO | train_inner | " + json.dumps({"num_updates": str(k), "loss": str(loss), "lr": str(rate)})
    ],
    "of one's own": lambda k, loss, rate, norm: [
        f"[INFO] Step={k} Loss={loss:.4f} LR={rate:.4g}",
        f"Validation: step {k} loss 9.0",
    ],
}
PROGRAMS = tuple(_PROGRAMS)
