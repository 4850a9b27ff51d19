"""States of interrupted runs: whole steps only, one run at a time, gone at the end."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from probes.errors import OutputError
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.gradients import _Run, measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.run_state import RunState, open_run_state, remove_useless_states
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._tiny import N_BLOCKS
from tests.probes.streaming._streamed import predicting, saved_family, two_batches

N_STEPS = 2 * N_BLOCKS + 2


class _StoppedError(Exception):
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    place.mkdir()
    return place


def test_finished_steps_are_there_again(folder: Path) -> None:
    state = RunState(folder)
    state.finish_step({"a": 1.5})
    state.finish_step({"a": float("inf")}, {"x": torch.arange(3), "held": {4: torch.ones(2)}, "none": None})
    again = RunState(folder)
    assert again.records == [{"a": 1.5}, {"a": float("inf")}]
    assert torch.equal(again.tensors["x"], torch.arange(3))
    assert torch.equal(again.tensors["held"][4], torch.ones(2))


def test_a_step_whose_tensors_are_not_in_place_does_not_count(folder: Path) -> None:
    state = RunState(folder)
    state.finish_step({"a": 1})
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write('{"a": 2}\n{"a": ')
    again = RunState(folder)
    assert again.records == [{"a": 1}]
    again.finish_step({"a": 3})
    assert RunState(folder).records == [{"a": 1}, {"a": 3}]


def _without_facts(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "tensors.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "not a file of tensors": (lambda folder: (folder / "tensors.safetensors").write_bytes(b"broken"), ".*eader"),
    "cut short": (lambda folder: os.truncate(folder / "tensors.safetensors", 40), ".*eader"),
    "another program's": (_without_facts, "'__metadata__' is not in it"),
    "lines are missing": (lambda folder: (folder / "steps.jsonl").write_text(""), "steps.jsonl holds 0 of 1 finished"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_with_what_to_do(damage: Callable[[Path], object], reason: str, folder: Path) -> None:
    RunState(folder).finish_step({})
    damage(folder)
    with pytest.raises(OutputError, match=rf"cannot be read \({reason}.*delete that folder to start anew"):
        RunState(folder)


def test_opening_a_whole_state_writes_nothing(folder: Path) -> None:
    state = RunState(folder)
    state.finish_step({"a": 1}, {"x": torch.ones(1)})
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    RunState(folder)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_kill_while_surplus_lines_are_taken_away_loses_no_finished_step(folder: Path, monkeypatch) -> None:
    RunState(folder).finish_step({"a": 1})
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write('{"a": ')

    def killed(path: Path, text: str, **_: object) -> int:
        with path.open("w") as stream:
            stream.write(text[:3])
        raise _StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(_StoppedError):
            RunState(folder)
    assert RunState(folder).records == [{"a": 1}]


LINES = {
    "other keys": ("{}", "'weight_norms' is not in it"),
    "a number": ("3", "'int' object"),
    "a list": ("[]", "list indices"),
}


@pytest.mark.parametrize(("line", "reason"), LINES.values(), ids=LINES)
def test_lines_of_another_kind_make_a_damaged_state(line: str, reason: str, folder: Path, tmp_path: Path) -> None:
    saved_family("llama", tmp_path)
    with open_streamed(tmp_path) as streamed, pytest.raises(_StoppedError):
        measure_streamed_gradient_norms(streamed, two_batches(), state=RunState(folder), on_step=_stop_at(1))
    (folder / "steps.jsonl").write_text(line + "\n")
    with open_streamed(tmp_path) as streamed, pytest.raises(OutputError, match=rf"cannot be read \({reason}.*to start anew"):
        measure_streamed_gradient_norms(streamed, two_batches(), state=RunState(folder))


class _Bomb:
    """Unpickling it would write a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self.witness, "boom"))


