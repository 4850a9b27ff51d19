"""One check of a device for every command, and one message."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import probes
from probes.checkpoint import load_checkpoint
from probes.device import DeviceError, named_device, resolve_device
from probes.errors import KeelError
from probes.streaming.model import open_streamed
from probes.training_config import TrainingConfigError

WRONG = {
    "no name of a device": ("abacus", "Expected one of cpu"),
    "not on this machine": ("cuda:77", ""),
    "without numbers": ("meta", "it holds shapes and no numbers"),
    "of a package that is not there": ("hpu", "No module named"),
}


@pytest.mark.parametrize(("name", "reason"), WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("error", [DeviceError, TrainingConfigError])
def test_what_cannot_be_used_is_named_with_the_reason_and_what_works(name: str, reason: str, error: type[KeelError]) -> None:
    with pytest.raises(error, match=rf"^device '{name}' cannot be used: {reason}.*; 'cpu' always works$"):
        resolve_device(name, error=error)


def test_a_number_that_counts_nothing_is_refused() -> None:
    with pytest.raises(DeviceError, match="cannot be used: Overflow"):
        resolve_device(2**70)


def test_a_name_may_be_of_a_device_that_is_elsewhere() -> None:
    assert named_device("cuda:77") == torch.device("cuda:77")
    with pytest.raises(DeviceError, match=r"^device 'abacus' cannot be used: Expected one of cpu.*; 'cpu' always works$"):
        named_device("abacus")


@pytest.mark.parametrize("opened", [load_checkpoint, open_streamed])
@pytest.mark.parametrize("name", [name for name, _ in WRONG.values()], ids=list(WRONG))
def test_a_checkpoint_is_not_read_where_it_cannot_be_put(opened, name: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=f"device '{name}' cannot be used"), opened(tmp_path / "none", device=name):
        pass


def test_no_other_module_makes_a_device_of_what_a_user_writes() -> None:
    """``torch.device("meta")`` and the device of a path of the stream are the program's own words."""
    made = set()
    for path in Path(probes.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device":
                (argument,) = node.args
                if not isinstance(argument, ast.Constant):
                    made.add((path.name, ast.unparse(argument)))
    assert made == {("device.py", "name"), ("stream_store.py", "place")}
