r"""Scaled shortcut: Keel's first attempt. Post-LN with a shortcut scale and ordinary initialisation.

.. math:: x' = N_{out}(\alpha\,x + F(x)),\qquad \alpha = L

DeepNorm with a larger α and without its smaller initial weights. L is the number of sub-layers. The equation has no rule
for the first block.

Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (24).
"""

from keel_theory.depth_expression import DepthRule
from keel_theory.parameters import positive_at_depth
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, alpha: DepthRule = "L") -> ResidualSpec:
    return ResidualSpec(norm_out=NormKind.RMS, shortcut_scale=positive_at_depth("alpha", alpha, n_sublayers))


SCHEME = Scheme(
    name="scaled_shortcut",
    label="Scaled shortcut (attempt 1)",
    equation="x' = LN(a*x + F(x)), a = L",
    latex=r"x' = \mathrm{LN}\left(\alpha x + F(x)\right),\quad \alpha = L",
    source="Chen & Wei 2026, arXiv:2601.19895, Eq. (24)",
    rule=_spec,
    switches=no_switches,
    parameter_docs={"alpha": "shortcut scale: a number or an expression in L, the number of sub-layers"},
)
