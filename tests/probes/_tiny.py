"""Tiny random models of every supported family, built from configurations alone: no download, a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import nn

from probes.config_fields import unknown_fields

__all__ = [
    "EXPERT_FAMILIES",
    "FAMILIES",
    "N_BLOCKS",
    "PARALLEL",
    "SAME_EXPERTS",
    "SAME_LAYOUT",
    "SEED",
    "VOCAB",
    "tiny_ids",
    "tiny_model",
    "tolerance",
]

SEED = 20260130
VOCAB = 64
WIDTH = 16
N_BLOCKS = 3

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": N_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA_LIKE = _LLAMA_LIKE | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "tie_word_embeddings": True}
_NEOX_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": N_BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_OPT_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "ffn_dim": 24,
    "num_hidden_layers": N_BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GPTJ_LIKE = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": N_BLOCKS,
    "n_head": 4,
    "n_positions": 32,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
_QWEN_MOE_LIKE = {"num_experts": 4, "moe_intermediate_size": 8}
_DEEPSEEK_LIKE = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}


def _build(name: str, *, config_name: str | None = None, **values: object) -> nn.Module:
    """Of the settings, those that the family declares or reads: the others would ask for what it does not compute."""
    config_class = getattr(transformers, f"{config_name or name}Config")
    unknown = unknown_fields({"model_type": config_class.model_type, **values})
    config = config_class(**{key: value for key, value in values.items() if key not in unknown})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=N_BLOCKS, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _experts(name: str, **values: object) -> nn.Module:
    model = _build(name, **_LLAMA_LIKE | {"num_experts_per_tok": 2, "head_dim": 4} | values)
    model.set_experts_implementation("eager")  # the grouped product does not exist in float64
    return model


def _deepseek_v3(**values: object) -> nn.Module:
    """One dense block, then experts in two groups of which one is chosen."""
    model = _experts("DeepseekV3", **_DEEPSEEK_LIKE | values)
    for block in model.model.layers[1:]:
        block.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    return model


def _encoder(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**_NEOX_LIKE)
    return getattr(transformers, f"{name}ForMaskedLM")(config)


def _falcon(**values: object) -> nn.Module:
    config = transformers.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=N_BLOCKS,
        num_attention_heads=4,
        ffn_hidden_size=24,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        **values,
    )
    return transformers.FalconForCausalLM(config)


_EXPERT_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mixtral": partial(_experts, "Mixtral", num_local_experts=4),
    "qwen2_moe": partial(_experts, "Qwen2Moe", **_QWEN_MOE_LIKE, shared_expert_intermediate_size=12, mlp_only_layers=[0]),
    "qwen3_moe": partial(_experts, "Qwen3Moe", **_QWEN_MOE_LIKE, norm_topk_prob=True),
    "qwen3_moe-sparse": partial(_experts, "Qwen3Moe", **_QWEN_MOE_LIKE, decoder_sparse_step=2),
    "olmoe": partial(_experts, "Olmoe", num_experts=4),
    "granitemoe": partial(_experts, "GraniteMoe", **_GRANITE_FACTORS, num_local_experts=4),
    "gpt_oss": partial(_experts, "GptOss", num_local_experts=4, sliding_window=4),
    "deepseek_v3": _deepseek_v3,
}
EXPERT_FAMILIES: tuple[str, ...] = tuple(_EXPERT_BUILDERS)
"""Those with experts in some of their blocks, four of which two are chosen unless other settings are given."""

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "llama": lambda: _build("Llama", **_LLAMA_LIKE),
    "llama-tied": lambda: _build("Llama", **_LLAMA_LIKE | {"tie_word_embeddings": True}),
    "llama-bias": lambda: _build("Llama", **_LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True}),
    "mistral": lambda: _build("Mistral", **_LLAMA_LIKE | {"sliding_window": 4}),
    "qwen2": lambda: _build("Qwen2", **_LLAMA_LIKE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": lambda: _build("Qwen3", **_LLAMA_LIKE | {"head_dim": 8}),
    "gemma": lambda: _build("Gemma", **_LLAMA_LIKE | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": lambda: _build("Gemma2", **_GEMMA_LIKE | {"final_logit_softcapping": 3.0}),
    "gemma3": lambda: _build(
        "Gemma3",
        config_name="Gemma3Text",
        **_GEMMA_LIKE | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "phi3": lambda: _build("Phi3", **_LLAMA_LIKE),
    "olmo2": lambda: _build("Olmo2", **_LLAMA_LIKE),
    "gpt2": _gpt2,
    "gpt_neox": lambda: _build("GPTNeoX", **_NEOX_LIKE | {"use_parallel_residual": True}),
    "gpt_neox-sequential": lambda: _build("GPTNeoX", **_NEOX_LIKE | {"use_parallel_residual": False}),
    "opt": lambda: _build("OPT", **_OPT_LIKE),
    "opt-post-norm": lambda: _build("OPT", **_OPT_LIKE | {"do_layer_norm_before": False}),
    "opt-projected": lambda: _build("OPT", **_OPT_LIKE | {"do_layer_norm_before": False, "word_embed_proj_dim": 8}),
    "olmo": lambda: _build("Olmo", **_LLAMA_LIKE | {"clip_qkv": 2.0}),
    "smollm3": lambda: _build("SmolLM3", **_LLAMA_LIKE | {"no_rope_layers": [1, 0, 1]}),
    "exaone4": lambda: _build("Exaone4", **_LLAMA_LIKE | {"sliding_window": 4, "sliding_window_pattern": 2}),
    "starcoder2": lambda: _build("Starcoder2", **_LLAMA_LIKE | {"sliding_window": 4, "tie_word_embeddings": True}),
    "granite": lambda: _build("Granite", **_LLAMA_LIKE | _GRANITE_FACTORS),
    "granite-tied": lambda: _build("Granite", **_LLAMA_LIKE | _GRANITE_FACTORS | {"tie_word_embeddings": True}),
    "nemotron": lambda: _build("Nemotron", **_LLAMA_LIKE),
    "falcon": lambda: _falcon(multi_query=True),
    "falcon-new": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-new-one-norm": lambda: _falcon(new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=2),
    "falcon-sequential": lambda: _falcon(parallel_attn=False, multi_query=False, bias=True, alibi=True),
    "falcon-alibi": lambda: _falcon(alibi=True, multi_query=True, bias=True),
    "gptj": lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(**_GPTJ_LIKE)),
    "cohere": lambda: _build("Cohere", **_LLAMA_LIKE | {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere-tied": lambda: _build("Cohere", **_LLAMA_LIKE | {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere2": lambda: _build(
        "Cohere2",
        **_LLAMA_LIKE | {"logit_scale": 0.3, "sliding_window": 4, "tie_word_embeddings": True, "head_dim": 4},
    ),
    "phi": lambda: _build("Phi", **_LLAMA_LIKE | {"qk_layernorm": True}),
    "stablelm": lambda: _build("StableLm", **_LLAMA_LIKE | {"use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm-parallel": lambda: _build("StableLm", **_LLAMA_LIKE | {"use_parallel_residual": True, "qk_layernorm": True}),
    **_EXPERT_BUILDERS,
    "bert": lambda: _encoder("Bert"),
    "roberta": lambda: _encoder("Roberta"),
    "xlm-roberta": lambda: _encoder("XLMRoberta"),
}

_DENSE_MOE = {"num_experts": 4, "moe_num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8, "moe_k": 2}
_SAME_LAYOUT: dict[str, Callable[..., nn.Module]] = {
    "arcee": partial(_build, "Arcee", **_LLAMA_LIKE),
    "camembert": partial(_encoder, "Camembert"),
    "codegen": lambda: transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**_GPTJ_LIKE)),
    "cwm": partial(_build, "Cwm", **_LLAMA_LIKE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "data2vec-text": partial(_encoder, "Data2VecText"),
    "ernie": partial(_encoder, "Ernie"),
    "ernie4_5": partial(_build, "Ernie4_5", **_LLAMA_LIKE),
    "glm": partial(_build, "Glm", **_LLAMA_LIKE | {"head_dim": 4}),
    "glm4": partial(_build, "Glm4", **_LLAMA_LIKE | {"head_dim": 4}),
    "gpt_bigcode": lambda: _build("GPTBigCode", **_GPTJ_LIKE),
    "helium": partial(_build, "Helium", **_LLAMA_LIKE | {"head_dim": 4}),
    "hunyuan_v1_dense": partial(_build, "HunYuanDenseV1", **_LLAMA_LIKE | {"head_dim": 4}),
    "ministral": partial(_build, "Ministral", **_LLAMA_LIKE | {"head_dim": 4}),
    "ministral3": partial(_build, "Ministral3", **_LLAMA_LIKE | {"head_dim": 4}),
    "olmo3": partial(_build, "Olmo3", **_LLAMA_LIKE | {"sliding_window": 4}),
    "persimmon": partial(_build, "Persimmon", **_LLAMA_LIKE | {"num_key_value_heads": 4}),
    "seed_oss": partial(_build, "SeedOss", **_LLAMA_LIKE | {"head_dim": 4}),
}
_SAME_EXPERTS: dict[str, Callable[..., nn.Module]] = {
    "deepseek_v2": partial(_experts, "DeepseekV2", **_DEEPSEEK_LIKE | {"topk_method": "group_limited_greedy", "head_dim": 4}),
    "dots1": partial(_experts, "Dots1", **_DEEPSEEK_LIKE, routed_scaling_factor=1.5),
    "ernie4_5_moe": partial(_experts, "Ernie4_5_Moe", **_DENSE_MOE, moe_layer_start_index=1),
    "flex_olmo": partial(_experts, "FlexOlmo", num_experts=4),
    "glm4_moe": partial(_experts, "Glm4Moe", **_DEEPSEEK_LIKE),
    "minimax_m2": partial(_experts, "MiniMaxM2", num_local_experts=4),
    "phimoe": partial(_experts, "Phimoe", num_local_experts=4),
}

SAME_EXPERTS: tuple[str, ...] = tuple(_SAME_EXPERTS)
SAME_LAYOUT: tuple[str, ...] = (*_SAME_LAYOUT, *_SAME_EXPERTS)
"""Further families of the table, whose description and code of a block are those of a family above."""

FAMILIES: tuple[str, ...] = tuple(_BUILDERS)
"""Every description of the table, and the variants whose stream runs differently."""

PARALLEL = {
    "gpt_neox",
    "falcon",
    "falcon-new",
    "falcon-new-one-norm",
    "falcon-alibi",
    "gptj",
    "codegen",
    "cohere",
    "cohere-tied",
    "cohere2",
    "phi",
    "stablelm-parallel",
}
"""Those whose attention and FFN read the same stream and are added to it together."""


def tiny_model(family: str, dtype: torch.dtype = torch.float64, **settings: object) -> nn.Module:
    """A random model of three blocks and width 16 in evaluation mode, the same at every call.

    Families with experts take further settings of their configuration.

    Matrices keep the family's own initialisation, ten times as wide, and every gain and bias is moved off its starting
    value, so that no part of the model is the identity or zero by chance.
    """
    builders = _BUILDERS | _SAME_LAYOUT | _SAME_EXPERTS
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    try:
        model = _in_dtype(builders[family](**settings), dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    parameter.mul_(10.0)
    finally:
        torch.set_rng_state(state)
    return model


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model as loading casts it: what the family keeps in float32 stays so."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in model.to(dtype).state_dict(keep_vars=True).items():
        if name.endswith(kept):
            tensor.data = tensor.data.float()
    return model


_FLOAT32_ROUTERS = {"deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "minimax_m2"}


def tolerance(family: str, usual: float) -> float:
    """Of a comparison between batches of different sizes: a router in float32 rounds them differently in any dtype."""
    return max(usual, 1e-5) if family in _FLOAT32_ROUTERS else usual


def tiny_ids(batch: int = 2, tokens: int = 12) -> torch.Tensor:
    """Token ids of shape (batch, tokens), none of them special, the same at every call."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(4, VOCAB, (batch, tokens), generator=generator)
