r"""Run a sweep: biggest trials first, side by side as far as slots and memory go, finished ones skipped, broken ones again.

The scheduler keeps nothing to itself: every fact is in the trials' folders, so it can be killed and started again, with the
same sweep or a changed one.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, get_args

from probes.corpus import check_sources
from probes.errors import Interrupted
from probes.executors import Executor, ExecutorName, Job, JobOptions, RunningElsewhere, make_executor, slurm_jobs_alive
from probes.sweep_folder import SweepFolder
from probes.sweep_spec import Sweep
from probes.trial import SweepError, Trial, labels, predicted_flops, predicted_memory
from probes.trial_folder import TrialFolder, TrialState
from probes.trial_run import TrialJob

__all__ = [
    "Event",
    "RunOptions",
    "SweepInterrupted",
    "available_cpus",
    "available_memory",
    "biggest_first",
    "run_sweep",
    "verdict",
    "visible_gpus",
]

_POLL = {"local": 0.5, "slurm": 2.0, "debug": 0.0}
"""Seconds between looks at the jobs."""
_BELONGS: Mapping[str, tuple[str, ...]] = {
    "jobs": ("local", "slurm"),
    "gpus": ("local",),
    "memory": ("local",),
    "time": ("local", "slurm"),
    "partition": ("slurm",),
    "parameters": ("slurm",),
}
"""Executors that an option has a meaning for."""
_SHARE_OF_MEMORY = 0.8
_JOBS_IN_QUEUE = 100
_PATIENCE = 60.0
"""Seconds that stopped jobs have to save their state."""


class SweepInterrupted(Interrupted):
    """Ctrl-C or SIGTERM asked the scheduler to stop. The message says what goes on without it, and how to go on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a sweep is run; none of it changes a trial's key.

    Attributes:
        executor: ``local``, ``slurm`` or ``debug``.
        jobs: trials side by side; None for as many as the CPUs hold at ``job.threads`` each, or 100 on Slurm.
        gpus: on this machine; each trial on a GPU has one to itself. None for as many as there are.
        memory: bytes that the trials of this machine may take together, as predicted; None for 80 % of what is free. A trial
            that is larger by itself runs alone.
        retries: how often a broken trial is tried again now; one whose configuration is at fault is not.
        save_seconds: a trial saves its state this often.
        keep_weights: whether the trained weights stay on the disk.
        job: what every job is given.
    """

    executor: str = "local"
    jobs: int | None = None
    gpus: int | None = None
    memory: int | None = None
    retries: int = 1
    save_seconds: float = 60.0
    keep_weights: bool = False
    job: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SweepError: if one is outside its domain; the message names it.
        """
        least = {"jobs": 1, "gpus": 0, "memory": 1, "retries": 0}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise SweepError(f"{name} must be at least {value}, got {given}")
        if self.job.threads < 1:
            raise SweepError(f"threads must be at least 1, got {self.job.threads}")
        if self.job.minutes is not None and self.job.minutes < 1:
            raise SweepError(f"time must be at least 1 minute, got {self.job.minutes}")
        if not self.save_seconds >= 0:
            raise SweepError(f"save_seconds must be at least 0, got {self.save_seconds}")
        self._check_belonging()

    def _check_belonging(self) -> None:
        """Refuse what this executor would leave aside."""
        given = {
            "jobs": self.jobs,
            "gpus": self.gpus,
            "memory": self.memory,
            "time": self.job.minutes,
            "partition": self.job.partition,
            "parameters": self.job.parameters or None,
        }
        idle = [name for name, value in given.items() if value is not None and self.executor not in _BELONGS[name]]
        if idle and self.executor in get_args(ExecutorName):
            told = "; ".join(f"{name} belongs to executor {' or '.join(_BELONGS[name])}" for name in idle)
            raise SweepError(f"{', '.join(idle)} cannot be given with executor '{self.executor}': {told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a trial.

    Attributes:
        folder: of the trial.
        label: of the trial among those of its sweep.
        what: ``started``, ``resumed``, ``waiting for another process``, ``finished``, ``failed``, ``interrupted``.
        detail: in words.
    """

    folder: TrialFolder
    label: str
    what: str
    detail: str = ""


def biggest_first(trials: Sequence[Trial]) -> list[Trial]:
    """By predicted cost, so that the last to end is not the longest to run; equal ones keep their order."""
    return sorted(trials, key=lambda trial: -predicted_flops(trial.config))


def available_memory() -> int:
    """Bytes that are free for new processes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run_sweep(
    sweep: Sweep,
    path: str | Path,
    options: RunOptions | None = None,
    *,
    on_event: Callable[[Event], object] | None = None,
) -> dict[TrialState, int]:
    """Run every trial of a sweep that is not finished yet.

    Args:
        sweep: which trials.
        path: folder of the sweep; trials that an earlier one has finished there count.
        options: how to run them.
        on_event: told what happens.

    Returns:
        How many trials are in each state at the end.

    Raises:
        SweepError: if another process runs a sweep in the folder, or the executor cannot take a job.
        TextError: if the text of a trial that is not finished is not there.
        SweepInterrupted: after Ctrl-C or SIGTERM.
    """
    options = options or RunOptions()
    folder = SweepFolder(path)
    trials = sweep.trials()
    folders = [folder.folder(trial) for trial in biggest_first(trials)]
    for text in dict.fromkeys(place.trial.config.corpus for place in folders if place.result is None):
        check_sources(text)
    executor = make_executor(options.executor, folder.jobs_path, options.job)
    with folder.owned():
        folder.catch_up(folders)
        named = labels(trials)

        def tell(place: TrialFolder, what: str, detail: str = "") -> None:
            if on_event is not None:
                on_event(Event(folder=place, label=named[place.trial.key], what=what, detail=detail))

        scheduler = _Scheduler(folder, executor, options, tell)
        with _stop_asked() as asked:
            scheduler.run([place for place in folders if place.result is None], asked, lambda: folder.write(sweep.name, trials))
        return dict(folder.counts(folders))


class _Tell(Protocol):
    """Say what happens to a trial."""

    def __call__(self, place: TrialFolder, what: str, detail: str = "") -> None: ...


@dataclass(slots=True)
class _Running:
    folder: TrialFolder
    job: Job
    memory: int
    gpu: str | None
    attempts_before: int


class _Scheduler:
    """Trials that wait, and trials that run."""

    def __init__(self, sweep: SweepFolder, executor: Executor, options: RunOptions, tell: _Tell) -> None:
        self.sweep, self.executor, self.options, self.tell = sweep, executor, options, tell
        self.slots = _Slots(options, local=executor.name != "slurm", debug=executor.name == "debug")
        self.waiting: list[TrialFolder] = []
        self.running: list[_Running] = []
        self.broken: dict[str, int] = {}
        self.memory: dict[str, int] = {}

    def run(self, folders: Sequence[TrialFolder], asked: threading.Event, begin: Callable[[], None]) -> None:
        """Until nothing waits and nothing runs.

        Args:
            folders: of the trials.
            asked: set where it shall stop.
            begin: called once, when the first job is under way or there is none; before that, nothing is replaced.
        """
        self.waiting = list(folders)
        self.memory = {place.trial.key: predicted_memory(place.trial.config) for place in folders}
        self._adopt()
        self._start_first()
        begin()
        while self.waiting or self.running:
            if asked.is_set():
                self._stop()
            self._start()
            if self.running:
                asked.wait(_POLL[self.executor.name])
            self._collect()

    def _adopt(self) -> None:
        """Trials that earlier schedulers have left running, or in a queue, are waited for."""
        queued = {place.path: job for place in self.waiting if (job := place.job) and job["executor"] == "slurm"}
        ids = {job["job_id"] for job in queued.values()}
        alive = slurm_jobs_alive(ids) if ids and self.executor.name == "slurm" else set()
        for place in list(self.waiting):
            job = queued.get(place.path)
            in_queue = job is not None and job["job_id"] in alive
            if in_queue or place.running:
                job_id = (job or place.job or {}).get("job_id", "unknown")
                self._take(place, RunningElsewhere(place, job_id, in_queue), None, _attempts(place))
                self.tell(place, "waiting for another process", f"job {job_id}")

    def _start_first(self) -> None:
        """One job, unless one runs already; where it is refused, no trace of the attempt stays.

        Raises:
            SweepError: if the executor refuses it.
        """
        if self.running:
            return
        places = [place.path for place in self.waiting]
        made = [path for path in (*places, *self.sweep.places) if not path.exists()]
        try:
            self._start(most=1)
        except Exception:
            if not self.running:
                for path in (*made, *([self.sweep.path] if self.sweep.is_new else [])):
                    shutil.rmtree(path, ignore_errors=True)
            raise

    def _start(self, most: int | None = None) -> None:
        """Fill the slots; a trial that does not fit lets smaller ones pass."""
        for place in list(self.waiting):
            if self.slots.full(self.running):
                return
            memory = self.memory[place.trial.key]
            on_gpu = place.trial.config.device.startswith("cuda")
            if not self.slots.fit(memory, on_gpu, self.running):
                continue
            gpu = self.slots.free_gpu(self.running) if on_gpu else None
            self._submit(place, memory, gpu)
            if len(self.running) == most:
                return

    def _submit(self, place: TrialFolder, memory: int, gpu: str | None) -> None:
        place.write_trial()
        steps, attempts = place.steps_done, _attempts(place)
        work = TrialJob(
            folder=str(place.path),
            trial=place.trial.to_dict(),
            threads=self.options.job.threads,
            save_seconds=self.options.save_seconds,
            keep_weights=self.options.keep_weights,
        )
        job = self.executor.submit(work, memory=memory, gpu=gpu)
        self._take(place, job, gpu, attempts)
        place.write_job(self.executor.name, job.job_id)
        self.tell(place, "resumed" if steps else "started", f"after step {steps}" if steps else "")

    def _take(self, place: TrialFolder, job: Job, gpu: str | None, attempts: int) -> None:
        self.waiting.remove(place)
        self.running.append(_Running(place, job, self.memory[place.trial.key], gpu, attempts))

    def _collect(self) -> None:
        for each in list(self.running):
            if not each.job.alive():
                self.running.remove(each)
                self._settle(each)

    def _settle(self, each: _Running) -> None:
        """Read how a job went from what it left."""
        place = each.folder
        result = place.result
        if result is not None:
            self.sweep.catch_up([place])
            self.tell(place, "finished", verdict(result))
            return
        failure = place.failure
        told = failure is not None and failure["attempts"] > each.attempts_before
        if not told and (place.interrupted or isinstance(each.job, RunningElsewhere)):
            self.tell(place, "interrupted", f"at step {place.steps_done}, its state is saved")
            self.waiting.append(place)
            return
        if not told:
            place.write_failure("the process ended without a word: killed by a signal, or out of memory")
            failure = place.failure
        assert failure is not None
        self._failed(place, failure)

    def _failed(self, place: TrialFolder, failure: dict[str, Any]) -> None:
        self.sweep.note({"key": place.trial.key, "state": TrialState.FAILED.value, "failure": failure})
        self.tell(place, "failed", f"attempt {failure['attempts']}: {failure['error']}")
        tries = self.broken[place.trial.key] = self.broken.get(place.trial.key, 0) + 1
        if tries <= self.options.retries and not failure["user_error"]:
            self.waiting.append(place)

    def _stop(self) -> None:
        """End what is ours, its state saved, and say how to go on.

        Raises:
            SweepInterrupted: always.
        """
        again = f"the same command goes on from {self.sweep.path}"
        if self.executor.outlives:
            raise SweepInterrupted(f"stopped waiting; {len(self.running)} job(s) stay in the queue, and {again}")
        end = time.monotonic() + _PATIENCE
        for each in self._own():
            each.job.stop()
        while any(each.job.alive() for each in self._own()) and time.monotonic() < end:
            time.sleep(1.0)
            for each in self._own():
                each.job.stop()
        left = sum(each.job.alive() for each in self._own())
        raise SweepInterrupted(f"stopped{f', {left} job(s) still saving' if left else ''}; {again}")

    def _own(self) -> Iterator[_Running]:
        return (each for each in self.running if not isinstance(each.job, RunningElsewhere))


def _attempts(place: TrialFolder) -> int:
    """Broken so far."""
    return int((place.failure or {}).get("attempts", 0))


class _Slots:
    """How much may run at once."""

    def __init__(self, options: RunOptions, *, local: bool, debug: bool) -> None:
        self._memory = (options.memory or int(_SHARE_OF_MEMORY * available_memory())) if local else None
        cpus = max(1, available_cpus() // options.job.threads)
        self._jobs = 1 if debug else options.jobs or (cpus if local else _JOBS_IN_QUEUE)
        self._local, self._asked_gpus = local, options.gpus
        self._gpus: list[str] | None = None

    def full(self, running: Sequence[_Running]) -> bool:
        """Whether as many run as may."""
        return len(running) >= self._jobs

    def fit(self, memory: int, on_gpu: bool, running: Sequence[_Running]) -> bool:
        """Whether one more trial can start beside these.

        Raises:
            SweepError: if it needs a GPU and there will never be one.
        """
        if self.full(running):
            return False
        if self._memory is not None and running and sum(each.memory for each in running) + memory > self._memory:
            return False
        return not (on_gpu and self._local) or self.free_gpu(running) is not None

    def free_gpu(self, running: Sequence[_Running]) -> str | None:
        """A GPU that none of these has; in a queue, any.

        Raises:
            SweepError: if this machine has none to give.
        """
        if not self._local:
            return "0"
        if self._gpus is None:
            self._gpus = visible_gpus()[: self._asked_gpus]
        if not self._gpus:
            raise SweepError("a trial asks for device 'cuda', and there is no GPU to give it; device 'cpu' always works")
        taken = {each.gpu for each in running}
        return next((gpu for gpu in self._gpus if gpu not in taken), None)


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number, or by an identifier."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(index) for index in range(count)]


def verdict(result: Mapping[str, Any]) -> str:
    """What a finished trial has found, in a few words."""
    judgement, training = result.get("judgement"), result["training"]
    if judgement is None:
        loss = training["final_loss"]
        return f"{training['outcome']}, loss {'not finite' if loss is None else f'{loss:.4g}'}"
    bound = ">= " if judgement["lower_bound"] else ""
    return f"{judgement['outcome'].replace('_', ' ')}, Max LR {bound}{judgement['max_lr']:.4g}"


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a flag."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
