"""Loss curves of whole real ramps, each read by three readers who had not seen the judge's answers.

``data/real_curves.parquet`` holds the points, with what models that do not learn lose on the same batches.
``data/real_curves.csv`` holds the readings, three rows per curve: the kind and the steps between which the trouble may be said
to begin; and a second kind and interval where a curve can honestly be read in two ways (a slow drift and then a jump; a run
that holds at a level little below the unigram entropy).

The readers (language models shown pictures, each curve whole, shuffled, without a name, with what batches make of the loss
taken off, as points and as running medians of 5 and 21) were told the kinds, that a departure is one from a tenth of what was
learned, and to give the earliest and latest onset that they would accept of a colleague. They worked alone. An answer is right
if one of the three would accept it.

The judge's dating of rises was chosen with the curves of seeds 0 to 2 in view. Those of seed 3 were held out: 17 of 18 were
right at first sight; the last showed that ends of falls were dated a few steps early on all curves, which was then mended.

After a sweep, ``python -m tests.probes._real_curves FOLDER ...`` collects the curves of all finished trials in the sweeps'
folders, and names those that have no reading yet.
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

__all__ = ["Interval", "Reading", "RealCurve", "collect", "real_curves"]

_DATA = Path(__file__).parent / "data"
_POINTS, _READINGS = _DATA / "real_curves.parquet", _DATA / "real_curves.csv"
_HELD_OUT_SEED = 3


@dataclass(frozen=True, slots=True)
class Interval:
    """A kind, and the first and last step at which the trouble may be said to begin; None of a healthy run.

    At the end of a ramp ``incomplete|irrecoverable_spike`` leaves open whether enough of it is left to tell.
    """

    kind: str
    low: int | None
    high: int | None

    def allows(self, kind: str, onset: int | None) -> bool:
        """Whether an answer agrees, its onset inside the interval."""
        if kind not in self.kind.split("|"):
            return False
        if self.low is None or self.high is None:
            return onset is None
        return onset is not None and self.low <= onset <= self.high

    @property
    def middle(self) -> int | None:
        return None if self.low is None or self.high is None else (self.low + self.high) // 2


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader makes of a curve, in one way or two."""

    reader: str
    ways: tuple[Interval, ...]
    why: str

    def allows(self, kind: str, onset: int | None) -> bool:
        """Whether the reader would accept an answer."""
        return any(way.allows(kind, onset) for way in self.ways)


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
    batch_losses: NDArray[np.float64]
    readings: tuple[Reading, ...]

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.n_sublayers}-{self.peak_lr:g}-seed{self.seed}"

    @property
    def held_out(self) -> bool:
        return self.seed == _HELD_OUT_SEED

    def accepted_by(self, kind: str, onset: int | None) -> int:
        """How many readers would accept an answer."""
        return sum(reading.allows(kind, onset) for reading in self.readings)

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.arange(1, len(self.losses) + 1)

    @property
    def learning_rates(self) -> NDArray[np.float64]:
        return self.peak_lr * self.steps / self.ramp_steps


_KEY = ["scheme", "n_sublayers", "peak_lr", "seed"]


@cache
def real_curves() -> tuple[RealCurve, ...]:
    """Every recorded curve that has been read, in the order of the readings."""
    points = dict(iter(pd.read_parquet(_POINTS).groupby(_KEY)))
    return tuple(_curve(points[key], readings) for key, readings in _readings().items())


def _curve(points: pd.DataFrame, readings: tuple[Reading, ...]) -> RealCurve:
    first, points = points.iloc[0], points.sort_values("step")
    return RealCurve(
        scheme=first["scheme"],
        n_sublayers=int(first["n_sublayers"]),
        seed=int(first["seed"]),
        peak_lr=float(first["peak_lr"]),
        ramp_steps=int(first["ramp_steps"]),
        unigram_entropy=float(first["unigram_entropy"]),
        initial_loss=float(first["initial_loss"]),
        losses=points["loss"].to_numpy(np.float64),
        batch_losses=points[["unigram_loss", "bigram_loss"]].to_numpy(np.float64),
        readings=readings,
    )


def _readings() -> dict[tuple[str, int, float, int], tuple[Reading, ...]]:
    found: dict[tuple[str, int, float, int], tuple[Reading, ...]] = {}
    with _READINGS.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["scheme"], int(row["n_sublayers"]), float(row["peak_lr"]), int(row["seed"])
            found[key] = (*found.get(key, ()), _reading(row))
    return found


def _reading(row: dict[str, str]) -> Reading:
    ways = [Interval(row["kind"], *_steps(row["low"], row["high"]))]
    if row["second_kind"]:
        ways.append(Interval(row["second_kind"], *_steps(row["second_low"], row["second_high"])))
    return Reading(row["reader"], tuple(ways), row["why"])


def _steps(low: str, high: str) -> tuple[int | None, int | None]:
    return (int(low), int(high)) if low else (None, None)


def collect(folders: list[Path]) -> pd.DataFrame:
    """The points of all finished trials of sweeps.

    Args:
        folders: of sweeps, each with ``trials/*/result.json`` and the logs of their steps.

    Returns:
        One row per step: the columns that name the run, ramp_steps, unigram_entropy, initial_loss, step, loss, unigram_loss,
        bigram_loss.
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
            **{name: np.array([row[name] for row in rows], np.float32) for name in ("loss", "unigram_loss", "bigram_loss")},
        }
    )


def _store(folders: list[Path]) -> None:
    """Write the points, and name the curves without a reading."""
    frame = collect(folders)
    frame.to_parquet(_POINTS, compression="zstd", index=False)
    readings = _readings()
    for key, part in frame.groupby(_KEY):
        if key not in readings:
            print(f"not read yet: {key}, {len(part)} steps")
    print(f"{len(frame)} points in {_POINTS}")


if __name__ == "__main__":
    _store([Path(argument) for argument in sys.argv[1:]])
