"""The settings of a GGUF file as a configuration of ``transformers``: each is applied, known to change nothing, or refused.

:data:`ARCHITECTURES` is the table. A setting that a file leaves out has the value that llama.cpp then takes, which is not
always the default of ``transformers``. Source of keys and defaults: llama.cpp, ``src/llama-model.cpp`` and the GGUF
specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from probes.errors import UnsupportedModelError
from probes.gguf_file import GgufFile
from probes.gguf_keys import Keys
from probes.gguf_rope import rope_parameters

__all__ = ["ARCHITECTURES", "Architecture", "config_fields"]

_MAIN_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the settings of one architecture of llama.cpp become the configuration of a family.

    Attributes:
        family: model type of ``transformers``.
        norm: key and field of the norms' epsilon.
        names: fields of this family for those that others call by another name.
        head_dim: whether the family can have heads of another width than the stream's over their number.
        rotary: whether positions are rotary.
        partial_rotary: whether a part of each head can be without positions.
        windowed: whether the family has one sliding window for all blocks.
        biases: field -> a tensor that is there when the field is true.
        more: further fields, from the settings and the fields known so far.
        fixed: fields whose value llama.cpp takes whatever the file says.
        neutral: more values at which a setting changes nothing.
        irrelevant: more settings, or first parts of their names, that change nothing: those of an image encoder are not run.
    """

    family: str
    norm: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    names: Mapping[str, str] = field(default_factory=dict)
    head_dim: bool = False
    rotary: bool = True
    partial_rotary: bool = False
    windowed: bool = False
    biases: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Keys, Fields], Fields] = lambda keys, fields: {}
    fixed: Mapping[str, object] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()


def config_fields(file: GgufFile) -> tuple[str, Fields]:
    """What a GGUF file says of its model.

    Args:
        file: the header.

    Returns:
        The model type of ``transformers`` and the fields of its configuration, without any that the file determines left out.

    Raises:
        CheckpointError: if a setting is missing or of the wrong kind.
        UnsupportedModelError: if the architecture is not in the table, or a setting or tensor of the file is not applied.
    """
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture '{file.architecture}' cannot be read; use its safetensors "
            f"(readable: {', '.join(ARCHITECTURES)})"
        )
    keys = Keys(file)
    fields = _main_fields(keys, architecture)
    width = _head_width(keys, architecture, fields)
    if architecture.head_dim:
        fields["head_dim"] = width
    if architecture.rotary:
        fields["rope_parameters"] = rope_parameters(keys, width, fields["max_position_embeddings"], architecture.partial_rotary)
    if architecture.windowed:
        fields["sliding_window"] = keys.whole("attention.sliding_window", 0, least=0) or None
    fields |= architecture.more(keys, fields)
    if not fields.keys() & {"query_pre_attn_scalar", "attention_multiplier"}:
        _check_scale(keys, width)
    keys.check_rest(architecture.neutral, architecture.irrelevant)
    fields |= {name: tensor in file.tensors for name, tensor in architecture.biases.items()}
    fields |= architecture.fixed
    family = fields.pop("model_type", architecture.family)
    return family, {architecture.names.get(name, name): value for name, value in fields.items()}


def _main_fields(keys: Keys, architecture: Architecture) -> Fields:
    fields: Fields = {_MAIN_FIELDS[key]: keys.whole(key) for key in list(_MAIN_FIELDS)[:3]}
    fields["num_attention_heads"] = heads = keys.whole("attention.head_count")
    fields["num_key_value_heads"] = keys.whole("attention.head_count_kv", heads)
    fields["intermediate_size"] = keys.whole("feed_forward_length")
    fields[architecture.norm[1]] = keys.real(architecture.norm[0])
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is not None:
        fields["vocab_size"] = embedding.shape[0]  # may be padded beyond the tokenizer
    fields["tie_word_embeddings"] = _tied(keys.file)
    return fields


def _tied(file: GgufFile) -> bool:
    """Whether the head is the embedding: left out of the file, or written twice."""
    head, embedding = (file.tensors.get(name) for name in ("output.weight", "token_embd.weight"))
    if head is None or embedding is None:
        return head is None
    same_kind = (head.type_name, head.shape) == (embedding.type_name, embedding.shape)
    return same_kind and file.same_bytes(head.name, embedding.name)


