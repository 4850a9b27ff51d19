"""What each constant of the divergence judge buys: every one doubled, and halved or switched off, and what that changes.

Judged are all recorded ramps (``tests/probes/data``), each three times: as a run of this toolkit, which knows its batches; as
a log comes, without them; and, those of seed 0, beside the healthy run. So are synthetic curves with a label, of every maker
at seeds 1 and 20260130. A constant buys something where a change of it makes readers reject verdicts or names labelled curves
wrong. The first row of the result is the judge as it is.

The result is written row by row; rows that are there already are not measured again. No seconds are measured.

    python benchmarks/judge_constants.py [-o benchmarks/results/judge_constants.csv]
"""

from __future__ import annotations

import argparse
import csv
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from probes import control_variates, divergence, divergence_criteria, onset, rise_onset
from probes.control_variates import without_batches
from probes.divergence import JudgeThresholds, Landmarks, judge_run
from probes.judgement import Judgement
from tests.probes._curves import HELD_OUT, TUNED_ON, Curve, make_curves
from tests.probes._real_curves import RealCurve, real_curves

RESULT = Path(__file__).parent / "results" / "judge_constants.csv"
MODULES: tuple[ModuleType, ...] = (divergence, divergence_criteria, rise_onset, onset, control_variates)
SEEDS = ((TUNED_ON, 1), (HELD_OUT, 20260130))
RAMPS = (100, 200, 300, 600)
WIDE, NARROW = 1e9, 1e-9
OFF: dict[str, Any] = {
    "rise_noise": NARROW,
    "gap_noise": NARROW,
    "still_falling_noise": NARROW,
    "still_falling": NARROW,
    "plateau_margin": NARROW,
    "rise_tail": NARROW,
    "gap_patience": NARROW,
    "blind_level": NARROW,
    "min_points": 1,
    "non_finite_patience": 1,
    "_OPEN_POINTS": 1,
    "_TELLING": 0.0,
    "_LASTS_BESIDE": 0.0,
    "_STANDS_OUT": WIDE,
    "_SHARP": 0.0,
    "_SHARP_SHARE": 0.0,
    "_SHARP_POINTS": -1,
    "_USUAL": 1.0,
    "_NEAR": 0.0,
    "_UP_BEYOND": 0.0,
    "_LEAST_BEFORE": 1,
    "_AFTER": 0.0,
    "_UNKNOWN": WIDE,
    "_FAR": WIDE,
    "_BATCH_FAR": WIDE,
    "_DRIFTS": WIDE,
    "_MOST": 0.0,
    "_RIDGE": 1e-12,
}
"""Values at which a constant has no say, where there are such; the others are halved."""
_SHARES = ("_USUAL", "_MOST")
_ODD = ("LEAST_POINTS", "_COURSE", "_NOISE_WINDOW")
PARTS: dict[str, Any] = {
    "_is_up": lambda *_: True,
    "_stands_out": lambda *_: True,
    "_returns": lambda *_: False,
    "_blind_plateau": lambda *_: None,
    "_date_sharp_rise": lambda *_: None,
}
"""Functions, and what stands in for them when they are switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One constant with another value.

    Attributes:
        module: where it is; ``JudgeThresholds`` for a public threshold.
        name: of it.
        index: in a tuple of constants, or None.
        value: as it is.
        tried: instead.
    """

    module: str
    name: str
    index: int | None
    value: float
    tried: float

    @property
    def label(self) -> str:
        """The constant by name."""
        return self.name if self.index is None else f"{self.name}[{self.index}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A row of the result.

    Attributes:
        module: of the constant.
        constant: by name; ``as it is`` for the judge unchanged.
        value: as it is.
        tried: instead.
        real_changed: recorded ramps whose kind or onset is another one.
        real_accepted: recorded ramps on which a reader accepts the verdict.
        log_accepted: the same without the batches.
        beside_changed: recorded ramps beside a healthy one of which a criterion's onset is another one.
        synthetic_right: labelled curves of the right kind.
        synthetic_dated: labelled curves of the right kind, and the onset within 4 % of the ramp.
    """

    module: str
    constant: str
    value: str
    tried: str
    real_changed: int
    real_accepted: int
    log_accepted: int
    beside_changed: int
    synthetic_right: int
    synthetic_dated: int


def thresholds() -> Iterator[Change]:
    """Every public threshold, changed."""
    for name in JudgeThresholds.__dataclass_fields__:
        yield from _tried("JudgeThresholds", name, None, getattr(JudgeThresholds(), name))


def constants() -> Iterator[Change]:
    """Every private constant of the judge's modules, changed, and every part switched off."""
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name.lstrip("_").isupper():
                yield from _tried(module.__name__, name, None, value)
            elif isinstance(value, tuple) and name.isupper() and all(isinstance(part, (int, float)) for part in value):
                for index, part in enumerate(value):
                    yield from _tried(module.__name__, name, index, part)
        for name in PARTS:
            if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
                yield Change(module=module.__name__, name=name, index=None, value=1, tried=0)


