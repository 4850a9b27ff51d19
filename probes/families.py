"""Model families: for each, a few lines that say where its residual stream runs.

A description is data, with names relative to the model or to a block; :func:`describe_model` turns it into the
:class:`~probes.layout.ResidualLayout` of one loaded model. A family that is not in the table is described at block level
by ``probes/generic_layout.py`` where that can be verified, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from probes.errors import UnsupportedModelError
from probes.layout import BlockKind, Boundary, Head, NormSite, Objective, ResidualLayout, Side, SublayerLayout, Tap
from probes.preserve import plain_name
from probes.taps import stream_of

__all__ = ["SUPPORTED_FAMILIES", "Family", "Part", "describe_model", "effective_gain", "owned_names"]

OWN_FAMILY = "keel_dynamics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sub-layer of a family. Names are relative to the block.

    Attributes:
        kind: attention or FFN.
        modules: owners of its parameters, norms included.
        branch: the module whose output is the tensor added to the shortcut.
        norms: pairs of module and role.
        after: where the stream after the sum is visible; None for the block's output.
        norm_out: the LayerNorm over the sum (Post-LN), or None.
        experts: parameters whose first dimension is the expert.
    """

    kind: BlockKind
    modules: tuple[str, ...]
    branch: str
    norms: tuple[tuple[str, str], ...]
    after: Tap | None = None
    norm_out: str | None = None
    experts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where the stream of a model family runs. Names are relative to the model; a module that a model lacks is skipped.

    Attributes:
        parts: the sub-layers of a block, in forward order.
        parallel: whether all parts of a block read the block's input and are added to it together.
        backbone: the module from ids to the last hidden state.
        blocks: the list of blocks.
        embedding: owners of the embedding's parameters.
        final_norm: the norm after the last block, or None.
        head: owners of the head's parameters; the first maps hidden states to logits.
        linear_head: whether that first module is one linear map.
        unit_offset: norms store w and multiply by 1 + w.
        objective: the loss the family is trained on.
    """

    parts: tuple[Part, ...]
    parallel: bool = False
    backbone: str = "model"
    blocks: str = "model.layers"
    embedding: tuple[str, ...] = ("model.embed_tokens",)
    final_norm: str | None = "model.norm"
    head: tuple[str, ...] = ("lm_head",)
    linear_head: bool = True
    unit_offset: bool = False
    objective: Objective = Objective.CAUSAL


_Rule: TypeAlias = "Family | Callable[[object], Family]"


def _attention(
    *norms: tuple[str, str], branch: str, after: Tap | None, owner: str = "self_attn", norm_out: str | None = None
) -> Part:
    modules = (owner, *(name for name, _ in norms if not name.startswith(f"{owner}.")))
    return Part(kind=BlockKind.ATTENTION, modules=modules, branch=branch, norms=norms, after=after, norm_out=norm_out)


def _ffn(*norms: tuple[str, str], branch: str, owners: tuple[str, ...] = ("mlp",), norm_out: str | None = None) -> Part:
    inside = tuple(f"{owner}." for owner in owners)
    modules = (*owners, *(name for name, _ in norms if not name.startswith(inside)))
    return Part(kind=BlockKind.FFN, modules=modules, branch=branch, norms=norms, norm_out=norm_out)


def _enters(module: str) -> Tap:
    return Tap(module, Side.INPUT)


def _leaves(module: str) -> Tap:
    return Tap(module, Side.OUTPUT)


# Pre-LN with RMSNorm; the stream between the sub-layers is what the second norm reads.
_LLAMA = Family(
    parts=(
        _attention(("input_layernorm", "in"), branch="self_attn", after=_enters("post_attention_layernorm")),
        _ffn(("post_attention_layernorm", "in"), branch="mlp"),
    )
)
# Norms before and after each branch, all storing w of a gain 1 + w.
_GEMMA2 = Family(
    parts=(
        _attention(
            ("input_layernorm", "in"),
            ("post_attention_layernorm", "branch"),
            branch="post_attention_layernorm",
            after=_enters("pre_feedforward_layernorm"),
        ),
        _ffn(
            ("pre_feedforward_layernorm", "in"),
            ("post_feedforward_layernorm", "branch"),
            branch="post_feedforward_layernorm",
        ),
    ),
    unit_offset=True,
)
# Norms after the branches only; the MLP reads the stream itself.
_OLMO2 = Family(
    parts=(
        _attention(("post_attention_layernorm", "branch"), branch="post_attention_layernorm", after=_enters("mlp")),
        _ffn(("post_feedforward_layernorm", "branch"), branch="post_feedforward_layernorm"),
    )
)
# As Llama, with a dropout between branch and sum.
_PHI3 = Family(
    parts=(
        _attention(("input_layernorm", "in"), branch="resid_attn_dropout", after=_enters("post_attention_layernorm")),
        _ffn(("post_attention_layernorm", "in"), branch="resid_mlp_dropout"),
    )
)
_MIXTRAL = replace(
    _LLAMA, parts=(_LLAMA.parts[0], replace(_LLAMA.parts[1], experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")))
)
_GPT2 = Family(
    parts=(
        _attention(("ln_1", "in"), branch="attn", owner="attn", after=_enters("ln_2")),
        _ffn(("ln_2", "in"), branch="mlp"),
    ),
    backbone="transformer",
    blocks="transformer.h",
    embedding=("transformer.wte", "transformer.wpe"),
    final_norm="transformer.ln_f",
)
_GPT_NEOX = Family(
    parts=(
        _attention(
            ("input_layernorm", "in"),
            branch="post_attention_dropout",
            owner="attention",
            after=_enters("post_attention_layernorm"),
        ),
        _ffn(("post_attention_layernorm", "in"), branch="post_mlp_dropout"),
    ),
    backbone="gpt_neox",
    blocks="gpt_neox.layers",
    embedding=("gpt_neox.embed_in",),
    final_norm="gpt_neox.final_layer_norm",
)
_OPT = Family(
    parts=(
        _attention(("self_attn_layer_norm", "in"), branch="self_attn", after=_enters("final_layer_norm")),
        _ffn(("final_layer_norm", "in"), branch="fc2", owners=("fc1", "fc2")),
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
        _attention(
            ("self_attn_layer_norm", "out"),
            branch="self_attn",
            after=_leaves("self_attn_layer_norm"),
            norm_out="self_attn_layer_norm",
        ),
        _ffn(("final_layer_norm", "out"), branch="fc2", owners=("fc1", "fc2"), norm_out="final_layer_norm"),
    ),
)
_BERT = Family(
    parts=(
        _attention(
            ("attention.output.LayerNorm", "out"),
            branch="attention.output.dropout",
            owner="attention",
            after=_leaves("attention.output.LayerNorm"),
            norm_out="attention.output.LayerNorm",
        ),
        _ffn(
            ("output.LayerNorm", "out"),
            branch="output.dropout",
            owners=("intermediate", "output"),
            norm_out="output.LayerNorm",
        ),
    ),
    backbone="bert",
    blocks="bert.encoder.layer",
    embedding=("bert.embeddings",),
    final_norm=None,
    head=("cls",),
    linear_head=False,
    objective=Objective.MASKED,
)


def _gpt_neox(config: object) -> Family:
    if not getattr(config, "use_parallel_residual", True):
        return _GPT_NEOX
    attention, ffn = _GPT_NEOX.parts
    return replace(_GPT_NEOX, parts=(replace(attention, after=None), ffn), parallel=True)


def _opt(config: object) -> Family:
    return _OPT if getattr(config, "do_layer_norm_before", True) else _OPT_POST_NORM


def _bert(config: object) -> Family:
    if getattr(config, "is_decoder", False):
        raise UnsupportedModelError("a bert configured as a decoder (is_decoder) is not supported; use the masked-LM encoder")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise UnsupportedModelError("bert with chunk_size_feed_forward runs its FFN in pieces; set it to 0 in the config")
    return _BERT


_FAMILIES: dict[str, _Rule] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": replace(_LLAMA, unit_offset=True),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "gpt2": _GPT2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "mixtral": _MIXTRAL,
    "bert": _bert,
}

SUPPORTED_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Model types known sub-layer by sub-layer."""


