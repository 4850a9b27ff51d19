"""A disk that fills up in the middle of any file of a run: one message, and nothing that was saved is lost.

The kernel refuses the write itself, by a limit on the size of a file, so that every library meets it as it would a full disk.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import probes.dynamics
import probes.saving
from probes.corpus import Corpus, CorpusConfig, build_corpus
from probes.errors import OutputError
from probes.run_folder import RunFolder, read_log
from probes.saving import load_model
from probes.sweep import RunOptions, run_sweep
from probes.sweep_folder import SweepFolder
from probes.training import TrainingConfig, train
from probes.trial_folder import TrialState
from tests.probes._runs import numbers, small_run
from tests.probes._sweeps import small_sweep

resource = pytest.importorskip("resource")

TEXT = CorpusConfig(max_bytes=20_000, tokenizer="bpe:300")


@contextlib.contextmanager
def _full(size: int) -> Iterator[None]:
    """No file grows beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus(TEXT)


@pytest.fixture(scope="module")
def config(corpus: Corpus) -> TrainingConfig:
    """Six steps, profiles at the second and fifth; saved after every other step."""
    run = small_run(steps=6, schedule="cosine", warmup=1, probe_steps=(2, 5))
    return replace(run, corpus=TEXT, model=replace(run.model, vocab_size=corpus.vocab_size))


@pytest.fixture(scope="module")
def whole(config: TrainingConfig, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config, corpus=corpus, folder=folder, save_steps=2)
    return folder


def _by_path(*arguments: Any) -> str:
    name: str = next(argument for argument in arguments if isinstance(argument, Path)).name
    return "profile" if name.startswith("step_") else name


_WRITERS: tuple[tuple[Any, str, Callable[..., str]], ...] = (
    (RunFolder, "append", lambda *_: "log.jsonl"),
    (RunFolder, "_replace", _by_path),
    (probes.dynamics, "_write", _by_path),
    (probes.saving, "_write", lambda *_: "model.safetensors"),
)
"""Where a run writes, and which file it is by the arguments."""


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let the disk be full while a file of that name is written for the nth time, a few bytes after what is there."""

    def at(name: str, nth: int) -> None:
        times = itertools.count(1)

        def wrapped(function: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
            def write(*arguments: Any) -> Any:
                if name_of(*arguments) != name or next(times) != nth:
                    return function(*arguments)
                log = arguments[0].path / name if name == "log.jsonl" else None
                with _full(10 + (log.stat().st_size if log is not None and log.exists() else 0)):
                    return function(*arguments)

            return write

        for owner, attribute, name_of in _WRITERS:
            monkeypatch.setattr(owner, attribute, wrapped(getattr(owner, attribute), name_of))

    return at


def assert_nothing_is_lost(folder: Path, whole: Path, config: TrainingConfig, corpus: Corpus, first_step: int) -> None:
    result = train(config, corpus=corpus, folder=folder, save_steps=2)
    assert result.sessions[-1]["first_step"] == first_step
    assert numbers(read_log(folder / "log.jsonl")) == numbers(read_log(whole / "log.jsonl"))
    ours, theirs = (dict(load_model(place).named_parameters()) for place in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert result.dynamics().equals(train(config, corpus=corpus, folder=whole).dynamics())
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize(
    ("name", "nth", "first_step"),
    [
        ("training.json", 1, 1),
        ("tokenizer.json", 1, 1),
        ("tokenizer_config.json", 1, 1),
        ("log.jsonl", 1, 1),
        ("log.jsonl", 4, 3),
        ("profile", 1, 1),
        ("profile", 2, 5),
        ("latest.safetensors", 1, 1),
        ("latest.safetensors", 2, 3),
        ("latest.safetensors", 3, 5),
        ("dynamics.parquet", 1, 7),
        ("model.safetensors", 1, 7),
        ("result.json", 1, 7),
    ],
)
def test_a_full_disk_loses_nothing_that_was_saved(
    name: str,
    nth: int,
    first_step: int,
    fill: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    whole: Path,
    config: TrainingConfig,
    corpus: Corpus,
) -> None:
    fill(name, nth)
    with pytest.raises(OutputError, match=r"cannot write .*(File too large|FileTooLarge)"):
        train(config, corpus=corpus, folder=tmp_path / "run", save_steps=2)
    monkeypatch.undo()
    assert_nothing_is_lost(tmp_path / "run", whole, config, corpus, first_step)


@pytest.fixture(scope="module")
def whole_sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    path = tmp_path_factory.mktemp("sweep")
    run_sweep(small_sweep(schemes=["keel"]), path, RunOptions(executor="debug"))
    return SweepFolder(path)


@pytest.mark.parametrize(
    ("name", "nth"),
    [("log.jsonl", 20), ("latest.safetensors", 1), ("model.safetensors", 1), ("result.json", 1), ("result.json", 2)],
)
def test_a_trial_that_met_a_full_disk_says_so_and_the_next_sweep_ends_it(
    name: str,
    nth: int,
    fill: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    whole_sweep: SweepFolder,
) -> None:
    sweep = small_sweep(schemes=["keel"])
    fill(name, nth)
    assert run_sweep(sweep, tmp_path, RunOptions(executor="debug")) == {TrialState.FAILED: 1}
    monkeypatch.undo()
    (trial,) = SweepFolder(tmp_path).read()[1]
    assert trial.failure is not None
    assert trial.failure["error"].startswith("OutputError: cannot write ")
    assert run_sweep(sweep, tmp_path, RunOptions(executor="debug")) == {TrialState.FINISHED: 1}
    (reference,) = whole_sweep.read()[1]
    assert numbers(trial.records()) == numbers(reference.records())
    assert trial.result is not None
    assert trial.result["judgement"] == reference.result["judgement"]
    assert trial.failure is None
