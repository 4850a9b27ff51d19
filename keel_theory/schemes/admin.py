r"""Admin: Post-LN whose shortcut scale is measured on data before training, then learned.

.. math:: x_i = N_{out}(\omega_i \odot x_{i-1} + F_i(x_{i-1}))

ω_i is a learnable vector of the model's width with one starting value per sub-layer, found in one forward pass at
initialisation, first sub-layer to last:

.. math:: \omega_1 = 1,\qquad \omega_{i+1}^2 = \mathrm{Var}[\omega_i x_{i-1}] + \mathrm{Var}[F_i(x_{i-1})]

with the variance over all entries of the tensor. Since x is normalised, Var[ω_i x_{i-1}] = ω_i² from the second sub-layer
on, so ω_i² is Var[x_0] plus the variances of all branches before i. The spec carries the value this gives for Var[x_0] = 1
and one variance q for every branch, :math:`\omega_i = \sqrt{1 + (i - 1) q}` (i from 1); profiling replaces it.

The package admin-torch skips the profiling and gives every sub-layer :math:`\omega^2 = (L + 1)/\ln(L + 1) - 1`.

Source: Liu et al. 2020, arXiv:2004.08249; the recursion as in the authors' code, LiyuanLucasLiu/Transformer-Clinic,
fairseq/fairseq/modules/transformer_layer.py (``init_type = adaptive-profiling``); microsoft/admin-torch,
admin_torch/admin.py (``calculate_init``).
Status: exact recursion; the closed form assumes unit input variance and equal branch variances.
"""

import math

from keel_theory.parameters import number
from keel_theory.spec import NormKind, ParameterValue, ProfileKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, branch_variance: ParameterValue = 1.0) -> ResidualSpec:
    variance = number("branch_variance", branch_variance, low=0.0, high=1e30)
    return ResidualSpec(
        norm_out=NormKind.RMS,
        shortcut_scale=math.sqrt(1.0 + sublayer_index * variance),
        profile=ProfileKind.ADMIN,
    )


SCHEME = Scheme(
    name="admin",
    label="Admin",
    equation="x' = LN(w*x + F(x)), w_i = sqrt(Var[x_0] + sum of Var[F_j] over the sub-layers before i), then learned",
    latex=r"x' = \mathrm{LN}\left(\omega \odot x + F(x)\right),\quad \omega_i^2 = 1 + \sum_{j<i}\mathrm{Var}[F_j]",
    source="Liu et al. 2020, arXiv:2004.08249",
    rule=_spec,
    switches=no_switches,
    varying=frozenset({"shortcut_scale"}),
    parameter_docs={"branch_variance": "Var[F(x)] of every branch, assumed for the starting value until it is profiled"},
)