def describe_model(model: nn.Module) -> ResidualLayout:
    """The residual stream of a loaded model.

    Args:
        model: a ``transformers`` model with its language-model head, or a model of the toolkit.

    Returns:
        Its layout, sub-layer by sub-layer for a family of the table, block by block for another that can be verified.

    Raises:
        UnsupportedModelError: if the stream cannot be found; the message names the family.
    """
    config = getattr(model, "config", None)
    family = str(getattr(config, "model_type", type(model).__name__))
    if family == OWN_FAMILY:
        from probes.model import residual_layout

        layout: ResidualLayout = residual_layout(model)
        return layout
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"family '{family}' is an encoder-decoder: it has two residual streams and no single depth to plot; "
            "decoder-only and encoder-only models are supported"
        )
    if family in _FAMILIES:
        layout = _layout(model, family, _resolve(_FAMILIES[family], config))
    else:
        from probes.generic_layout import generic_layout

        layout = generic_layout(model, family, SUPPORTED_FAMILIES)
    _check_ownership(model, layout)
    return layout


def effective_gain(model: nn.Module, site: NormSite) -> Tensor:
    """The factor a normalisation applies to each coordinate, 1 + w where the checkpoint stores w.

    Args:
        model: the model the site belongs to.
        site: one of its normalisations.

    Returns:
        Detached gain, dimensionless, shape (D,); ones for a norm without a weight.
    """
    norm = model.get_submodule(site.module)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return torch.ones(cast("tuple[int, ...]", getattr(norm, "normalized_shape", (1,))))
    return 1 + weight.detach() if site.unit_offset else weight.detach()


