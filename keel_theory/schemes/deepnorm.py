r"""DeepNorm: Post-LN with a scaled shortcut and smaller initial branch weights.

.. math:: x' = N_{out}(\alpha\,x + F(x)),\qquad \alpha = L^{1/4}

L is the number of sub-layers. β multiplies the initial standard deviation of the value, output and FFN matrices; query and
key matrices keep theirs. Two values of β are published for a decoder of M blocks, L = 2M:

* ``paper``: :math:`\beta = L^{-1/4}`, as Chen & Wei 2026, arXiv:2601.19895, Eq. (5) states it;
* ``deepnet``: :math:`\beta = (8M)^{-1/4} = (4L)^{-1/4}`, from DeepNet itself (Wang et al. 2022, arXiv:2203.00555).

Both sources agree on :math:`\alpha = (2M)^{1/4} = L^{1/4}`. DeepNet applies β to Xavier initialisation; here it is a factor
on whatever standard deviation the model starts with.
"""

from keel_theory.depth_expression import DepthRule
from keel_theory.parameters import positive_at_depth
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SchemeError, SublayerKind, no_switches

__all__ = ["SCHEME"]

_PUBLISHED_BETA = {"paper": "L**-0.25", "deepnet": "(4*L)**-0.25"}


def _spec(
    sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, alpha: DepthRule = "L**0.25", beta: DepthRule = "paper"
) -> ResidualSpec:
    return ResidualSpec(
        norm_out=NormKind.RMS,
        shortcut_scale=positive_at_depth("alpha", alpha, n_sublayers),
        init_gain=positive_at_depth("beta", _beta_rule(beta), n_sublayers),
    )


def _beta_rule(beta: DepthRule) -> DepthRule:
    """The expression behind a published name; numbers and expressions pass."""
    if isinstance(beta, str) and beta != "L" and beta.isidentifier() and beta not in _PUBLISHED_BETA:
        raise SchemeError(f"beta must be one of {', '.join(_PUBLISHED_BETA)}, a number or an expression in L, got '{beta}'")
    return _PUBLISHED_BETA.get(beta, beta) if isinstance(beta, str) else beta


SCHEME = Scheme(
    name="deepnorm",
    label="DeepNorm",
    equation="x' = LN(a*x + F(x)), a = L**0.25; value, output and FFN matrices start b times smaller",
    latex=r"x' = \mathrm{LN}\left(\alpha x + F(x)\right),\quad \alpha = L^{1/4}",
    source="Wang et al. 2022, arXiv:2203.00555; Chen & Wei 2026, arXiv:2601.19895, Eq. (5)",
    rule=_spec,
    switches=no_switches,
    parameter_docs={
        "alpha": "shortcut scale: a number or an expression in L, the number of sub-layers",
        "beta": "factor on the initial value, output and FFN weights: 'paper' = L**-0.25 (Eq. 5), 'deepnet' = (4*L)**-0.25 "
        "(arXiv:2203.00555), a number or an expression in L",
    },
)
