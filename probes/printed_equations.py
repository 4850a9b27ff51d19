r"""The paper's definitions as they are printed, held against what a model of that scheme computes.

Each equation is written out here once more, from its sub-layer's modules and from nothing of the scheme's spec: which norm
stands where, and which scale is on the shortcut, is the equation's own. Norms are written out as well: the paper's Eq. (9)
times :math:`\sqrt d`, which its notation leaves out.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (1)-(9), (23)-(26), (28).   Status: exact.   Assumes: eps = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from probes.blocks import Norm, ResidualSublayer
from probes.config import ModelConfig
from probes.model import Transformer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PRINTED", "Printed", "largest_difference"]

_NO_EPS = 1e-300
_FIRST = 2
"""The first block has rules of its own in Keel; the equations are about the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A definition.

    Attributes:
        scheme: whose model is held against it.
        update: the stream after a sub-layer as printed: a function of the sub-layer, the stream of shape (B, T, D), and L, the
            number of sub-layers.
    """

    scheme: str
    update: Callable[[ResidualSublayer, Tensor, int], Tensor]


def _norm(module: Any, x: Tensor) -> Tensor:
    """Eq. (9) times sqrt(d): x / ||x||_2 * g, elementwise in g."""
    assert isinstance(module, Norm)
    normed: Tensor = math.sqrt(x.shape[-1]) * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * module.weight
    return normed


def _highway(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    gate: Any = sublayer.gate
    transform = 1 / (1 + torch.exp(-(x @ gate.weight.T + gate.bias)))
    mixed: Tensor = transform * sublayer.branch.function(x) + (1 - transform) * x
    return mixed


def _residual(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    branch: Tensor = sublayer.branch(x)
    return x + branch


def _post_ln(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    return _norm(sublayer.norm_out, x + sublayer.branch.function(x))


def _deepnorm(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    return _norm(sublayer.norm_out, n_sublayers**0.25 * x + sublayer.branch.function(x))


def _pre_ln(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    branch: Tensor = sublayer.branch.function(_norm(sublayer.branch.norm_in, x))
    return x + branch


def _keel(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    return _norm(sublayer.norm_out, n_sublayers * x + sublayer.branch.function(_norm(sublayer.branch.norm_in, x)))


def _attempt_1(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    return _norm(sublayer.norm_out, n_sublayers * x + sublayer.branch.function(x))


def _attempt_2(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    gain: Any = sublayer.branch.input_gain
    return _norm(sublayer.norm_out, n_sublayers * x + sublayer.branch.function(gain.weight * x))


def _attempt_3(sublayer: ResidualSublayer, x: Tensor, n_sublayers: int) -> Tensor:
    gain: Any = sublayer.branch.input_gain
    inner = gain.weight * _norm(sublayer.branch.norm_in, x)
    return _norm(sublayer.norm_out, n_sublayers * x + sublayer.branch.function(inner))


PRINTED: Mapping[str, Printed] = MappingProxyType(
    {
        "1": Printed(scheme="highway", update=_highway),
        "2": Printed(scheme="pre_ln", update=_residual),
        "3": Printed(scheme="post_ln", update=_post_ln),
        "5": Printed(scheme="deepnorm", update=_deepnorm),
        "6": Printed(scheme="pre_ln", update=_pre_ln),
        "8": Printed(scheme="keel", update=_keel),
        "9": Printed(scheme="post_ln", update=_post_ln),
        "24": Printed(scheme="scaled_shortcut", update=_attempt_1),
        "25": Printed(scheme="scaled_shortcut_input_gain", update=_attempt_2),
        "26": Printed(scheme="scaled_shortcut_normed_input_gain", update=_attempt_3),
    }
)
"""The definitions by number. Eq. (2) is every Pre-LN sub-layer with its norm counted to the branch, Eq. (9) the norm of a
Post-LN one."""


def largest_difference(equation: str, n_blocks: int = 3) -> float:
    """What separates a model's sub-layers from a printed definition.

    Args:
        equation: a key of :data:`PRINTED`.
        n_blocks: of the model, two sub-layers each; the first block is left out.

    Returns:
        Largest difference of the two outputs over the size of the printed one, dimensionless; attention and FFN, random
        weights, norms and gains away from one, float64.

    Example:
        >>> largest_difference("3") < 1e-14
        True
    """
    printed = PRINTED[equation]
    small: dict[str, Any] = {"width": 16, "ffn_width": 24, "vocab_size": 19, "compute_dtype": "float64", "norm_eps": _NO_EPS}
    config = ModelConfig(scheme=printed.scheme, n_blocks=n_blocks, **small)
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        stream = torch.randn(2, 7, config.width, generator=generator, dtype=torch.float64)
        gaps = [
            (sublayer(stream) - expected).abs().max() / expected.abs().max()
            for sublayer in model.sublayers()[_FIRST:]
            for expected in [printed.update(sublayer, stream, config.n_sublayers)]
        ]
    return float(max(gaps))
