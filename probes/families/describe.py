"""From a family's description to the layout of one loaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from probes.errors import UnsupportedModelError
from probes.families.dense import DENSE
from probes.families.description import Family, Part, enters, leaves
from probes.families.encoders import ENCODERS
from probes.families.experts import EXPERTS
from probes.families.parallel import PARALLEL
from probes.layout import Boundary, Head, NormSite, ResidualLayout, SublayerLayout, Tap
from probes.preserve import plain_name
from probes.taps import stream_of

__all__ = ["OWN_FAMILY", "SUPPORTED_FAMILIES", "describe_model", "effective_gain", "owned_names"]

OWN_FAMILY = "keel_dynamics"

_FAMILIES = DENSE | PARALLEL | EXPERTS | ENCODERS

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
        rule = _FAMILIES[family]
        layout = _layout(model, family, rule if isinstance(rule, Family) else rule(model))
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


def _layout(model: nn.Module, name: str, family: Family) -> ResidualLayout:
    _require(model, name, family)
    blocks = tuple(f"{family.blocks}.{i}" for i in range(len(cast("nn.ModuleList", model.get_submodule(family.blocks)))))
    final = NormSite(module=family.final_norm, role="final", unit_offset=family.unit_offset) if family.final_norm else None
    if final is not None and not _has(model, final.module):
        final = None
    boundaries = [Boundary(name="embedding", block=-1, tap=enters(blocks[0]))]
    sublayers: list[SublayerLayout] = []
    for index, block in enumerate(blocks):
        _add_block(model, family, index, block, boundaries, sublayers)
    if final is not None:
        boundaries.append(Boundary(name="final norm", block=len(blocks) - 1, tap=leaves(final.module)))
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
        owned = {name for sublayer in sublayers if sublayer.block == index for name in sublayer.modules}
        sublayers.append(_sublayer(model, family, index, block, part, position, owned))
        if not family.parallel:
            tap = leaves(block) if part.after is None else Tap(f"{block}.{part.after.module}", part.after.side)
            boundaries.append(Boundary(name=f"block {index} {part.kind.value}", block=index, tap=tap))
    if family.parallel:
        boundaries.append(Boundary(name=f"block {index}", block=index, tap=leaves(block)))


def _sublayer(
    model: nn.Module, family: Family, index: int, block: str, part: Part, position: int, owned: set[str]
) -> SublayerLayout:
    modules = tuple(f"{block}.{module}" for module in part.modules)
    experts = f"{block}.{part.experts}" if part.experts and _has(model, f"{block}.{part.experts}") else None
    return SublayerLayout(
        block=index,
        kind=part.kind,
        boundary_in=position,
        boundary_out=position + 1,
        branch=leaves(f"{block}.{part.branch}"),
        modules=tuple(module for module in modules if module not in owned),
        norms=tuple(NormSite(module=f"{block}.{n}", role=role, unit_offset=family.unit_offset) for n, role in part.norms),
        branch_scale=float(getattr(model.get_submodule(block), family.branch_scale)) if family.branch_scale else 1.0,
        experts=experts,
        expert_parameters=_expert_parameters(model, experts),
        combine=_post_norm(model.get_submodule(f"{block}.{part.norm_out}")) if part.norm_out else None,
    )


def _expert_parameters(model: nn.Module, experts: str | None) -> tuple[str, ...]:
    if experts is None:
        return ()
    return tuple(f"{experts}.{name}" for name, _ in model.get_submodule(experts).named_parameters(recurse=False))


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
        plain = plain if family.logit_scale == 1 else plain * family.logit_scale
        plain = plain if family.logit_divisor == 1 else plain / family.logit_divisor
        return plain if softcap is None else torch.tanh(plain / softcap) * softcap

    return Head(
        backbone=run,
        logits=logits,
        linear=projection if family.linear_head else None,
        scale=family.logit_scale / family.logit_divisor,
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
    blocks = cast("nn.ModuleList", model.get_submodule(family.blocks))
    if not len(blocks):
        raise UnsupportedModelError(f"{type(model).__name__} of family '{name}' has no blocks")
    inside = {needed for part in family.parts for needed in (*part.modules, part.branch)}
    for index, block in enumerate(blocks):
        missing = sorted(needed for needed in inside if not _has(block, needed))
        if missing:
            raise UnsupportedModelError(
                f"block {index} of this {name} has no module '{missing[0]}': its configuration asks for another block than "
                "the ones known here"
            )


def _check_ownership(model: nn.Module, layout: ResidualLayout) -> None:
    """Refuse a model with a parameter that the layout does not know, rather than leave it out of every sum."""
    owners = tuple(f"{name}." for _, name in owned_names(layout))
    for name in map(plain_name, dict(model.named_parameters())):
        if not name.startswith(owners):
            raise UnsupportedModelError(
                f"parameter '{name}' of family '{layout.family}' belongs to no known sub-layer "
                "(an adapter, or cross-attention?)"
            )
