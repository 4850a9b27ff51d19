"""Experts that are sent no token are named, in every family with experts, from memory and from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from probes.families import describe_model
from probes.gradient_norms import measure_gradient_norms
from probes.gradient_result import GradientNorms
from probes.layout import ResidualLayout
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from tests.probes._tiny import EXPERT_FAMILIES, SAME_EXPERTS, tiny_ids, tiny_model
from tests.probes.streaming._streamed import predicting

N_EXPERTS = 4


def one_chosen(family: str) -> nn.Module:
    return tiny_model(family, num_experts_per_tok=1)


def all_chosen(family: str) -> nn.Module:
    groups = {"topk_group": 2} if family == "deepseek_v3" else {}
    return tiny_model(family, num_experts_per_tok=N_EXPERTS, **groups)


def routers(model: nn.Module, layout: ResidualLayout) -> list[nn.Module]:
    """The routers, one per sub-layer with experts."""
    beside = [model.get_submodule(s.experts.rpartition(".")[0]) for s in layout.sublayers if s.experts is not None]
    return [getattr(ffn, "gate", None) or ffn.router for ffn in beside]


@torch.no_grad()
def send_to(model: nn.Module, layout: ResidualLayout, expert_of_token: dict[int, int]) -> None:
    """Route by token: one coordinate of the stream is held large, with a sign that the token decides.

    Tokens that are not named, or are sent to expert 0, have it positive; the others are sent to the one expert they name.
    """
    model.get_input_embeddings().weight[:, 0] = 1e4
    for token in (token for token, expert in expert_of_token.items() if expert):
        model.get_input_embeddings().weight[token, 0] = -1e4
    for sublayer in layout.sublayers:
        for site in sublayer.norms:
            model.get_submodule(site.module).weight[0] = 1.0
    for router in routers(model, layout):
        router.weight.zero_()
        router.weight[:, 0] = -50.0
        router.weight[0, 0] = 50.0
        for expert in set(expert_of_token.values()) - {0}:
            router.weight[1:, 0] = -20.0
            router.weight[expert, 0] = -80.0


def measured(model: nn.Module, ids: Tensor) -> GradientNorms:
    return measure_gradient_norms(model, [ids])


def assert_idle(result: GradientNorms, layout: ResidualLayout, idle: tuple[int, ...]) -> None:
    names = {name for sublayer in layout.sublayers for name in sublayer.expert_parameters}
    assert names
    assert dict(result.idle_experts) == (dict.fromkeys(sorted(names), idle) if idle else {})
    said = [sentence for sentence in result.verdict() if "without tokens" in sentence]
    assert all(sentence.endswith(f": {', '.join(map(str, idle))}.") for sentence in said)
    assert len(said) == (len({s.experts for s in layout.sublayers} - {None}) if idle else 0)


@pytest.mark.parametrize("family", [*EXPERT_FAMILIES, *SAME_EXPERTS])
def test_every_parameter_of_the_experts_is_known_by_its_first_dimension(family: str) -> None:
    model = tiny_model(family)
    layout = describe_model(model)
    known = [name for sublayer in layout.sublayers for name in sublayer.expert_parameters]
    assert sorted(known) == sorted(name for name, _ in model.named_parameters() if ".experts." in name)
    assert {len(model.get_parameter(name)) for name in known} == {N_EXPERTS}
    assert all(s.expert_parameters == () for s in layout.sublayers if s.experts is None)


@pytest.mark.parametrize("family", [*EXPERT_FAMILIES, *SAME_EXPERTS])
def test_experts_without_tokens_are_those_without_a_gradient(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids(1, 3)
    result = measured(model, ids)
    model(ids).logits.square().sum().backward()
    for sublayer in describe_model(model).sublayers:
        gradients = [model.get_parameter(name).grad.flatten(1) for name in sublayer.expert_parameters]
        for name in sublayer.expert_parameters:
            silent = (~torch.cat(gradients, dim=1).any(dim=1)).nonzero().squeeze(1)
            assert result.idle_experts.get(name, ()) == tuple(silent.tolist())


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_all_tokens_sent_to_one_expert_leave_the_others_without(family: str) -> None:
    model = one_chosen(family)
    layout = describe_model(model)
    send_to(model, layout, {})
    result = measured(model, tiny_ids())
    assert_idle(result, layout, (1, 2, 3))
    model(tiny_ids()).logits.square().sum().backward()
    for name in result.idle_experts:  # the gradient agrees
        assert [bool(of_expert.any()) for of_expert in model.get_parameter(name).grad] == [True, False, False, False]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_that_all_have_tokens_are_not_named(family: str) -> None:
    model = all_chosen(family)
    assert_idle(measured(model, tiny_ids()), describe_model(model), ())


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_token_that_predicts_nothing_is_a_token(family: str) -> None:
    """The last token's own FFN in the last block has no share in the loss, but its expert was sent a token."""
    model = one_chosen(family)
    layout = describe_model(model)
    send_to(model, layout, {5: 2})
    ids = tiny_ids()
    ids[ids == 5] = 6
    assert_idle(measured(model, ids), layout, (1, 2, 3))
    ids[0, -1] = 5
    assert_idle(measured(model, ids), layout, (1, 3))


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_idle_in_one_batch_is_not_idle(family: str) -> None:
    model = one_chosen(family)
    layout = describe_model(model)
    send_to(model, layout, {5: 2})
    ids = tiny_ids()
    ids[ids == 5] = 6
    others = ids.clone()
    others[1, 3] = 5
    assert_idle(measure_gradient_norms(model, [ids, others]), layout, (1, 3))


def test_a_gradient_that_vanishes_does_not_make_experts_idle() -> None:
    model = all_chosen("mixtral")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = measured(model, tiny_ids())
    assert result.boundaries[0].stream_grad.value == 0
    assert_idle(result, describe_model(model), ())


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_read_from_disk_are_named_as_well(family: str, tmp_path: Path) -> None:
    model = one_chosen(family)
    layout = describe_model(model)
    send_to(model, layout, {5: 2})
    ids = tiny_ids()
    ids[ids == 5] = 6
    ids[0, -1] = 5
    model.save_pretrained(tmp_path)
    with open_streamed(tmp_path) as streamed:
        assert_idle(measure_streamed_gradient_norms(streamed, [predicting(ids, layout)]), layout, (1, 3))
