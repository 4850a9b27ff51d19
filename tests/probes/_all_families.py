"""A tiny random model of every language-model family that ``transformers`` has, shrunk by the names of configuration fields."""

from __future__ import annotations

import copy
import string
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

__all__ = ["KINDS", "NOT_TINY", "VOCAB", "save_tiny", "tiny_config", "tiny_of_kind"]

VOCAB = 64

_SMALL: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size entity_vocab_size"),
    (VOCAB, "shape_vocab_size pronunciation_vocab_size max_position_embeddings n_positions max_seq_len n_ctx context_length"),
    (32, "model_max_length mamba_d_ssm"),
    (24, "intermediate_size moe_intermediate_size ffn_dim ffn_hidden_size shared_expert_intermediate_size d_ff dff dim_ff"),
    (24, "hidden_dim intermediate_size_mlp shared_intermediate_size expert_ffn_hidden_size feed_forward_size d_inner"),
    (24, "shared_experts_intermediate_size dense_intermediate_size moe_shared_expert_intermediate_size block_ff_dim"),
    (24, "encoder_ffn_dim decoder_ffn_dim n_inner"),
    (16, "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim input_embedding_size lru_width"),
    (16, "output_embedding_size attention_hidden_size pooler_hidden_size entity_emb_size embedding_dim embedding_rank"),
    (8, "kv_lora_rank q_lora_rank qk_head_dim o_lora_rank mamba_d_state state_size ssm_state_size mamba_dt_rank"),
    (8, "time_step_rank laurel_rank hidden_size_per_layer_input gated_norm_rank router_hidden_size adapter_rank"),
    (8, "index_head_dim index_topk sliding_window sliding_window_size window_size attention_window_size mamba_chunk_size"),
    (8, "chunk_size attention_chunk_size loop_gate_rank d_rel rel_extent local_attention hc_lowrank index_block_size"),
    (8, "num_centroids block_multiple_of ffn_round_up_to_multiple_of shape_embed_dim pronunciation_embed_dim block_size"),
    (8, "mamba_d_head mamba_headdim mamba_head_dim intra_bottleneck_size true_hidden_size"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_kv_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads linear_num_value_heads"),
    (4, "swa_num_attention_heads mamba_num_heads n_mamba_heads mamba_n_heads index_n_heads num_experts num_local_experts"),
    (4, "n_routed_experts moe_num_experts head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels d_head"),
    (4, "attention_head_size attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim"),
    (4, "rotary_dim dim_head global_head_dim query_pre_attn_scalar zero_expert_num"),
    (3, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_encoder_layers"),
    (3, "num_decoder_layers max_window_layers sep_token_id cls_token_id mask_token_id image_token_id video_token_id"),
    (2, "num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk"),
    (2, "n_shared_experts num_hidden_groups top_k_experts index_topk_blocks heads_per_ngram eos_token_id"),
    (1, "n_group topk_group num_expert_group n_groups first_k_dense_replace mamba_n_groups mamba_ngroups num_mem_blocks"),
    (1, "num_nextn_predict_layers bos_token_id decoder_start_token_id"),
    (0, "pad_token_id num_kv_shared_layers"),
)
_BY_NAME = {name: value for value, names in _SMALL for name in names.split()}

_MULTI_HEAD = {"num_key_value_heads": 4}  # latent attention repeats no key
_OWN_HEAD_WIDTH = {"head_dim": 4}
_FOUR_BLOCKS = {"num_hidden_layers": 4}  # every fourth block attends
_MAMBA_BESIDE = {"mamba_d_head": 8, "mamba_n_heads": 4}
_TWICE_AS_WIDE = {"attention_hidden_size": 32, "attention_head_dim": 8}  # attention reads stream and embedding side by side
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _MULTI_HEAD
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla", "youtu", "dots3_note_text", "esmc"), _MULTI_HEAD),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "bailing_hybrid"), _FOUR_BLOCKS),
    **dict.fromkeys(("kimi_linear", "lfm2_moe"), _FOUR_BLOCKS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _OWN_HEAD_WIDTH),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _MAMBA_BESIDE),
    "jamba": {"num_hidden_layers": 8},
    "mamba2": {"head_dim": 8, "num_heads": 4},
    "gemma3n_text": {"intermediate_size": 24, "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "deepseek_v2": _MULTI_HEAD | {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 4},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"], **_TWICE_AS_WIDE},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "pad_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "reformer": {
        "axial_pos_embds_dim": (8, 8),
        "axial_pos_shape": (4, 3),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], **_TWICE_AS_WIDE},
    "neomme": {"head_dim": 16},
    "mobilebert": {"embedding_size": 8},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "rwkv": {"attention_hidden_size": 16},
}
"""What a family needs besides, so that its sizes fit together."""

NOT_TINY = {
    "blt": "its embedding of hashes has three thousand million entries whatever the sizes",
    "cohere_compass_text": "its default configuration lacks rotary settings that the model asks for",
    "dbrx": "its default configuration lacks a rotary base that the model asks for",
    "dots3_note_text": "the sizes of its latent attention are constants",
    "gemma4_assistant": "its default configuration is refused by its own check",
    "git": "it brings a whole image encoder",
    "perceiver": "its latent array is a constant of the family",
    "phi4_multimodal": "it brings whole image and audio encoders",
    "qwen4_exp_text": "the sizes of its n-gram tables have no default",
}
"""Families that no small configuration builds, with the reason."""


Kind: TypeAlias = "tuple[type[PretrainedConfig], type[nn.Module], dict[str, Any]]"


def _kinds() -> dict[str, Kind]:
    """``family`` or ``family-masked`` -> configuration, model and settings; an encoder's causal class is built as a decoder."""
    masked = {config.model_type for config in MODEL_FOR_MASKED_LM_MAPPING}
    kinds: dict[str, Kind] = {}
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        kinds[config.model_type] = config, model, {"is_decoder": True} if config.model_type in masked else {}
    for config, model in MODEL_FOR_MASKED_LM_MAPPING.items():
        kinds[f"{config.model_type}-masked"] = config, model, {}
    return kinds


KINDS = _kinds()


def tiny_config(kind: str) -> PretrainedConfig:
    """The family's default configuration with every size that has a known name made small."""
    config_class, model_class, settings = KINDS[kind]
    values = config_class().to_dict()
    sizes = {name: small for name, small in _BY_NAME.items() if _shrinks(name, values.get(name), small)}
    config = config_class(**sizes | settings | _OWN.get(config_class.model_type, {}))
    config.architectures = [model_class.__name__]
    return config


def _shrinks(name: str, value: object, small: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (value >= small or "token" in name)


def tiny_of_kind(kind: str, dtype: torch.dtype) -> nn.Module:
    """A random model in evaluation mode, the same at every call; matrices ten times as wide as the family starts them."""
    config, model_class = tiny_config(kind), KINDS[kind][1]
    with torch.random.fork_rng():
        torch.manual_seed(20260130)
        model = model_class._from_config(copy.deepcopy(config), experts_implementation="eager").to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    parameter.mul_(10.0)
    return model


def save_tiny(kind: str, folder: Path) -> None:
    """The float32 model as a checkpoint, with a tokenizer of one token per letter."""
    tiny_of_kind(kind, torch.float32).save_pretrained(folder)
    symbols = ("[UNK]", "<s>", "</s>", "[MASK]", *string.ascii_letters)
    backend = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, [], unk_token="[UNK]"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", mask_token="[MASK]").save_pretrained(folder)
