"""Streamed layer removal gives the numbers of the model in memory, from one read of its weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from probes.checkpoint import load_checkpoint
from probes.errors import OutputError
from probes.layer_removal import measure_layer_removal
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.model import open_streamed
from probes.streaming.removal import KeptSweep, measure_streamed_layer_removal
from probes.streaming.run_state import RunState
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._tiny import FAMILIES, N_BLOCKS
from tests.probes.streaming._streamed import estimates, losses, predicting, saved_family, two_batches


@pytest.mark.parametrize("unit", ["block", "sublayer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_numbers_of_the_model_in_memory(family: str, unit: str, tmp_path: Path) -> None:
    folder = saved_family(family, tmp_path)
    checkpoint = load_checkpoint(folder)
    batches = two_batches(checkpoint.layout)
    expected = measure_layer_removal(checkpoint.model, batches, layout=checkpoint.layout, unit=unit, joint=False)
    with open_streamed(folder) as streamed:
        got = measure_streamed_layer_removal(streamed, batches, unit=unit, taylor=True)
    with open_streamed(folder) as streamed:
        forward = measure_streamed_layer_removal(streamed, batches, unit=unit)
    assert losses(got) == pytest.approx(losses(expected), rel=1e-9, abs=1e-12)
    assert [cost.unit for cost in got.costs] == [cost.unit for cost in expected.costs]
    for a, b in zip(estimates(got), estimates(expected), strict=True):
        assert a == pytest.approx(b, rel=1e-8, abs=1e-12)
    for a, b in zip(estimates(forward), estimates(expected), strict=True):
        assert a == pytest.approx(b[1:], rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "highway", "admin"])
def test_the_toolkits_own_models(scheme: str, tmp_path: Path) -> None:
    save_model(perturbed(Transformer(small_config(scheme))), tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    batches = [predicting(random_ids())]
    expected = measure_layer_removal(checkpoint.model, batches, layout=checkpoint.layout, unit="sublayer", span=2)
    with open_streamed(tmp_path) as streamed:
        got = measure_streamed_layer_removal(streamed, batches, unit="sublayer", span=2, joint=True)
    assert losses(got) == pytest.approx(losses(expected), rel=1e-9, abs=1e-12)
    assert [c.delta_loss.value for c in got.joint] == pytest.approx([c.delta_loss.value for c in expected.joint], rel=1e-9)


def test_a_head_read_in_windows_of_rows_gives_the_same(tmp_path: Path) -> None:
    folder = saved_family("gemma2", tmp_path)
    with open_streamed(folder) as streamed:
        whole = measure_streamed_layer_removal(streamed, two_batches())
    with open_streamed(folder, window_bytes=5 * 16 * 8) as streamed:
        parts = measure_streamed_layer_removal(streamed, two_batches())
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "n_reads"), [({}, 1), ({"taylor": True}, 3), ({"joint": True, "threshold": 1e9}, 2)], ids=str
)
def test_every_weight_is_read_as_often_as_is_said(options: dict[str, object], n_reads: int, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    batches = two_batches()
    with open_streamed(folder) as streamed:
        stream = streamed.stream
        opening = stream.n_bytes_read
        result = measure_streamed_layer_removal(streamed, batches, **options)
        blocks = sum(stream.block_bytes(k) for k in range(N_BLOCKS))
        rows = sum(len(torch.unique(batch.inputs)) for batch in batches) * 16 * 8
        n_entries = 2 if n_reads > 1 else 1  # forward and backward enter the model once
        assert stream.n_bytes_read - opening == n_reads * blocks + n_entries * (64 * 16 * 8 + rows)
    assert all(len(cost.estimates) == 3 + ("taylor" in options) for cost in result.costs)


def test_nan_in_one_variant_is_reported_for_it_alone(tmp_path: Path) -> None:
    """Block 1 refuses, with NaN, a stream that block 0 has not been through."""
    folder = saved_family("llama", tmp_path)
    (batch, _) = two_batches()
    with open_streamed(folder) as streamed:
        entries: list[torch.Tensor] = []
        blocks = [streamed.model.get_submodule(name) for name in streamed.layout.blocks]
        blocks[0].register_forward_pre_hook(lambda _, args: entries.append(args[0][:1].clone()))

        def nan_without_block_0(_: object, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            skipped = (args[0][::2] == entries[0]).all(dim=2).all(dim=1).repeat_interleave(2)
            return torch.where(skipped[:, None, None], torch.nan, output)

        blocks[1].register_forward_hook(nan_without_block_0)
        result = measure_streamed_layer_removal(streamed, [batch])
    assert [math.isnan(cost.delta_loss.value) for cost in result.costs] == [True, False, False]
    assert math.isfinite(result.loss.value)


class _KilledError(Exception):
    pass


def _kill_after(state: RunState, n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends in the middle of the step after these."""
    finish = RunState.finish_step

    def killed(self: RunState, *args: object, **kwargs: object) -> None:
        if self.n_steps >= n_steps:
            raise _KilledError
        finish(self, *args, **kwargs)

    monkeypatch.setattr(RunState, "finish_step", killed)


