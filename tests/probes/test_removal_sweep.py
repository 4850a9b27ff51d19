"""One pass over the weights gives the losses of the naive loop."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from keel_theory.schemes import SCHEMES
from probes import stream_store
from probes.block_runner import BlockRunner
from probes.errors import OutputError
from probes.families import describe_model
from probes.model import Transformer
from probes.removal_sweep import removal_losses
from probes.removal_units import removal_units
from probes.text import TokenBatch
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._naive_removal import identity_in_place_of, next_token_batch, plain_losses
from tests.probes._tiny import FAMILIES, VOCAB, tiny_ids, tiny_model

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def sweep(model: nn.Module, removals: list[frozenset[int]], batch: TokenBatch, **options: object) -> Tensor:
    [losses] = removal_losses(BlockRunner(model, describe_model(model)), [batch], removals, **options)
    return losses


def units(model: nn.Module, kind: str, span: int = 1) -> list[frozenset[int]]:
    return [frozenset(unit.sublayers) for unit in removal_units(describe_model(model), kind, span)]


def assert_equals_naive_loop(model: nn.Module, removals: list[frozenset[int]], batch: TokenBatch, **options: object) -> None:
    losses = sweep(model, removals, batch, **options)
    torch.testing.assert_close(losses[0], plain_losses(model, batch), **EXACT)
    for removal, row in zip(removals, losses[1:], strict=True):
        with identity_in_place_of(model, removal):
            naive = plain_losses(model, batch)
        torch.testing.assert_close(row, naive, **EXACT)
    assert all(not torch.allclose(row, losses[0]) for row in losses[1:]), "a removal without effect shows nothing"


@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize("kind", ["block", "sublayer", "attn", "ffn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_naive_loop(family: str, kind: str, span: int) -> None:
    model = tiny_model(family)
    assert_equals_naive_loop(model, units(model, kind, span), next_token_batch(tiny_ids()))


@pytest.mark.parametrize(("kind", "span"), [("block", 1), ("sublayer", 1), ("sublayer", 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_the_naive_loop_in_every_scheme(scheme: str, kind: str, span: int) -> None:
    model = perturbed(Transformer(small_config(scheme)))
    assert_equals_naive_loop(model, units(model, kind, span), next_token_batch(random_ids()))


def test_shared_blocks_are_removed_one_by_one() -> None:
    model = perturbed(Transformer(small_config("keel", shared_blocks=True)))
    assert_equals_naive_loop(model, units(model, "sublayer"), next_token_batch(random_ids()))


def test_removals_need_not_be_runs_nor_sorted() -> None:
    model = tiny_model("gemma2")
    removals = [frozenset({5, 0}), frozenset({2, 3}), frozenset({0, 1, 4, 5}), frozenset({3})]
    assert_equals_naive_loop(model, removals, next_token_batch(tiny_ids()))


def test_removing_nothing_is_the_intact_model() -> None:
    model = tiny_model("llama")
    losses = sweep(model, [frozenset(), frozenset({0})], next_token_batch(tiny_ids()))
    assert torch.equal(losses[1], losses[0])


@pytest.mark.parametrize("tokens_per_call", [1, 24, 60])
def test_the_size_of_a_call_changes_nothing(tokens_per_call: int) -> None:
    model = tiny_model("gemma3")
    removals, batch = units(model, "sublayer"), next_token_batch(tiny_ids())
    losses = sweep(model, removals, batch, tokens_per_call=tokens_per_call)
    torch.testing.assert_close(losses, sweep(model, removals, batch), **EXACT)


def test_several_batches_are_carried_together() -> None:
    model = tiny_model("llama")
    runner, removals = BlockRunner(model, describe_model(model)), units(model, "block")
    batches = [next_token_batch(tiny_ids(2, 12)), next_token_batch(tiny_ids(1, 5))]
    together = removal_losses(runner, batches, removals)
    assert [tuple(losses.shape) for losses in together] == [(4, 22), (4, 4)]
    for batch, losses in zip(batches, together, strict=True):
        torch.testing.assert_close(losses, sweep(model, removals, batch), **EXACT)


@pytest.mark.parametrize(
    ("name", "window"), [("Gemma2", {"sliding_window": 2}), ("Qwen2", {"use_sliding_window": True, "sliding_window": 2})]
)
def test_alternating_attention_keeps_its_places_where_deletion_shifts_them(name: str, window: dict[str, object]) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=kinds,
        **window,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    batch = next_token_batch(tiny_ids(1, 12))
    removed = frozenset(removal_units(describe_model(model))[0].sublayers)
    losses = sweep(model, [removed], batch)[1]
    with identity_in_place_of(model, removed):
        torch.testing.assert_close(losses, plain_losses(model, batch), **EXACT)
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers = 3  # but layer_types still starts with block 0's
    assert float((plain_losses(model, batch) - losses).abs().max()) > 1e-2


def test_a_variant_of_nan_leaves_the_others_alone() -> None:
    model = tiny_model("llama")
    removals, batch = units(model, "block"), next_token_batch(tiny_ids())
    clean = sweep(model, removals, batch)
    block = model.model.layers[2]
    entry = BlockRunner(model, describe_model(model)).enter(batch.inputs)
    without_0 = model.model.layers[1](entry.stream_BTD, *entry.calls[1].filled(entry.stream_BTD)[0][1:], **_keywords(entry))

    def poisoned(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = [torch.allclose(stream, bad) for stream in args[0] for bad in without_0]
        bad = torch.tensor(rows).view(len(args[0]), -1).any(dim=1)
        return output.masked_fill(bad[:, None, None], float("nan"))

    handle = block.register_forward_hook(poisoned)
    losses = sweep(model, removals, batch)
    handle.remove()
    assert torch.isnan(losses[1]).all()
    torch.testing.assert_close(losses[[0, 2, 3]], clean[[0, 2, 3]], **EXACT)


def _keywords(entry: object) -> dict[str, object]:
    return entry.calls[1].filled(entry.stream_BTD)[1]


def test_streams_beyond_the_limit_go_to_disk_and_give_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama")
    removals, batch = units(model, "sublayer"), next_token_batch(tiny_ids())
    on_disk = sweep(model, removals, batch, max_memory=0, spill_folder=tmp_path)
    assert torch.equal(on_disk, sweep(model, removals, batch))
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_spill_is_said_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stream_store.os, "posix_fallocate", full)
    model = tiny_model("llama")
    ran: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(OutputError, match=r"take \S+e-05 GB and do not fit into .*No space left on device.*set TMPDIR"):
        sweep(model, units(model, "block"), next_token_batch(tiny_ids()), max_memory=0, spill_folder=tmp_path)
    assert ran == []
    assert list(tmp_path.iterdir()) == []
