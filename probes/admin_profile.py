"""Admin's profiling pass: shortcut scales measured on data before training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keel_theory.spec import ProfileKind
from probes.model import Transformer

__all__ = ["profile_admin"]


@torch.no_grad()
def profile_admin(model: Transformer, batches: Sequence[Tensor]) -> tuple[float, ...]:
    r"""Set Admin's shortcut scales from the branch variances of one forward pass.

    .. math:: \omega_1 = 1, \qquad \omega_{i+1}^2 = \mathrm{Var}[\omega_i x_{i-1}] + \mathrm{Var}[F_i(x_{i-1})]

    Sub-layers are visited in order, each with the scale just set, so that one pass is enough; variances are over all
    elements of all batches. The norm makes Var[x] = 1 past the first sub-layer, so omega_i^2 is the input's variance plus
    the branch variances before i: Admin's sum.

    Source: Liu et al. 2020, arXiv:2004.08249, section 4; recursion as in the authors' code, which starts it at 1.
    Status: exact rule.   Assumes: the weights are at initialisation.

    Args:
        model: with a profiled scheme; its scales are overwritten.
        batches: token ids, each of shape (B, T).

    Returns:
        omega of each sub-layer, dimensionless, first to last.

    Raises:
        ValueError: if the scheme is not profiled, there is no batch, or a variance is not a positive number.
    """
    sublayers = model.sublayers()
    if any(sublayer.spec.profile is not ProfileKind.ADMIN for sublayer in sublayers):
        raise ValueError(f"scheme '{model.config.scheme}' has no profiled shortcut scale")
    if not batches:
        raise ValueError("profiling needs at least one batch of token ids")
    streams = [model.embedding(ids_BT) for ids_BT in batches]
    omegas, omega = [], 1.0
    for index, sublayer in enumerate(sublayers):
        assert isinstance(sublayer.shortcut_scale, Tensor)  # a profiled spec has a vector
        sublayer.shortcut_scale.fill_(omega)
        omegas.append(omega)
        branches = [sublayer.branch(stream_BTD) for stream_BTD in streams]
        variance = _variance([omega * s for s in streams]) + _variance(branches)
        if not (torch.isfinite(variance) and variance > 0):
            raise ValueError(f"the variance after sub-layer {index} is {variance.item()}; profiling needs a positive number")
        omega = variance.sqrt().item()
        streams = [sublayer.combine(stream, branch) for stream, branch in zip(streams, branches, strict=True)]
    return tuple(omegas)


def _variance(tensors: Sequence[Tensor]) -> Tensor:
    """Over all elements of all tensors, float64, scalar."""
    return torch.cat([t.flatten() for t in tensors]).double().var(correction=0)
