r"""Where the residual stream of a model is visible, as data.

A decoder or encoder is a residual stream x_0 ... x_K with a branch added between two **boundaries**. A layout names, for
one loaded model, the module whose input or output *is* the stream at each boundary, the branch of each sub-layer, and
which modules own its parameters. The probes read layouts and know no model family; ``probes/families.py`` and
``probes/model.py`` write them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

__all__ = ["BlockKind", "Boundary", "Head", "NormSite", "Objective", "ResidualLayout", "Side", "SublayerLayout", "Tap"]


class Side(str, Enum):
    """Which end of a module a tensor is read at."""

    INPUT = "input"
    OUTPUT = "output"


class BlockKind(str, Enum):
    """What lies between two boundaries."""

    ATTENTION = "attention"
    FFN = "ffn"
    BLOCK = "block"
    """A whole block: the family is known at block level only."""


class Objective(str, Enum):
    """Which loss the model was trained on."""

    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class Tap:
    """A tensor: the first input or the first output of a module, by its dotted name.

    Shape (B, T, D), or the same numbers as (B*T, D) where a model flattens its tokens (OPT around its FFN).
    """

    module: str
    side: Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A place of the residual stream.

    Attributes:
        name: ``embedding``, ``block 3 attention`` (the stream after that sub-layer), ``final norm`` ...
        block: 0-based block that the stream leaves here, -1 for the embedding output.
        tap: where it is visible.
    """

    name: str
    block: int
    tap: Tap


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSite:
    """A normalisation with a learned gain.

    Attributes:
        module: dotted name.
        role: ``in``, ``branch``, ``out`` (on the shortcut) or ``final``.
        unit_offset: the checkpoint stores w and the effective gain is 1 + w.
    """

    module: str
    role: str
    unit_offset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerLayout:
    """One sub-layer: what is added to the stream between two boundaries.

    Attributes:
        block: 0-based block index.
        kind: attention, FFN, or a whole block where no more is known.
        boundary_in: index of the boundary that the branch reads.
        boundary_out: index of the boundary after the sum; two sub-layers share both in a parallel block.
        branch: where the tensor that is added to the shortcut is visible, before ``branch_scale``; None where it is not
            (block level). A model may add to that tensor in place afterwards: it is what it was when the module returned it.
        modules: dotted names of the modules that own the sub-layer's parameters, its norms included; a norm that feeds
            attention and FFN of a parallel block belongs to the attention.
        norms: its normalisations, a shared one too.
        branch_scale: constant factor on the branch in the sum, 1 for a plain residual.
        shortcut_scale: the largest factor on the stream in the sum (Keel's alpha), 1 for a plain residual.
        experts: dotted name of the module that is called with the tokens and, as integers, the experts chosen for each; None
            in a dense sub-layer.
        expert_parameters: dotted names of the parameters whose first dimension is the expert.
        combine: (stream, branch) -> stream after the sub-layer, differentiable in the stream with branch and gate held
            constant; None where the shortcut is the identity (x + branch_scale * branch), or not known.
        shortcut_known: whether ``combine`` says what the shortcut is; False where a block is read as a whole.
    """

    block: int
    kind: BlockKind
    boundary_in: int
    boundary_out: int
    branch: Tap | None
    modules: tuple[str, ...]
    norms: tuple[NormSite, ...] = ()
    branch_scale: float = 1.0
    shortcut_scale: float = 1.0
    experts: str | None = None
    expert_parameters: tuple[str, ...] = ()
    combine: Callable[[Tensor, Tensor], Tensor] | None = None
    shortcut_known: bool = True

    def added(self, branch: Tensor) -> Tensor:
        """What the sum adds: the branch times its factor, a tensor of its own that later changes in place do not reach.

        Args:
            branch: as its module returns it.
        """
        return branch * self.branch_scale if self.branch_scale != 1 else branch.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """From the last hidden state to logits.

    Attributes:
        backbone: input ids (B, T) -> hidden state (B, T, D) as the head reads it, after the final norm, with its graph,
            without cache.
        logits: hidden states (N, D) -> logits (N, V), exactly as the model computes them.
        linear: the module whose ``weight`` (V, D) and ``bias`` give the logits when they are one linear map (apart from
            ``scale`` and ``softcap``), else None.
        scale: constant factor on the linear map's output.
        softcap: c where the model computes c * tanh(scale * linear / c), else None.
        in_backbone: those of ``modules`` that the backbone runs itself, after the final norm, in forward order (OPT's last
            projection): ``logits`` does not run them again.
        modules: dotted names of the modules that own the head's parameters (a tied weight belongs to the embedding too).
    """

    backbone: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    linear: nn.Module | None
    modules: tuple[str, ...]
    scale: float = 1.0
    softcap: float | None = None
    in_backbone: tuple[str, ...] = ()

    def shaped_(self, linear_NV: Tensor) -> Tensor:
        """Logits from the linear map's output, in its memory."""
        if self.scale != 1:
            linear_NV = linear_NV.mul_(self.scale)
        return linear_NV if self.softcap is None else linear_NV.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualLayout:
    """The residual stream of one loaded model.

    Attributes:
        family: the model type, for example ``llama`` or ``keel_dynamics``.
        objective: causal or masked language modelling.
        n_blocks: number of Transformer blocks.
        boundaries: the stream's places in forward order; the first is the embedding output, the last the output of the
            final norm where there is one.
        sublayers: in forward order.
        embedding_modules: owners of the embedding's parameters (token, position, embedding norm).
        final_norm: the final norm, or None.
        head: how logits are computed.
        blocks: dotted names of the blocks, in order.
    """

    family: str
    objective: Objective
    n_blocks: int
    boundaries: tuple[Boundary, ...]
    sublayers: tuple[SublayerLayout, ...]
    embedding_modules: tuple[str, ...]
    final_norm: NormSite | None
    head: Head
    blocks: tuple[str, ...]
