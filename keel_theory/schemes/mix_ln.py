r"""Mix-LN: Post-LN in the first blocks, Pre-LN in the rest.

.. math:: x' = N_{out}(x + F(x))\ \text{in the first}\ \lfloor r M \rfloor\ \text{of}\ M\ \text{blocks},\qquad
    x' = x + F(N_{in}(x))\ \text{after them}

A number of blocks that is not whole is rounded down, as in the definition (the first ⌊rM⌋ layers are Post-LN, the other
⌈(1 - r)M⌉ Pre-LN): at r = 0.25, a model of 6 blocks has one Post-LN block. r = 0 is Pre-LN, r = 1 is Post-LN.

Source: Li, Yin & Liu 2024, arXiv:2412.13795 (r = 0.25); sketched in Chen & Wei 2026, arXiv:2601.19895.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

from keel_theory.parameters import number
from keel_theory.spec import NormKind, ParameterValue, ResidualSpec, Scheme, SublayerKind

__all__ = ["SCHEME"]


def _spec(sublayer_index: int, n_sublayers: int, kind: SublayerKind, *, ratio: ParameterValue = 0.25) -> ResidualSpec:
    if sublayer_index // 2 < _n_post_blocks(n_sublayers, ratio):
        return ResidualSpec(norm_out=NormKind.RMS)
    return ResidualSpec(norm_in=NormKind.RMS)


def _n_post_blocks(n_sublayers: int, ratio: ParameterValue) -> int:
    """In exact arithmetic, with the next float above the ratio: 0.29 * 100 is 28.999999999999996 in floats and means 29."""
    n_blocks = (n_sublayers + 1) // 2
    above = Fraction(math.nextafter(number("ratio", ratio, low=0.0, high=1.0), 2.0))
    return min(math.floor(above * n_blocks), n_blocks)


def _switches(n_sublayers: int, parameters: Mapping[str, ParameterValue]) -> tuple[int, ...]:
    return (2 * _n_post_blocks(n_sublayers, parameters["ratio"]),)


SCHEME = Scheme(
    name="mix_ln",
    label="Mix-LN",
    equation="first ratio of the blocks: x' = LN(x + F(x)); the rest: x' = x + F(LN(x))",
    latex=r"x' = \mathrm{LN}(x + F(x))\ \text{below},\quad x' = x + F(\mathrm{LN}(x))\ \text{above}",
    source="Li, Yin & Liu 2024, arXiv:2412.13795",
    rule=_spec,
    switches=_switches,
    parameter_docs={"ratio": "fraction of the blocks, from the first on, that are Post-LN; rounded down to whole blocks"},
)
