"""Ways to measure the loss without each block of one causal language model, each as a user of it would write them.

Every contender measures the same: the mean loss of the full model and of every model with the identity in place of one block.
Without the head, the last hidden state takes the place of the logits and its first entry that of the target, so that every
contender still has one number per variant to agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CONTENDERS", "Contender", "Pass"]

Pass = Callable[[], list[float]]
"""One measurement: mean losses in nats, of the full model first, then without each block."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to measure.

    Attributes:
        prepare: (model, ids of shape (1, T), whether with the head) -> its pass.
        package: distribution that it needs beyond this toolkit's own; None where it needs none.
        module: import name of that distribution.
    """

    prepare: Callable[[Any, Tensor, bool], Pass]
    package: str | None = None
    module: str | None = None

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return self.module is None or find_spec(self.module) is not None


def _mean_loss(logits_TV: Tensor, ids_1T: Tensor, head: bool) -> float:
    targets = ids_1T[0, 1:] if head else torch.zeros_like(ids_1T[0, 1:])
    return float(nn.functional.cross_entropy(logits_TV[:-1].float(), targets))


def _naive(model: Any, ids_1T: Tensor, head: bool) -> Pass:
    """The whole model once per block, with the identity in its place."""

    def loss() -> float:
        if head:
            return _mean_loss(model(input_ids=ids_1T, use_cache=False).logits[0], ids_1T, head)
        return _mean_loss(model.model(input_ids=ids_1T, use_cache=False).last_hidden_state[0], ids_1T, head)

    @torch.no_grad()
    def one_pass() -> list[float]:
        losses = [loss()]
        for block in model.model.layers:
            with _identity(block):
                losses.append(loss())
        return losses

    return one_pass


@contextmanager
def _identity(block: nn.Module) -> Iterator[None]:
    block.forward = lambda hidden_states, **_: hidden_states  # type: ignore[method-assign]
    try:
        yield
    finally:
        del block.__dict__["forward"]


def _prefix(model: Any, ids_1T: Tensor, head: bool) -> Pass:
    """By hand: the streams of the full model are kept, and each variant starts behind its block."""
    blocks = model.model.layers
    positions = torch.arange(ids_1T.shape[1])[None]

    def run(stream: Tensor, first: int, rotary: Any, into: list[Tensor] | None = None) -> float:
        for block in blocks[first:]:
            if into is not None:
                into.append(stream)
            stream = block(stream, attention_mask=None, position_ids=positions, position_embeddings=rotary, use_cache=False)
        hidden = model.model.norm(stream)
        return _mean_loss((model.lm_head(hidden) if head else hidden)[0], ids_1T, head)

    @torch.no_grad()
    def one_pass() -> list[float]:
        stream = model.model.embed_tokens(ids_1T)
        rotary = model.model.rotary_emb(stream, position_ids=positions)
        kept: list[Tensor] = []
        losses = [run(stream, 0, rotary, kept)]
        return losses + [run(kept[i], i + 1, rotary) for i in range(len(blocks))]

    return one_pass


def _keel(model: Any, ids_1T: Tensor, head: bool) -> Pass:
    from probes.families import describe_model
    from probes.layer_removal import measure_layer_removal
    from probes.text import IGNORED, TokenBatch

    layout = describe_model(model)
    targets = torch.full_like(ids_1T, IGNORED)
    targets[:, :-1] = ids_1T[:, 1:] if head else 0
    if not head:
        layout = replace(layout, head=replace(layout.head, logits=lambda hidden: hidden, linear=None))
    batch = TokenBatch(ids_1T, targets)

    def one_pass() -> list[float]:
        result = measure_layer_removal(model, [batch], layout=layout, estimates=False, joint=False)
        return [result.loss.value, *(result.loss.value + cost.delta_loss.value for cost in result.costs)]

    return one_pass


def _nnsight(model: Any, ids_1T: Tensor, head: bool) -> Pass:
    from nnsight import NNsight

    traced: Any = NNsight(model)

    def loss(removed: int | None) -> float:
        with traced.trace(input_ids=ids_1T, use_cache=False):
            if removed is not None:
                block = traced.model.layers[removed]
                block.skip(block.input)
            last = (traced.output.logits if head else traced.model.norm.output).save()
        return _mean_loss(last[0], ids_1T, head)

    @torch.no_grad()
    def one_pass() -> list[float]:
        return [loss(removed) for removed in (None, *range(len(model.model.layers)))]

    return one_pass


def _transformer_lens(model: Any, ids_1T: Tensor, head: bool) -> Pass:
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge.boot_transformers(model.config._name_or_path, hf_model=model, device="cpu")

    def loss(removed: int | None) -> float:
        held: list[Tensor] = []
        hooks: list[tuple[str, Callable[..., object]]] = []
        if removed is not None:
            hooks += [
                (f"blocks.{removed}.hook_in", lambda stream, hook: held.append(stream)),
                (f"blocks.{removed}.hook_out", lambda stream, hook: held.pop()),
            ]
        hidden: list[Tensor] = []
        if not head:
            hooks.append(("ln_final.hook_out", lambda stream, hook: hidden.append(stream)))
        logits = bridge.run_with_hooks(ids_1T, return_type="logits", fwd_hooks=hooks)
        return _mean_loss((logits if head else hidden[0])[0], ids_1T, head)

    @torch.no_grad()
    def one_pass() -> list[float]:
        return [loss(removed) for removed in (None, *range(len(model.model.layers)))]

    return one_pass


CONTENDERS: Mapping[str, Contender] = {
    "naive": Contender(_naive),
    "keel": Contender(_keel),
    "prefix": Contender(_prefix),
    "nnsight": Contender(_nnsight, "nnsight", "nnsight"),
    "transformer-lens": Contender(_transformer_lens, "transformer-lens", "transformer_lens"),
}
"""By name. ``naive`` is the answer to agree with, and the time to compare with."""
