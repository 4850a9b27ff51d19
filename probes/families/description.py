"""What a description of a model family says, and the few words in which the tables say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from probes.layout import BlockKind, Objective, Side, Tap

__all__ = ["Family", "Part", "Rule", "attention_part", "enters", "ffn_part", "leaves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sub-layer of a family. Names are relative to the block.

    Attributes:
        kind: attention or FFN.
        modules: owners of its parameters, norms included; a norm that two parts share is owned by the first.
        branch: the module whose output is the tensor added to the shortcut, or that tensor before the block's multiplier.
        norms: pairs of module and role.
        after: where the stream after the sum is visible; None for the block's output.
        norm_out: the LayerNorm over the sum (Post-LN), or None.
        experts: the module whose own parameters all have the expert as their first dimension; a block without it is dense.
    """

    kind: BlockKind
    modules: tuple[str, ...]
    branch: str
    norms: tuple[tuple[str, str], ...]
    after: Tap | None = None
    norm_out: str | None = None
    experts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where the stream of a model family runs. Names are relative to the model; a module that a model lacks is skipped.

    Attributes:
        parts: the sub-layers of a block, in forward order.
        parallel: whether all parts of a block read the block's input and are added to it together.
        branch_scale: the attribute of a block that multiplies its branches before the sum, or None.
        backbone: the module from ids to the last hidden state.
        blocks: the list of blocks.
        embedding: owners of the embedding's parameters.
        final_norm: the norm after the last block, or None.
        head: owners of the head's parameters; the first maps hidden states to logits.
        linear_head: whether that first module is one linear map.
        logit_scale: constant factor of the head's output.
        logit_divisor: constant divisor of the head's output.
        unit_offset: norms store w and multiply by 1 + w.
        objective: the loss the family is trained on.
    """

    parts: tuple[Part, ...]
    parallel: bool = False
    branch_scale: str | None = None
    backbone: str = "model"
    blocks: str = "model.layers"
    embedding: tuple[str, ...] = ("model.embed_tokens",)
    final_norm: str | None = "model.norm"
    head: tuple[str, ...] = ("lm_head",)
    linear_head: bool = True
    logit_scale: float = 1.0
    logit_divisor: float = 1.0
    unit_offset: bool = False
    objective: Objective = Objective.CAUSAL


Rule: TypeAlias = "Family | Callable[[Any], Family]"
"""A description, or what gives one for a model, where its configuration changes the way of the stream."""


def attention_part(
    *norms: tuple[str, str], branch: str, after: Tap | None = None, owner: str = "self_attn", norm_out: str | None = None
) -> Part:
    """An attention sub-layer whose parameters lie in one module and its norms."""
    modules = (owner, *(name for name, _ in norms if not name.startswith(f"{owner}.")))
    return Part(kind=BlockKind.ATTENTION, modules=modules, branch=branch, norms=norms, after=after, norm_out=norm_out)


def ffn_part(
    *norms: tuple[str, str],
    branch: str,
    owners: tuple[str, ...] = ("mlp",),
    norm_out: str | None = None,
    experts: str | None = None,
) -> Part:
    """An FFN, the last sub-layer of a block."""
    inside = tuple(f"{owner}." for owner in owners)
    modules = (*owners, *(name for name, _ in norms if not name.startswith(inside)))
    return Part(kind=BlockKind.FFN, modules=modules, branch=branch, norms=norms, norm_out=norm_out, experts=experts)


def enters(module: str) -> Tap:
    """What a module reads."""
    return Tap(module, Side.INPUT)


def leaves(module: str) -> Tap:
    """What a module returns."""
    return Tap(module, Side.OUTPUT)
