"""Loss curves of real ramps with labels of the eye; the labels were written down before the judge was shown the curves.

``data/real_curves.parquet`` holds the points, ``data/real_curves.csv`` one label a line. A label gives the kind and an interval
in which the trouble begins; where a curve can be read in two ways (a slow drift and then a jump; a run that holds at a level
little below the unigram entropy) it gives both, and says why. All runs of a seed see the same batches, so what the batches
make of the loss was taken off before looking: a curve minus the fluctuation of the runs of that seed that stand still at the
unigram entropy has a half to a fifth of its noise.

After a sweep, ``python -m tests.probes._real_curves FOLDER ...`` collects the curves of all finished trials in the sweep's
folders, and names those that have no label yet; the label is then a line to write by hand.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["Label", "Reading", "RealCurve", "collect", "real_curves"]

_DATA = Path(__file__).parent / "data"
_POINTS, _LABELS = _DATA / "real_curves.parquet", _DATA / "real_curves.csv"


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a curve: its kind, and the first and last step at which the trouble may be said to begin.

    At the end of a ramp ``incomplete|irrecoverable_spike`` leaves open whether enough of it is left to tell.
    """

    kind: str
    onset_low: int | None
    onset_high: int | None

    def allows(self, kind: str, onset: int | None) -> bool:
        """Whether an answer agrees, its onset inside the interval."""
        if kind not in self.kind.split("|"):
            return False
        if self.onset_low is None or self.onset_high is None:
            return onset is None
        return onset is not None and self.onset_low <= onset <= self.onset_high


@dataclass(frozen=True, slots=True)
class Label:
    """One reading or two, and how they were come by."""

    readings: tuple[Reading, ...]
    how: str

    def allows(self, kind: str, onset: int | None) -> bool:
        """Whether an answer agrees with one of the readings."""
        return any(reading.allows(kind, onset) for reading in self.readings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCurve:
    """A run up a ramp."""

    scheme: str
    n_sublayers: int
    seed: int
    peak_lr: float
    ramp_steps: int
    unigram_entropy: float
    initial_loss: float
    losses: NDArray[np.float64]
    label: Label

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.n_sublayers}-{self.peak_lr:g}-seed{self.seed}"

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.arange(1, len(self.losses) + 1)

    @property
    def learning_rates(self) -> NDArray[np.float64]:
        return self.peak_lr * self.steps / self.ramp_steps


_KEY = ["scheme", "n_sublayers", "peak_lr", "seed"]


@cache
def real_curves() -> tuple[RealCurve, ...]:
    """Every recorded curve that has a label, in the order of the labels."""
    points = dict(iter(pd.read_parquet(_POINTS).groupby(_KEY)))
    return tuple(_curve(points[key], label) for key, label in _labels().items())


def _curve(points: pd.DataFrame, label: Label) -> RealCurve:
    first = points.iloc[0]
    return RealCurve(
        scheme=first["scheme"],
        n_sublayers=int(first["n_sublayers"]),
        seed=int(first["seed"]),
        peak_lr=float(first["peak_lr"]),
        ramp_steps=int(first["ramp_steps"]),
        unigram_entropy=float(first["unigram_entropy"]),
        initial_loss=float(first["initial_loss"]),
        losses=points.sort_values("step")["loss"].to_numpy(np.float64),
        label=label,
    )


def _labels() -> dict[tuple[str, int, float, int], Label]:
    with _LABELS.open(newline="") as file:
        return {_key(row): _label(row) for row in csv.DictReader(file)}


def _key(row: dict[str, str]) -> tuple[str, int, float, int]:
    return row["scheme"], int(row["n_sublayers"]), float(row["peak_lr"]), int(row["seed"])


def _label(row: dict[str, str]) -> Label:
    readings = [Reading(row["kind"], *_interval(row["onset_low"], row["onset_high"]))]
    if row["second_kind"]:
        readings.append(Reading(row["second_kind"], *_interval(row["second_low"], row["second_high"])))
    return Label(tuple(readings), row["how"])


def _interval(low: str, high: str) -> tuple[int | None, int | None]:
    return (int(low), int(high)) if low else (None, None)


def collect(folders: list[Path]) -> pd.DataFrame:
    """The points of all finished trials of sweeps.

    Args:
        folders: of sweeps, each with ``trials/*/result.json`` and the logs of their steps.

    Returns:
        One row per step: the columns that name the run, ramp_steps, unigram_entropy, initial_loss, step, loss.
    """
    results = [path for folder in folders for path in sorted(folder.glob("trials/*/result.json"))]
    frame = pd.concat([_points(path) for path in results], ignore_index=True)
    return frame.sort_values([*_KEY, "step"], ignore_index=True)


def _points(result: Path) -> pd.DataFrame:
    trial = json.loads(result.read_text())
    config, text = trial["config"], trial["training"]["corpus"]
    (log,) = result.parent.glob("seed_*/log.jsonl")
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if "loss" in row]
    steps = [row["step"] for row in rows]
    if steps != list(range(1, len(rows) + 1)):
        raise ValueError(f"{log}: steps are not 1, 2, 3 ...")
    return pd.DataFrame(
        {
            "scheme": config["model"]["scheme"],
            "n_sublayers": np.int16(2 * config["model"]["n_blocks"]),
            "peak_lr": config["peak_lr"],
            "seed": np.int16(config["seed"]),
            "ramp_steps": np.int16(config["steps"]),
            "unigram_entropy": text["unigram_entropy"],
            "initial_loss": np.log(text["vocab_size"]),
            "step": np.array(steps, np.int16),
            "loss": np.array([row["loss"] for row in rows], np.float32),
        }
    )


def _store(folders: list[Path]) -> None:
    """Write the points, and name the curves without a label."""
    frame = collect(folders)
    frame.to_parquet(_POINTS, compression="zstd", index=False)
    labels = _labels()
    for key, part in frame.groupby(_KEY):
        if key not in labels:
            print(f"no label yet: {key}, {len(part)} steps")
    print(f"{len(frame)} points in {_POINTS}")


if __name__ == "__main__":
    _store([Path(argument) for argument in sys.argv[1:]])
