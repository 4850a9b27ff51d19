"""GGUF files give the numbers of their safetensors twins, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from probes.checkpoint import load_checkpoint
from probes.errors import KeelError, UnsupportedModelError
from probes.families import SUPPORTED_FAMILIES
from probes.gguf_file import read_gguf
from probes.gguf_settings import ARCHITECTURES as READABLE
from probes.gradient_norms import measure_gradient_norms
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from tests.probes._gguf import ARCHITECTURES, gguf_model, write_gguf
from tests.probes._tiny import VOCAB
from tests.probes.streaming._streamed import predicting


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
        return found


def assert_twins(original: nn.Module, arch: str, folder: Path, *, n_tokens: int, **written: Any) -> None:
    """The file and the folder of one model give the same logits, losses and gradients, in memory and streamed."""
    original.save_pretrained(folder / "twin")
    path = write_gguf(folder / "model.gguf", original, arch, **written)
    plain, read = load_checkpoint(folder / "twin"), load_checkpoint(path)
    ids = torch.randint(1, VOCAB, (2, n_tokens))  # 0 is the padding of some twins, whose embedding has no gradient
    torch.testing.assert_close(logits(plain.model, ids), logits(original, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(read.model, ids), logits(plain.model, ids), rtol=0, atol=1e-5)
    assert (read.warnings, read.n_parameters) == ((), plain.n_parameters)
    expected = measure_gradient_norms(plain.model, [predicting(ids)], layout=plain.layout)
    results = [measure_gradient_norms(read.model, [predicting(ids)], layout=read.layout)]
    if read.family in SUPPORTED_FAMILIES:
        with open_streamed(path) as streamed:
            results.append(measure_streamed_gradient_norms(streamed, [predicting(ids)]))
    for result in results:
        assert result.loss.value == pytest.approx(expected.loss.value, rel=1e-5)
        frame, known = (each.to_frame().select_dtypes("number") for each in (result, expected))
        np.testing.assert_allclose(frame.to_numpy(), known.to_numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("n_tokens", [16, 128])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_file_and_its_safetensors_twin_give_the_same_numbers(arch: str, n_tokens: int, tmp_path: Path) -> None:
    assert_twins(gguf_model(arch, max_position_embeddings=128), arch, tmp_path, n_tokens=n_tokens)


def test_every_readable_architecture_has_a_twin_test() -> None:
    assert set(READABLE) <= set(ARCHITECTURES)


LONG = [1.0, 2.0, 4.0, 8.0]
SHORT = [1.0, 1.1, 1.2, 1.3]


def llama3_factors(config: Any) -> np.ndarray:
    """Divisors of the frequencies as Llama 3.1 computes them and its converter writes them."""
    rope = config.rope_parameters
    frequencies = rope["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def factors(name: str, values: Callable[[Any], Any]) -> Callable[[Any], dict[str, np.ndarray]]:
    return lambda config: {name: np.asarray(values(config), np.float32)}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": LONG,
    "short_factor": SHORT,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.19,
}
LONGROPE_KEYS = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 32}

# Rotary positions as a configuration states them, the settings of the file, and its tensors of factors.
ROPES: dict[str, tuple[dict[str, Any], dict[str, object], dict[str, Callable[[Any], Any]]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "linear by default": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.factor": 4.0}, {}),
    "linear under its old name": ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}, {}),
    "named none": ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "yarn": (YARN, YARN_KEYS, {}),
    "yarn with its own attention": (
        YARN | {"attention_factor": 1.5 * (1 + 0.1 * np.log(4.0)), "beta_fast": 16.0, "beta_slow": 2.0},
        YARN_KEYS | {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        {},
    ),
    "llama3": (LLAMA3, {}, {"rope_freqs.weight": llama3_factors}),
    "longrope": (
        LONGROPE,
        LONGROPE_KEYS,
        {"rope_factors_long.weight": lambda config: LONG, "rope_factors_short.weight": lambda config: SHORT},
    ),
    "another base": ({"rope_type": "default", "rope_theta": 3000.0}, {}, {}),
}


@pytest.mark.parametrize("n_tokens", [16, 128])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize(("rope", "settings", "tensors"), ROPES.values(), ids=ROPES)
def test_scaled_rotary_positions_are_applied(
    rope: dict[str, Any], settings: dict[str, object], tensors: dict[str, Any], arch: str, n_tokens: int, tmp_path: Path
) -> None:
    original = gguf_model(arch, max_position_embeddings=128, rope_parameters={"rope_theta": 500.0} | rope, head_dim=8)
    made = {name: np.asarray(values(original.config), np.float32) for name, values in tensors.items()}
    assert_twins(original, arch, tmp_path, n_tokens=n_tokens, settings=settings, change=lambda known: known.update(made))


def test_scaling_changes_the_numbers_of_a_short_text(tmp_path: Path) -> None:
    """The comparison above can fail at 16 tokens already."""
    original = gguf_model("llama")
    scaled = load_checkpoint(write_gguf(tmp_path / "m.gguf", original, "llama", settings={"rope.scaling.factor": 4.0})).model
    ids = torch.randint(VOCAB, (2, 16))
    assert (logits(scaled, ids) - logits(original, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("arch", ["stablelm", "nemotron", "phi3"])
def test_a_part_of_each_head_without_positions_is_kept_so(arch: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert_twins(gguf_model(arch, rope_parameters=rope, max_position_embeddings=128), arch, tmp_path, n_tokens=20)


def test_longrope_of_phi3_and_the_scaled_half_of_gemma3(tmp_path: Path) -> None:
    rope = LONGROPE | {"rope_theta": 500.0, "partial_rotary_factor": 1.0}
    tensors = {f"rope_factors_{name}.weight": np.asarray(v, np.float32) for name, v in (("long", LONG), ("short", SHORT))}
    phi3 = gguf_model("phi3", max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope)
    assert_twins(phi3, "phi3", tmp_path, n_tokens=40, settings=LONGROPE_KEYS, change=lambda known: known.update(tensors))
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    ropes = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 700.0}
    gemma = gguf_model("gemma3", max_position_embeddings=128, rope_parameters=ropes)
    assert_twins(gemma, "gemma3", tmp_path / "gemma", n_tokens=40, settings=settings)


CHANGES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "one head of keys per query": ("llama", {"num_key_value_heads": 4}, {"attention.head_count_kv": None}),
    "wide heads": ("llama", {"head_dim": 16}, {}),
    "wide heads, stated as such": ("llama", {"head_dim": 16}, {"attention.key_length": 16, "attention.value_length": 16}),
    "another epsilon": ("llama", {"rms_norm_eps": 0.1}, {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "no bias": ("starcoder2", {"use_bias": False}, {}),
    "a window for every block": ("mistral", {"sliding_window": 3}, {}),
    "settings for every block": ("llama", {}, {"feed_forward_length": [64, 64], "attention.head_count": [4, 4]}),
    "caps": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}, {}),
    "a cap in gemma3": ("gemma3", {"final_logit_softcapping": 1.5}, {}),
    "an image encoder elsewhere": ("gemma3", {}, {"vision.block_count": 27, "mm.tokens_per_image": 256}),
    "attention by another scale": ("gemma2", {"query_pre_attn_scalar": 64}, {"attention.scale": 0.125}),
    "the usual scale, stated": ("llama", {}, {"attention.scale": 8**-0.5}),
    "windows in another pattern": (
        "gemma3",
        {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
        {"attention.sliding_window_pattern": [True, False] * 3 + [False]},
    ),
    "wide experts": ("qwen3moe", {"moe_intermediate_size": 56}, {}),
    "experts of the usual width": (
        "qwen3moe",
        {"moe_intermediate_size": 32},
        {"expert_feed_forward_length": None, "expert_weights_norm": True, "expert_gating_func": 1},
    ),
    "a wide shared expert": ("qwen2moe", {"shared_expert_intermediate_size": 72, "num_experts_per_tok": 3}, {}),
    "in series": ("stablelm", {"use_parallel_residual": False}, {}),
    "in parallel": ("stablelm", {"use_parallel_residual": True}, {}),
    "what changes nothing": (
        "llama",
        {},
        {"logit_scale": 1.0, "residual_scale": 1.0, "expert_count": 0, "attention.causal": True, "pooling_type": 0}
        | {"attention.sliding_window": 0, "rope.scaling.finetuned": True, "vocab_size": VOCAB},
    ),
}


@pytest.mark.parametrize(("arch", "changes", "settings"), CHANGES.values(), ids=CHANGES)
def test_settings_are_applied(arch: str, changes: dict[str, object], settings: dict[str, object], tmp_path: Path) -> None:
    assert_twins(gguf_model(arch, max_position_embeddings=128, **changes), arch, tmp_path, n_tokens=24, settings=settings)


def test_a_head_written_twice_is_tied(tmp_path: Path) -> None:
    original = gguf_model("llama", tie_word_embeddings=True)
    both = {"change": lambda tensors: tensors.update({"output.weight": tensors["token_embd.weight"]})}
    assert_twins(original, "llama", tmp_path, n_tokens=16, **both)


REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "an unknown setting": ("llama", {"attention.output_gate": 1}),
    "a multiplier of the branches": ("llama", {"residual_scale": 0.22}),
    "a multiplier of the embedding": ("llama", {"embedding_scale": 12.0}),
    "a multiplier of the logits": ("qwen2", {"logit_scale": 0.25}),
    "attention by another scale": ("llama", {"attention.scale": 0.5}),
    "attention to what follows": ("llama", {"attention.causal": False}),
    "a pooled embedding": ("qwen3", {"pooling_type": 3}),
    "a soft cap": ("llama", {"attn_logit_softcapping": 50.0}),
    "a cap of the logits": ("qwen2", {"final_logit_softcapping": 30.0}),
    "a window the family lacks": ("qwen2", {"attention.sliding_window": 16}),
    "values of another width": ("llama", {"attention.value_length": 16}),
    "heads of another width": ("qwen2", {"attention.key_length": 16, "attention.value_length": 16}),
    "half of each head without positions": ("llama", {"rope.dimension_count": 4, "attention.key_length": 8}),
    "positions in sections": ("qwen2", {"rope.dimension_sections": [2, 1, 1, 0]}),
    "another kind of scaling": ("llama", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}),
    "part of yarn": ("llama", YARN_KEYS | {"rope.scaling.yarn_ext_factor": 0.5}),
    "a multiplier of yarn": ("llama", YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.1}),
    "yarn where the family has none": ("phi3", YARN_KEYS),
    "positions of learned length": ("gpt2", {"rope.freq_base": 10000.0}),
    "biased experts": ("qwen3moe", {"expert_weights_norm": False}),
    "a sigmoid router": ("qwen3moe", {"expert_gating_func": 2}),
    "scaled experts": ("qwen2moe", {"expert_weights_scale": 2.5}),
    "dense blocks first": ("qwen3moe", {"leading_dense_block_count": 1}),
    "blocks that differ": ("llama", {"feed_forward_length": [64, 32]}),
    "heads that differ": ("llama", {"attention.head_count_kv": [2, 4]}),
    "a pattern of another depth": ("gemma3", {"attention.sliding_window_pattern": [True]}),
    "a word for a number": ("llama", {"attention.head_count": "four"}),
    "no epsilon": ("llama", {"attention.layer_norm_rms_epsilon": None}),
    "no heads": ("llama", {"attention.head_count": 0}),
    "no base": ("llama", {"rope.freq_base": 0.0}),
    "experts of a width that is not there": ("qwen3moe", {"expert_feed_forward_length": 48}),
    "more experts than there are": ("qwen3moe", {"expert_count": 8}),
}
SAID_OTHERWISE = {
    "experts of a width that is not there": r"'blk\.0\.ffn_.*_exps\.weight' has shape|cannot be streamed",
    "more experts than there are": r"'blk\.0\.ffn_.*_exps\.weight' has shape|cannot be streamed",
    "yarn where the family has none": r"refused by transformers: .*longrope",
}


@pytest.mark.parametrize("read", [load_checkpoint, open_streamed])
@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_is_not_applied_is_refused_by_name(case: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    arch, settings = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", gguf_model(arch), arch, settings=settings)
    named = SAID_OTHERWISE.get(case, "|".join(key.replace(".", r"\.") for key in settings))
    with pytest.raises(KeelError, match=named) as error:
        read(path)
    assert len(str(error.value).splitlines()) <= 5


TENSORS: dict[str, tuple[str, str]] = {
    "a bias": ("llama", "blk.0.attn_output_norm.bias"),
    "norms of queries": ("llama", "blk.1.attn_q_norm.weight"),
    "a norm after the branch": ("qwen2", "blk.0.post_attention_norm.weight"),
    "attention sinks": ("qwen3", "blk.0.attn_sinks.weight"),
    "a scale": ("llama", "blk.0.attn_q.scale"),
    "one expert of many": ("llama", "blk.0.ffn_gate.0.weight"),
    "a classifier": ("llama", "cls.output.weight"),
    "rotary factors for long texts alone": ("llama", "rope_factors_long.weight"),
}


@pytest.mark.parametrize("read", [load_checkpoint, open_streamed])
@pytest.mark.parametrize(("arch", "name"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_without_a_place_is_refused_by_name(
    arch: str, name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    extra = {name: np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", gguf_model(arch), arch, change=lambda tensors: tensors.update(extra))
    with pytest.raises(UnsupportedModelError, match=name.replace(".", r"\.")):
        read(path)


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 2.0, 0.0, 4.0], [1.0, 2.0, float("nan"), 4.0]])
def test_rotary_factors_that_make_no_sense_are_refused(values: list[float], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.asarray(values, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama", change=lambda tensors: tensors.update(extra))
    with pytest.raises(KeelError, match=r"'rope_freqs\.weight' must hold 4 positive numbers"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_type("adapter"), r"is a LoRA adapter: merge it into its base model"),
        (lambda w: w.add_string("adapter.type", "lora"), r"is a LoRA adapter: merge it into its base model"),
        (lambda w: w.add_type("mmproj"), r"is the vision or audio part of a model"),
        (lambda w: w.add_type("imatrix"), r"is an importance matrix for quantising"),
        (lambda w: w.add_type("dataset"), r"is no model: its general\.type is 'dataset'"),
    ],
    ids=["adapter", "older adapter", "mmproj", "imatrix", "dataset"],
)
def test_a_file_that_is_no_model_is_refused_by_what_it_is(extra: Any, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama", extra=extra)
    with pytest.raises(KeelError, match=message):
        load_checkpoint(path)


def test_a_vocabulary_alone_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama", change=dict.clear)
    with pytest.raises(KeelError, match=r"holds no tensors: it is a vocabulary"):
        load_checkpoint(path)


UNREADABLE = sorted(set(gguf.MODEL_ARCH_NAMES.values()) - set(READABLE))


def test_every_other_architecture_of_llama_cpp_is_refused_by_name(tmp_path: Path) -> None:
    assert len(UNREADABLE) > 50
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    header = read_gguf(path)
    from dataclasses import replace

    from probes.gguf_settings import config_fields

    for name in UNREADABLE:
        with pytest.raises(UnsupportedModelError, match=f"architecture '{name}' cannot be read; use its safetensors"):
            config_fields(replace(header, architecture=name))
