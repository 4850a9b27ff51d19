r"""HybridNorm: normalised queries, keys and values in attention, a Post-Norm FFN.

One block maps X to X' by

.. math:: Y = X + \mathrm{Attn}_{QKV}(X),\qquad X' = u + F(u),\quad u = N(Y)

with attention that normalises its queries, keys and values. The normalised state u is the FFN's input *and* its shortcut, so
the norm stands on the stream, between the two sub-layers. In the form of one update per sub-layer that is

* attention: :math:`u = N_{out}(X + \mathrm{Attn}_{QKV}(X))`, that is ``norm_out`` and ``qkv_norm``;
* FFN: :math:`X' = u + F(u)`, without any norm.

Cutting the block after the norm instead of before it changes no number of the forward or backward pass.

The starred variant makes block 0 Pre-Norm and keeps its normalised queries, keys and values:
:math:`Y = X + \mathrm{Attn}_{QKV}(N(X))`, :math:`X' = Y + F(N(Y))`.

Source: Zhuo et al. 2025, arXiv:2503.04598, and the authors' README, BryceZhuo/HybridNorm (block 0:
``attn_norm: True, ffn_residual: False``).
"""

from collections.abc import Mapping

from keel_theory.parameters import choice
from keel_theory.spec import NormKind, ParameterValue, ResidualSpec, Scheme, SublayerKind

__all__ = ["SCHEME"]

_VARIANTS = ("plain", "star")


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, variant: str = "plain") -> ResidualSpec:
    attention = kind is SublayerKind.ATTENTION
    if choice("variant", variant, _VARIANTS) == "star" and sublayer_index < 2:
        return ResidualSpec(norm_in=NormKind.RMS, qkv_norm=attention)
    return ResidualSpec(norm_out=NormKind.RMS if attention else NormKind.NONE, qkv_norm=attention)


def _switches(n_sublayers: int, parameters: Mapping[str, ParameterValue]) -> tuple[int, ...]:
    return (2,) if parameters["variant"] == "star" else ()


SCHEME = Scheme(
    name="hybrid_norm",
    label="HybridNorm",
    equation="attention: u = LN(x + Attn(x)), queries, keys and values normalised; FFN: x' = u + F(u)",
    latex=r"u = \mathrm{LN}\left(x + \mathrm{Attn}_{QKV}(x)\right),\quad x' = u + F(u)",
    source="Zhuo et al. 2025, arXiv:2503.04598",
    rule=_spec,
    switches=_switches,
    parameter_docs={"variant": "'plain', or 'star' for a Pre-Norm block 0"},
)
