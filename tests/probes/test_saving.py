from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keel_theory.schemes import SCHEMES
from probes.checkpoint import load_checkpoint
from probes.config import ConfigError
from probes.errors import CheckpointError, OutputError
from probes.model import Transformer
from probes.saving import load_model, read_config, save_model
from probes.streaming.model import open_streamed
from tests.probes._models import perturbed, random_ids, small_config

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_model(perturbed(Transformer(small_config("deepnorm"))), folder)
    return folder


def edit_config(folder: Path, change: Change) -> None:
    stored = json.loads((folder / "config.json").read_text())
    change(stored)
    (folder / "config.json").write_text(json.dumps(stored))


def assert_same_model(model: Transformer, other: Transformer) -> None:
    assert model.config == other.config
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(model(random_ids()), other(random_ids()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"tied_embeddings": True}, {"shared_blocks": True}, {"learnable_alpha": True, "norm": "layer"}], ids=str
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip(tmp_path: Path, scheme: str, options: dict[str, Any]) -> None:
    model = perturbed(Transformer(small_config(scheme, **options)))
    save_model(model, tmp_path / "new" / "model")
    assert_same_model(load_model(tmp_path / "new" / "model"), model)


def test_scheme_parameters_come_back(tmp_path: Path) -> None:
    model = Transformer(small_config(scheme_parameters={"alpha": "2*sqrt(L)"}))
    save_model(model, tmp_path / "model")
    assert_same_model(load_model(tmp_path / "model"), model)


