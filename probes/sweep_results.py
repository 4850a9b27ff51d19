r"""What a sweep has found, as one tidy frame: a row per trial and criterion; and where every trial stands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from probes.sweep_folder import SweepFolder
from probes.trial import SweepError, Trial
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import judge_records

if TYPE_CHECKING:
    import pandas as pd

    from probes.judgement import Judgement
    from probes.run_folder import StepRecord

__all__ = ["COLUMNS", "Judged", "judge_again", "origins", "results_frame", "seed_table", "status_rows"]

COLUMNS = (
    "trial",
    "kind",
    "scheme",
    "n_sublayers",
    "width",
    "seed",
    "peak_lr",
    "steps",
    "batch_size",
    "seq_len",
    "criterion",
    "status",
    "onset_step",
    "max_lr",
    "lower_bound",
    "resolution",
    "best_loss",
    "final_loss",
    "validation_loss",
    "steps_done",
    "judged_steps",
    "seconds",
    "judged_seconds",
    "peak_memory",
    "reason",
)
"""``criterion`` is ``overall``, or one criterion on every step that was trained; of plain training there is the former only.

``steps_done`` and ``seconds`` are of training; ``judged_steps`` and ``judged_seconds`` of the part after which the verdict was
certain, all of it where it never was. Losses are nats per token, ``peak_memory`` is bytes.
"""

_INTEGERS = ("onset_step", "steps_done", "judged_steps", "peak_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A stress test judged again.

    Attributes:
        verdict: as while it ran.
        to_end: every criterion on every step.
        seconds: of training, up to where the verdict was certain.
    """

    verdict: Judgement
    to_end: Judgement
    seconds: float


