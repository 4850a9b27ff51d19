r"""Branch norm: only the branch's output is normalised, before the sum.

.. math:: x' = x + N_{branch}(F(x))

The layout of OLMo 2, which normalises queries and keys besides; that is a choice of its attention and not part of the scheme.

Source: OLMo Team 2025, arXiv:2501.00656.
"""

from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    return ResidualSpec(norm_branch=NormKind.RMS)


SCHEME = Scheme(
    name="branch_norm",
    label="Branch norm",
    equation="x' = x + LN(F(x))",
    latex=r"x' = x + \mathrm{LN}(F(x))",
    source="OLMo Team 2025, arXiv:2501.00656",
    rule=_spec,
    switches=no_switches,
)
