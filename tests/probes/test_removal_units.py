"""What can be removed, how it is called, and what is refused."""

from __future__ import annotations

import pytest

from probes.families import describe_model
from probes.removal_units import RemovalError, joint_unit, removal_units
from tests.probes._tiny import tiny_model


@pytest.fixture(scope="module")
def layout():
    return describe_model(tiny_model("llama"))


def test_blocks(layout) -> None:
    units = removal_units(layout)
    assert [unit.name for unit in units] == ["block 0", "block 1", "block 2"]
    assert [unit.sublayers for unit in units] == [(0, 1), (2, 3), (4, 5)]
    assert units[1].modules == ("model.layers.1",)


def test_spans_are_half_open_and_start_everywhere(layout) -> None:
    units = removal_units(layout, "block", 2)
    assert [(unit.name, unit.start, unit.stop) for unit in units] == [("blocks [0, 2)", 0, 2), ("blocks [1, 3)", 1, 3)]
    assert units[1].modules == ("model.layers.1", "model.layers.2")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("sublayer", [f"block {b} {kind}" for b in range(3) for kind in ("attention", "ffn")]),
        ("attn", [f"block {b} attention" for b in range(3)]),
        ("ffn", [f"block {b} ffn" for b in range(3)]),
    ],
)
def test_sublayers(layout, kind: str, names: list[str]) -> None:
    assert [unit.name for unit in removal_units(layout, kind)] == names


def test_modules_of_a_sublayer_and_of_a_span_across_blocks(layout) -> None:
    assert removal_units(layout, "attn")[1].modules == ("model.layers.1.self_attn", "model.layers.1.input_layernorm")
    across = removal_units(layout, "sublayer", 3)[1]
    assert across.name == "sub-layers [1, 4)"
    assert across.modules == ("model.layers.0.mlp", "model.layers.0.post_attention_layernorm", "model.layers.1")


def test_spans_of_one_kind_skip_the_other(layout) -> None:
    assert removal_units(layout, "attn", 2)[0].sublayers == (0, 2)


def test_sets_that_are_no_runs_are_listed(layout) -> None:
    unit = joint_unit(layout, "block", [2, 0, 2])
    assert (unit.name, unit.sublayers) == ("blocks 0, 2", (0, 1, 4, 5))


def test_a_span_longer_than_the_model(layout) -> None:
    with pytest.raises(RemovalError, match="a span of 4 does not fit: the model has 3 blocks; use 1 to 3"):
        removal_units(layout, "block", 4)
    with pytest.raises(RemovalError, match="a span of 0 does not fit"):
        removal_units(layout, "block", 0)


def test_an_index_out_of_range(layout) -> None:
    with pytest.raises(RemovalError, match="there is no block 3: the model has 3, counted from 0 to 2"):
        joint_unit(layout, "block", [1, 3])
    with pytest.raises(RemovalError, match="no block to remove is named"):
        joint_unit(layout, "block", [])


def test_an_unknown_kind(layout) -> None:
    with pytest.raises(RemovalError, match="unknown unit 'head'; known: block, sublayer, attn, ffn"):
        removal_units(layout, "head")


@pytest.mark.parametrize("family", ["cohere", "gptj", "phi", "falcon", "stablelm-parallel"])
def test_a_norm_that_the_rest_of_the_block_reads_is_not_removed(family: str) -> None:
    layout = describe_model(tiny_model(family))
    shared = layout.sublayers[0].norms[0].module
    assert layout.sublayers[1].norms[0].module == shared
    attention, ffn = removal_units(layout, "attn")[0], removal_units(layout, "ffn")[0]
    assert shared in layout.sublayers[0].modules
    assert shared not in (*attention.modules, *ffn.modules, *layout.sublayers[1].modules)
    assert joint_unit(layout, "sublayer", [0, 1]).modules == (layout.blocks[0],)


def test_norms_of_its_own_go_with_a_parallel_sublayer() -> None:
    layout = describe_model(tiny_model("falcon-new"))
    assert [name.rpartition(".")[2] for name in removal_units(layout, "attn")[0].modules] == ["self_attention", "ln_attn"]
    assert [name.rpartition(".")[2] for name in removal_units(layout, "ffn")[0].modules] == ["mlp", "ln_mlp"]
