"""Reading parts of files, and files that change under the reader's hands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from probes.errors import CheckpointError
from probes.streaming.files import FileReader
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.removal import measure_streamed_layer_removal
from probes.weight_files import find_weight_files
from tests.probes.streaming._streamed import saved_family, two_batches

STORED = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    tensors = {str(dtype): torch.randn(7, 3).to(dtype) for dtype in STORED} | {"scalar": torch.tensor(2.5)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return tensors, path


@pytest.mark.parametrize("wanted", STORED, ids=str)
@pytest.mark.parametrize("kept", STORED, ids=str)
def test_rows_are_cast_as_torch_casts_them(kept: torch.dtype, wanted: torch.dtype, stored) -> None:
    tensors, path = stored
    files = find_weight_files(path)
    reader = FileReader(files.files)
    out = torch.empty(4, 3, dtype=wanted)
    reader.read(files.tensors[str(kept)], out, first_row=2)
    assert torch.equal(out, tensors[str(kept)][2:6].to(wanted))
    assert reader.n_bytes_read == 4 * 3 * kept.itemsize


def test_a_scalar_is_read(stored) -> None:
    files = find_weight_files(stored[1])
    out = torch.empty(())
    FileReader(files.files).read(files.tensors["scalar"], out)
    assert out.item() == 2.5


def _touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _longer(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def _replaced(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "touched": (_touched, "has changed while it was in use"),
    "longer": (_longer, "has changed while it was in use"),
    "replaced": (_replaced, "has changed while it was in use"),
    "gone": (Path.unlink, "No such file"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_is_refused_by_name(change: Callable[[Path], None], message: str, stored) -> None:
    _, path = stored
    files = find_weight_files(path)
    reader = FileReader(files.files)
    reader.check_headers()
    change(path)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{message}"):
        reader.read(files.tensors["torch.float32"], torch.empty(7, 3))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        reader.check()


def test_a_header_that_changes_behind_size_and_time_is_noticed_at_the_end(stored) -> None:
    _, path = stored
    reader = FileReader([path])
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"scalar", b"salary"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    reader.check()
    with pytest.raises(CheckpointError, match="another header"):
        reader.check_headers()


@pytest.mark.parametrize("at_block", [1, 2])
def test_a_shard_that_changes_during_a_removal_ends_it_by_name(at_block: int, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)

    def change(stage: str, done: int, total: int) -> None:
        if done == at_block:
            for path in folder.glob("*.safetensors"):
                _touched(path)

    with (
        open_streamed(folder) as streamed,
        pytest.raises(CheckpointError, match=r"model-0000\d-of-0000\d.safetensors has changed"),
    ):
        measure_streamed_layer_removal(streamed, two_batches(), on_progress=change)


@pytest.mark.parametrize("at_step", [1, 4, 6])
def test_a_shard_that_changes_during_a_run_ends_it_by_name(at_step: int, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)

    def change(done: int, total: int) -> None:
        if done == at_step:
            for path in folder.glob("*.safetensors"):
                _touched(path)

    with (
        open_streamed(folder) as streamed,
        pytest.raises(CheckpointError, match=r"model-0000\d-of-0000\d.safetensors has changed"),
    ):
        measure_streamed_gradient_norms(streamed, two_batches(), on_step=change)
