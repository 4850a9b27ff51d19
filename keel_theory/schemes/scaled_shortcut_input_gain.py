r"""Scaled shortcut with a learned gain on the branch's input: Keel's second attempt.

.. math:: x' = N_{out}(\alpha\,x + F(\beta \odot x)),\qquad \alpha = L

β is a learned vector of the model's width, started at one. L is the number of sub-layers. The equation has no rule for the
first block.

Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (25).
"""

from keel_theory.depth_expression import DepthRule
from keel_theory.parameters import positive_at_depth
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, alpha: DepthRule = "L") -> ResidualSpec:
    return ResidualSpec(
        norm_out=NormKind.RMS,
        shortcut_scale=positive_at_depth("alpha", alpha, n_sublayers),
        input_gain=True,
    )


SCHEME = Scheme(
    name="scaled_shortcut_input_gain",
    label="Scaled shortcut, input gain (attempt 2)",
    equation="x' = LN(a*x + F(b*x)), a = L, b a learned vector started at 1",
    latex=r"x' = \mathrm{LN}\left(\alpha x + F(\beta \odot x)\right),\quad \alpha = L",
    source="Chen & Wei 2026, arXiv:2601.19895, Eq. (25)",
    rule=_spec,
    switches=no_switches,
    parameter_docs={"alpha": "shortcut scale: a number or an expression in L, the number of sub-layers"},
)
