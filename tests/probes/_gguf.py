"""GGUF files as llama.cpp's converter writes them, from small models of ``transformers``.

Names of tensors are those of the ``gguf`` package, which the converter uses too; what it does to settings and values is
written here anew, architecture by architecture, so that a file is an independent statement of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import nn

from tests.probes._tiny import VOCAB

__all__ = ["ARCHITECTURES", "add_vocabulary", "gguf_model", "write_gguf"]

CONTEXT = 32
Tensors = dict[str, np.ndarray]


def permuted(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a query or key matrix, or its bias, in llama.cpp's order: halves of each head interleaved."""
    return weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _same(config: Any, name: str, value: np.ndarray) -> Tensors:
    return {name: value}


def _llama(config: Any, name: str, value: np.ndarray) -> Tensors:
    for part, n_heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
        if part in name:
            return {name: permuted(value, n_heads)}
    return _experts(config, name, value)


def _norms_plus_one(config: Any, name: str, value: np.ndarray) -> Tensors:
    return {name: value + 1 if name.endswith("norm.weight") else value}


def _gpt2(config: Any, name: str, value: np.ndarray) -> Tensors:
    transposed = re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name)
    return {name: value.T if transposed else value}


def _experts(config: Any, name: str, value: np.ndarray) -> Tensors:
    """Gates and what they multiply apart, and the shared expert's gate as a vector."""
    if "gate_up_exps" in name:
        gate, up = np.split(value, 2, axis=1)
        return {name.replace("gate_up_exps", "gate_exps"): gate, name.replace("gate_up_exps", "up_exps"): up}
    return {name: value[0] if "ffn_gate_inp_shexp" in name else value}


