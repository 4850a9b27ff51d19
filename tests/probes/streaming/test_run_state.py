"""States of interrupted runs: whole steps only, one run at a time, gone at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from probes.errors import OutputError
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.run_state import RunState, open_run_state
from tests.probes._tiny import N_BLOCKS
from tests.probes.streaming._streamed import saved_family, two_batches

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


def test_a_damaged_state_is_refused_with_what_to_do(folder: Path) -> None:
    RunState(folder).finish_step({})
    (folder / "tensors.pt").write_bytes(b"broken")
    with pytest.raises(OutputError, match="delete that folder to start anew"):
        RunState(folder)


def test_streams_stay_in_their_file(folder: Path) -> None:
    shapes = [(1, 2, 3), (2, 2, 3)]
    RunState(folder).streams("inputs", shapes, 4, torch.float32)[1][3] = 7.0
    assert torch.equal(RunState(folder).streams("inputs", shapes, 4, torch.float32)[1][3], torch.full((2, 2, 3), 7.0))


def test_a_full_disk_loses_no_finished_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(folder)
    state.finish_step({"a": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OutputError, match="No space left on device; the 1 steps done so far are kept there"):
            state.finish_step({"a": 2})
    assert RunState(folder).records == [{"a": 1}]


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
