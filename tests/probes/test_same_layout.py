"""Families that share a description with another one: every probe once, where the others are held in each of its variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from probes.block_runner import BlockRunner
from probes.checkpoint import load_checkpoint
from probes.families import describe_model
from probes.gradient_norms import measure_gradient_norms
from probes.norms import Status
from probes.pruning import save_pruned
from probes.removal_sweep import removal_losses
from probes.removal_units import joint_unit, removal_units
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from tests.probes._naive_removal import identity_in_place_of, next_token_batch, plain_losses
from tests.probes._reference import plain_autograd, plain_shortcut
from tests.probes._tiny import SAME_LAYOUT, tiny_ids, tiny_model, tolerance
from tests.probes.streaming._streamed import assert_same_norms, predicting, two_batches
from tests.probes.test_pruning import as_checkpoint

pytestmark = pytest.mark.parametrize("family", SAME_LAYOUT)


def test_gradients_agree_with_plain_autograd(family: str) -> None:
    model = tiny_model(family)
    layout = describe_model(model)
    batch = predicting(tiny_ids(), layout)
    result = measure_gradient_norms(model, [batch])
    loss, streams, parameters = plain_autograd(model, layout, batch)
    assert result.loss.value == pytest.approx(loss, rel=1e-10)
    assert [b.stream_grad.value for b in result.boundaries] == pytest.approx(streams, rel=1e-10)
    measured = {p.name: p.grad_norm.value for p in result.parameters if p.grad_norm.status is not Status.NONE}
    assert measured == pytest.approx(parameters, rel=1e-10)
    shortcut = plain_shortcut(model, layout, batch)
    assert [b.shortcut_grad.value for b in result.boundaries[: len(shortcut)]] == pytest.approx(shortcut, rel=1e-10)


@pytest.mark.parametrize("kind", ["block", "sublayer"])
def test_removal_equals_the_naive_loop(family: str, kind: str) -> None:
    model, batch = tiny_model(family), next_token_batch(tiny_ids())
    layout = describe_model(model)
    removals = [frozenset(unit.sublayers) for unit in removal_units(layout, kind)]
    [losses] = removal_losses(BlockRunner(model, layout), [batch], removals)
    same = tolerance(family, 1e-9)
    torch.testing.assert_close(losses[0], plain_losses(model, batch), rtol=same, atol=same)
    for removal, row in zip(removals, losses[1:], strict=True):
        with identity_in_place_of(model, removal):
            torch.testing.assert_close(row, plain_losses(model, batch), rtol=same, atol=same)
        assert not torch.allclose(row, losses[0])


def test_a_streamed_checkpoint_gives_the_numbers_of_the_loaded_one(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path, max_shard_size="12KB")
    checkpoint = load_checkpoint(tmp_path)
    assert [w for w in checkpoint.warnings if "tokenizer" not in w] == []
    batches = two_batches(checkpoint.layout)
    expected = measure_gradient_norms(checkpoint.model, batches, layout=checkpoint.layout)
    with open_streamed(tmp_path) as streamed:
        assert_same_norms(measure_streamed_gradient_norms(streamed, batches), expected, tolerance(family, 1e-9))


@pytest.mark.parametrize("blocks", [[0], [1]], ids=str)
def test_a_saved_pruned_model_gives_the_logits_of_removal(family: str, blocks: list[int], tmp_path: Path) -> None:
    model, ids = tiny_model(family), tiny_ids()
    unit = joint_unit(describe_model(model), "block", blocks)
    save_pruned(as_checkpoint(model), unit, tmp_path / "pruned")
    again = load_checkpoint(tmp_path / "pruned").model
    with torch.no_grad(), identity_in_place_of(model, unit.sublayers):
        torch.testing.assert_close(again(ids).logits, model(ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)
