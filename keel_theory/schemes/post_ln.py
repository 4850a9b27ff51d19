r"""Post-LN: the normalisation stands on the shortcut, after the sum.

.. math:: x' = N_{out}(x + F(x))

The layout of the original Transformer (Vaswani et al. 2017, arXiv:1706.03762).

Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (3).
"""

from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    return ResidualSpec(norm_out=NormKind.RMS)


SCHEME = Scheme(
    name="post_ln",
    label="Post-LN",
    equation="x' = LN(x + F(x))",
    latex=r"x' = \mathrm{LN}\left(x + F(x)\right)",
    source="Vaswani et al. 2017, arXiv:1706.03762; Chen & Wei 2026, arXiv:2601.19895, Eq. (3)",
    rule=_spec,
    switches=no_switches,
)