def results_frame(folders: Iterable[TrialFolder], judgements: Mapping[str, Judged] | None = None) -> pd.DataFrame:
    """Every finished trial.

    Args:
        folders: of the trials; those that are not finished are left out.
        judgements: by key, in place of what the trial has stored.

    Returns:
        Columns as :data:`COLUMNS`.
    """
    import pandas as pd

    judgements = judgements or {}
    rows = [
        row
        for folder in folders
        if (result := folder.result) is not None
        for row in _rows(folder.trial, _judged_anew(result, judgements.get(folder.trial.key)))
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({**dict.fromkeys(_INTEGERS, "Int64"), "lower_bound": "boolean"})


def _judged_anew(result: dict[str, Any], anew: Judged | None) -> dict[str, Any]:
    if anew is None:
        return result
    fresh = {"judgement": anew.verdict.to_dict(), "to_end": anew.to_end.to_dict(), "judged_seconds": anew.seconds}
    return {**result, **fresh}


def _rows(trial: Trial, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    config, training, judgement = trial.config, result["training"], result.get("judgement")
    facts = {
        "trial": trial.key,
        "kind": trial.kind,
        "scheme": config.model.scheme,
        "n_sublayers": config.model.n_sublayers,
        "width": config.model.width,
        "seed": config.seed,
        "peak_lr": config.peak_lr,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "best_loss": training["best_loss"],
        "final_loss": training["final_loss"],
        "validation_loss": training["validation_loss"],
        "steps_done": training["steps_done"],
        "seconds": training["seconds"],
        "peak_memory": result["peak_memory"],
    }
    if judgement is None:
        return [facts | {"criterion": "overall", "status": training["outcome"], "judged_steps": training["steps_done"]}]
    facts |= {
        "resolution": judgement["resolution"],
        "best_loss": result["to_end"]["best_loss"],
        "judged_steps": judgement["last_step"],
        "judged_seconds": result["judged_seconds"],
    }
    overall = {
        "criterion": "overall",
        "status": judgement["outcome"],
        "reason": judgement["reasons"][0],
        **{name: judgement[name] for name in ("onset_step", "max_lr", "lower_bound")},
    }
    return [facts | row for row in (overall, *result["to_end"]["criteria"])]


def judge_again(folders: Sequence[TrialFolder], *, reference: str | None = None) -> dict[str, Judged]:
    """Judge the logs of finished stress tests again, with the present judge and, if asked, beside a healthy run.

    Args:
        folders: of the trials.
        reference: scheme whose trial is the healthy run: the one of the same depth, width, ramp, data and seed.

    Returns:
        By key.

    Raises:
        SweepError: if a trial has no such reference, or that one has not been trained to the end.
    """
    finished = [(place, result) for place in folders if (result := place.result) is not None]
    answers = {}
    for place, result in finished:
        if place.trial.kind != "stress":
            continue
        records = place.records()
        healthy = None if reference is None else _reference(place.trial, reference, [other for other, _ in finished])
        judge = partial(
            judge_records,
            records,
            result["training"]["corpus"],
            ramp_steps=place.trial.config.steps,
            reference=healthy,
        )
        verdict = judge()
        seconds = next(record.time for record in records if record.step == verdict.last_step)
        answers[place.trial.key] = Judged(verdict=verdict, to_end=judge(to_end=True), seconds=seconds)
    return answers


def _reference(trial: Trial, scheme: str, finished: Iterable[TrialFolder]) -> Sequence[StepRecord]:
    for place in finished:
        differing = set(trial.config.differences(place.trial.config.to_dict()))
        if place.trial.config.model.scheme == scheme and differing <= {"model.scheme", "model.scheme_parameters"}:
            records = place.records()
            if len(records) < trial.config.steps:
                raise SweepError(
                    f"reference {place.trial.label} ends at step {len(records)}; a reference is trained to the end "
                    "(early_stop = false)"
                )
            return records
    raise SweepError(f"no finished trial of scheme '{scheme}' is a reference for {trial.label}")


def origins(folders: Iterable[TrialFolder]) -> dict[str, list[Any]]:
    """Where the finished trials come from: every version, commit, platform, thread count and text among them, ready for JSON.

    Args:
        folders: of the trials.

    Returns:
        Distinct values by name; one value where all agree.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        result = folder.result
        if result is None:
            continue
        for name, value in _origin(result["training"]):
            found.setdefault(name, {})[str(value)] = value
    return {name: [values[key] for key in sorted(values)] for name, values in found.items()}


def _origin(training: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known, corpus = training["provenance"], training["corpus"]
    yield from ((name, known[name]) for name in ("commit", "platform"))
    yield from ((f"{package} version", version) for package, version in known["versions"].items() if version)
    yield from (("threads", session["threads"]) for session in training["sessions"])
    yield from (
        (f"text {name}", corpus[name]) for name in ("content_hash", "n_train_tokens", "unigram_entropy", "python_stdlib")
    )


def seed_table(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Max LR over the seeds: per scheme, depth, width and ramp the median with its bootstrap interval, and the kinds.

    Args:
        frame: of :func:`results_frame`.

    Returns:
        One row per group, ready to be shown.
    """
    from probes.seed_summary import combine_seeds

    rows = []
    stress = frame[(frame["criterion"] == "overall") & (frame["kind"] == "stress")]
    by = ["n_sublayers", "width", "peak_lr", "steps", "scheme"]
    for values, group in stress.groupby(by, sort=False):
        seen = zip(group["max_lr"].astype(float).tolist(), group["lower_bound"].astype(bool).tolist(), strict=True)
        judgements = [_Seen(max_lr, lower_bound) for max_lr, lower_bound in seen]
        kinds = Counter(str(status).replace("_", " ") for status in group["status"])
        rows.append(
            dict(zip(by, values, strict=True))
            | {
                "max_lr": combine_seeds(judgements).words(),  # type: ignore[arg-type]  # it reads these two fields
                "seeds": len(group),
                "outcome": ", ".join(kind if n == len(group) else f"{n} {kind}" for kind, n in kinds.most_common()),
                "best_loss": float(group["best_loss"].median()) if group["best_loss"].notna().any() else math.nan,
            }
        )
    return rows


class _Seen:
    """What a summary over seeds reads of a judgement."""

    def __init__(self, max_lr: float, lower_bound: bool) -> None:
        self.max_lr, self.lower_bound = max_lr, lower_bound


def status_rows(sweep: SweepFolder) -> list[dict[str, Any]]:
    """Every trial of the present sweep with its state, progress and, in words, what is known.

    Args:
        sweep: the folder.
    """
    from probes.sweep import verdict

    rows = []
    for place in sweep.read()[1]:
        state, result, failure = place.state, place.result, place.failure
        words = verdict(result) if result is not None else ""
        if state is TrialState.FAILED and failure is not None:
            words = f"attempt {failure['attempts']}: {failure['error']}"
        elif state is TrialState.RUNNING and (job := place.job):
            words = f"{job['executor']} job {job['job_id']}"
        done, total = place.steps_done, place.trial.config.steps
        rows.append(
            {
                "trial": place.trial.key,
                "scheme": place.trial.config.model.scheme,
                "n_sublayers": place.trial.config.model.n_sublayers,
                "width": place.trial.config.model.width,
                "peak_lr": place.trial.config.peak_lr,
                "seed": place.trial.config.seed,
                "state": state.value,
                "steps": f"{done}/{total}",
                "about": words,
            }
        )
    return rows
