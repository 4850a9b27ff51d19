"""Runs whose files somebody has damaged: one message that names file and field, for every file and every field."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from probes.errors import CheckpointError
from probes.run_folder import RESULT_FIELDS, RunFolder
from probes.training import TrainingInterrupted, train
from tests.probes._damage import BROKEN_FILES, changed, identifiers, rewrite, without, wrong_values
from tests.probes._runs import small_corpus, small_run

WRONG_RESULTS = wrong_values(RESULT_FIELDS)
_Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(small_run(), corpus=small_corpus(), folder=folder)
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"

    def interrupt(record: Any) -> None:
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted, match="after step 3"):
        train(small_run(), corpus=small_corpus(), folder=folder, on_step=interrupt)
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_once, tmp_path / "run"))


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


def again(folder: Path) -> None:
    train(small_run(), corpus=small_corpus(), folder=folder)


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
@pytest.mark.parametrize("name", ["training.json", "result.json"])
def test_a_broken_file_of_a_finished_run_is_named(finished: Path, name: str, content: bytes) -> None:
    (finished / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}.*name another folder"):
        again(finished)


@pytest.mark.parametrize("field", RESULT_FIELDS)
def test_a_missing_field_of_a_result_is_named(finished_once: Path, tmp_path: Path, field: str) -> None:
    rewrite(tmp_path / "result.json", without(json.loads((finished_once / "result.json").read_text()), field))
    with pytest.raises(CheckpointError, match=rf"result\.json: field '{field}' is missing"):
        _ = RunFolder(tmp_path).result


@pytest.mark.parametrize(("field", "value"), WRONG_RESULTS, ids=identifiers(WRONG_RESULTS))
def test_a_wrong_field_of_a_result_is_named(finished_once: Path, tmp_path: Path, field: str, value: Any) -> None:
    rewrite(tmp_path / "result.json", changed(json.loads((finished_once / "result.json").read_text()), field, value))
    with pytest.raises(CheckpointError, match=rf"result\.json: field '{field}' must be "):
        _ = RunFolder(tmp_path).result


@pytest.mark.parametrize("field", ["config", "corpus"])
@pytest.mark.parametrize("value", [3, None, "a", []])
def test_a_wrong_field_of_the_configuration_is_named(finished: Path, field: str, value: Any) -> None:
    rewrite(finished / "training.json", changed(json.loads((finished / "training.json").read_text()), field, value))
    with pytest.raises(CheckpointError, match=rf"training\.json: field '{field}' must be a table"):
        again(finished)


@pytest.mark.parametrize("field", ["model", "corpus", "steps"])
@pytest.mark.parametrize("value", [3, None, [], {}])
def test_a_configuration_with_a_damaged_part_is_another_one(finished: Path, field: str, value: Any) -> None:
    stored = json.loads((finished / "training.json").read_text())
    rewrite(finished / "training.json", changed(stored, f"config.{field}", value))
    with pytest.raises(CheckpointError, match=rf"holds a run of another configuration: {field}"):
        again(finished)


def _lines(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


def _put(folder: Path, lines: list[str]) -> None:
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))


RECORD = {"step": 2, "lr": 0.1, "loss": 1.0, "grad_norm": 1.0, "time": 1.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((json.dumps({k: v for k, v in RECORD.items() if k != name}), f"field '{name}' is missing") for name in RECORD),
        *(
            (json.dumps({**RECORD, name: value}), f"field '{name}' must be")
            for name in RECORD
            for value in (None, "x", [], True)
        ),
        *(
            (json.dumps({**RECORD, name: value}), f"field '{name}' must be a number, or one of nan, inf, -inf")
            for name in ("unigram_loss", "bigram_loss")
            for value in (None, "x", [], True, 10**400)
        ),
        (json.dumps({**RECORD, "step": 2.5}), "field 'step' must be a count"),
        (json.dumps({**RECORD, "step": 9}), r"is of step 9: a line is missing or twice there"),
        (json.dumps({**RECORD, "loss": 10**400}), "field 'loss' must be a number"),
        ('{"step": 2, "lr": 0.', "cannot read"),
        ("", "cannot read"),
        ("[2]", "does not hold a JSON object"),
    ],
)
def test_a_damaged_line_of_the_log_is_named(finished: Path, line: str, message: str) -> None:
    lines = _lines(finished)
    _put(finished, [lines[0], line, *lines[2:]])
    with pytest.raises(CheckpointError, match=rf"log\.jsonl line 2.*{message}|{message}.*log\.jsonl line 2"):
        again(finished)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "log.jsonl").unlink(), r"cannot read .*log\.jsonl: No such file"),
        (lambda folder: (folder / "log.jsonl").write_bytes(b"\xff\xfe\n"), r"cannot read .*log\.jsonl"),
        (lambda folder: _put(folder, _lines(folder)[:-1]), r"log\.jsonl holds 49 steps, result\.json beside it knows 50"),
        (lambda folder: _put(folder, _lines(folder)[1:]), r"log\.jsonl line 1 is of step 2"),
        (lambda folder: _put(folder, []), r"log\.jsonl holds 0 steps, result\.json beside it knows 50"),
    ],
    ids=["missing", "binary", "shorter", "beginning lost", "empty"],
)
def test_a_damaged_log_of_a_finished_run_is_named(finished: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(finished)
    with pytest.raises(CheckpointError, match=message):
        again(finished)


def _state(folder: Path) -> tuple[_Tensors, dict[str, Any], Path]:
    path = folder / "state" / "latest.safetensors"
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"]), path  # noqa: SIM118


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
def test_a_broken_state_is_named(stopped: Path, content: bytes) -> None:
    (stopped / "state" / "latest.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest\.safetensors is not a readable state"):
        again(stopped)


@pytest.mark.parametrize("facts", [None, "", "{}", "[]", "3", "{"])
def test_a_state_with_foreign_facts_is_named(stopped: Path, facts: str | None) -> None:
    tensors, _, path = _state(stopped)
    save_file(tensors, path, metadata=None if facts is None else {"facts": facts})
    with pytest.raises(CheckpointError, match=r"the 'facts' of .*latest\.safetensors.*start the run anew"):
        again(stopped)


@pytest.mark.parametrize("field", ["step", "seconds", "sessions", "log_bytes"])
@pytest.mark.parametrize("value", ["missing", None, "x", True, [3]])
def test_a_wrong_fact_of_a_state_is_named(stopped: Path, field: str, value: Any) -> None:
    tensors, facts, path = _state(stopped)
    facts = without(facts, field) if value == "missing" else changed(facts, field, value)
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})
    with pytest.raises(CheckpointError, match=rf"latest\.safetensors: field '{field}' "):
        again(stopped)


def test_a_state_of_another_step_than_its_log_is_named(stopped: Path) -> None:
    tensors, facts, path = _state(stopped)
    save_file(tensors, path, metadata={"facts": json.dumps({**facts, "step": 2})})
    with pytest.raises(CheckpointError, match=r"log\.jsonl holds 3 steps, its saved state is of step 2"):
        again(stopped)


WEIGHT = "head.weight"


def _renamed(name: str, new: str) -> Callable[[_Tensors], None]:
    def change(tensors: _Tensors) -> None:
        tensors[new] = tensors.pop(name)

    return change


def _put_tensor(name: str, tensor: torch.Tensor) -> Callable[[_Tensors], None]:
    def change(tensors: _Tensors) -> None:
        tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"model/{WEIGHT}"), rf"lacks the tensor 'model/{WEIGHT}'"),
        (_put_tensor(f"model/{WEIGHT}", torch.zeros(3)), rf"'model/{WEIGHT}' has shape \(3,\), not \(256, 16\)"),
        (_put_tensor(f"optimizer/{WEIGHT}/exp_avg", torch.zeros(3)), rf"'optimizer/{WEIGHT}/exp_avg' has shape \(3,\)"),
        (_put_tensor(f"optimizer/{WEIGHT}/step", torch.zeros(3)), rf"'optimizer/{WEIGHT}/step' has shape \(3,\), not \(\)"),
        (lambda t: t.pop(f"optimizer/{WEIGHT}/exp_avg"), rf"lacks the tensor 'optimizer/{WEIGHT}/exp_avg'"),
        (_renamed(f"optimizer/{WEIGHT}/exp_avg", "optimizer/nobody/exp_avg"), r"holds 'optimizer/nobody/exp_avg', which"),
        (_renamed(f"optimizer/{WEIGHT}/exp_avg", f"optimizer/{WEIGHT}/momentum"), r"momentum', which this model does not have"),
        (lambda t: t.pop("random/cpu"), r"the saved random state cannot be used"),
        (_put_tensor("random/cpu", torch.zeros(4)), r"the saved random state cannot be used"),
        (_put_tensor("random/cpu", torch.zeros(4, dtype=torch.uint8)), r"the saved random state cannot be used"),
    ],
)
def test_a_foreign_tensor_of_a_state_is_named(stopped: Path, change: Callable[[_Tensors], object], message: str) -> None:
    tensors, facts, path = _state(stopped)
    change(tensors)
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})
    with pytest.raises(CheckpointError, match=message):
        again(stopped)


def test_an_undamaged_copy_goes_on_and_ends(stopped: Path) -> None:
    tensors, facts, path = _state(stopped)
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})
    again(stopped)
    again(stopped)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the run's tokenizer is damaged: .*tokenizer\.json"):
        train(small_run(), folder=tmp_path)