def _head_width(keys: Keys, architecture: Architecture, fields: Fields) -> int:
    usual, odd = divmod(fields["hidden_size"], fields["num_attention_heads"])
    stated = None if not architecture.head_dim or keys.get("attention.key_length") else keys.get("rope.dimension_count")
    width = keys.whole("attention.key_length", usual if not isinstance(stated, int) or architecture.partial_rotary else stated)
    if keys.whole("attention.value_length", width) != width:
        raise keys.refused("attention.value_length")
    if not architecture.head_dim and (width != usual or odd):
        raise keys.refused("attention.key_length", width)
    return width


def _check_scale(keys: Keys, width: int) -> None:
    """Attention scores scaled by anything but the head's width, where the family has no field for it."""
    scale = keys.real("attention.scale", 0)
    if scale and not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        raise keys.refused("attention.scale")


def _llama(keys: Keys, fields: Fields) -> Fields:
    """Mistral and Mixtral, which llama.cpp calls by the same name, where there is a sliding window or experts."""
    window = {"sliding_window": keys.whole("attention.sliding_window", 0, least=0) or None}
    n_experts = keys.whole("expert_count", 0, least=0)
    if n_experts:
        used = keys.whole("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": n_experts, "num_experts_per_tok": used} | window
    return {"model_type": "mistral"} | window if window["sliding_window"] else {}


def _granite(keys: Keys, fields: Fields) -> Fields:
    """Multipliers of the embedding, the branches, attention's scores and, as a divisor, the logits; 0 stands for none."""
    usual = (fields["hidden_size"] // fields["num_attention_heads"]) ** -0.5
    return {
        "embedding_multiplier": keys.real("embedding_scale", 0) or 1.0,
        "residual_multiplier": keys.real("residual_scale", 0) or 1.0,
        "attention_multiplier": keys.real("attention.scale", 0) or usual,
        "logits_scaling": keys.real("logit_scale", 0) or 1.0,
    }


def _gemma2(keys: Keys, fields: Fields) -> Fields:
    caps = {
        name: keys.real(name, usual) or None
        for name, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    }
    return caps | _windows(keys, fields, window=4096, period=2) | _query_scale(keys, fields, wide_blocks=46)


def _gemma3(keys: Keys, fields: Fields) -> Fields:
    """Blocks with a sliding window have rotary positions of their own, never scaled."""
    caps = {name: keys.real(name, 0) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10_000.0)}
    rope = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    windows = _windows(keys, fields, window=0, period=6)
    return caps | windows | _query_scale(keys, fields, wide_blocks=62) | {"rope_parameters": rope}


def _query_scale(keys: Keys, fields: Fields, *, wide_blocks: int) -> Fields:
    """Attention's scale; llama.cpp takes width / heads in the 27B models, which it knows by their number of blocks."""
    usual = fields["head_dim"]
    if fields["num_hidden_layers"] == wide_blocks:
        usual = fields["hidden_size"] // fields["num_attention_heads"]
    scale = keys.real("attention.scale", 0)
    return {"query_pre_attn_scalar": round(scale**-2) if scale else usual}


def _windows(keys: Keys, fields: Fields, *, window: int, period: int) -> Fields:
    """Sliding windows in all blocks but every ``period``-th, unless the file states another pattern."""
    key, n_blocks = "attention.sliding_window_pattern", fields["num_hidden_layers"]
    window = keys.whole("attention.sliding_window", window, least=0)
    slides = keys.array(key)
    if slides is None:
        period = keys.whole(key, period)
        slides = tuple((block + 1) % period != 0 for block in range(n_blocks))
    if len(slides) != n_blocks:
        raise keys.refused(key, f"{len(slides)} values for {n_blocks} blocks")
    types = ["sliding_attention" if slide and window else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": types}


def _experts(keys: Keys, fields: Fields) -> Fields:
    used = keys.whole("expert_used_count")
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", fields["intermediate_size"] // used),
    }


def _shared_expert(keys: Keys, fields: Fields) -> Fields:
    width = keys.whole("expert_shared_feed_forward_length", fields["intermediate_size"])
    return _experts(keys, fields) | {"shared_expert_intermediate_size": width}


