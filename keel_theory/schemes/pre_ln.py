r"""Pre-LN: only the branch's input is normalised, the shortcut is the identity.

.. math:: x' = x + F(N_{in}(x))

A model of this scheme needs a final norm before its head; that norm belongs to the model, not to a sub-layer.

Source: Xiong et al. 2020, arXiv:2002.04745; Chen & Wei 2026, arXiv:2601.19895, Eq. (6).
"""

from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    return ResidualSpec(norm_in=NormKind.RMS)


SCHEME = Scheme(
    name="pre_ln",
    label="Pre-LN",
    equation="x' = x + F(LN(x))",
    latex=r"x' = x + F(\mathrm{LN}(x))",
    source="Xiong et al. 2020, arXiv:2002.04745; Chen & Wei 2026, arXiv:2601.19895, Eq. (6)",
    rule=_spec,
    switches=no_switches,
)
