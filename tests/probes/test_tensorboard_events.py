"""Against the real package where it is installed, and against a stand-in of its reader everywhere."""

import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from probes.loss_logs import LossLogError, read_loss_log
from probes.tensorboard_events import TensorBoardError, is_event_file

RUN = {
    "train/loss": {k: math.nan if k == 5 else 5.0 - 0.1 * k for k in range(1, 6)},
    "train/learning_rate": {k: 0.01 * k for k in range(1, 6)},
    "train/grad_norm": {1: 2.0},
    "eval/loss": {3: 9.0},
}


def assert_is_the_run(log):
    assert log.steps.tolist() == [1, 2, 3, 4, 5]
    assert log.losses[:4].tolist() == pytest.approx([4.9, 4.8, 4.7, 4.6])
    assert math.isnan(log.losses[4])
    assert log.learning_rates.tolist() == pytest.approx([0.01 * k for k in range(1, 6)])
    assert log.grad_norms == (2.0, None, None, None, None)


@pytest.fixture
def event_folder(tmp_path, monkeypatch):
    """A folder whose events a stand-in of the package's reader gives."""

    def install(scalars):
        class EventAccumulator:
            def __init__(self, path, size_guidance):
                assert size_guidance == {"scalars": 0}  # all of them: the default keeps a sample

            def Reload(self):
                return self

            def Tags(self):
                return {"scalars": list(scalars)}

            def Scalars(self, tag):
                return [SimpleNamespace(step=step, value=value) for step, value in scalars[tag].items()]

        names = ["tensorboard", "tensorboard.backend", "tensorboard.backend.event_processing"]
        for name in names:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        module = types.ModuleType(names[-1] + ".event_accumulator")
        module.EventAccumulator = EventAccumulator
        monkeypatch.setitem(sys.modules, module.__name__, module)
        (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
        return tmp_path

    return install


def test_tags_are_chosen_by_their_names(event_folder):
    log = read_loss_log(event_folder(RUN))
    assert_is_the_run(log)
    assert log.batch_losses is None


def test_losses_of_the_batches_have_their_tags(event_folder):
    of_batch = {"unigram_loss": {k: 3.0 + k for k in range(1, 5)}, "train/bigram_loss": {k: 2.0 + k for k in range(1, 6)}}
    log = read_loss_log(event_folder({**RUN, **of_batch}))
    assert_is_the_run(log)
    assert log.batch_losses[:4].tolist() == [[3.0 + k, 2.0 + k] for k in range(1, 5)]
    assert all(math.isnan(value) for value in log.batch_losses[4])


def test_missing_rates_are_refused_with_the_tags_found(event_folder):
    folder = event_folder({"train/loss": {1: 5.0}, "eval/loss": {1: 5.0}})
    with pytest.raises(LossLogError, match="no learning rates: columns found are train/loss, eval/loss"):
        read_loss_log(folder)


def test_missing_losses_are_refused_with_the_tags_found(event_folder):
    with pytest.raises(LossLogError, match="no losses: columns found are train/lr, weights"):
        read_loss_log(event_folder({"train/lr": {1: 5.0}, "weights": {1: 5.0}}))


def test_no_scalars(event_folder):
    with pytest.raises(TensorBoardError, match="holds no scalars"):
        read_loss_log(event_folder({}))


def test_real_event_file(tmp_path):
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writer_module.EventFileWriter(str(tmp_path))
    for tag, values in RUN.items():
        for step, value in values.items():
            writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()
    assert_is_the_run(read_loss_log(tmp_path))


@pytest.mark.parametrize(("name", "is_one"), [("events.out.tfevents.17.host.0", True), ("loss.csv", False)])
def test_event_files_are_known_by_name(name, is_one):
    assert is_event_file(Path(name)) is is_one
