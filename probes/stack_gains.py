r"""What a real model's shortcuts keep of a gradient, with its branches replaced by noise or left as they are.

Theory multiplies shortcut gains under assumptions: branches of a given variance, uncorrelated with the stream. Here the same
product is measured on the modules of :mod:`probes.model`, twice: with every branch replaced by independent noise of the
assumed variance, so that the assumptions hold and any difference is a fault in model or theory; and with the model's own
branches, so that one sees what the assumptions are worth. The **full** gain, branch paths included, stands beside it.

A gradient is followed by its direction and the logarithm of its length, so that no depth underflows.

Shape suffixes: B batch, T tokens, D width. N = B T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel_theory.propagation import propagate_shortcut
from probes.blocks import ResidualSublayer
from probes.model import Transformer

__all__ = ["StackGains", "full_log_gain", "noise_stack", "own_stack"]


@dataclass(frozen=True, slots=True)
class StackGains:
    """A forward pass and a random gradient's way back along the shortcuts.

    Attributes:
        log_gains: natural log of each sub-layer's gain at each position, nats, shape (n_sublayers, N).
        first: the stream that enters, shape (B, T, D).
        last: the stream that leaves, shape (B, T, D).
        stream_variance: mean square of the stream before each sub-layer and after the last, shape (n_sublayers + 1,).
        branch_variance: mean square of what is added to each shortcut, shape (n_sublayers,).
    """

    log_gains: Tensor
    first: Tensor
    last: Tensor
    stream_variance: Tensor
    branch_variance: Tensor

    @property
    def log_products(self) -> Tensor:
        """Natural log of the product over all sub-layers at each position, nats, shape (N,)."""
        return self.log_gains.sum(0)

    @property
    def input_cosines(self) -> Tensor:
        """Cosine between the entering and the leaving stream at each position, shape (N,)."""
        return torch.nn.functional.cosine_similarity(self.first, self.last, dim=-1).flatten()


def noise_stack(
    model: Transformer,
    *,
    branch_variance: float = 1.0,
    scaled_matrices: int = 0,
    n_positions: int = 256,
    seed: int = 0,
) -> StackGains:
    """Run a model whose branches are independent Gaussian noise of the variance that theory gives them.

    Norms, scales and the way they are combined are the model's own. A Highway gate is the model's own too; with zero gate
    weights it is the constant that theory assumes.

    Args:
        model: its branches are not called.
        branch_variance: q, variance of F's output for an input of unit variance.
        scaled_matrices: matrices of each branch that start ``init_gain`` times smaller.
        n_positions: N, independent draws.
        seed: of the noise.

    Returns:
        The gains at every position; the entering stream is Gaussian, normalised to unit RMS.
    """
    config = model.config
    trace = propagate_shortcut(
        config.residual_scheme, config.n_sublayers, branch_variance=branch_variance, scaled_matrices=scaled_matrices
    )
    generator = torch.Generator().manual_seed(seed)
    shape = (1, n_positions, config.width)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=config.stream_dtype)

    stream = draw()
    stream = stream / stream.square().mean(-1, keepdim=True).sqrt()
    tape: list[tuple[ResidualSublayer, Tensor, Tensor]] = []
    with torch.no_grad():
        for sublayer, variance in zip(model.sublayers(), trace.added_variances, strict=True):
            tape.append((sublayer, stream, float(variance) ** 0.5 * draw()))
            stream = sublayer.shortcut(*tape[-1][1:])
    return _gains(tape, stream, draw())


def own_stack(model: Transformer, ids_BT: Tensor, *, seed: int = 0) -> StackGains:
    """Run a model as it is and follow a random gradient along the shortcuts alone, branches and gates held constant.

    Args:
        model: of the toolkit.
        ids_BT: token ids, shape (B, T).
        seed: of the gradient.

    Returns:
        The gains at every position.
    """
    tape: list[tuple[ResidualSublayer, Tensor, Tensor]] = []
    with torch.no_grad():
        stream = model.embedding(ids_BT)
        rotary = model.rotary(stream)
        for sublayer in model.sublayers():
            gate = None if sublayer.gate is None else sublayer.gate(stream)
            tape.append((sublayer, stream, sublayer.branch(stream, rotary, gate)))
            stream = sublayer.shortcut(*tape[-1][1:])
    return _gains(tape, stream, _random_like(stream, seed))


@torch.enable_grad()
def full_log_gain(model: Transformer, ids_BT: Tensor, *, seed: int = 0) -> Tensor:
    """Natural log of the gain of a random gradient from the last sub-layer to the embedding's output, branches included.

    Args:
        model: of the toolkit.
        ids_BT: token ids, shape (B, T); gradients mix the positions of a sequence.
        seed: of the gradient.

    Returns:
        One number per sequence, nats, shape (B,).
    """
    first = model.embedding(ids_BT).detach().requires_grad_()
    rotary, stream = model.rotary(first), first
    for sublayer in model.sublayers():
        stream = sublayer(stream, rotary)
    gradient = _random_like(stream, seed)
    (at_first,) = torch.autograd.grad(stream, first, gradient)
    return torch.log(at_first.flatten(1).norm(dim=1) / gradient.flatten(1).norm(dim=1))


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)


def _gains(tape: Sequence[tuple[ResidualSublayer, Tensor, Tensor]], last: Tensor, gradient: Tensor) -> StackGains:
    log_gains: list[Tensor] = []
    for sublayer, stream, branch in reversed(tape):
        unit = gradient / gradient.norm(dim=-1, keepdim=True)
        with torch.enable_grad():
            leaf = stream.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(sublayer.shortcut(leaf, branch), leaf, unit)
        log_gains.append(gradient.norm(dim=-1).log().flatten())
    streams = [stream for _, stream, _ in tape]
    return StackGains(
        log_gains=torch.stack(log_gains[::-1]),
        first=streams[0],
        last=last,
        stream_variance=_mean_squares([*streams, last]),
        branch_variance=_mean_squares(branch for _, _, branch in tape),
    )


def _mean_squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().mean() for tensor in tensors])
