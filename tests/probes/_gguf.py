"""GGUF files as llama.cpp's converter writes them, from small models of ``transformers``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from torch import nn

from tests.probes._tiny import VOCAB

__all__ = ["add_vocabulary", "gguf_model", "write_gguf"]


def permuted(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a query or key matrix in llama.cpp's order: halves of each head interleaved."""
    return weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCK_NAMES = {
    "llama": LLAMA_NAMES | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "gemma2": LLAMA_NAMES
    | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
TOP_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def gguf_tensors(model: nn.Module, arch: str) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().numpy()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if match is None:
            tensors[TOP_NAMES.get(name, "output.weight")] = value + 1 if arch == "gemma2" and "norm" in name else value
            continue
        if arch == "llama" and match[2].endswith(("q_proj", "k_proj")):
            value = permuted(value, config.num_attention_heads if "q_proj" in match[2] else config.num_key_value_heads)
        if arch == "gemma2" and "norm" in match[2]:
            value = value + 1
        tensors[f"blk.{match[1]}.{BLOCK_NAMES[arch][match[2]]}.weight"] = value
    return tensors


def write_gguf(
    path: Path,
    model: nn.Module,
    arch: str,
    *,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    quantise: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A file as llama.cpp's converter writes it."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(32)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "gemma2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    else:
        writer.add_rope_dimension_count(config.head_dim)
    add_vocabulary(writer)
    extra(writer)
    tensors = gguf_tensors(model, arch)
    change(tensors)
    for name, value in tensors.items():
        if quantise is None or value.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(value))
        else:
            writer.add_tensor(name, gguf.quantize(value, quantise), raw_dtype=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Single letters, as a byte-level vocabulary writes them, and one merge."""
    letters = [*(chr(code) for code in range(33, 31 + VOCAB)), "<|endoftext|>", "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(VOCAB - 2)
    writer.add_bos_token_id(VOCAB - 2)


def gguf_model(arch: str, **changes: object) -> nn.Module:
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    }[arch]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "tie_word_embeddings": arch == "gemma2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    if arch == "gemma2":
        settings |= {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
    model = model_class(config_class(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(5.0)
    return model
