r"""Run one trial in its folder: train, judge, write the result. This is what every executor calls, in a process of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.memory import peak_memory
from probes.trial import Trial
from probes.trial_folder import TrialFolder

if TYPE_CHECKING:
    from probes.divergence import Landmarks
    from probes.judgement import Judgement
    from probes.run_folder import StepRecord
    from probes.training import TrainingResult

__all__ = ["TrialJob", "judge_records", "run_trial"]

_WEIGHTS = "model.safetensors"


def run_trial(
    folder: TrialFolder, *, threads: int | None = None, save_seconds: float = 60.0, keep_weights: bool = False
) -> dict[str, Any]:
    """Train to the end, or to the certain divergence, and write the result. Where it was begun, it goes on.

    Args:
        folder: of the trial.
        threads: of torch; None leaves the choice to it.
        save_seconds: save the state this often.
        keep_weights: whether the trained weights stay on the disk.

    Returns:
        What ``result.json`` holds.

    Raises:
        SweepError: if another process works on the trial.
        TrainingInterrupted: after SIGTERM or Ctrl-C, once the state is saved.
    """
    import torch

    with folder.locked():
        stored = folder.result
        if stored is not None:
            return stored
        folder.write_trial()
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads or before)
            values = _train(folder, save_seconds) | {"peak_memory": peak_memory()}
        finally:
            torch.set_num_threads(before)
        if not keep_weights:
            (folder.run_path / _WEIGHTS).unlink(missing_ok=True)
        folder.write_result(values)
    return values


def _train(folder: TrialFolder, save_seconds: float) -> dict[str, Any]:
    from probes.max_learning_rate import stress_test
    from probes.training import train

    trial = folder.trial
    values: dict[str, Any] = {"key": trial.key, **trial.to_dict()}
    if trial.kind == "train":
        result = train(trial.config, folder=folder.run_path, save_seconds=save_seconds)
        return values | {"training": _summary(result)}
    test = stress_test(trial.config, folder=folder.path, early_stop=trial.early_stop, save_seconds=save_seconds)
    (run,) = test.runs
    values["training"] = _summary(run.training)
    return values | _judged(run.judgement, run.training.records, run.training.corpus)


def _summary(result: TrainingResult) -> dict[str, Any]:
    return {name: value for name, value in result.to_dict().items() if name not in ("config", "key")}


def _judged(judgement: Judgement, records: Sequence[StepRecord], corpus: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict, the time it took, and every criterion on all that was trained."""
    to_end = judge_records(records, corpus, ramp_steps=judgement.ramp_steps, to_end=True)
    judged = next(record.time for record in records if record.step == judgement.last_step)
    return {"judgement": judgement.to_dict(), "to_end": to_end.to_dict(), "judged_seconds": judged}


def judge_records(
    records: Sequence[StepRecord],
    corpus: Mapping[str, Any],
    *,
    ramp_steps: int,
    to_end: bool = False,
    reference: Sequence[StepRecord] | None = None,
) -> Judgement:
    """Judge the steps of a run again, exactly as they were judged while they came.

    Args:
        records: one per optimizer step.
        corpus: what the run says of its text.
        ramp_steps: length of the ramp.
        to_end: look at every step, for the Max LR by every criterion.
        reference: a healthy run over the same text and schedule; without one, degradation cannot be judged.
    """
    from probes.divergence import judge_run
    from probes.run_folder import batch_losses

    return judge_run(
        [r.step for r in records],
        [r.lr for r in records],
        [r.loss for r in records],
        [r.grad_norm for r in records],
        batch_losses=batch_losses(records),
        ramp_steps=ramp_steps,
        landmarks=_landmarks(corpus, reference),
        to_end=to_end,
    )


def _landmarks(corpus: Mapping[str, Any], reference: Sequence[StepRecord] | None) -> Landmarks:
    from probes.divergence import Landmarks
    from probes.max_learning_rate import beside_reference

    known = Landmarks.of_text(**{name: corpus[name] for name in ("unigram_entropy", "bigram_entropy", "vocab_size")})
    return known if reference is None else beside_reference(known, reference)


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """What an executor is handed: run a trial, and leave word of how it went in the trial's folder.

    A job that is preempted, or near its time limit, is queued again by submitit through :meth:`checkpoint`; the trial then goes
    on from the state that it saved itself, and ends with the numbers of an uninterrupted run.

    Attributes:
        folder: absolute path of the trial's folder.
        trial: as :meth:`~probes.trial.Trial.to_dict`.
        threads: of torch.
        save_seconds: between saved states.
        keep_weights: whether the trained weights stay.
        visible_gpu: the only one that the process may see, as CUDA_VISIBLE_DEVICES names it; None changes nothing.
    """

    folder: str
    trial: dict[str, Any]
    threads: int
    save_seconds: float
    keep_weights: bool
    visible_gpu: str | None = None

    def __call__(self) -> str:
        """Run; every ordinary error becomes a ``failure.json``.

        Returns:
            ``finished``, ``interrupted`` or ``failed``.
        """
        from probes.errors import KeelError
        from probes.training import TrainingInterrupted

        if self.visible_gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpu  # before anything has asked CUDA for its devices
        place = TrialFolder(Path(self.folder), Trial.from_dict(self.trial))
        try:
            run_trial(place, threads=self.threads, save_seconds=self.save_seconds, keep_weights=self.keep_weights)
        except TrainingInterrupted:
            place.mark_interrupted()
            return "interrupted"
        except Exception as error:
            traceback.print_exc()  # into the job's log
            place.write_failure(f"{type(error).__name__}: {error}", user_error=isinstance(error, KeelError))
            return "failed"
        return "finished"

    def checkpoint(self) -> Any:
        """Queue the same job again: all that it needs is in the trial's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
