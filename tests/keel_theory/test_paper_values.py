"""Numbers that the papers fix, one table."""

from collections import Counter
from math import sqrt

import pytest

from keel_theory.schemes import get_scheme
from keel_theory.spec import GateKind, NormKind, ProfileKind

# scheme, parameters, sub-layers, field, value of every sub-layer
VALUES = [
    ("keel", {}, 4, "shortcut_scale", [1, 1, 4, 4]),
    ("keel", {}, 48, "shortcut_scale", [1, 1] + [48] * 46),  # 24 blocks: neither 24 nor 1/sqrt(48)
    ("keel", {}, 512, "shortcut_scale", [1, 1] + [512] * 510),
    ("keel", {"alpha": "3"}, 4, "shortcut_scale", [1, 1, 3, 3]),
    ("scaled_shortcut", {}, 4, "shortcut_scale", [4, 4, 4, 4]),
    ("scaled_shortcut_input_gain", {}, 4, "shortcut_scale", [4, 4, 4, 4]),
    ("scaled_shortcut_input_gain", {}, 4, "input_gain", [1, 1, 1, 1]),
    ("scaled_shortcut_normed_input_gain", {}, 4, "shortcut_scale", [4, 4, 4, 4]),
    ("scaled_shortcut_normed_input_gain", {}, 4, "input_gain", [1, 1, 1, 1]),
    ("deepnorm", {}, 16, "shortcut_scale", [2] * 16),
    ("deepnorm", {}, 16, "init_gain", [0.5] * 16),
    ("deepnorm", {"beta": "paper"}, 16, "init_gain", [0.5] * 16),
    ("deepnorm", {"beta": "deepnet"}, 4, "init_gain", [0.5] * 4),  # (8 * 2 blocks)^-1/4
    ("deepnorm", {"beta": "deepnet"}, 64, "init_gain", [0.25] * 64),  # (8 * 32 blocks)^-1/4
    ("deepnorm", {"beta": "L**-0.5"}, 4, "init_gain", [0.5] * 4),
    ("admin", {}, 4, "shortcut_scale", [1, sqrt(2), sqrt(3), 2]),
    ("admin", {"branch_variance": "3"}, 3, "shortcut_scale", [1, 2, sqrt(7)]),
    ("admin", {"branch_variance": 0}, 3, "shortcut_scale", [1, 1, 1]),
    ("layernorm_scaling", {}, 8, "input_scale", [1, 1, 1 / sqrt(2), 1 / sqrt(2), 1 / sqrt(3), 1 / sqrt(3), 0.5, 0.5]),
    ("highway", {}, 2, "gate_bias", [-1, -1]),
    ("highway", {"gate_bias": "-3"}, 2, "gate_bias", [-3, -3]),
    ("hybrid_norm", {}, 4, "qkv_norm", [1, 0, 1, 0]),
    ("hybrid_norm", {"variant": "star"}, 4, "qkv_norm", [1, 0, 1, 0]),
]


@pytest.mark.parametrize(("name", "parameters", "n_sublayers", "field", "expected"), VALUES)
def test_value_of_every_sublayer(name, parameters, n_sublayers, field, expected):
    specs = get_scheme(name).with_parameters(**parameters).specs(n_sublayers)
    assert [getattr(spec, field) for spec in specs] == pytest.approx(expected, rel=1e-15, abs=0)


# scheme, parameters, sub-layers, positions (0-based) of the norms on the branch's input, its output, and the sum
NORMS = [
    ("highway", {}, 4, [], [], []),
    ("highway", {"norm": "input"}, 4, [0, 1, 2, 3], [], []),
    ("post_ln", {}, 4, [], [], [0, 1, 2, 3]),
    ("deepnorm", {}, 4, [], [], [0, 1, 2, 3]),
    ("admin", {}, 4, [], [], [0, 1, 2, 3]),
    ("pre_ln", {}, 4, [0, 1, 2, 3], [], []),
    ("hybrid_norm", {}, 4, [], [], [0, 2]),
    ("hybrid_norm", {"variant": "star"}, 4, [0, 1], [], [2]),
    ("mix_ln", {}, 8, [2, 3, 4, 5, 6, 7], [], [0, 1]),
    ("mix_ln", {"ratio": "0.5"}, 8, [4, 5, 6, 7], [], [0, 1, 2, 3]),
    ("keel", {}, 4, [0, 1, 2, 3], [], [1, 2, 3]),  # 2N inner and 2N - 1 outer norms, 4N - 1 in all
    ("scaled_shortcut", {}, 4, [], [], [0, 1, 2, 3]),
    ("scaled_shortcut_input_gain", {}, 4, [], [], [0, 1, 2, 3]),
    ("scaled_shortcut_normed_input_gain", {}, 4, [0, 1, 2, 3], [], [0, 1, 2, 3]),
    ("peri_ln", {}, 4, [0, 1, 2, 3], [0, 1, 2, 3], []),
    ("branch_norm", {}, 4, [], [0, 1, 2, 3], []),
    ("layernorm_scaling", {}, 4, [0, 1, 2, 3], [], []),
]


@pytest.mark.parametrize(("name", "parameters", "n_sublayers", "inner", "branch", "outer"), NORMS)
def test_places_of_the_norms(name, parameters, n_sublayers, inner, branch, outer):
    specs = get_scheme(name).with_parameters(**parameters).specs(n_sublayers)
    places = [
        [i for i, spec in enumerate(specs) if getattr(spec, field) is not NormKind.NONE]
        for field in ("norm_in", "norm_branch", "norm_out")
    ]
    assert places == [inner, branch, outer]


@pytest.mark.parametrize(
    ("n_blocks", "ratio", "n_post_blocks"),
    [
        (12, 0.25, 3),
        (24, 0.25, 6),
        (6, 0.25, 1),  # 1.5 is rounded down
        (3, 0.25, 0),
        (100, 0.29, 29),  # 0.29 * 100 is 28.999999999999996 in floating point
        (10, 0.3, 3),
        (3, 1 / 3, 1),
        (7, 0.999, 6),
    ],
)
def test_mix_ln_blocks(n_blocks, ratio, n_post_blocks):
    specs = get_scheme("mix_ln").with_parameters(ratio=ratio).specs(2 * n_blocks)
    count = Counter(spec.norm_out for spec in specs)
    assert count[NormKind.RMS] == 2 * n_post_blocks
    assert all(spec.norm_out is NormKind.RMS for spec in specs[: 2 * n_post_blocks])


def test_admin_is_profiled_and_highway_is_gated_in_every_sublayer():
    assert {spec.profile for spec in get_scheme("admin").specs(6)} == {ProfileKind.ADMIN}
    assert {spec.gate for spec in get_scheme("highway").specs(6)} == {GateKind.HIGHWAY}