def owned_names(layout: ResidualLayout) -> tuple[tuple[str, str], ...]:
    """Pairs of owner (``embedding``, ``sublayer 3``, ``final norm``, ``head``) and module, over a whole layout."""
    pairs = [("embedding", name) for name in layout.embedding_modules]
    for index, sublayer in enumerate(layout.sublayers):
        pairs += [(f"sublayer {index}", name) for name in sublayer.modules]
    if layout.final_norm is not None:
        pairs.append(("final norm", layout.final_norm.module))
    return (*pairs, *(("head", name) for name in layout.head.modules))


def _resolve(rule: _Rule, config: object) -> Family:
    return rule if isinstance(rule, Family) else rule(config)


def _layout(model: nn.Module, name: str, family: Family) -> ResidualLayout:
    _require(model, name, family)
    blocks = tuple(f"{family.blocks}.{i}" for i in range(len(cast("nn.ModuleList", model.get_submodule(family.blocks)))))
    final = NormSite(module=family.final_norm, role="final", unit_offset=family.unit_offset) if family.final_norm else None
    if final is not None and not _has(model, final.module):
        final = None
    boundaries = [Boundary(name="embedding", block=-1, tap=_enters(blocks[0]))]
    sublayers: list[SublayerLayout] = []
    for index, block in enumerate(blocks):
        _add_block(model, family, index, block, boundaries, sublayers)
    if final is not None:
        boundaries.append(Boundary(name="final norm", block=len(blocks) - 1, tap=_leaves(final.module)))
    return ResidualLayout(
        family=name,
        objective=family.objective,
        n_blocks=len(blocks),
        boundaries=tuple(boundaries),
        sublayers=tuple(sublayers),
        embedding_modules=tuple(module for module in family.embedding if _has(model, module)),
        final_norm=final,
        head=_head(model, family),
        blocks=blocks,
    )


