"""Decoders whose sub-layers follow one another, each with an FFN of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probes.families.description import Family, Rule, attention_part, enters, ffn_part, leaves

__all__ = ["DENSE", "LLAMA", "OLMO2", "granite"]

# Pre-LN; the stream between the sub-layers is what the second norm reads.
LLAMA = Family(
    parts=(
        attention_part(("input_layernorm", "in"), branch="self_attn", after=enters("post_attention_layernorm")),
        ffn_part(("post_attention_layernorm", "in"), branch="mlp"),
    )
)
# Norms before and after each branch.
_GEMMA2 = Family(
    parts=(
        attention_part(
            ("input_layernorm", "in"),
            ("post_attention_layernorm", "branch"),
            branch="post_attention_layernorm",
            after=enters("pre_feedforward_layernorm"),
        ),
        ffn_part(
            ("pre_feedforward_layernorm", "in"),
            ("post_feedforward_layernorm", "branch"),
            branch="post_feedforward_layernorm",
        ),
    ),
    unit_offset=True,
)
# Norms after the branches only; the MLP reads the stream itself.
OLMO2 = Family(
    parts=(
        attention_part(("post_attention_layernorm", "branch"), branch="post_attention_layernorm", after=enters("mlp")),
        ffn_part(("post_feedforward_layernorm", "branch"), branch="post_feedforward_layernorm"),
    )
)
# As Gemma 2 under other names, with plain gains.
_GLM4 = Family(
    parts=(
        attention_part(
            ("input_layernorm", "in"),
            ("post_self_attn_layernorm", "branch"),
            branch="post_self_attn_layernorm",
            after=enters("post_attention_layernorm"),
        ),
        ffn_part(("post_attention_layernorm", "in"), ("post_mlp_layernorm", "branch"), branch="post_mlp_layernorm"),
    )
)
# As Llama, with a dropout between branch and sum.
_PHI3 = Family(
    parts=(
        attention_part(("input_layernorm", "in"), branch="resid_attn_dropout", after=enters("post_attention_layernorm")),
        ffn_part(("post_attention_layernorm", "in"), branch="resid_mlp_dropout"),
    )
)
_GPT2 = Family(
    parts=(
        attention_part(("ln_1", "in"), branch="attn", owner="attn", after=enters("ln_2")),
        ffn_part(("ln_2", "in"), branch="mlp"),
    ),
    backbone="transformer",
    blocks="transformer.h",
    embedding=("transformer.wte", "transformer.wpe"),
    final_norm="transformer.ln_f",
)
_OPT = Family(
    parts=(
        attention_part(("self_attn_layer_norm", "in"), branch="self_attn", after=enters("final_layer_norm")),
        ffn_part(("final_layer_norm", "in"), branch="fc2", owners=("fc1", "fc2")),
    ),
    backbone="model.decoder",
    blocks="model.decoder.layers",
    embedding=("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
    final_norm="model.decoder.final_layer_norm",
    head=("lm_head", "model.decoder.project_out"),
)
# Post-LN: the norm stands on the shortcut, after the sum.
_OPT_POST_NORM = replace(
    _OPT,
    parts=(
        attention_part(
            ("self_attn_layer_norm", "out"),
            branch="self_attn",
            after=leaves("self_attn_layer_norm"),
            norm_out="self_attn_layer_norm",
        ),
        ffn_part(("final_layer_norm", "out"), branch="fc2", owners=("fc1", "fc2"), norm_out="final_layer_norm"),
    ),
)


def _opt(model: Any) -> Family:
    return _OPT if model.config.do_layer_norm_before else _OPT_POST_NORM


def granite(family: Family) -> Rule:
    """A family whose branches and logits have constant factors of the configuration."""
    return lambda model: replace(family, branch_scale="residual_multiplier", logit_divisor=float(model.config.logits_scaling))


DENSE: dict[str, Rule] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": replace(LLAMA, unit_offset=True),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _PHI3,
    "olmo": LLAMA,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "smollm3": LLAMA,
    "exaone4": OLMO2,
    "starcoder2": LLAMA,
    "granite": granite(LLAMA),
    "nemotron": replace(LLAMA, unit_offset=True),
    "arcee": LLAMA,
    "cwm": LLAMA,
    "ernie4_5": LLAMA,
    "glm": LLAMA,
    "glm4": _GLM4,
    "helium": LLAMA,
    "hunyuan_v1_dense": LLAMA,
    "ministral": LLAMA,
    "ministral3": LLAMA,
    "persimmon": replace(LLAMA, final_norm="model.final_layernorm"),
    "seed_oss": LLAMA,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "opt": _opt,
}
