r"""What a real model's shortcuts keep of a gradient, with its branches replaced by noise or left as they are.

Theory multiplies shortcut gains under assumptions: branches of a given variance, uncorrelated with the stream. Here the same
product is measured on the modules of :mod:`probes.model`, twice: with every attention and FFN replaced by independent noise as
large as its **actual** input asks (norms, gains and scales around it are the model's own and are run), so that the assumptions
hold and any difference is a fault in model or theory; and with the model's own branches, so that one sees what the assumptions
are worth. The **full** gain, branch paths included, stands beside it. No variance and no scale is taken from theory.

A gradient is followed by its direction and the logarithm of its length, so that no depth underflows.

Shape suffixes: B batch, T tokens, D width. N = B T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keel_theory.spec import ResidualSpec
from probes.blocks import ResidualSublayer
from probes.model import Transformer

__all__ = ["StackGains", "full_log_gain", "noise_branches", "noise_stack", "own_stack"]


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


class _Noise(nn.Module):
    """In place of an attention or FFN: Gaussian noise whose variance is q times the mean square of what it is given."""

    def __init__(self, spec: ResidualSpec, branch_variance: float, scaled_matrices: int, generator: torch.Generator) -> None:
        super().__init__()
        n_scaled = min(scaled_matrices, 1) if spec.qkv_norm else scaled_matrices  # normalised values do not feel their matrix
        self.size = branch_variance**0.5 * spec.init_gain**n_scaled
        self.reads_size = not spec.qkv_norm
        self.generator = generator

    def forward(self, x_BTD: Tensor, rotary: object = None) -> Tensor:
        """Noise of the input's shape; rotary is there so that every branch is called alike."""
        noise_BTD = torch.randn(x_BTD.shape, generator=self.generator, dtype=x_BTD.dtype)
        rms_BT1 = x_BTD.square().mean(-1, keepdim=True).sqrt()
        written_BTD: Tensor = self.size * (rms_BT1 * noise_BTD if self.reads_size else noise_BTD)
        return written_BTD


@contextmanager
def noise_branches(
    model: Transformer, *, branch_variance: float = 1.0, scaled_matrices: int = 0, seed: int = 0
) -> Iterator[torch.Generator]:
    """Replace every attention and FFN by noise, and put them back at the end, whatever happens.

    Args:
        model: its norms, gains, scales and gates stay.
        branch_variance: q, variance of the noise for an input of unit variance.
        scaled_matrices: matrices of each branch that start ``init_gain`` times smaller.
        seed: of the noise.

    Yields:
        The generator that the noise comes from.
    """
    generator = torch.Generator().manual_seed(seed)
    own = [(sublayer.branch, sublayer.branch.function) for sublayer in model.sublayers()]
    try:
        for sublayer in model.sublayers():
            sublayer.branch.function = _Noise(sublayer.spec, branch_variance, scaled_matrices, generator)
        yield generator
    finally:
        for branch, function in own:
            branch.function = function


def noise_stack(
    model: Transformer,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    scaled_matrices: int = 0,
    n_positions: int = 256,
    tangent: bool = False,
    seed: int = 0,
) -> StackGains:
    r"""Run a model whose attentions and FFNs are independent Gaussian noise.

    Norms, scales and the way they are combined are the model's own. A Highway gate is the model's own too; with zero gate
    weights it is the constant that theory assumes. Admin's scales are as they have been profiled.

    Status: exact for the draws.   Assumes: nothing; what theory assumes of branches holds by construction.

    Args:
        model: its attentions and FFNs are not called.
        branch_variance: q, variance of F's output for an input of unit variance.
        stream_variance: v > 0 of the stream that enters.
        scaled_matrices: matrices of each branch that start ``init_gain`` times smaller.
        n_positions: N, independent draws.
        tangent: take the gradient orthogonal to the stream that leaves, as it is behind any norm (J x = 0); an isotropic one
            loses a share 1/(2 D) in the last norm, whatever the scheme.
        seed: of the noise.

    Returns:
        The gains at every position; the entering stream is Gaussian, normalised to one RMS.

    Example:
        >>> from probes.config import tiny
        >>> gains = noise_stack(Transformer(tiny("pre_ln")), n_positions=8)
        >>> bool(gains.log_products.abs().max() < 1e-5)  # nothing is lost
        True
    """
    noise = noise_branches(model, branch_variance=branch_variance, scaled_matrices=scaled_matrices, seed=seed)
    with torch.no_grad(), noise as generator:
        shape = (1, n_positions, model.config.width)
        stream_BTD = torch.randn(shape, generator=generator, dtype=model.config.stream_dtype)
        unit_BTD = stream_BTD / stream_BTD.square().mean(-1, keepdim=True).sqrt()
        tape, last_BTD = _forward(model, stream_variance**0.5 * unit_BTD)
        gradient_BTD = torch.randn(shape, generator=generator, dtype=last_BTD.dtype)
    if tangent:
        along_BT1 = (gradient_BTD * last_BTD).sum(-1, keepdim=True) / last_BTD.square().sum(-1, keepdim=True)
        gradient_BTD = gradient_BTD - along_BT1 * last_BTD
    return _gains(tape, last_BTD, gradient_BTD)


def own_stack(model: Transformer, ids_BT: Tensor, *, seed: int = 0) -> StackGains:
    """Run a model as it is and follow a random gradient along the shortcuts alone, branches and gates held constant.

    Status: exact for the model and the tokens.   Assumes: nothing.

    Args:
        model: of the toolkit.
        ids_BT: token ids, shape (B, T).
        seed: of the gradient.

    Returns:
        The gains at every position.

    Example:
        >>> from probes.config import tiny
        >>> gains = own_stack(Transformer(tiny("pre_ln")), torch.arange(6)[None])
        >>> gains.log_gains.shape[1], bool(gains.log_products.abs().max() < 1e-5)
        (6, True)
    """
    with torch.no_grad():
        tape, last_BTD = _forward(model, model.embedding(ids_BT))
    return _gains(tape, last_BTD, _random_like(last_BTD, seed))


def _forward(model: Transformer, stream_BTD: Tensor) -> tuple[list[tuple[ResidualSublayer, Tensor, Tensor]], Tensor]:
    """Each sub-layer with the stream that enters it and what it adds, and the stream that leaves."""
    tape: list[tuple[ResidualSublayer, Tensor, Tensor]] = []
    rotary = model.rotary(stream_BTD)
    for sublayer in model.sublayers():
        gate_BTD = None if sublayer.gate is None else sublayer.gate(stream_BTD)
        tape.append((sublayer, stream_BTD, sublayer.branch(stream_BTD, rotary, gate_BTD)))
        stream_BTD = sublayer.shortcut(*tape[-1][1:])
    return tape, stream_BTD


@torch.enable_grad()
def full_log_gain(model: Transformer, ids_BT: Tensor, *, seed: int = 0) -> Tensor:
    """Natural log of the gain of a random gradient from the last sub-layer to the embedding's output, branches included.

    Status: exact for the model and the tokens.   Assumes: nothing.

    Args:
        model: of the toolkit.
        ids_BT: token ids, shape (B, T); gradients mix the positions of a sequence.
        seed: of the gradient.

    Returns:
        One number per sequence, nats, shape (B,).

    Example:
        >>> from probes.config import tiny
        >>> full_log_gain(Transformer(tiny("keel")), torch.arange(6).reshape(2, 3)).shape
        torch.Size([2])
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
