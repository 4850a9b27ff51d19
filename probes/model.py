"""A decoder-only Transformer of the paper's kind, in any residual scheme.

Shape suffixes: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel_theory.spec import NormKind, SublayerKind
from probes.blocks import Block, Linear, Norm, ResidualSublayer, Rotary, build_parts, rotary_table
from probes.config import ModelConfig
from probes.layout import BlockKind, Boundary, Head, NormSite, Objective, ResidualLayout, Side, SublayerLayout, Tap

__all__ = ["Embedding", "Transformer", "residual_layout"]


class Embedding(nn.Embedding):
    """Token ids (B, T) to the residual stream (B, T, D), in float32 or wider whatever the weight's dtype."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is: no draw from the global generator."""

    def forward(self, ids_BT: Tensor) -> Tensor:  # noqa: D102
        return functional.embedding(ids_BT, self.weight).to(torch.promote_types(self.weight.dtype, torch.float32))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head.

    Every matrix is drawn from N(0, init_std^2), times the scheme's init_gain, by a generator of its own that is seeded with the
    configuration's seed and the parameter's name: the global generator is not touched, and two schemes with one seed start
    from the same branch weights. Norm weights and input gains start at one.

    Args:
        config: of the model.
        initialise: whether to draw the weights; False leaves the matrices' memory as it is, for a caller that fills it.
    """

    def __init__(self, config: ModelConfig, *, initialise: bool = True) -> None:
        super().__init__()
        dtype = config.stream_dtype
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, dtype=dtype)
        self.blocks = nn.ModuleList(_blocks(config))
        self.final_norm = Norm(NormKind(config.norm), config.width, config.norm_eps, dtype) if config.final_norm else None
        self.head = Linear(config.width, config.vocab_size, dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        if initialise:
            self.draw_weights()

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token, in the stream's dtype."""
        logits_BTV: Tensor = self.head(self.hidden(ids_BT))
        return logits_BTV

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Hidden state (B, T, D) that the head reads, after the final norm."""
        stream_BTD: Tensor = self.embedding(ids_BT)
        rotary = self.rotary(stream_BTD)
        for block in self.blocks:
            stream_BTD = block(stream_BTD, rotary)
        return stream_BTD if self.final_norm is None else self.final_norm(stream_BTD)

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy, nats per target; targets of -100 do not count."""
        return functional.cross_entropy(self(ids_BT).flatten(0, 1), targets_BT.flatten())

    def rotary(self, stream_BTD: Tensor) -> Rotary:
        """The rotary table for a stream of this length, shared by all blocks."""
        config = self.config
        return rotary_table(
            stream_BTD.shape[1], config.head_width, config.rope_theta, dtype=stream_BTD.dtype, device=stream_BTD.device
        )

    def sublayers(self) -> tuple[ResidualSublayer, ...]:
        """All sub-layers, first to last."""
        blocks = cast("Sequence[Block]", self.blocks)  # ModuleList forgets the type
        return tuple(sublayer for block in blocks for sublayer in (block.attention, block.ffn))

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Draw every matrix anew; parameters that are not matrices keep their values."""
        for name, module in self.named_modules():
            if isinstance(module, Embedding | Linear) and not (module is self.head and self.config.tied_embeddings):
                gain = module.init_gain if isinstance(module, Linear) else 1.0
                _draw(module.weight, f"{self.config.seed}/{name}", self.config.init_std * gain)


def _blocks(config: ModelConfig) -> Iterator[Block]:
    specs = config.specs()
    kinds = (SublayerKind.ATTENTION, SublayerKind.FFN)
    shared = [build_parts(config, specs[i::2], kind) if config.shared_blocks else None for i, kind in enumerate(kinds)]
    for i in range(config.n_blocks):
        yield Block(*(ResidualSublayer(config, specs[2 * i + j], kind, shared[j]) for j, kind in enumerate(kinds)))


def _draw(weight: Tensor, name: str, std: float) -> None:
    """Fill with N(0, std^2), drawn in float32 so that every compute dtype starts from the same numbers."""
    if weight.is_meta:
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(seed)
    weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))


def residual_layout(model: nn.Module) -> ResidualLayout:
    """Where the residual stream of one of the toolkit's own models is visible.

    Args:
        model: a :class:`Transformer`, or a module that holds one; names are relative to this module.

    Example:
        >>> from probes.config import tiny
        >>> [boundary.name for boundary in residual_layout(Transformer(tiny())).boundaries[:3]]
        ['embedding', 'block 0 attention', 'block 0 ffn']
    """
    path, transformer = next((name, m) for name, m in model.named_modules() if isinstance(m, Transformer))
    prefix = f"{path}." if path else ""
    n_blocks = transformer.config.n_blocks
    places = [("embedding", -1, "embedding")]
    places += [(f"block {i} {kind.value}", i, f"blocks.{i}.{kind.value}") for i in range(n_blocks) for kind in SublayerKind]
    places += [] if transformer.final_norm is None else [("final norm", n_blocks - 1, "final_norm")]
    return ResidualLayout(
        family=ModelConfig.model_type,
        objective=Objective.CAUSAL,
        n_blocks=n_blocks,
        boundaries=tuple(Boundary(name=n, block=b, tap=Tap(prefix + module, Side.OUTPUT)) for n, b, module in places),
        sublayers=tuple(_sublayer_layout(i, sublayer, prefix) for i, sublayer in enumerate(transformer.sublayers())),
        embedding_modules=(f"{prefix}embedding",),
        final_norm=None if transformer.final_norm is None else NormSite(module=f"{prefix}final_norm", role="final"),
        head=Head(backbone=transformer.hidden, logits=transformer.head, linear=transformer.head, modules=(f"{prefix}head",)),
        blocks=tuple(f"{prefix}blocks.{i}" for i in range(n_blocks)),
    )


def _sublayer_layout(index: int, sublayer: ResidualSublayer, prefix: str) -> SublayerLayout:
    name = f"{prefix}blocks.{index // 2}.{sublayer.kind.value}"
    sites = (("branch.norm_in", "in"), ("branch.norm_branch", "branch"), ("norm_out", "out"))
    present = dict(sublayer.named_modules(remove_duplicate=False))  # a module that is None is not listed
    return SublayerLayout(
        block=index // 2,
        kind=BlockKind(sublayer.kind.value),
        boundary_in=index,
        boundary_out=index + 1,
        branch=Tap(f"{name}.branch", Side.OUTPUT),
        modules=(name,),
        norms=tuple(NormSite(module=f"{name}.{site}", role=role) for site, role in sites if site in present),
        shortcut_scale=float(torch.as_tensor(sublayer.shortcut_scale).detach().abs().amax()),
        combine=None if sublayer.is_plain_sum else sublayer.shortcut,
    )