def _phi3(keys: Keys, fields: Fields) -> Fields:
    """The family keeps the length that its positions were made for twice."""
    context = fields["max_position_embeddings"]
    return {"original_max_position_embeddings": fields["rope_parameters"].get("original_max_position_embeddings", context)}


def _falcon(keys: Keys, fields: Fields) -> Fields:
    """With one head of keys it is the older block; a second norm before attention is there or not."""
    older = fields["num_key_value_heads"] == 1
    n_norms = 2 if "blk.0.attn_norm_2.weight" in keys.file.tensors else 1
    return {"new_decoder_architecture": not older, "multi_query": older, "num_ln_in_parallel_attn": None if older else n_norms}


def _gpt2(keys: Keys, fields: Fields) -> Fields:
    if fields.pop("num_key_value_heads") != fields["num_attention_heads"]:
        raise keys.refused("attention.head_count_kv")
    return {}


def _stablelm(keys: Keys, fields: Fields) -> Fields:
    """A block without a second norm is parallel; converters have written another word for it than the model has."""
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.file.tensors}


_LAYER_NORM = "attention.layer_norm_epsilon"
_QKV_BIAS, _UP_BIAS = "blk.0.attn_q.bias", "blk.0.ffn_up.bias"
_SOFTMAX_ROUTER = {"expert_gating_func": (1,)}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        family="llama", head_dim=True, biases={"attention_bias": _QKV_BIAS, "mlp_bias": _UP_BIAS}, more=_llama
    ),
    "granite": Architecture(family="granite", more=_granite, biases={"attention_bias": _QKV_BIAS, "mlp_bias": _UP_BIAS}),
    "smollm3": Architecture(
        family="smollm3",
        biases={"attention_bias": _QKV_BIAS, "mlp_bias": _UP_BIAS},
        fixed={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "olmo2": Architecture(family="olmo2", biases={"attention_bias": _QKV_BIAS}),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3", head_dim=True, biases={"attention_bias": _QKV_BIAS}),
    "qwen2moe": Architecture(
        family="qwen2_moe",
        more=_shared_expert,
        biases={"qkv_bias": _QKV_BIAS},
        fixed={"norm_topk_prob": False},
        neutral=_SOFTMAX_ROUTER | {"expert_weights_norm": (False,)},
    ),
    "qwen3moe": Architecture(
        family="qwen3_moe",
        head_dim=True,
        more=_experts,
        biases={"attention_bias": _QKV_BIAS},
        fixed={"norm_topk_prob": True},
        neutral=_SOFTMAX_ROUTER | {"expert_weights_norm": (True,)},
    ),
    "gemma": Architecture(family="gemma", head_dim=True),
    "gemma2": Architecture(family="gemma2", head_dim=True, more=_gemma2),
    "gemma3": Architecture(family="gemma3_text", head_dim=True, more=_gemma3, irrelevant=frozenset({"vision", "mm"})),
    "phi3": Architecture(family="phi3", partial_rotary=True, windowed=True, more=_phi3),
    "gpt2": Architecture(
        family="gpt2",
        norm=(_LAYER_NORM, "layer_norm_epsilon"),
        rotary=False,
        more=_gpt2,
        names={
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
        },
    ),
    "falcon": Architecture(
        family="falcon",
        norm=(_LAYER_NORM, "layer_norm_epsilon"),
        more=_falcon,
        fixed={"parallel_attn": True, "alibi": False, "bias": False},
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    ),
    "stablelm": Architecture(
        family="stablelm",
        norm=(_LAYER_NORM, "layer_norm_eps"),
        partial_rotary=True,
        biases={"use_qkv_bias": _QKV_BIAS},
        more=_stablelm,
        irrelevant=frozenset({"use_parallel_residual"}),
    ),
    "starcoder2": Architecture(
        family="starcoder2", norm=(_LAYER_NORM, "norm_epsilon"), windowed=True, biases={"use_bias": _QKV_BIAS}
    ),
    "nemotron": Architecture(
        family="nemotron",
        norm=(_LAYER_NORM, "norm_eps"),
        head_dim=True,
        partial_rotary=True,
        biases={"attention_bias": _QKV_BIAS, "mlp_bias": _UP_BIAS},
    ),
}
