"""What early stopping saves: a table of Max LR with every ramp run to its end, beside the same table stopped when certain.

The sweep is run once, without early stopping, while the judge listens in every trial as it does with it. The moment at which it
became certain is then in each trial's own log, so that both sides of the comparison come from the same steps on the same
machine under the same load: the seconds up to the stop, and the seconds of the whole ramp. Reported are the sums over the
table and the length of the schedule, biggest first, that the sweep's workers would have had; for the table as it is committed
(where a grid says ``early_stop = false`` it runs on) and for stopping everywhere. Seconds are of training; starting a process
and reading the text cost the same either way and are left out.

In the same run every verdict is found again: by a fresh judge that is given the log up to the stop, and by another that is
given the whole log. Both are compared with the one that listened while the ramp was run (which differs where the judge has been
changed since), and with one that does not stop listening: that says what the rest of the ramp would have changed.

Limits: the two fresh verdicts are equal, and the judge takes at most 1 % of the time of training. Exit code 1 if one is passed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _measure import environment, write_json

from probes.divergence import Landmarks, StreamingJudge
from probes.executors import JobOptions
from probes.judgement import Judgement
from probes.run_folder import StepRecord
from probes.sweep import Event, RunOptions, biggest_first, run_sweep
from probes.sweep_folder import SweepFolder
from probes.sweep_results import origins
from probes.sweep_spec import Sweep, read_sweep
from probes.trial import SweepError, Trial, labels
from probes.trial_folder import TrialFolder

JUDGE_SHARE = 0.01
DECIDES = ("outcome", "onset_step", "max_lr", "lower_bound")
"""What a verdict says; the rest of a judgement describes how far it looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTrial:
    """One ramp that was run to its end, and where it could have been stopped.

    Attributes:
        scheme: name.
        peak_lr: learning rate at the end of the ramp.
        steps: optimizer steps of the ramp.
        seed: of weights and data.
        may_stop: whether the committed table stops it.
        outcome: of the verdict.
        max_lr: of the verdict.
        stop_step: step at which the judge is certain; the last one where it never is.
        stop_seconds: of training up to there.
        end_step: last step that was trained.
        end_seconds: of training in all.
        judge_cpu_seconds: CPU time of a judge that is given every step up to the stop.
        equal: whether a judge that is given the log up to the stop and one that is given all of it say the same.
        as_heard: whether the judge that listened during training said the same.
        holds: whether a judge that goes on listening comes to the same outcome, onset and Max LR.
        outcome_at_end: of that judge.
        max_lr_at_end: of that judge.
    """

    scheme: str
    peak_lr: float
    steps: int
    seed: int
    may_stop: bool
    outcome: str
    max_lr: float
    stop_step: int
    stop_seconds: float
    end_step: int
    end_seconds: float
    judge_cpu_seconds: float
    equal: bool
    as_heard: bool
    holds: bool
    outcome_at_end: str
    max_lr_at_end: float

    @property
    def committed_seconds(self) -> float:
        """Of training in the committed table."""
        return self.stop_seconds if self.may_stop else self.end_seconds


def to_the_end(sweep: Sweep) -> Sweep:
    """The sweep with every ramp run to its end."""
    return Sweep(name=f"{sweep.name}_to_the_end", grids=tuple(replace(grid, early_stop=False) for grid in sweep.grids))


def stopped_runs(sweep: Sweep) -> dict[str, bool]:
    """By the key of a training configuration: whether every trial of the sweep that trains it may stop early.

    Raises:
        SweepError: if a trial is no stress test.
    """
    stops: dict[str, bool] = {}
    for trial in sweep.trials():
        if trial.kind != "stress":
            raise SweepError(f"{trial.label} is no stress test; only these are judged")
        stops[trial.config.key] = trial.early_stop and stops.get(trial.config.key, True)
    return stops


