r"""Where trials run: in processes of this machine or in a Slurm queue, both through submitit; or in this very process.

An executor starts a job and says whether it is still alive. How the trial went is read from the trial's folder alone, so a job
that was killed without a word is known by what it left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from probes.errors import KeelError
from probes.trial import SweepError
from probes.trial_folder import TrialFolder
from probes.trial_run import TrialJob

__all__ = [
    "Executor",
    "ExecutorName",
    "Job",
    "JobOptions",
    "MissingSubmititError",
    "RunningElsewhere",
    "make_executor",
    "slurm_jobs_alive",
]

ExecutorName: TypeAlias = Literal["local", "slurm", "debug"]

_WEEK = 7 * 24 * 60
_SPARE_MEMORY = 1.5  # a queue kills what exceeds its request, and the prediction is an estimate


class MissingSubmititError(KeelError):
    """The optional package that runs the trials is not installed. The message says how to get it."""

    def __init__(self) -> None:
        super().__init__(
            "keel sweep run needs submitit: pip install 'keel-dynamics[sweep]', or pip install submitit; "
            "--executor debug runs one trial after the other without it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What every job is given.

    Attributes:
        threads: of torch, one CPU each.
        minutes: time limit; None for the partition's own on Slurm, and a week on one machine.
        partition: of Slurm; None for its default.
        parameters: further parameters of submitit's Slurm executor, for example ``slurm_account``.
    """

    threads: int = 1
    minutes: int | None = None
    partition: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Job(Protocol):
    """A trial under way."""

    @property
    def job_id(self) -> str:
        """As the executor calls it."""

    def alive(self) -> bool:
        """Whether it runs or waits in a queue."""

    def stop(self) -> None:
        """Ask it to save its state and end; asking again does no harm."""


class Executor(Protocol):
    """Starts jobs."""

    name: ExecutorName
    outlives: bool
    """Whether jobs are meant to go on without this process."""

    def submit(self, job: TrialJob, *, memory: int, gpu: str | None) -> Job:
        """Start a job.

        Args:
            job: what to run.
            memory: predicted, bytes.
            gpu: the one it may see, as CUDA_VISIBLE_DEVICES names it; None for none.
        """


def make_executor(name: str, folder: Path, options: JobOptions) -> Executor:
    """The executor of that name.

    Args:
        name: ``local``, ``slurm`` or ``debug``.
        folder: for submitit's files and the jobs' output.
        options: of every job.

    Raises:
        MissingSubmititError: if submitit is not installed.
        SweepError: if the name is unknown, or there is no Slurm here that answers.
    """
    if name not in get_args(ExecutorName):
        raise SweepError(f"unknown executor '{name}'; known: {', '.join(get_args(ExecutorName))}")
    if name == "debug":
        return _Debug()
    try:
        submitit = import_module("submitit")
    except ImportError as error:
        raise MissingSubmititError from error
    return (_Slurm if name == "slurm" else _Local)(submitit, folder, options)


@dataclass(frozen=True, slots=True)
class RunningElsewhere:
    """A trial that another process works on; it is waited for, and not started twice.

    Attributes:
        folder: of the trial.
        job_id: whatever is known of it.
        in_slurm_queue: whether it is a Slurm job, which may still be waiting.
    """

    folder: TrialFolder
    job_id: str
    in_slurm_queue: bool = False

    def alive(self) -> bool:
        """Whether its lock is held, or its job is in the queue."""
        return self.folder.running or (self.in_slurm_queue and self.job_id in slurm_jobs_alive({self.job_id}))

    def stop(self) -> None:
        """Leave it alone: it is not ours."""


class _Local:
    """A fresh process per trial on this machine."""

    name: ExecutorName = "local"
    outlives = False

    def __init__(self, submitit: Any, folder: Path, options: JobOptions) -> None:
        self._submitit, self._folder, self._options = submitit, folder, options

    def submit(self, job: TrialJob, *, memory: int, gpu: str | None) -> Job:
        """Start a process that sees only its own GPU; memory is capped by the caller."""
        executor = self._submitit.LocalExecutor(folder=self._folder)
        executor.update_parameters(timeout_min=self._options.minutes or _WEEK, signal_delay_s=30)
        with _threads(self._options.threads), _deaf_to_interrupts():
            return _LocalJob(executor.submit(replace(job, visible_gpu=gpu)))  # submitit itself knows numbers alone


