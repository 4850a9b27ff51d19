"""Runs on disk: whole files or none, logs cut to their state, refusals that name the field."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from probes.errors import CheckpointError, OutputError
from probes.run_folder import RunFolder, SavedState, StepRecord, batch_losses, read_log
from tests.probes._runs import small_run

CORPUS = {"content_hash": "abc"}


def _record(step: int, loss: float = 1.5) -> StepRecord:
    return StepRecord(step=step, lr=0.1 * step, loss=loss, grad_norm=1 / 3, time=0.25)


def _state(value: float) -> SavedState:
    return SavedState(
        {"w": torch.full((3,), value)}, {"step": 1, "seconds": 0.5, "sessions": [{"first_step": 1, "threads": 1}]}
    )


@pytest.mark.parametrize("loss", [0.1 + 0.2, 1e-300, -math.inf, math.inf])
def test_records_come_back_bit_for_bit(loss) -> None:
    assert StepRecord.from_json(_record(3, loss).to_json()) == _record(3, loss)


def test_a_loss_that_is_no_number_survives_strict_json() -> None:
    line = _record(3, math.nan).to_json()
    assert '"loss": "nan"' in line
    assert math.isnan(StepRecord.from_json(line).loss)


@pytest.mark.parametrize("of_batch", [(2.5, 0.1 + 0.2), (math.inf, -math.inf)])
def test_losses_of_the_batch_come_back_bit_for_bit(of_batch) -> None:
    record = replace(_record(3), unigram_loss=of_batch[0], bigram_loss=of_batch[1])
    assert StepRecord.from_json(record.to_json()) == record
    assert record.batch_losses == of_batch


def test_what_is_not_known_of_a_batch_is_not_written() -> None:
    assert list(json.loads(_record(3).to_json())) == ["step", "lr", "loss", "grad_norm", "time"]


@pytest.mark.parametrize("known", [{}, {"unigram_loss": 2.0}, {"bigram_loss": 2.0}], ids=["none", "unigram", "bigram"])
def test_the_losses_of_a_batch_are_both_or_none(known) -> None:
    record = replace(_record(3), **known)
    assert record.batch_losses is None
    assert StepRecord.from_json(record.to_json()) == record


def test_losses_of_the_batches_of_a_run_that_began_without_them() -> None:
    later = replace(_record(2), unigram_loss=3.0, bigram_loss=2.0)
    found = batch_losses([_record(1), later])
    assert found is not None
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [3.0, 2.0]
    assert batch_losses([_record(1)]) is None
    assert batch_losses([]) is None


def test_the_log_is_cut_to_its_state(tmp_path) -> None:
    config = small_run()
    with RunFolder(tmp_path).opened(config, CORPUS) as folder:
        folder.append(_record(1))
        folder.save(_state(1.0))
        folder.append(_record(2))
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "lr": 0.')  # a kill in the middle of a line
    assert [r.step for r in read_log(tmp_path / "log.jsonl")] == [1, 2]
    with RunFolder(tmp_path).opened(config, CORPUS) as folder:
        state, records = folder.resume()
    assert records == [_record(1)]
    assert state is not None
    assert torch.equal(state.tensors["w"], torch.ones(3))
    assert read_log(tmp_path / "log.jsonl") == [_record(1)]


def test_without_a_state_a_run_starts_anew(tmp_path) -> None:
    with RunFolder(tmp_path).opened(small_run(), CORPUS) as folder:
        folder.append(_record(1))
        assert folder.resume() == (None, [])
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_missing_lines_of_the_log_are_noticed(tmp_path) -> None:
    with RunFolder(tmp_path).opened(small_run(), CORPUS) as folder:
        folder.append(_record(1))
        folder.save(_state(1.0))
        os.truncate(tmp_path / "log.jsonl", 10)
        with pytest.raises(CheckpointError, match=r"has 10 bytes, its saved state knows .*: lines are missing"):
            folder.resume()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_lr": 0.5}, "peak_lr is 0.02 there, 0.5 here"),
        ({"n_blocks": 3}, "model.n_blocks is 2 there, 3 here"),
        ({"seed": 1}, "seed is 0 there, 1 here"),
    ],
)
def test_another_configuration_is_refused_by_its_fields(tmp_path, changes, message) -> None:
    with RunFolder(tmp_path).opened(small_run(), CORPUS):
        pass
    with pytest.raises(CheckpointError, match=message), RunFolder(tmp_path).opened(small_run(**changes), CORPUS):
        pass


def test_another_text_under_the_same_name_is_refused(tmp_path) -> None:
    with RunFolder(tmp_path).opened(small_run(), CORPUS):
        pass
    other = {"content_hash": "def"}
    with (
        pytest.raises(CheckpointError, match="content_hash is 'abc' there, 'def' here"),
        RunFolder(tmp_path).opened(small_run(), other),
    ):
        pass


def test_a_folder_with_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(CheckpointError, match=r"holds config\.json but no training\.json"),
        RunFolder(tmp_path).opened(small_run(), CORPUS),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["config.json"]


def test_two_at_a_time_are_refused(tmp_path) -> None:
    pytest.importorskip("fcntl")
    with RunFolder(tmp_path).opened(small_run(), CORPUS):  # noqa: SIM117 - the second must be met inside the first
        with (
            pytest.raises(CheckpointError, match="another process is training"),
            RunFolder(tmp_path).opened(small_run(), CORPUS),
        ):
            pass


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputError, match=r"cannot write the run to .*file"),
        RunFolder(tmp_path / "file").opened(small_run(), CORPUS),
    ):
        pass


def test_a_full_disk_leaves_the_state_saved_before(tmp_path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = replace(_state(2.0), tensors={"w": torch.zeros(100_000)})
    with RunFolder(tmp_path).opened(small_run(), CORPUS) as folder:
        folder.append(_record(1))
        folder.save(_state(1.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(OutputError, match=r"cannot write latest\.safetensors .*what was saved before is unharmed"):
                folder.save(big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        state, records = folder.resume()
    assert state is not None
    assert torch.equal(state.tensors["w"], torch.ones(3))
    assert records == [_record(1)]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["latest.safetensors"]


@pytest.mark.parametrize("content", [b"", b"garbage that is longer than a header"])
def test_a_damaged_state_is_named(tmp_path, content) -> None:
    with RunFolder(tmp_path).opened(small_run(), CORPUS) as folder:
        folder.save(_state(1.0))
        (tmp_path / "state" / "latest.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"latest\.safetensors is not a readable state"):
            folder.resume()
