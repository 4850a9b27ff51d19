"""What a figure finds beside what the paper says: rises of a loss, spreads over seeds, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from probes.divergence import JudgeThresholds
from probes.onset import FloatArray, noise_deviation, running_median

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Rise",
    "Verdict",
    "conclude",
    "decide",
    "every",
    "failed_runs",
    "final_loss",
    "in_runs",
    "largest_rise",
    "learned_nothing",
    "paired_gap",
    "same_sign",
    "spread_over_seeds",
]

Parts = Mapping[str, "bool | None"]
NEAR_UNIGRAM = 0.02
"""Share of the unigram entropy within which a loss is said to end there: what a run reaches that has learned nothing else."""


class Verdict(str, Enum):
    """Whether a measurement agrees with the paper."""

    REPRODUCED = "reproduced"
    IN_DIRECTION = "reproduced in direction"
    NOT_REPRODUCED = "not reproduced"
    NOT_DECIDED = "not decided"


def conclude(parts: Parts, main: Collection[str]) -> str:
    """The verdict on a statement by its parts.

    Args:
        parts: whether each part holds; None where the runs do not decide it.
        main: the parts that make its direction.

    Returns:
        Reproduced if every part holds; in direction if every main part does; not reproduced if some main part does not hold;
        otherwise not decided.

    Example:
        >>> conclude({"lower": None, "smooth": True}, main=["lower"])
        'not decided'
    """
    found = [parts[name] for name in main]
    if all(found):
        return decide(fully=all(parts.values()), in_direction=True)
    return Verdict.NOT_REPRODUCED.value if any(part is False for part in found) else Verdict.NOT_DECIDED.value


def every(answers: Iterable[bool | None]) -> bool | None:
    """Whether all answers are yes; no where one is no, None where none is no and one is open.

    Example:
        >>> every([True, True]), every([True, None]), every([False, None])
        (True, None, False)
    """
    found = list(answers)
    return False if any(answer is False for answer in found) else None if None in found else True


def same_sign(differences: Sequence[float] | FloatArray) -> bool | None:
    """Whether differences are above zero in every seed: True, in none: False, else None, for the seeds do not decide.

    Example:
        >>> same_sign([0.1, 0.2]), same_sign([-0.1, 0.0]), same_sign([0.1, -0.1])
        (True, False, None)
    """
    values = np.asarray(differences, float)
    if not len(values) or np.isnan(values).any():
        return None
    above = values > 0
    return bool(above[0]) if (above == above[0]).all() else None


def learned_nothing(runs: pd.DataFrame) -> pd.Series[bool]:
    """Whether runs end at the unigram entropy of their text, or above it, or not at a number.

    A difference between two such runs says nothing of what either can learn.

    Args:
        runs: with validation_loss and unigram_entropy, nats per token.
    """
    ends_there: pd.Series[bool] = ~(runs["validation_loss"] < (1 - NEAR_UNIGRAM) * runs["unigram_entropy"])
    return ends_there


def decide(*, fully: bool, in_direction: bool) -> str:
    """The verdict.

    Args:
        fully: every part of the statement holds in every seed.
        in_direction: its main part holds in the median.

    Example:
        >>> decide(fully=False, in_direction=True)
        'reproduced in direction'
    """
    verdict = Verdict.REPRODUCED if fully else Verdict.IN_DIRECTION if in_direction else Verdict.NOT_REPRODUCED
    return verdict.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The largest rise of a loss above its lowest level so far.

    Attributes:
        height: nats; infinite where the loss stops being a number.
        step_index: where it is reached.
        is_spike: whether some rise is more than noise and more than the share of what had been learned from which the
            divergence judge counts a rise.
    """

    height: float
    step_index: int
    is_spike: bool


def largest_rise(losses: Sequence[float] | FloatArray) -> Rise:
    """The largest rise of a loss curve, whether or not it comes back; what counts as a rise is what the judge counts.

    The level is a running median of five steps. A rise is a spike from the share ``rise`` of what had been learned by then, and
    from ``rise_noise`` standard deviations of the noise from step to step: :class:`probes.divergence.JudgeThresholds`.

    Args:
        losses: nats, one per optimizer step.

    Returns:
        The rise.

    Example:
        >>> largest_rise([5, 4, 3, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 3]).height
        1.0
    """
    values = np.asarray(losses, float)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        return Rise(height=math.inf, step_index=int(bad[0]), is_spike=True)
    level = running_median(values)
    lowest = np.minimum.accumulate(level)
    rise = level - lowest
    judge = JudgeThresholds()
    needed = np.maximum(judge.rise * (level[0] - lowest), judge.rise_noise * noise_deviation(values))
    where = int(np.argmax(rise))
    return Rise(height=float(rise[where]), step_index=where, is_spike=bool((rise > needed).any()))


def in_runs(frame: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """One row per run: its columns, final loss and largest rise.

    Args:
        frame: curves.
        by: further columns that tell runs apart; a trial's key does already.

    Returns:
        Columns of the runs, with final_loss (nats), rise (nats), is_spike.
    """
    import pandas as pd

    rows = []
    for _, run in frame.groupby(["trial", *by], sort=False):
        rise = largest_rise(run["loss"].to_numpy(float))
        constant = run.iloc[0].drop(["step", "lr", "loss", "grad_norm"]).to_dict()
        rows.append({**constant, "final_loss": final_loss(run), "rise": rise.height, "is_spike": rise.is_spike})
    return pd.DataFrame(rows)


def final_loss(run: pd.DataFrame, share: float = 0.05) -> float:
    """Mean loss of a run's last steps, nats per token; NaN where one is not finite.

    Args:
        run: of one run.
        share: of its steps.
    """
    losses = run["loss"].to_numpy(float)
    last = losses[-max(1, round(share * len(losses))) :]
    return float(last.mean()) if np.isfinite(last).all() else math.nan


def spread_over_seeds(values: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and number, ready for JSON.

    Example:
        >>> spread_over_seeds([1.0, 3.0, 2.0])
        {'median': 2.0, 'low': 1.0, 'high': 3.0, 'seeds': 3}
    """
    found = np.asarray(values, float)
    return {
        "median": float(np.median(found)),
        "low": float(found.min()),
        "high": float(found.max()),
        "seeds": len(found),
    }


def failed_runs(failed: pd.DataFrame) -> list[dict[str, Any]]:
    """Which runs :func:`learned_nothing`, ready for JSON.

    Args:
        failed: of :func:`in_runs`, those alone.
    """
    return [
        {
            "scheme": str(run["scheme"]),
            "n_sublayers": int(run["n_sublayers"]),
            "seed": int(run["seed"]),
            "validation_loss": float(run["validation_loss"]),
        }
        for _, run in failed.iterrows()
    ]


def paired_gap(runs: pd.DataFrame, value: str, first: str = "pre_ln", second: str = "keel") -> list[float]:
    """One scheme's value minus another's, seed by seed: same data in the same order.

    Args:
        runs: as :func:`in_runs` gives them, one run per scheme and seed.
        value: column.
        first: scheme.
        second: scheme that is taken away.

    Returns:
        One difference per seed, by ascending seed.
    """
    table = runs.pivot(index="seed", columns="scheme", values=value)
    return [float(gap) for gap in table[first] - table[second]]