class _LocalJob:
    """A process with a process that watches it."""

    def __init__(self, job: Any) -> None:
        self._job = job

    @property
    def job_id(self) -> str:
        return str(self._job.job_id)

    def alive(self) -> bool:
        return not self._job.done()

    def stop(self) -> None:
        """The watcher passes the signal on; the first one makes the trial save and end, later ones are ignored by it."""
        self._job._process.send_signal(signal.SIGTERM)


class _Slurm:
    """A job of a Slurm cluster per trial."""

    name: ExecutorName = "slurm"
    outlives = True

    def __init__(self, submitit: Any, folder: Path, options: JobOptions) -> None:
        self._submitit, self._folder, self._options = submitit, folder, options
        listed = _squeue()
        if listed.returncode:
            said = " ".join(listed.stderr.split()) or f"squeue ends with code {listed.returncode}"
            raise SweepError(f"Slurm does not answer: {said}; nothing was submitted, try again when squeue works")

    def submit(self, job: TrialJob, *, memory: int, gpu: str | None) -> Job:
        """Queue a job that may be queued again when it is preempted or out of time.

        Raises:
            SweepError: if the queue refuses it.
        """
        executor = self._submitit.AutoExecutor(folder=self._folder, cluster="slurm", slurm_max_num_timeout=1000)
        parameters: dict[str, Any] = {
            "name": "keel",
            "cpus_per_task": self._options.threads,
            "slurm_mem": f"{int(memory * _SPARE_MEMORY / 1e6) + 1}M",
            "slurm_additional_parameters": {"requeue": True},
        }
        if self._options.minutes is not None:
            parameters["timeout_min"] = self._options.minutes
        if self._options.partition is not None:
            parameters["slurm_partition"] = self._options.partition
        if gpu is not None:
            parameters["gpus_per_node"] = 1
        executor.update_parameters(**parameters, **self._options.parameters)
        try:
            with _threads(self._options.threads):
                return _SlurmJob(str(executor.submit(job).job_id))
        except RuntimeError as error:  # submitit's own error is one, and holds all that sbatch has said
            said = " ".join(str(error).split()) or type(error).__name__
            raise SweepError(f"Slurm refuses the job: {said}; jobs that are queued already stay there") from error


@dataclass(frozen=True, slots=True)
class _SlurmJob:
    job_id: str

    def alive(self) -> bool:
        return self.job_id in slurm_jobs_alive({self.job_id})

    def stop(self) -> None:
        """It stays in the queue, where it needs no one."""


def slurm_jobs_alive(job_ids: set[str]) -> set[str]:
    """Those of the jobs that run, or wait, or may come back; all of them while the queue does not answer.

    Args:
        job_ids: to ask for.

    Returns:
        A subset.

    Raises:
        SweepError: if there is no Slurm on this machine.
    """
    listed = _squeue()
    return job_ids & set(listed.stdout.split()) if listed.returncode == 0 else set(job_ids)


def _squeue() -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["squeue", "--noheader", "--me", "--format=%A"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SweepError(f"executor 'slurm' needs Slurm's commands: squeue: {error.strerror or error}") from error


class _Debug:
    """This process, one trial after the other: for a debugger, and where submitit is missing."""

    name: ExecutorName = "debug"
    outlives = False

    def submit(self, job: TrialJob, *, memory: int, gpu: str | None) -> Job:
        """Run it at the first look; a GPU is the one that torch takes by itself."""
        return _Here(job, str(os.getpid()))


@dataclass(slots=True)
class _Here:
    work: TrialJob | None
    job_id: str

    def alive(self) -> bool:
        work, self.work = self.work, None
        if work is not None:
            work()
        return False

    def stop(self) -> None:
        self.work = None


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Let processes that start now use this many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(n)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let processes that start now ignore Ctrl-C, which a terminal sends to all; they are stopped one by one instead."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