def time_trial(folder: TrialFolder, *, may_stop: bool) -> TimedTrial:
    """Find a finished trial's stop in its log, and its verdict in every way.

    Args:
        folder: of a trial that was run to its end.
        may_stop: whether the committed table stops it.

    Raises:
        SweepError: if the trial is not finished, was stopped early, or the clock of its log goes back.
    """
    trial, result = folder.trial, folder.result
    if result is None or trial.early_stop:
        raise SweepError(f"{folder.path}: {trial.label} has not been run to its end")
    records = folder.records()
    check_clock(records, folder.path)
    corpus = result["training"]["corpus"]
    landmarks = Landmarks.of_text(**{name: corpus[name] for name in ("unigram_entropy", "bigram_entropy", "vocab_size")})
    at_stop, stop, cpu_seconds = listen_to_the_stop(records, trial, landmarks)
    verdict, whole = at_stop.to_dict(), listen(records, trial, landmarks).to_dict()
    longest = listen(records, trial, landmarks, to_end=True).to_dict()
    return TimedTrial(
        scheme=trial.config.model.scheme,
        peak_lr=trial.config.peak_lr,
        steps=trial.config.steps,
        seed=trial.config.seed,
        may_stop=may_stop,
        outcome=at_stop.outcome.value,
        max_lr=at_stop.max_lr,
        stop_step=stop.step,
        stop_seconds=stop.time,
        end_step=records[-1].step,
        end_seconds=records[-1].time,
        judge_cpu_seconds=cpu_seconds,
        equal=verdict == whole,
        as_heard=verdict == result["judgement"],
        holds=all(longest[name] == verdict[name] for name in DECIDES),
        outcome_at_end=longest["outcome"],
        max_lr_at_end=longest["max_lr"],
    )


def check_clock(records: Sequence[StepRecord], path: Path) -> None:
    """A log's seconds count on over resumed sessions; one that starts again would make sums of them wrong.

    Raises:
        SweepError: if they do not.
    """
    for before, after in itertools.pairwise(records):
        if after.time < before.time:
            raise SweepError(f"{path}: the clock goes back from {before.time:.3f} s to {after.time:.3f} s at step {after.step}")


def listen_to_the_stop(
    records: Sequence[StepRecord], trial: Trial, landmarks: Landmarks
) -> tuple[Judgement, StepRecord, float]:
    """The verdict of a judge that is given steps until it is certain, the last step it was given, and its CPU seconds."""
    judge = StreamingJudge(ramp_steps=trial.config.steps, landmarks=landmarks)
    begun = time.process_time()
    for record in records:
        if judge.feed(record.step, record.lr, record.loss, record.grad_norm, batch_losses=record.batch_losses):
            break
    return judge.judgement(), record, time.process_time() - begun


