r"""Keel: Post-LN with a scaled shortcut and a normalised branch input.

.. math:: x' = N_{out}(\alpha\,x + F(N_{in}(x))),\qquad \alpha = L

L is the number of **sub-layers**, attention and FFN counted separately (the paper's footnote 1): a model of 256 blocks has
L = 512. The first block differs: its attention has no output norm and α = 1 (so it is a Pre-LN sub-layer), its FFN keeps
the output norm but has α = 1. From the embedding on that adds a factor :math:`1/\sqrt{v_0 + 2q}` to the
product, v_0 the variance of the embedding: 1/√3 for :math:`v_0 = q = 1`, about 3.5 at the paper's initialisation (v_0 = 4e-4, q
about 0.04).

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (8) and (28), implementation rules of section 4.
"""

from collections.abc import Mapping

from keel_theory.depth_expression import DepthRule
from keel_theory.parameters import positive_at_depth
from keel_theory.spec import NormKind, ParameterValue, ResidualSpec, Scheme, SublayerKind

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, alpha: DepthRule = "L") -> ResidualSpec:
    return ResidualSpec(
        norm_in=NormKind.RMS,
        norm_out=NormKind.NONE if sublayer_index == 0 else NormKind.RMS,
        shortcut_scale=1.0 if sublayer_index < 2 else positive_at_depth("alpha", alpha, n_sublayers),
    )


def _switches(n_sublayers: int, parameters: Mapping[str, ParameterValue]) -> tuple[int, ...]:
    return 1, 2  # the first attention and the first FFN are each their own case


SCHEME = Scheme(
    name="keel",
    label="Keel",
    equation="x' = LN(a*x + F(LN(x))), a = L; first attention: no output LN, a = 1; first FFN: a = 1",
    latex=r"x' = \mathrm{LN}\left(\alpha x + F(\mathrm{LN}(x))\right)",
    source="Chen & Wei 2026, arXiv:2601.19895, Eqs. (8), (28)",
    rule=_spec,
    switches=_switches,
    parameter_docs={"alpha": "shortcut scale: a number or an expression in L, the number of sub-layers"},
)
