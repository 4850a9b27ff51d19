"""Tiny random models of every supported family, built from configurations alone: no download, a fixed seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

__all__ = ["FAMILIES", "N_BLOCKS", "SEED", "VOCAB", "tiny_ids", "tiny_model"]

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


def _build(name: str, *, config_name: str | None = None, **values: object) -> nn.Module:
    config = getattr(transformers, f"{config_name or name}Config")(**values)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=N_BLOCKS, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _mixtral() -> nn.Module:
    model = _build("Mixtral", **_LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2})
    model.set_experts_implementation("eager")  # the grouped product does not exist in float64
    return model


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=N_BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
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
    "mixtral": _mixtral,
    "bert": _bert,
}

FAMILIES: tuple[str, ...] = tuple(_BUILDERS)
"""Every family of the table, and the variants whose stream runs differently."""


def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A random model of three blocks and width 16 in evaluation mode, the same at every call.

    Matrices keep the family's own initialisation, ten times as wide, and every vector (gains, biases) is moved off its
    starting value, so that no part of the model is the identity or zero by chance.
    """
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    try:
        model = _BUILDERS[family]().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    parameter.mul_(10.0)
    finally:
        torch.set_rng_state(state)
    return model


def tiny_ids(batch: int = 2, tokens: int = 12) -> torch.Tensor:
    """Token ids of shape (batch, tokens), none of them special, the same at every call."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(4, VOCAB, (batch, tokens), generator=generator)