def _falcon(config: Any, name: str, value: np.ndarray) -> Tensors:
    """Groups of queries around one key and one value, sorted into all queries, all keys, all values."""
    n_kv = config.num_kv_heads if config.new_decoder_architecture else 1
    if "attn_qkv" not in name:
        return {name: value}
    grouped = value.reshape(n_kv, config.num_attention_heads // n_kv + 2, config.head_dim, config.hidden_size)
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    return {name: np.concatenate([part.reshape(-1, config.hidden_size) for part in parts])}


def _rms(config: Any) -> dict[str, object]:
    return {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}


def _head_lengths(config: Any) -> dict[str, object]:
    return _rms(config) | {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _llama_settings(config: Any) -> dict[str, object]:
    experts = getattr(config, "num_local_experts", 0)
    more = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok} if experts else {}
    window = getattr(config, "sliding_window", None)
    return _rms(config) | {"rope.dimension_count": config.head_dim} | more | _window(window)


def _granite_settings(config: Any) -> dict[str, object]:
    return _rms(config) | {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _window(window: int | None) -> dict[str, object]:
    return {"attention.sliding_window": window} if window else {}


def _gemma_settings(config: Any) -> dict[str, object]:
    caps = {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    known = {name: value for name, value in caps.items() if value is not None}
    return _head_lengths(config) | known | _window(config.sliding_window)


def _expert_settings(config: Any) -> dict[str, object]:
    shared = getattr(config, "shared_expert_intermediate_size", None)
    more = {"expert_shared_feed_forward_length": shared} if shared else {}
    return more | {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _partial(config: Any) -> dict[str, object]:
    width = config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(width * config.rope_parameters["partial_rotary_factor"])}


@dataclass(frozen=True)
class Architecture:
    """A family of ``transformers``, a tiny configuration of it, and how its converter writes it."""

    family: str
    tiny: Mapping[str, object] = field(default_factory=dict)
    settings: Callable[[Any], dict[str, object]] = _rms
    tensor: Callable[[Any, str, np.ndarray], Tensors] = _same


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {"head_dim": 16, "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 16}
_FALCON = {"alibi": False, "ffn_hidden_size": 128, "num_kv_heads": 2}
_EPSILON = "attention.layer_norm_epsilon"

ARCHITECTURES = {
    "llama": Architecture("llama", {"head_dim": 8}, _llama_settings, _llama),
    "mistral": Architecture("mistral", {"head_dim": 8, "sliding_window": 6}, _llama_settings, _llama),
    "mixtral": Architecture(
        "mixtral",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        _llama_settings,
        _llama,
    ),
    "granite": Architecture(
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.25, "logits_scaling": 4.0},
        _granite_settings,
        _llama,
    ),
    "smollm3": Architecture("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}, _rms, _llama),
    "olmo2": Architecture("olmo2", {"pad_token_id": 1}),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", {"head_dim": 16}, _head_lengths),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _EXPERTS | {"shared_expert_intermediate_size": 40},
        lambda config: _rms(config) | _expert_settings(config),
        _experts,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        lambda config: _head_lengths(config) | _expert_settings(config),
        _experts,
    ),
    "gemma": Architecture("gemma", {"head_dim": 16, "tie_word_embeddings": True}, _head_lengths, _norms_plus_one),
    "gemma2": Architecture("gemma2", _GEMMA | {"final_logit_softcapping": 2.0}, _gemma_settings, _norms_plus_one),
    "gemma3": Architecture("gemma3_text", _GEMMA | {"num_hidden_layers": 7}, _gemma_settings, _norms_plus_one),
    "phi3": Architecture(
        "phi3",
        {"sliding_window": 5, "pad_token_id": 0},
        lambda config: _rms(config) | _partial(config) | _window(config.sliding_window),
    ),
    "gpt2": Architecture(
        "gpt2",
        {"n_inner": 64, "tie_word_embeddings": True, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        lambda config: {_EPSILON: config.layer_norm_epsilon},
        _gpt2,
    ),
    "falcon": Architecture(
        "falcon", _FALCON | {"multi_query": True}, lambda config: {_EPSILON: config.layer_norm_epsilon}, _falcon
    ),
    "falcon new": Architecture(
        "falcon",
        _FALCON | {"new_decoder_architecture": True},
        lambda config: {_EPSILON: config.layer_norm_epsilon, "attention.head_count_kv": config.num_kv_heads},
        _falcon,
    ),
    "stablelm": Architecture(
        "stablelm",
        {"use_qkv_bias": True, "layer_norm_eps": 1e-3},
        lambda config: {_EPSILON: config.layer_norm_eps, "use_parallel_residual": True} | _partial(config),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {"norm_epsilon": 1e-3, "sliding_window": 6},
        lambda config: {_EPSILON: config.norm_epsilon} | _window(config.sliding_window),
    ),
    "nemotron": Architecture(
        "nemotron",
        {"head_dim": 8, "norm_eps": 1e-3},
        lambda config: {_EPSILON: config.norm_eps} | _partial(config),
        _norms_plus_one,
    ),
}
_LLAMA_CPP_NAME = {"mistral": "llama", "mixtral": "llama", "falcon new": "falcon"}


def gguf_settings(model: nn.Module, arch: str) -> dict[str, object]:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta"))
    inner = next(getattr(config, name) for name in ("ffn_hidden_size", "n_inner", "intermediate_size") if hasattr(config, name))
    kv_heads = {"falcon": 1, "gpt2": config.num_attention_heads}.get(arch, config.num_key_value_heads)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads,
        **({"rope.freq_base": theta} if theta is not None and arch != "gpt2" else {}),
        **ARCHITECTURES[arch].settings(config),
    }


def gguf_tensors(model: nn.Module, arch: str) -> Tensors:
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[_LLAMA_CPP_NAME.get(arch, arch)]
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        tensors |= ARCHITECTURES[arch].tensor(model.config, _name(names, name), parameter.detach().float().numpy())
    return tensors


def _name(names: gguf.TensorNameMap, name: str) -> str:
    """Of a tensor in the file; the joined experts of ``transformers`` are written as two by every converter."""
    block = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
    if block is not None:
        return f"blk.{block[1]}.ffn_{block[2]}_exps.weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def write_gguf(
    path: Path,
    model: nn.Module,
    arch: str,
    *,
    change: Callable[[Tensors], object] = lambda tensors: None,
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    quantise: gguf.GGMLQuantizationType | None = None,
    settings: Mapping[str, object] = {},
) -> Path:
    """A file as llama.cpp's converter writes it; ``settings`` replaces or, by None, leaves out settings."""
    name = _LLAMA_CPP_NAME.get(arch, arch)
    writer = gguf.GGUFWriter(path, name)
    for key, value in (gguf_settings(model, arch) | settings).items():
        add_setting(writer, f"{name}.{key}", value)
    add_vocabulary(writer)
    extra(writer)
    tensors = gguf_tensors(model, arch)
    change(tensors)
    for tensor, value in tensors.items():
        if quantise is None or value.ndim == 1:
            writer.add_tensor(tensor, np.ascontiguousarray(value))
        else:
            writer.add_tensor(tensor, gguf.quantize(value, quantise), raw_dtype=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_setting(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        add[type(value)](key, value)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Single letters, as a byte-level vocabulary writes them, and one merge."""
    letters = [*(chr(code) for code in range(33, 31 + VOCAB)), "<|endoftext|>", "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(VOCAB - 2)
    writer.add_bos_token_id(VOCAB - 2)


def gguf_model(arch: str, **changes: object) -> nn.Module:
    """A small model of the family with weights, norms and biases that all matter."""
    architecture = ARCHITECTURES[arch]
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    if architecture.family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    if architecture.family == "gpt2":
        del settings["rope_parameters"]
    config_class = transformers.CONFIG_MAPPING[architecture.family]
    config = config_class(**settings | dict(architecture.tiny) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(5.0)
    return model