def test_files_on_disk(saved: Path) -> None:
    stored = json.loads((saved / "config.json").read_text())
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert (stored["model_type"], stored["format_version"], stored["tokenizer"]) == ("keel_dynamics", 1, "bytes")
    assert stored["model"] == small_config("deepnorm").to_dict()
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_shared_weights_are_written_once(tmp_path: Path) -> None:
    save_model(Transformer(small_config(shared_blocks=True, tied_embeddings=True)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in tensors
    assert not [name for name in tensors if "blocks.2" in name]


def test_saving_over_a_model_replaces_it_and_leaves_other_files_alone(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    model = perturbed(Transformer(small_config("keel")))
    save_model(model, saved)
    assert_same_model(load_model(saved), model)
    assert (saved / "notes.txt").read_text() == "mine"


def test_failed_save_leaves_the_former_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("probes.saving.save_file", fail)
    with pytest.raises(OutputError, match=r"cannot write a model to .*model: No space left on device"):
        save_model(Transformer(small_config("keel")), saved)
    assert load_model(saved).config.scheme == "deepnorm"
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write a model to .*file/model"):
        save_model(Transformer(small_config()), tmp_path / "file" / "model")


def test_compute_dtype_can_be_chosen_at_loading(tmp_path: Path) -> None:
    model = Transformer(small_config(compute_dtype="float32"))
    save_model(model, tmp_path)
    wide = load_model(tmp_path, compute_dtype="float64")
    assert wide(random_ids()).dtype is torch.float64
    torch.testing.assert_close(wide(random_ids()).float(), model(random_ids()), rtol=1e-4, atol=1e-5)


def set_scheme(name: str) -> Change:
    return lambda stored: stored["model"].update(scheme=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_scheme("post_norm_deluxe"), "unknown scheme 'post_norm_deluxe'; known: "),
        (set_scheme("post_ln"), "saved with scheme = 'deepnorm', but config.json beside it says 'post_ln'"),
        (lambda stored: stored["model"].update(scheme_parameters={"alpha": 1.0}), "saved with scheme_parameters = {}"),
        (lambda stored: stored["model"].update(scheme_parameters={"gamma": 1.0}), "'deepnorm' has no parameter 'gamma'"),
        (lambda stored: stored["model"].update(scheme_parameters={"alpha": "__import__"}), "__import__"),
        (lambda stored: stored["model"].update(scheme_parameters=3), "config.json: "),
        (lambda stored: stored["model"].update(dropout=0.1), "unknown model configuration field.*dropout"),
        (lambda stored: stored["model"].pop("width"), "missing model configuration field.*width"),
        (lambda stored: stored["model"].update(width="wide"), "width must be an integer"),
        (lambda stored: stored.pop("model"), "no model configuration under 'model'"),
        (lambda stored: stored.update(model_type="llama"), "does not describe a model of the type keel_dynamics"),
        (lambda stored: stored.update(format_version=2), "has format version 2; this version of the toolkit reads 1"),
        (lambda stored: stored.pop("format_version"), "has format version None"),
    ],
)
def test_foreign_configuration_is_refused(saved: Path, change: Change, message: str) -> None:
    edit_config(saved, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_depth_that_the_weights_lack_names_a_tensor(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    del tensors["blocks.1.ffn.branch.function.up.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks tensor\(s\): blocks\.1\.ffn\.branch\.function\.up\.weight"):
        load_model(saved)


def test_many_missing_tensors_are_counted(saved: Path) -> None:
    save_file({}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor\(s\): .* and \d+ more"):
        load_model(saved)


def test_unknown_tensor_is_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    save_file(load_file(path) | {"blocks.0.extra": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"holds unknown tensor\(s\): blocks\.0\.extra"):
        load_model(saved)


def test_wrong_shape_is_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    save_file(load_file(path) | {"head.weight": torch.ones(3, 16)}, path)
    with pytest.raises(CheckpointError, match=r"head\.weight has shape \(3, 16\), the configuration needs \(19, 16\)"):
        load_model(saved)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("not json", "the configuration in its metadata is not valid JSON"),
        ("[1]", "in its metadata is not a JSON object but a list"),
        ("[" * 200_000, "in its metadata is not valid JSON"),
    ],
    ids=["not JSON", "list", "deep"],
)
@pytest.mark.parametrize("read", [load_model, load_checkpoint, open_streamed])
def test_broken_metadata_is_refused(saved: Path, read: Callable[[Path], object], metadata: str, message: str) -> None:
    path = saved / "model.safetensors"
    save_file(load_file(path), path, metadata={"keel_dynamics": metadata})
    with pytest.raises(CheckpointError, match=message):
        read(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_blocks": 10**9}, "n_blocks = 1000000000; at most 100000 can be read"),
        ({"n_blocks": 10**4}, "holds [0-9]+ values, config.json beside it asks for [0-9]+"),
        ({"width": 4 * 10**12}, "width must be at most 2147483647"),
        ({"vocab_size": 10**12}, "vocab_size must be at most 2147483647"),
        ({"vocab_size": 10**9}, "holds [0-9]+ values, config.json beside it asks for [0-9]+"),
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [load_model, open_streamed])
def test_an_absurd_size_is_refused_before_a_model_is_built(
    saved: Path, read: Callable[[Path], object], change: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(saved, lambda stored: stored["model"].update(change))
    path = saved / "model.safetensors"
    save_file(load_file(path), path)
    monkeypatch.setattr(Transformer, "__init__", lambda *args, **kwargs: pytest.fail("a model was built"))
    with pytest.raises(CheckpointError, match=message):
        read(saved)


@pytest.mark.parametrize("read", [load_model, open_streamed])
def test_integers_are_no_weights(saved: Path, read: Callable[[Path], object]) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"head.weight": tensors["head.weight"].to(torch.int32)}, path)
    with pytest.raises(CheckpointError, match=r"tensor 'head\.weight' in .* is stored as I32"):
        read(saved)


def test_truncated_weights_are_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"holds no {name}"):
        load_model(saved)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 200_000], ids=["cut", "not UTF-8", "deep"])
def test_broken_configuration_is_refused(saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_config(saved)


def test_unknown_compute_dtype_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="compute_dtype must be one of"):
        load_model(saved, compute_dtype="int4")  # type: ignore[arg-type]  # the mistake under test


def test_512_blocks_round_trip(tmp_path: Path) -> None:
    model = Transformer(small_config(n_blocks=512, ffn_width=16, n_heads=2))
    save_model(model, tmp_path)
    assert_same_model(load_model(tmp_path), model)
