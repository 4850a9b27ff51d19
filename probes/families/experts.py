"""Decoders with a mixture of experts, all experts of a block in one tensor each; some blocks may be dense."""

from __future__ import annotations

from dataclasses import replace

from probes.families.dense import LLAMA, OLMO2, granite
from probes.families.description import Family, Rule, ffn_part

__all__ = ["EXPERTS"]


def _experts(ffn: str = "mlp") -> Family:
    routed = ffn_part(("post_attention_layernorm", "in"), branch=ffn, owners=(ffn,), experts=f"{ffn}.experts")
    return replace(LLAMA, parts=(LLAMA.parts[0], routed))


EXPERTS: dict[str, Rule] = {
    "mixtral": _experts(),
    "qwen2_moe": _experts(),
    "qwen3_moe": _experts(),
    "olmoe": _experts(),
    "gpt_oss": _experts(),
    "deepseek_v2": _experts(),
    "deepseek_v3": _experts(),
    "dots1": _experts(),
    "ernie4_5_moe": _experts(),
    "flex_olmo": replace(OLMO2, parts=(OLMO2.parts[0], replace(OLMO2.parts[1], experts="mlp.experts"))),
    "glm4_moe": _experts(),
    "minimax_m2": _experts(),
    "phimoe": _experts(),
    "granitemoe": granite(_experts("block_sparse_moe")),
}
