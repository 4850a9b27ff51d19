from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel_theory.schemes import SCHEMES
from probes.errors import CheckpointError
from probes.families import describe_model
from probes.hf import KeelDynamicsConfig, KeelDynamicsForCausalLM
from probes.model import Transformer
from probes.saving import load_model, save_model
from tests.probes._models import perturbed, random_ids, small_config

OPTIONS: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": True},
    {"shared_blocks": True},
    {"shared_blocks": True, "tied_embeddings": True, "learnable_alpha": True},
    {"compute_dtype": "bfloat16"},
]


def assert_same_weights(loaded: Transformer, model: Transformer) -> None:
    ours, theirs = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(loaded(random_ids()), model(random_ids()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip_through_transformers(tmp_path: Path, scheme: str, options: dict[str, Any]) -> None:
    model = perturbed(Transformer(small_config(scheme, **options)))
    save_model(model, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(loaded, KeelDynamicsForCausalLM)
    assert_same_weights(loaded.transformer, model)
    assert torch.equal(loaded(random_ids()).logits, loaded.transformer(random_ids()))

    loaded.save_pretrained(tmp_path / "theirs")
    assert_same_weights(load_model(tmp_path / "theirs"), model)
    assert load_model(tmp_path / "theirs").config == model.config
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").transformer, model)


def test_loss_is_of_the_next_token() -> None:
    model = AutoModelForCausalLM.from_config(KeelDynamicsConfig(model=small_config().to_dict()))
    ids = random_ids()
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, model.transformer.loss(ids[:, :-1], ids[:, 1:]), rtol=1e-10, atol=0)
    assert model(ids).loss is None


def test_asking_for_bfloat16_keeps_weights_and_stream_in_float32(tmp_path: Path) -> None:
    save_model(Transformer(small_config(compute_dtype="float32")), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.transformer.hidden(random_ids()).dtype is torch.float32


def test_configuration_comes_back(tmp_path: Path) -> None:
    config = small_config("mix_ln", scheme_parameters={"ratio": 0.5})
    save_model(Transformer(config), tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_config() == config


def test_unknown_scheme_is_refused(tmp_path: Path) -> None:
    save_model(Transformer(small_config()), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["model"]["scheme"] = "kiel"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="unknown scheme 'kiel'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_layout_of_the_wrapper_resolves() -> None:
    model = KeelDynamicsForCausalLM(KeelDynamicsConfig(model=small_config().to_dict()))
    layout = describe_model(model)
    assert layout.boundaries[1].tap.module == "transformer.blocks.0.attention"
    assert all(model.get_submodule(boundary.tap.module) is not None for boundary in layout.boundaries)


def test_embeddings_are_where_transformers_looks() -> None:
    model = KeelDynamicsForCausalLM(KeelDynamicsConfig())
    assert model.get_input_embeddings() is model.transformer.embedding
    assert model.get_output_embeddings() is model.transformer.head


@pytest.mark.slow
def test_transformers_alone_refuses_the_folder(tmp_path: Path) -> None:
    save_model(Transformer(small_config()), tmp_path)
    code = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "keel_dynamics" in run.stderr