@pytest.mark.parametrize("n_steps", range(2 * N_BLOCKS))
def test_a_run_stopped_anywhere_goes_on_with_the_same_numbers(n_steps: int, tmp_path: Path, monkeypatch) -> None:
    folder = saved_family("gemma2", tmp_path / "model")
    options = {"unit": "sublayer", "span": 3}  # units that are open while the run stops
    with open_streamed(folder) as streamed:
        opening = streamed.stream.n_bytes_read
        expected = measure_streamed_layer_removal(streamed, two_batches(), **options)
        whole_run = streamed.stream.n_bytes_read - opening
    place = tmp_path / "state"
    place.mkdir()
    with monkeypatch.context() as patch, open_streamed(folder) as streamed:
        state = RunState(place)
        _kill_after(state, n_steps, patch)
        with pytest.raises(_KilledError):
            measure_streamed_layer_removal(streamed, two_batches(), state=state, **options)
    again = RunState(place)
    assert again.n_steps == n_steps
    with open_streamed(folder) as streamed:
        before = streamed.stream.n_bytes_read
        got = measure_streamed_layer_removal(streamed, two_batches(), state=again, **options)
        assert (losses(got), estimates(got)) == (losses(expected), estimates(expected))
        finished = sum(streamed.stream.block_bytes(k) for k in range(n_steps // 2))
        assert streamed.stream.n_bytes_read - before == whole_run - finished


@pytest.mark.parametrize("n_steps", [0, 1, 4, 2 * N_BLOCKS - 1])
def test_units_removed_together_go_on_too(n_steps: int, tmp_path: Path, monkeypatch) -> None:
    folder = saved_family("llama", tmp_path / "model")
    options = {"joint": True, "threshold": 1e9}  # everything is cheap
    with open_streamed(folder) as streamed:
        expected = measure_streamed_layer_removal(streamed, two_batches(), **options)
    place = tmp_path / "state"
    place.mkdir()
    finish, in_part = RunState.finish_step, []

    def killed(self: RunState, *args: object, **kwargs: object) -> None:
        if self.folder.name == "together":
            if self.n_steps >= n_steps:
                raise _KilledError
            in_part.append(self.n_steps)
        finish(self, *args, **kwargs)

    with monkeypatch.context() as patch, open_streamed(folder) as streamed, pytest.raises(_KilledError):  # noqa: PT012
        patch.setattr(RunState, "finish_step", killed)
        measure_streamed_layer_removal(streamed, two_batches(), state=RunState(place), **options)
    assert in_part == list(range(n_steps))
    with open_streamed(folder) as streamed:
        got = measure_streamed_layer_removal(streamed, two_batches(), state=RunState(place), **options)
    assert len(got.joint) == N_BLOCKS - 1  # one block is left
    assert got.joint == expected.joint
    assert (got.costs, got.loss) == (expected.costs, expected.loss)


def test_variants_that_do_not_fit_onto_the_disk_are_refused(tmp_path: Path, monkeypatch) -> None:
    folder = saved_family("llama", tmp_path / "model")
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 100})())
    place = tmp_path / "state"
    place.mkdir()
    with open_streamed(folder) as streamed, pytest.raises(OutputError, match="GB and do not fit into"):
        measure_streamed_layer_removal(streamed, two_batches(), state=RunState(place))
    assert not list(place.glob("*.streams"))


def test_a_line_that_does_not_say_what_was_copied_makes_a_damaged_state(tmp_path: Path) -> None:
    KeptSweep(RunState(tmp_path)).open([(1, 2, 3)], 2, torch.float32)
    RunState(tmp_path).finish_step({"passed": 0})
    with pytest.raises(OutputError, match=r"'copied' is not in it.*to start anew"):
        KeptSweep(RunState(tmp_path)).open([(1, 2, 3)], 2, torch.float32)