def _add_block(
    model: nn.Module, family: Family, index: int, block: str, boundaries: list[Boundary], sublayers: list[SublayerLayout]
) -> None:
    start = len(boundaries) - 1
    for part in family.parts:
        position = start if family.parallel else len(boundaries) - 1
        sublayers.append(_sublayer(model, family, index, block, part, position))
        if not family.parallel:
            tap = _leaves(block) if part.after is None else Tap(f"{block}.{part.after.module}", part.after.side)
            boundaries.append(Boundary(name=f"block {index} {part.kind.value}", block=index, tap=tap))
    if family.parallel:
        boundaries.append(Boundary(name=f"block {index}", block=index, tap=_leaves(block)))


def _sublayer(model: nn.Module, family: Family, index: int, block: str, part: Part, position: int) -> SublayerLayout:
    return SublayerLayout(
        block=index,
        kind=part.kind,
        boundary_in=position,
        boundary_out=position + 1,
        branch=_leaves(f"{block}.{part.branch}"),
        modules=tuple(f"{block}.{module}" for module in part.modules),
        norms=tuple(NormSite(module=f"{block}.{n}", role=role, unit_offset=family.unit_offset) for n, role in part.norms),
        expert_parameters=tuple(f"{block}.{parameter}" for parameter in part.experts),
        combine=_post_norm(model.get_submodule(f"{block}.{part.norm_out}")) if part.norm_out else None,
    )


def _post_norm(norm: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """LayerNorm(stream + branch), differentiable in the stream alone; the module is not called, so no hook of it runs."""
    layer_norm = cast("nn.LayerNorm", norm)

    def combine(stream: Tensor, branch: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.detach() for p in (layer_norm.weight, layer_norm.bias))
        total = stream + branch.detach().reshape(stream.shape)
        return nn.functional.layer_norm(total, layer_norm.normalized_shape, weight, bias, layer_norm.eps)

    return combine


def _head(model: nn.Module, family: Family) -> Head:
    backbone, projection = model.get_submodule(family.backbone), model.get_submodule(family.head[0])
    softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def run(input_ids: Tensor) -> Tensor:
        return stream_of(backbone(input_ids=input_ids, use_cache=False))

    def logits(hidden: Tensor) -> Tensor:
        plain: Tensor = projection(hidden)
        return plain if softcap is None else torch.tanh(plain / softcap) * softcap

    return Head(
        backbone=run,
        logits=logits,
        linear=projection if family.linear_head else None,
        softcap=softcap,
        modules=tuple(module for module in family.head if _has(model, module)),
        in_backbone=tuple(module for module in family.head[1:] if _has(model, module)),
    )


def _has(model: nn.Module, name: str) -> bool:
    """Whether the module exists; an attribute set to None does not."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _require(model: nn.Module, name: str, family: Family) -> None:
    for needed in (family.backbone, family.blocks, family.head[0]):
        if not _has(model, needed):
            raise UnsupportedModelError(
                f"{type(model).__name__} of family '{name}' has no module '{needed}'; a model with its "
                f"{family.objective.value} language-model head is needed"
            )
    if not len(cast("nn.ModuleList", model.get_submodule(family.blocks))):
        raise UnsupportedModelError(f"{type(model).__name__} of family '{name}' has no blocks")


def _check_ownership(model: nn.Module, layout: ResidualLayout) -> None:
    """Refuse a model with a parameter that the layout does not know, rather than leave it out of every sum."""
    owners = tuple(f"{name}." for _, name in owned_names(layout))
    for name in map(plain_name, dict(model.named_parameters())):
        if not name.startswith(owners):
            raise UnsupportedModelError(
                f"parameter '{name}' of family '{layout.family}' belongs to no known sub-layer "
                "(an adapter, or cross-attention?)"
            )
