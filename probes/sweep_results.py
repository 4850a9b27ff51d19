r"""What a sweep has found, as one tidy frame: a row per trial and criterion; and where every trial stands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from probes.sweep_folder import SweepFolder
from probes.trial import SweepError, Trial, distinguishing, labels, setting_name, setting_text
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
    "configuration",
)
"""Trials that differ in their seed alone share a ``configuration``. Every other field that tells trials of one shape, ramp and
batch apart has a further column under its dotted name (``clip``, ``model.scheme_parameters``), as text.

``criterion`` is ``overall``, or one criterion on every step that was trained; of plain training there is the former only.

``steps_done`` and ``seconds`` are of training; ``judged_steps`` and ``judged_seconds`` of the part after which the verdict was
certain, all of it where it never was. Losses are nats per token, ``peak_memory`` is bytes.
"""

_SHOWN = ("kind", "model.scheme", "model.n_blocks", "model.width", "peak_lr", "steps", "batch_size", "seq_len")
"""Fields that always have a column."""
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
        Columns as :data:`COLUMNS`, and the fields that tell the trials apart beside them.
    """
    import pandas as pd

    judgements = judgements or {}
    finished = [(folder.trial, result) for folder in folders if (result := folder.result) is not None]
    further = distinguishing([trial for trial, _ in finished], _SHOWN)
    rows = [
        row | {name: setting_text(trial.settings[name]) for name in further}
        for trial, result in finished
        for row in _rows(trial, _judged_anew(result, judgements.get(trial.key)))
    ]
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *further])
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
        "configuration": trial.configuration,
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
    finished = list(finished)
    named = labels([trial, *(place.trial for place in finished)])
    places = [
        place
        for place in finished
        if place.trial.config.model.scheme == scheme
        and set(trial.config.differences(place.trial.config.to_dict())) <= {"model.scheme", "model.scheme_parameters"}
    ]
    if not places:
        raise SweepError(f"no finished trial of scheme '{scheme}' is a reference for {named[trial.key]}")
    if len({place.trial.config for place in places}) > 1:
        several = "; ".join(f"{place.trial.key} ({named[place.trial.key]})" for place in places)
        raise SweepError(
            f"several trials of scheme '{scheme}' could be the reference for {named[trial.key]}: {several}; keep one of them"
        )
    longest = max(places, key=lambda place: len(place.records()))  # of one run, with and without an early stop
    records = longest.records()
    if len(records) < trial.config.steps:
        raise SweepError(
            f"reference {named[longest.trial.key]} ends at step {len(records)}; a reference is trained to the end "
            "(early_stop = false)"
        )
    return records


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
    """Max LR over the seeds of each configuration: the median with its bootstrap interval, and the kinds.

    Args:
        frame: of :func:`results_frame`.

    Returns:
        One row per configuration, ready to be shown: with batch and window where they differ, and the further columns.
    """
    from probes.seed_summary import combine_seeds

    rows = []
    stress = frame[(frame["criterion"] == "overall") & (frame["kind"] == "stress")]
    by = ["n_sublayers", "width", "peak_lr", "steps", "scheme"]
    by += [name for name in ("batch_size", "seq_len") if stress[name].nunique() > 1]
    by += [name for name in frame.columns if name not in COLUMNS and stress[name].nunique() > 1]
    for _, trials in stress.groupby("configuration", sort=False):
        group = trials.drop_duplicates("seed")
        seen = zip(group["max_lr"].astype(float).tolist(), group["lower_bound"].astype(bool).tolist(), strict=True)
        judgements = [_Seen(max_lr, lower_bound) for max_lr, lower_bound in seen]
        kinds = Counter(str(status).replace("_", " ") for status in group["status"])
        rows.append(
            {setting_name(name): group[name].iloc[0] for name in by}
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
    places = sweep.read()[1]
    further = distinguishing([place.trial for place in places])
    for place in places:
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
                **{setting_name(name): setting_text(place.trial.settings[name]) for name in further},
                "seed": place.trial.config.seed,
                "state": state.value,
                "steps": f"{done}/{total}",
                "about": words,
            }
        )
    return rows
