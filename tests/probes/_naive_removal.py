"""The slow, obvious way to remove something: the model's own forward pass with the identity in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from probes.families import describe_model
from probes.layout import ResidualLayout
from probes.model import Transformer
from probes.taps import input_of
from probes.text import IGNORED, TokenBatch

__all__ = ["identity_in_place_of", "next_token_batch", "plain_losses"]


def next_token_batch(ids: Tensor) -> TokenBatch:
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    return TokenBatch(ids, targets)


def plain_losses(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Nats of every predicted token from the model's own logits, all at once."""
    with torch.no_grad():
        output = model(batch.inputs, **({} if isinstance(model, Transformer) else {"use_cache": False}))
        logits = output if isinstance(output, Tensor) else output.logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses[(batch.targets != IGNORED).flatten()]


@contextmanager
def identity_in_place_of(model: nn.Module, sublayers: Iterable[int]) -> Iterator[None]:
    """Whole blocks return what they were given; a single sub-layer's update is left out inside its block."""
    layout = describe_model(model)
    removed = set(sublayers)
    with ExitStack() as stack:
        for block, name in enumerate(layout.blocks):
            inside = {i for i, s in enumerate(layout.sublayers) if s.block == block}
            if inside <= removed:
                stack.enter_context(_forward(model.get_submodule(name), _same_stream(model.get_submodule(name))))
                continue
            for index in sorted(inside & removed):
                _leave_out(stack, model, layout, index)
        yield


def _leave_out(stack: ExitStack, model: nn.Module, layout: ResidualLayout, index: int) -> None:
    sublayer = layout.sublayers[index]
    own = next((m for m in model.modules() if isinstance(m, Transformer)), None)
    if own is not None:
        stack.enter_context(_forward(own.sublayers()[index], lambda stream, rotary=None: stream))
    elif f"{layout.blocks[0]}.attention.output" in dict(
        model.named_modules()
    ):  # BERT and its kind: dense, dropout and LayerNorm(x + input) live in one module
        name = layout.blocks[sublayer.block] + (".attention.output" if sublayer.kind.value == "attention" else ".output")
        stack.enter_context(_forward(model.get_submodule(name), lambda hidden, stream: stream))
    else:
        branch = model.get_submodule(sublayer.branch.module)
        stack.callback(branch.register_forward_hook(lambda _, __, output: _zeros(output)).remove)
        for site in (site for site in sublayer.norms if site.role == "out"):  # Post-LN: x + 0 goes past the norm
            stack.enter_context(_forward(model.get_submodule(site.module), lambda stream: stream))


def _zeros(output: object) -> object:
    if isinstance(output, Tensor):
        return torch.zeros_like(output)
    assert isinstance(output, tuple)
    return (torch.zeros_like(output[0]), *output[1:])


def _same_stream(block: nn.Module) -> object:
    own = block.forward

    def forward(*args: object, **kwargs: object) -> object:
        output = own(*args, **kwargs)
        stream = input_of(args, kwargs)
        return stream if isinstance(output, Tensor) else (stream, *output[1:])

    return forward


@contextmanager
def _forward(module: nn.Module, function: object) -> Iterator[None]:
    module.forward = function
    try:
        yield
    finally:
        del module.__dict__["forward"]