def test_a_pickle_in_place_of_the_state_is_never_opened(folder: Path) -> None:
    RunState(folder).finish_step({})
    witness = folder / "witness"
    (folder / "tensors.safetensors").write_bytes(pickle.dumps(_Bomb(witness)))
    with pytest.raises(OutputError, match="cannot be read"):
        RunState(folder)
    assert not witness.exists()


VALUES = {
    "nested": {"rows": [{"weight": torch.randn(3, 2)}, {}], "held": {4: torch.ones(2), -1: None}},
    "numbers": {"a": 1, "b": -0.1, "c": float("inf"), "d": True, "e": "text"},
    "dtypes": {str(d): torch.ones(2, dtype=d) for d in (torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float64)},
    "views": {"row": torch.arange(6.0).view(2, 3)[1], "column": torch.arange(6.0).view(2, 3).T, "scalar": torch.tensor(2.5)},
    "empty": {"none": torch.empty(0, 3)},
    "nan": {"x": torch.tensor([float("nan"), -0.0, 1e-45])},
}


def _bits(value: object) -> object:
    """Something to compare two values by, tensors bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: _bits(inner) for key, inner in value.items()}
    return [_bits(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_is_handed_on_comes_back_bit_for_bit(values: dict[str, object], folder: Path) -> None:
    RunState(folder).finish_step({}, values)
    assert _bits(RunState(folder).tensors) == _bits(values)


def test_the_same_memory_twice_becomes_two_tensors(folder: Path) -> None:
    shared = torch.arange(3)
    RunState(folder).finish_step({}, {"a": shared, "b": [shared, shared[1:]]})
    again = RunState(folder).tensors
    again["a"][0] = 9
    assert (again["b"][0].tolist(), again["b"][1].tolist()) == ([0, 1, 2], [1, 2])


def test_streams_stay_in_their_file(folder: Path) -> None:
    shapes = [(1, 2, 3), (2, 2, 3)]
    RunState(folder).streams("inputs", shapes, 4, torch.float32)[1][3] = 7.0
    assert torch.equal(RunState(folder).streams("inputs", shapes, 4, torch.float32)[1][3], torch.full((2, 2, 3), 7.0))


STREAM_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "is missing"),
    "cut short": (lambda path: os.truncate(path, 40), "has 40 bytes"),
    "longer": (lambda path: os.truncate(path, 400), "has 400 bytes"),
}


@pytest.mark.parametrize(("damage", "found"), STREAM_DAMAGES.values(), ids=STREAM_DAMAGES)
def test_streams_that_finished_steps_need_are_never_made_anew(damage, found, folder: Path) -> None:
    shapes = [(1, 2, 3)]
    state = RunState(folder)
    state.streams("inputs", shapes, 4, torch.float32)[0][:] = 7.0
    state.finish_step({})
    damage(folder / "inputs.streams")
    with pytest.raises(OutputError, match=rf"inputs\.streams of 96 bytes {found}.*delete that folder to start anew"):
        RunState(folder).streams("inputs", shapes, 4, torch.float32)


def test_streams_of_a_run_without_a_finished_step_are_made_anew(folder: Path) -> None:
    (folder / "inputs.streams").write_bytes(b"another size")
    assert RunState(folder).streams("inputs", [(1, 2, 3)], 4, torch.float32)[0].shape == (4, 1, 2, 3)


def test_a_full_disk_loses_no_finished_step(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = RunState(folder)
    state.finish_step({"a": 1}, {"x": torch.ones(3)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write the state.*the 1 steps done so far are kept there"):
            state.finish_step({"a": 2}, {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = RunState(folder)
    assert again.records == [{"a": 1}]
    assert torch.equal(again.tensors["x"], torch.ones(3))


def test_the_state_is_removed_after_a_run_that_ends_well_and_kept_otherwise(tmp_path: Path) -> None:
    def stopped_run() -> None:
        with open_run_state(tmp_path, {"a": 1}) as state:
            state.finish_step({})
            raise _StoppedError

    with pytest.raises(_StoppedError):
        stopped_run()
    with open_run_state(tmp_path, {"a": 2}) as other:
        assert other.n_steps == 0
    with open_run_state(tmp_path, {"a": 1}) as state:
        assert state.n_steps == 1
    assert not list(tmp_path.iterdir())


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from probes.streaming.run_state import open_run_state\n"
        "with open_run_state(pathlib.Path(sys.argv[1]), {}): pass"
    )
    with open_run_state(tmp_path, {}):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another process is at the same run" in done.stderr


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot keep the state of the run in"), open_run_state(tmp_path / "file", {}):
        pass


def _stop_at(step: int) -> Callable[[int, int], None]:
    def stop(done: int, total: int) -> None:
        if done == step:
            raise _StoppedError

    return stop


@pytest.mark.parametrize("family", ["bert", "llama-tied"])
@pytest.mark.parametrize("step", range(1, N_STEPS))
def test_gradients_stopped_after_any_step_go_on_with_the_same_numbers(family: str, step: int, folder: Path, tmp_path) -> None:
    saved_family(family, tmp_path)
    with open_streamed(tmp_path) as streamed:
        batches = two_batches(streamed.layout)
        expected = measure_streamed_gradient_norms(streamed, batches)
    with open_streamed(tmp_path) as streamed, pytest.raises(_StoppedError):
        measure_streamed_gradient_norms(streamed, batches, state=RunState(folder), on_step=_stop_at(step))
    state = RunState(folder)
    assert state.n_steps == step
    with open_streamed(tmp_path) as streamed:
        got = measure_streamed_gradient_norms(streamed, batches, state=state)
    assert got.to_frame().equals(expected.to_frame())


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


@pytest.mark.parametrize("scheme", ["keel", "highway"])
def test_all_that_was_handed_on_goes_to_the_device_of_the_run(scheme: str, folder: Path, tmp_path: Path) -> None:
    save_model(perturbed(Transformer(small_config(scheme, shared_blocks=True, tied_embeddings=True))), tmp_path)
    batches = [predicting(random_ids())]
    with open_streamed(tmp_path) as streamed, pytest.raises(_StoppedError):
        measure_streamed_gradient_norms(streamed, batches, state=RunState(folder), on_step=_stop_at(N_BLOCKS + 2))
    with open_streamed(tmp_path) as streamed:
        run = _Run(streamed, batches, RunState(folder))
        run.streamed = replace(streamed, device=torch.device("meta"))
        run._restore()
    kept = _tensors(run._handed_on())
    assert len(kept) == len(_tensors(RunState(folder).tensors)) > 2
    assert {tensor.device.type for tensor in kept} == {"meta"}


def test_states_without_a_finished_step_are_removed_and_running_ones_are_not(tmp_path: Path) -> None:
    for name, n_steps in (("empty", 0), ("begun", 1)):
        (tmp_path / f".keel-run-{name}").mkdir()
        for file in ("lock", "run.json"):
            (tmp_path / f".keel-run-{name}" / file).write_text("{}")
        for _ in range(n_steps):
            RunState(tmp_path / f".keel-run-{name}").finish_step({})
    with open_run_state(tmp_path, {"running": True}) as state:
        assert set(remove_useless_states(tmp_path, lambda _: False)) == {tmp_path / ".keel-run-begun", state.folder}
    assert remove_useless_states(tmp_path, lambda _: True) == []
    assert not list(tmp_path.iterdir())


def test_files_of_streams_are_made_together_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=150))
    with pytest.raises(OutputError, match=r"take 1\.92e-07 GB and do not fit"):
        RunState(folder).all_streams(("a", "b"), [(1, 2, 3)], 4, torch.float32)
    assert not list(folder.iterdir())
    RunState(folder).all_streams(("a",), [(1, 2, 3)], 4, torch.float32)
