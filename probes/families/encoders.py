"""Encoders with a masked-LM head, Post-LN: the norm over the sum stands on the shortcut."""

from __future__ import annotations

from typing import Any

from probes.errors import UnsupportedModelError
from probes.families.description import Family, Rule, attention_part, ffn_part, leaves
from probes.layout import Objective

__all__ = ["ENCODERS"]


def _bert(backbone: str = "bert", head: str = "cls") -> Rule:
    family = Family(
        parts=(
            attention_part(
                ("attention.output.LayerNorm", "out"),
                branch="attention.output.dropout",
                owner="attention",
                after=leaves("attention.output.LayerNorm"),
                norm_out="attention.output.LayerNorm",
            ),
            ffn_part(
                ("output.LayerNorm", "out"),
                branch="output.dropout",
                owners=("intermediate", "output"),
                norm_out="output.LayerNorm",
            ),
        ),
        backbone=backbone,
        blocks=f"{backbone}.encoder.layer",
        embedding=(f"{backbone}.embeddings",),
        final_norm=None,
        head=(head,),
        linear_head=False,
        objective=Objective.MASKED,
    )

    def rule(model: Any) -> Family:
        config = model.config
        if not type(model).__name__.endswith("ForMaskedLM"):
            raise UnsupportedModelError(
                f"{type(model).__name__} of family '{config.model_type}' is no masked language model; a model with its masked "
                "language-model head is needed"
            )
        if getattr(config, "is_decoder", False):
            raise UnsupportedModelError(
                f"a {config.model_type} configured as a decoder (is_decoder) is not supported; use the masked-LM encoder"
            )
        if getattr(config, "chunk_size_feed_forward", 0):
            raise UnsupportedModelError(
                f"{config.model_type} with chunk_size_feed_forward runs its FFN in pieces; set it to 0 in the config"
            )
        return family

    return rule


ENCODERS: dict[str, Rule] = {
    "bert": _bert(),
    "roberta": _bert("roberta", "lm_head"),
    "xlm-roberta": _bert("roberta", "lm_head"),
    "camembert": _bert("roberta", "lm_head"),
    "data2vec-text": _bert("data2vec_text", "lm_head"),
    "ernie": _bert("ernie"),
}
