"""Decoders whose attention and FFN read the same stream and are added to it together, always or by their configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probes.errors import UnsupportedModelError
from probes.families.dense import LLAMA
from probes.families.description import Family, Rule, attention_part, enters, ffn_part

__all__ = ["PARALLEL"]

# One norm before both.
_COHERE = Family(
    parts=(
        attention_part(("input_layernorm", "in"), branch="self_attn"),
        ffn_part(("input_layernorm", "in"), branch="mlp"),
    ),
    parallel=True,
)
# The dropout after both branches is one module: branches are read before it.
_PHI = replace(_COHERE, final_norm="model.final_layernorm")
_GPTJ = Family(
    parts=(
        attention_part(("ln_1", "in"), branch="attn", owner="attn"),
        ffn_part(("ln_1", "in"), branch="mlp"),
    ),
    parallel=True,
    backbone="transformer",
    blocks="transformer.h",
    embedding=("transformer.wte",),
    final_norm="transformer.ln_f",
)
_GPT_NEOX = Family(
    parts=(
        attention_part(
            ("input_layernorm", "in"),
            branch="post_attention_dropout",
            owner="attention",
            after=enters("post_attention_layernorm"),
        ),
        ffn_part(("post_attention_layernorm", "in"), branch="post_mlp_dropout"),
    ),
    backbone="gpt_neox",
    blocks="gpt_neox.layers",
    embedding=("gpt_neox.embed_in",),
    final_norm="gpt_neox.final_layer_norm",
)


def _gpt_neox(model: Any) -> Family:
    if not model.config.use_parallel_residual:
        return _GPT_NEOX
    attention, ffn = _GPT_NEOX.parts
    return replace(_GPT_NEOX, parts=(replace(attention, after=None), ffn), parallel=True)


def _stablelm(model: Any) -> Family:
    return _COHERE if model.config.use_parallel_residual else LLAMA


def _cohere(model: Any) -> Family:
    return replace(_COHERE, logit_scale=float(getattr(model, "logit_scale", 1.0)))


def _falcon(model: Any) -> Family:
    """Falcon 7B (parallel, one norm), 40B (parallel, two), and RW (sequential)."""
    config = model.config
    if config.new_decoder_architecture and not config.parallel_attn:
        raise UnsupportedModelError("a falcon with new_decoder_architecture and without parallel_attn cannot be run; set one")
    two = config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2
    before_attention = "ln_attn" if two else "input_layernorm"
    before_ffn = "ln_mlp" if two else "input_layernorm" if config.parallel_attn else "post_attention_layernorm"
    return replace(
        _GPTJ,
        parts=(
            attention_part(
                (before_attention, "in"),
                branch="self_attention",
                owner="self_attention",
                after=None if config.parallel_attn else enters(before_ffn),
            ),
            ffn_part((before_ffn, "in"), branch="mlp"),
        ),
        parallel=config.parallel_attn,
        embedding=("transformer.word_embeddings",),
    )


PARALLEL: dict[str, Rule] = {
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "cohere": _cohere,
    "cohere2": _cohere,
    "phi": _PHI,
    "stablelm": _stablelm,
}
