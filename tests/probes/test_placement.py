"""A placement is held against the model: every name is one of it, and nothing of it is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from probes.errors import CheckpointError
from probes.placement import check_placement
from tests.probes._tiny import FAMILIES, N_BLOCKS, tiny_model


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.stem_norm = nn.LayerNorm(2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))


GOOD = {
    "all at once": {"": "cpu"},
    "part by part": {"stem": "cpu", "stem_norm": "cpu", "blocks": "cpu"},
    "one apart from the rest": {"": "cpu", "blocks.3": "disk"},
    "parameters": {"stem.weight": "cpu", "stem.bias": "cpu", "stem_norm": "cpu", "blocks": "cpu"},
}


@pytest.mark.parametrize("placement", GOOD.values(), ids=list(GOOD))
def test_names_of_the_model_that_cover_it_are_taken(placement: dict[str, object]) -> None:
    check_placement(placement, Nested())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nope", "'"),
        ("steam", "'stem', "),
        ("blocks.12", "'blocks."),
        ("block.3", "'blocks.3', "),
        ("Blocks", "'blocks', "),
        ("stem.", "'stem', "),
    ],
)
@pytest.mark.parametrize("rest", [{}, {"": "cpu"}], ids=["alone", "beside the whole"])
def test_a_name_that_is_not_there_is_refused_with_the_nearest_that_are(
    name: str, nearest: str, rest: dict[str, object]
) -> None:
    with pytest.raises(
        CheckpointError, match=rf"^the placement names '{name}', and Nested has no such module; nearest: {nearest}"
    ):
        check_placement({name: "cpu"} | rest, Nested())


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({}, r"no device to 28 parameter\(s\) of Nested, first 'stem.weight'; add 'stem', or '' for the whole model"),
        (
            {"stem": "cpu", "blocks": "cpu"},
            r"no device to 2 parameter\(s\) of Nested, first 'stem_norm.weight'; add 'stem_norm'",
        ),
        (
            {"stem": "cpu", "stem_norm": "cpu", "blocks.1": "cpu"},
            r"no device to 22 parameter\(s\) of Nested, first 'blocks.0.w",
        ),
    ],
    ids=["nothing", "a name that begins alike", "blocks"],
)
def test_what_is_left_out_is_refused(placement: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_placement(placement, Nested())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_children_of_every_family_are_a_placement(family: str) -> None:
    model = tiny_model(family, torch.float32)
    check_placement({name: "cpu" for name, _ in model.named_children()}, model)
    with pytest.raises(CheckpointError, match="has no such module; nearest: "):
        check_placement({"": "cpu", f"blocks.{N_BLOCKS}": "cpu"}, model)


def test_a_parameter_of_the_model_itself_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(CheckpointError, match="first 'scale'; add 'scale', or '' for the whole model"):
        check_placement({"0": "cpu"}, model)
