r"""LayerNorm Scaling: Pre-LN whose normalised branch input shrinks with depth.

.. math:: x' = x + F\left(N_{in}(x) / \sqrt{l}\right)

l is the index of the **block**, counted from 1: both sub-layers of a block share it.

Source: Sun et al. 2025, arXiv:2502.05795; the index as in the authors' code, lmsdss/LayerNorm-Scaling,
peft_pretraining/modeling_llama.py (``1 / sqrt(layer_index + 1)`` in the attention and in the FFN of a block).
"""

import math

from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    block = sublayer_index // 2 + 1
    return ResidualSpec(norm_in=NormKind.RMS, input_scale=1.0 / math.sqrt(block))


SCHEME = Scheme(
    name="layernorm_scaling",
    label="LayerNorm Scaling",
    equation="x' = x + F(LN(x) / sqrt(l)), l the block's index from 1",
    latex=r"x' = x + F\left(\mathrm{LN}(x) / \sqrt{l}\right)",
    source="Sun et al. 2025, arXiv:2502.05795",
    rule=_spec,
    switches=no_switches,
    varying=frozenset({"input_scale"}),
)
