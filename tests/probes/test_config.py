from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from keel_theory.schemes import SCHEMES
from keel_theory.spec import SchemeError
from probes.config import PRESETS, ConfigError, ModelConfig, count_parameters, describe, estimate_memory, narrow, tiny, wide
from probes.model import Transformer
from tests.probes._models import small_config

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ffn": "gelu", "n_kv_heads": 4},
    {"ffn": "relu", "tied_embeddings": True, "final_norm": False},
    {"learnable_alpha": True, "norm": "layer"},
    {"shared_blocks": True},
    {"shared_blocks": True, "learnable_alpha": True, "tied_embeddings": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameter_count_is_that_of_the_built_model(scheme: str, options: dict[str, Any]) -> None:
    config = small_config(scheme, **options)
    assert count_parameters(config) == sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize(("scheme", "parameters"), [("hybrid_norm", {"variant": "star"}), ("mix_ln", {"ratio": 0.5})])
def test_parameter_count_follows_scheme_parameters(scheme: str, parameters: dict[str, Any]) -> None:
    config = small_config(scheme, scheme_parameters=parameters)
    assert count_parameters(config) == sum(p.numel() for p in Transformer(config).parameters())


def test_the_512_sublayer_model_is_the_papers_3_billion() -> None:
    config = narrow(512)
    assert config.n_blocks == 256
    assert count_parameters(config) == pytest.approx(3.22e9, rel=1e-3)
    assert describe(config) == "256 blocks / 512 sub-layers, 3.22 B parameters, 12.9 GB in float32"


def test_table_8() -> None:
    assert (narrow(64).width, narrow(64).ffn_width, narrow(64).n_heads, narrow(64).n_kv_heads) == (1024, 3072, 16, 8)
    assert (wide(128).width, wide(128).ffn_width, wide(128).n_heads, wide(128).n_kv_heads) == (2048, 6144, 16, 8)
    assert {(c.norm_eps, c.rope_theta, c.init_std) for c in (narrow(64), wide(128))} == {(1e-5, 1e4, 0.02)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_sublayers(name: str) -> None:
    config = PRESETS[name]("pre_ln")
    assert config.scheme == "pre_ln"
    if name.split("-")[-1].isdigit():
        assert config.n_sublayers == int(name.split("-")[-1])


def test_memory_counts_weights_gradients_and_two_moments() -> None:
    config = small_config()
    memory, n_parameters = estimate_memory(config), count_parameters(config)
    assert (memory.weights, memory.gradients, memory.adamw_state) == (8 * n_parameters, 8 * n_parameters, 16 * n_parameters)
    assert memory.training == 32 * n_parameters
    assert estimate_memory(replace(config, compute_dtype="bfloat16")).weights == 4 * n_parameters


@pytest.mark.parametrize(("n_blocks", "text"), [(1, "1 block / 2 sub-layers"), (2, "2 blocks / 4 sub-layers")])
def test_description_says_blocks_and_sublayers(n_blocks: int, text: str) -> None:
    assert describe(small_config(n_blocks=n_blocks)).startswith(text)


def test_alpha_counts_sublayers_not_blocks() -> None:
    scales = [spec.shortcut_scale for spec in small_config(n_blocks=24).specs()]
    assert scales == [1.0, 1.0] + [48.0] * 46


@pytest.mark.parametrize(
    ("compute", "stream"),
    [("float32", torch.float32), ("bfloat16", torch.float32), ("float16", torch.float32), ("float64", torch.float64)],
)
def test_stream_is_never_below_float32(compute: str, stream: torch.dtype) -> None:
    assert replace(tiny(), compute_dtype=compute).stream_dtype is stream


def test_configurations_with_the_same_parameters_are_equal_and_hash_alike() -> None:
    first = small_config("deepnorm", scheme_parameters={"alpha": 2.0, "beta": 1.0})
    second = small_config("deepnorm", scheme_parameters=(("beta", 1.0), ("alpha", 2.0)))
    assert first == second
    assert hash(first) == hash(second)
    assert first != replace(first, scheme_parameters={})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dictionary_round_trip(scheme: str) -> None:
    config = small_config(scheme, learnable_alpha=True, seed=7)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert set(config.to_dict()) == {field.name for field in fields(ModelConfig)}


def test_round_trip_keeps_scheme_parameters() -> None:
    config = small_config(scheme_parameters={"alpha": "L**0.5"})
    assert ModelConfig.from_dict(config.to_dict()).specs()[2].shortcut_scale == pytest.approx(6**0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_blocks": 0}, "n_blocks must be an integer of at least 1, got 0"),
        ({"n_blocks": 2.0}, "n_blocks must be an integer"),
        ({"width": True}, "width must be an integer"),
        ({"vocab_size": "256"}, "vocab_size must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"n_heads": 3}, "width 64 is not divisible by n_heads 3"),
        ({"n_heads": 64, "n_kv_heads": 64}, "head width 1 .* must be even"),
        ({"n_kv_heads": 3}, "n_heads 4 is not divisible by n_kv_heads 3"),
        ({"norm_eps": 0.0}, "norm_eps must be a positive finite number"),
        ({"init_std": float("nan")}, "init_std must be a positive finite number, got nan"),
        ({"rope_theta": "big"}, "rope_theta must be a positive finite number"),
        ({"ffn": "silu"}, "ffn must be one of swiglu, gelu, relu, got 'silu'"),
        ({"norm": "batch"}, "norm must be one of rms, layer"),
        ({"compute_dtype": "int8"}, "compute_dtype must be one of"),
        ({"shared_blocks": 1}, "shared_blocks must be true or false, got 1"),
        ({"scheme_parameters": {"alpha": [1]}}, "scheme_parameters: 'alpha' must be a number or a text"),
    ],
)
def test_bad_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(tiny(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "kiel"}, "unknown scheme 'kiel'; known: .*keel"),
        ({"scheme_parameters": {"gamma": 1.0}}, "scheme 'keel' has no parameter 'gamma'; its parameters: alpha"),
    ],
)
def test_bad_scheme_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        replace(tiny(), **changes)


@pytest.mark.parametrize("preset", [narrow, wide])
@pytest.mark.parametrize("n_sublayers", [0, 63])
def test_odd_number_of_sublayers_is_refused(preset: Any, n_sublayers: int) -> None:
    with pytest.raises(ConfigError, match=f"a block has 2 sub-layers.*got {n_sublayers}"):
        preset(n_sublayers)


def test_unknown_and_missing_fields_are_named() -> None:
    values = tiny().to_dict()
    with pytest.raises(ConfigError, match=r"unknown model configuration field\(s\): dropout"):
        ModelConfig.from_dict(values | {"dropout": 0.1})
    del values["width"]
    with pytest.raises(ConfigError, match=r"missing model configuration field\(s\): width"):
        ModelConfig.from_dict(values)


def test_sharing_refuses_weights_that_differ_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES["pre_ln"]
    growing = replace(scheme, rule=lambda i, n, kind: replace(scheme.rule(i, n, kind), init_gain=1.0 + i))
    monkeypatch.setattr("probes.config.get_scheme", lambda name: growing)
    with pytest.raises(ConfigError, match="shared_blocks: init_gain of scheme 'pre_ln' changes with depth"):
        small_config("pre_ln", shared_blocks=True)
