r"""Highway: a learned gate mixes branch and shortcut, elementwise.

.. math:: x' = T(x) \odot F(x) + (1 - T(x)) \odot x,\qquad T(x) = \sigma(W_T x + b_T)

The carry gate is C = 1 - T. b_T starts negative, so that the network first carries its input; Srivastava et al. 2015
suggest -1 or -3. Eq. (1) has no normalisation; ``norm=input`` adds one on the branch's input only, for a fair comparison
with Pre-LN.

Source: Srivastava et al. 2015, arXiv:1505.00387; Chen & Wei 2026, arXiv:2601.19895, Eq. (1).
"""

from keel_theory.parameters import choice, number
from keel_theory.spec import GateKind, NormKind, ParameterValue, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]

_NORM_IN = {"none": NormKind.NONE, "input": NormKind.RMS}


def _spec(
    sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, gate_bias: ParameterValue = -1.0, norm: str = "none"
) -> ResidualSpec:
    return ResidualSpec(
        norm_in=_NORM_IN[choice("norm", norm, _NORM_IN)],
        gate=GateKind.HIGHWAY,
        gate_bias=number("gate_bias", gate_bias),
    )


SCHEME = Scheme(
    name="highway",
    label="Highway",
    equation="x' = T(x)*F(x) + (1 - T(x))*x, T(x) = sigmoid(W x + bias)",
    latex=r"x' = T(x) \odot F(x) + (1 - T(x)) \odot x",
    source="Srivastava et al. 2015, arXiv:1505.00387; Chen & Wei 2026, arXiv:2601.19895, Eq. (1)",
    rule=_spec,
    switches=no_switches,
    parameter_docs={
        "gate_bias": "starting value of the gate's bias before the sigmoid; negative values carry the input at first",
        "norm": "'none' (Eq. 1) or 'input' for a normalisation of the branch's input",
    },
)