def _tried(module: str, name: str, index: int | None, value: float) -> Iterator[Change]:
    whole = isinstance(value, int)
    less: float = max(1, value // 2) if whole else value / 2
    values = [OFF.get(name, less), 2 * value]
    if name in _SHARES:
        values = [min(each, 1.0) for each in values]
    if name in _ODD:
        values = [int(each) | 1 for each in values]
    for each in values:
        if each != value:
            yield Change(module=module, name=name, index=index, value=value, tried=each)


@contextmanager
def changed(change: Change | None) -> Iterator[JudgeThresholds]:
    """The judge with one constant changed, and the thresholds to judge by."""
    if change is None:
        yield JudgeThresholds()
        return
    if change.module == "JudgeThresholds":
        tried: dict[str, Any] = {change.name: change.tried}
        yield replace(JudgeThresholds(), **tried)
        return
    module = importlib.import_module(change.module)
    kept = getattr(module, change.name)
    if change.name in PARTS:
        new = PARTS[change.name]
    elif change.index is None:
        new = change.tried
    else:
        new = tuple(change.tried if i == change.index else part for i, part in enumerate(kept))
    setattr(module, change.name, new)
    try:
        yield JudgeThresholds()
    finally:
        setattr(module, change.name, kept)


def judge_real(curve: RealCurve, by: JudgeThresholds, *, batches: bool = True, reference: RealCurve | None = None) -> Judgement:
    """The verdict on a recorded ramp."""
    known = Landmarks(
        unigram_entropy=curve.unigram_entropy,
        initial_loss=curve.initial_loss,
        reference_steps=None if reference is None else reference.steps.astype(float),
        reference_losses=None if reference is None else without_batches(reference.losses, reference.batch_losses),
    )
    return judge_run(
        curve.steps.tolist(),
        curve.learning_rates.tolist(),
        curve.losses.tolist(),
        batch_losses=curve.batch_losses if batches else None,
        ramp_steps=curve.ramp_steps,
        landmarks=known,
        thresholds=by,
    )


def judge_synthetic(curve: Curve, by: JudgeThresholds) -> Judgement:
    """The verdict on a labelled curve."""
    told = curve.reference is not None
    known = Landmarks(
        unigram_entropy=curve.unigram_entropy,
        reference_steps=curve.steps.astype(float) if told else None,
        reference_losses=curve.reference,
    )
    return judge_run(curve.steps.tolist(), curve.learning_rates.tolist(), curve.losses.tolist(), landmarks=known, thresholds=by)


@cache
def synthetic_curves() -> tuple[Curve, ...]:
    """Two of every maker, of either set of shapes."""
    return tuple(curve for shapes, seed in SEEDS for curve in make_curves(replace(shapes, ramps=RAMPS), 2, seed))


def _healthy_one(curve: RealCurve) -> RealCurve | None:
    """Pre-LN on the same ramp, for the curves of seed 0."""
    alike = (
        c for c in real_curves() if (c.scheme, c.seed, c.peak_lr, c.n_sublayers) == ("pre_ln", curve.seed, curve.peak_lr, 64)
    )
    return next(alike, None) if curve.scheme != "pre_ln" and curve.n_sublayers == 64 and curve.seed == 0 else None


def _verdict(answer: Judgement) -> tuple[object, ...]:
    return answer.outcome.value, answer.onset_step


def measure(by: JudgeThresholds) -> dict[str, list[tuple[object, ...]]]:
    """Verdicts on all curves, by set."""
    real = real_curves()
    beside = [(curve, healthy) for curve in real if (healthy := _healthy_one(curve)) is not None]
    return {
        "real": [_verdict(judge_real(curve, by)) for curve in real],
        "log": [_verdict(judge_real(curve, by, batches=False)) for curve in real],
        "beside": [
            tuple(result.onset_step for result in judge_real(curve, by, reference=healthy).criteria)
            for curve, healthy in beside
        ],
        "synthetic": [_verdict(judge_synthetic(curve, by)) for curve in synthetic_curves()],
    }


def effect(change: Change | None, base: dict[str, list[tuple[object, ...]]] | None) -> Effect:
    """Measure the judge with a constant changed.

    Args:
        change: None for the judge as it is.
        base: verdicts of the judge as it is; None where these are they.
    """
    with changed(change) as by:
        now = measure(by)
    base = base or now
    label = (
        ("", "as it is", "", "") if change is None else (change.module, change.label, f"{change.value:g}", f"{change.tried:g}")
    )
    right = [(c, v) for c, v in zip(synthetic_curves(), now["synthetic"], strict=True) if v[0] == c.kind]
    return Effect(
        module=label[0],
        constant=label[1],
        value=label[2],
        tried=label[3],
        real_changed=_differing(base["real"], now["real"]),
        real_accepted=_accepted(now["real"]),
        log_accepted=_accepted(now["log"]),
        beside_changed=_differing(base["beside"], now["beside"]),
        synthetic_right=len(right),
        synthetic_dated=sum(c.onset is None or abs(int(str(v[1])) - c.onset) <= 0.04 * c.n_steps for c, v in right),
    )


def _differing(before: Sequence[object], after: Sequence[object]) -> int:
    return sum(one != other for one, other in zip(before, after, strict=True))


def _accepted(verdicts: Sequence[tuple[Any, ...]]) -> int:
    return sum(curve.accepted_by(*verdict) > 0 for curve, verdict in zip(real_curves(), verdicts, strict=True))


def _done(path: Path) -> set[tuple[str, str, str]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["module"], row["constant"], row["tried"]) for row in csv.DictReader(file)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every constant and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("thresholds", "constants", "all"), default="all", help="which of them")
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="CSV; what is there already is kept")
    given = parser.parse_args(arguments)
    output = given.output
    done = _done(output)
    base = measure(JudgeThresholds())
    public, private = (
        ([] if given.part == "constants" else [*thresholds()]),
        ([] if given.part == "thresholds" else [*constants()]),
    )
    for change in [None, *public, *private]:
        if (("", "as it is", "") if change is None else (change.module, change.label, f"{change.tried:g}")) in done:
            continue
        row = effect(change, base)
        fresh = not output.exists()
        with output.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if fresh:
                writer.writerow(field.name for field in fields(Effect))
            writer.writerow(astuple(row))
        print(*astuple(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
