r"""Training runs behind the figures: by the sweep machinery, resumable, finished ones skipped; and their curves as a frame.

**Learning rates.** One rule for every figure, fixed before any of its runs: a learning rate of the paper times
:data:`LR_FACTOR`. Table 1 gives Keel at 64 sub-layers a Max LR of 1.01e-2 at width 1024; at width 64 the high ramp of
``benchmarks/sweeps/table1_cpu.toml`` gave 0.0625 to 0.069 over three seeds, median 0.0675, when the rule was fixed. Their ratio
is the factor. (A later judge dates the same runs to 0.064 in all three; the factor was not changed afterwards.) Keel is the
anchor since it is the one scheme whose upper end both have seen: Pre-LN has none up to 0.25 here. The GPU presets are wide
enough to take the paper's learning rates as they are.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.config import count_parameters
from probes.errors import KeelError
from probes.sweep import Event, RunOptions, run_sweep
from probes.sweep_folder import SweepFolder
from probes.sweep_spec import Sweep, sweep_from_dict
from probes.trial import Trial, labels, predicted_flops
from probes.trial_folder import TrialFolder

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LR_FACTOR",
    "FigureRunError",
    "constant",
    "curve_frame",
    "figure_sweep",
    "run_columns",
    "scaled_lr",
    "train_curves",
    "trained",
]

LR_FACTOR = 6.7
"""Our learning rate over the paper's: 0.0675 / 0.0101, Keel's Max LR at 64 sub-layers when the rule was fixed."""

_INLINE_FLOPS = 1e12
"""A sweep that is cheaper runs in this process: starting others takes longer."""
_WEIGHTS = "model.safetensors"


class FigureRunError(KeelError):
    """A training run behind a figure broke. The message says which, and how."""


def scaled_lr(paper_lr: float) -> float:
    """A learning rate of the paper, at our width.

    Args:
        paper_lr: dimensionless.

    Returns:
        Dimensionless, two significant digits.

    Example:
        >>> scaled_lr(4.5e-3)
        0.03
    """
    return float(f"{LR_FACTOR * paper_lr:.2g}")


def constant(peak_lr: float) -> dict[str, Any]:
    """A grid whose learning rate stays at its peak after the warm-up.

    Example:
        >>> constant(0.03)
        {'peaks': [0.03], 'training': {'final_lr': 0.03}}
    """
    return {"peaks": [peak_lr], "training": {"final_lr": peak_lr}}


def figure_sweep(name: str, values: Mapping[str, Any], device: str = "cpu") -> Sweep:
    """The sweep of a figure's settings.

    Args:
        name: of the sweep, and of its folder.
        values: as in a sweep's TOML file; plain training unless ``kind`` says otherwise.
        device: of every run.
    """
    training = {"device": device, **values.get("training", {})}
    return sweep_from_dict({"name": name, "kind": "train", **values, "training": training})


@contextmanager
def trained(sweep: Sweep, folder: Path | None, *, keep_weights: bool = False) -> Iterator[tuple[TrialFolder, ...]]:
    """Have every trial of a sweep finished; what an earlier call has finished is not run again.

    Sweeps that several figures read are shared: a sweep lies in the folder of its own name beside the figure's.

    Args:
        sweep: which trials.
        folder: of the figure; without one the runs are gone afterwards.
        keep_weights: whether the trained models are wanted.

    Yields:
        The finished trials, in the order of the sweep.

    Raises:
        FigureRunError: if one breaks.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = SweepFolder(Path(temporary) if folder is None else folder.parent / sweep.name)
        trials = sweep.trials()
        folders = tuple(place.folder(trial) for trial in trials)
        if keep_weights:
            _forget_without_weights(folders)
        if any(each.result is None for each in folders):
            options = RunOptions(executor=_executor(trials), keep_weights=keep_weights)
            run_sweep(sweep, place.path, options, on_event=_tell)
            _check(folders)
        yield folders


def _forget_without_weights(folders: Sequence[TrialFolder]) -> None:
    """A trial that was finished without its weights being kept is trained again; it ends with the same numbers."""
    for place in folders:
        if place.result is not None and not (place.run_path / _WEIGHTS).exists():
            shutil.rmtree(place.path)


def _executor(trials: Sequence[Trial]) -> str:
    cheap = sum(predicted_flops(trial.config) for trial in trials) < _INLINE_FLOPS
    return "debug" if cheap or find_spec("submitit") is None else "local"


def _tell(event: Event) -> None:
    print(f"  {event.label}: {event.what} {event.detail}".rstrip(), file=sys.stderr, flush=True)


def _check(folders: Sequence[TrialFolder]) -> None:
    named = labels([place.trial for place in folders])
    for place in folders:
        if place.result is None:
            failure = place.failure or {}
            raise FigureRunError(
                f"{named[place.trial.key]} broke: {failure.get('error', 'no result')}; its files: {place.path}"
            )


def run_columns(place: TrialFolder) -> dict[str, Any]:
    """What a figure says of a finished run: one value per column.

    Args:
        place: of the trial.
    """
    config, training = place.trial.config, (place.result or {})["training"]
    validation = training["validation_loss"]
    return {
        "trial": place.trial.key,
        "scheme": config.model.scheme,
        "n_sublayers": config.model.n_sublayers,
        "width": config.model.width,
        "n_parameters": count_parameters(config.model),
        "seed": config.seed,
        "peak_lr": config.peak_lr,
        "steps": config.steps,
        "warmup": config.warmup,
        "tokens_per_step": config.batch_size * config.seq_len,
        "seq_len": config.seq_len,
        "device": config.device,
        "unigram_entropy": float(training["corpus"]["unigram_entropy"]),
        "initial_loss": math.log(config.model.vocab_size),
        "outcome": training["outcome"],
        "validation_loss": math.nan if validation is None else float(validation),
    }


def curve_frame(folders: Sequence[TrialFolder]) -> pd.DataFrame:
    """The curves of finished runs, a row per run and optimizer step.

    Args:
        folders: of the trials.

    Returns:
        Columns of :func:`run_columns`, then step, lr, loss (nats per token, before the update), grad_norm (before clipping).
    """
    import pandas as pd

    parts = [pd.DataFrame(_steps(place)).assign(**run_columns(place)) for place in folders]
    frame = pd.concat(parts, ignore_index=True)
    measured = ["step", "lr", "loss", "grad_norm"]
    return frame[[*(name for name in frame.columns if name not in measured), *measured]]


def train_curves(name: str, *, folder: Path | None = None, sweep: Mapping[str, Any], device: str = "cpu") -> pd.DataFrame:
    """Train a figure's sweep, or read what is trained: the ``compute`` of figures that show nothing but curves.

    Args:
        name: of the figure.
        folder: of its runs; without one they are gone afterwards.
        sweep: as in a sweep's TOML file.
        device: of the runs.

    Returns:
        As :func:`curve_frame`.
    """
    with trained(figure_sweep(name, sweep, device), folder) as folders:
        return curve_frame(folders)


def _steps(place: TrialFolder) -> dict[str, Any]:
    import numpy as np

    records = place.records()
    return {
        "step": np.array([record.step for record in records], np.int32),
        "lr": np.array([record.lr for record in records], np.float32),
        "loss": np.array([record.loss for record in records], np.float32),
        "grad_norm": np.array([record.grad_norm for record in records], np.float32),
    }