def listen(records: Iterable[StepRecord], trial: Trial, landmarks: Landmarks, *, to_end: bool = False) -> Judgement:
    """The verdict of a judge that is given the whole log."""
    judge = StreamingJudge(ramp_steps=trial.config.steps, landmarks=landmarks, to_end=to_end)
    for record in records:
        judge.feed(record.step, record.lr, record.loss, record.grad_norm, batch_losses=record.batch_losses)
    return judge.judgement()


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Length of a schedule in which each free worker takes the next job.

    Args:
        seconds: of each job, in the order in which they are taken.
        workers: side by side.

    Returns:
        Seconds until the last one ends.

    Example:
        >>> makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2)
        7.0
    """
    ends = [0.0] * workers
    for duration in seconds:
        heapq.heappush(ends, heapq.heappop(ends) + duration)
    return max(ends)


def summary(trials: Sequence[TimedTrial], workers: int) -> dict[str, Any]:
    """Sums over trials, in the order in which a sweep takes them, and the lengths of the schedules."""
    ways = {
        "to_the_end": [trial.end_seconds for trial in trials],
        "as_committed": [trial.committed_seconds for trial in trials],
        "stopping_everywhere": [trial.stop_seconds for trial in trials],
    }
    sums = {name: math.fsum(seconds) for name, seconds in ways.items()}
    lengths = {name: makespan(seconds, workers) for name, seconds in ways.items()}
    return {
        "trials": len(trials),
        "stopped": sum(trial.stop_step < trial.end_step for trial in trials),
        "seconds": sums,
        "share_of_the_time": {name: seconds / sums["to_the_end"] for name, seconds in sums.items()},
        "makespan_seconds": lengths,
        "share_of_the_makespan": {name: length / lengths["to_the_end"] for name, length in lengths.items()},
        "judge_cpu_seconds": math.fsum(trial.judge_cpu_seconds for trial in trials),
    }


def limits_broken(trials: Sequence[TimedTrial]) -> list[str]:
    """What is not as it has to be, in words."""
    told = [
        f"{trial.scheme}, peak {trial.peak_lr:g} in {trial.steps} steps, seed {trial.seed}: "
        "the verdict at the stop is not that of the whole log"
        for trial in trials
        if not trial.equal
    ]
    share = math.fsum(t.judge_cpu_seconds for t in trials) / math.fsum(t.stop_seconds for t in trials)
    return told + ([f"the judge takes {share:.2%} of the time of training"] if share > JUDGE_SHARE else [])


def measure(sweep: Sweep, runs: Path, jobs: int) -> tuple[list[TimedTrial], dict[str, list[Any]]]:
    """Run what is not run yet of a sweep, and time every trial in the order in which a sweep takes them.

    Args:
        sweep: as committed.
        runs: folder of the run; what it holds already is not run again.
        jobs: trials side by side, one thread each.

    Returns:
        The trials, and where they were run.

    Raises:
        SweepError: if trials broke.
    """
    stops, whole = stopped_runs(sweep), to_the_end(sweep)
    run_sweep(whole, runs, RunOptions(jobs=jobs, job=JobOptions(threads=1)), on_event=_tell)
    folders = [SweepFolder(runs).folder(trial) for trial in biggest_first(whole.trials())]
    named = labels(whole.trials())
    broken = [named[folder.trial.key] for folder in folders if folder.result is None]
    if broken:
        raise SweepError(f"{len(broken)} trial(s) have no result, first: {broken[0]}; keel sweep status {runs} says why")
    return [time_trial(folder, may_stop=stops[folder.trial.config.key]) for folder in folders], origins(folders)


def _tell(event: Event) -> None:
    print(f"{event.label}: {event.what} {event.detail}".rstrip(), file=sys.stderr, flush=True)


def table(record: dict[str, Any]) -> str:
    """The sums as text."""
    head = f"{'':36}{'trials':>7}{'stopped':>9}{'to the end s':>14}{'as committed':>14}{'everywhere':>12}{'judge CPU s':>13}"
    rows = [*record["schemes"].items(), ("all", record["table"])]
    lines = [head, *(_line(name, found) for name, found in rows)]
    spans, shares = record["table"]["makespan_seconds"], record["table"]["share_of_the_makespan"]
    ways = (f"{name.replace('_', ' ')} {spans[name]:.0f} s ({shares[name]:.3f})" for name in spans)
    lines.append(f"schedule of {record['jobs']} workers, biggest first: {', '.join(ways)}")
    lines.append(
        f"of {record['table']['trials']} verdicts at the stop, {record['verdicts_equal']} are those of the whole log, "
        f"{record['verdicts_as_heard']} those heard during training, {record['verdicts_that_hold']} those of listening on"
    )
    return "\n".join(lines)


def _line(name: str, found: dict[str, Any]) -> str:
    seconds, shares = found["seconds"], found["share_of_the_time"]
    committed, everywhere = (f"{shares[way]:.3f}" for way in ("as_committed", "stopping_everywhere"))
    counts = f"{found['trials']:>7}{found['stopped']:>9}"
    return f"{name:36}{counts}{seconds['to_the_end']:>14.1f}{committed:>14}{everywhere:>12}{found['judge_cpu_seconds']:>13.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code says whether the limits are kept."""
    options = _parser().parse_args(arguments)
    trials, where = measure(read_sweep(options.sweep), options.runs, options.jobs)
    schemes = sorted({trial.scheme for trial in trials})
    broken = limits_broken(trials)
    record = {
        "sweep": str(options.sweep),
        "jobs": options.jobs,
        "table": summary(trials, options.jobs),
        "schemes": {name: summary([t for t in trials if t.scheme == name], options.jobs) for name in schemes},
        "verdicts_equal": sum(trial.equal for trial in trials),
        "verdicts_as_heard": sum(trial.as_heard for trial in trials),
        "verdicts_that_hold": sum(trial.holds for trial in trials),
        "trials": [asdict(trial) | {"committed_seconds": trial.committed_seconds} for trial in trials],
        "limits": {"judge_share": JUDGE_SHARE},
        "limits_broken": broken,
        "origins": where,
        "environment": environment(threads=1, seed=None, packages=("submitit",)),
    }
    write_json(options.output, record)
    print(table(record))
    for line in broken:
        print(f"limit not kept: {line}", file=sys.stderr)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", type=Path, default=Path("benchmarks/sweeps/table1_cpu.toml"), help="TOML of stress tests")
    parser.add_argument("--runs", type=Path, default=Path("runs/early_stopping"), help="folder of the runs; it resumes")
    parser.add_argument("--jobs", type=int, default=2, help="trials side by side, one thread each [2]")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/early_stopping.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
