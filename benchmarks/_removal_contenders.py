"""Ways to measure the loss without each block of one causal language model, each as a user of it would write them.

Every contender measures the same: the mean loss of the full model and of every model with the identity in place of one block.
Without the head, the last hidden state takes the place of the logits and its first entry that of the target, so that every
contender still has one number per variant to agree on.

The float32 cross-entropy that everyone calls rounds by about 1e-5 nats on a vocabulary of 49,152, so losses are compared by
runs that are not timed, in which the loss of the contender's own float32 logits is taken in float64 (``loss_dtype``).
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
class Text:
    """What is measured on.

    Attributes:
        ids_1T: token ids.
        head: whether the language-model head is part of the measurement.
        loss_dtype: of the cross-entropy of those who take it themselves.
    """

    ids_1T: Tensor
    head: bool
    loss_dtype: torch.dtype = torch.float32

    def mean_loss(self, logits_TV: Tensor) -> float:
        """Of the next tokens; without the head, of the first entry of the hidden state."""
        targets = self.ids_1T[0, 1:] if self.head else torch.zeros_like(self.ids_1T[0, 1:])
        return float(nn.functional.cross_entropy(logits_TV[:-1].to(self.loss_dtype), targets))


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to measure.

    Attributes:
        prepare: (model, the text) -> its pass.
        package: distribution that it needs beyond this toolkit's own; None where it needs none.
        module: import name of that distribution.
    """

    prepare: Callable[[Any, Text], Pass]
    package: str | None = None
    module: str | None = None

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return self.module is None or find_spec(self.module) is not None


def _naive(model: Any, text: Text) -> Pass:
    """The whole model once per block, with the identity in its place."""

    def loss() -> float:
        if text.head:
            return text.mean_loss(model(input_ids=text.ids_1T, use_cache=False).logits[0])
        return text.mean_loss(model.model(input_ids=text.ids_1T, use_cache=False).last_hidden_state[0])

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
    block.forward = lambda hidden_states, **_: hidden_states
    try:
        yield
    finally:
        del block.__dict__["forward"]


def _prefix(model: Any, text: Text) -> Pass:
    """By hand: the streams of the full model are kept, and each variant starts behind its block."""
    blocks = model.model.layers
    positions = torch.arange(text.ids_1T.shape[1])[None]

    def run(stream: Tensor, first: int, rotary: Any, into: list[Tensor] | None = None) -> float:
        for block in blocks[first:]:
            if into is not None:
                into.append(stream)
            stream = block(stream, attention_mask=None, position_ids=positions, position_embeddings=rotary, use_cache=False)
        hidden = model.model.norm(stream)
        return text.mean_loss((model.lm_head(hidden) if text.head else hidden)[0])

    @torch.no_grad()
    def one_pass() -> list[float]:
        stream = model.model.embed_tokens(text.ids_1T)
        rotary = model.model.rotary_emb(stream, position_ids=positions)
        kept: list[Tensor] = []
        losses = [run(stream, 0, rotary, kept)]
        return losses + [run(kept[i], i + 1, rotary) for i in range(len(blocks))]

    return one_pass


def _keel(model: Any, text: Text) -> Pass:
    from probes.families import describe_model
    from probes.layer_removal import measure_layer_removal
    from probes.text import IGNORED, TokenBatch

    layout = describe_model(model)
    targets = torch.full_like(text.ids_1T, IGNORED)
    targets[:, :-1] = text.ids_1T[:, 1:] if text.head else 0
    if not text.head:
        layout = replace(layout, head=replace(layout.head, logits=lambda hidden: hidden, linear=None))
    batch = TokenBatch(text.ids_1T, targets)

    def one_pass() -> list[float]:
        result = measure_layer_removal(model, [batch], layout=layout, estimates=False, joint=False)
        return [result.loss.value, *(result.loss.value + cost.delta_loss.value for cost in result.costs)]

    return one_pass


def _nnsight(model: Any, text: Text) -> Pass:
    from nnsight import NNsight

    traced: Any = NNsight(model)

    def loss(removed: int | None) -> float:
        with traced.trace(input_ids=text.ids_1T, use_cache=False):
            if removed is not None:
                block = traced.model.layers[removed]
                block.skip(block.input)
            last = (traced.output.logits if text.head else traced.model.norm.output).save()
        return text.mean_loss(last[0])

    @torch.no_grad()
    def one_pass() -> list[float]:
        return [loss(removed) for removed in (None, *range(len(model.model.layers)))]

    return one_pass


def _transformer_lens(model: Any, text: Text) -> Pass:
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
        if not text.head:
            hooks.append(("ln_final.hook_out", lambda stream, hook: hidden.append(stream)))
        logits = bridge.run_with_hooks(text.ids_1T, return_type="logits", fwd_hooks=hooks)
        return text.mean_loss((logits if text.head else hidden[0])[0])

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
