r"""Peri-LN: a normalisation before and one after the branch, none on the shortcut.

.. math:: x' = x + N_{branch}(F(N_{in}(x)))

The layout of Gemma 2 and Gemma 3. Peri-LN also normalises the embedding and the last hidden state. These norms belong to the
model, not to a sub-layer: the toolkit's models have the final one and leave the embedding's out, as Gemma does.

Source: Kim et al. 2025, arXiv:2502.02732.
"""

from keel_theory.spec import NormKind, ResidualSpec, Scheme, SublayerKind, no_switches

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind) -> ResidualSpec:
    return ResidualSpec(norm_in=NormKind.RMS, norm_branch=NormKind.RMS)


SCHEME = Scheme(
    name="peri_ln",
    label="Peri-LN",
    equation="x' = x + LN(F(LN(x)))",
    latex=r"x' = x + \mathrm{LN}\left(F(\mathrm{LN}(x))\right)",
    source="Kim et al. 2025, arXiv:2502.02732; its norm of the embedding is left out, as in Gemma 2",
    rule=_spec,
    switches=no_switches,
)
