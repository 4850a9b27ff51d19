"""A single block outside the model's loop gives what it gives inside it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import transformers

from keel_theory.schemes import SCHEMES
from probes.block_runner import BlockRunner
from probes.errors import UnsupportedModelError
from probes.families import describe_model
from probes.model import Transformer
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._tiny import FAMILIES, PARALLEL, VOCAB, tiny_ids, tiny_model, tolerance


def through_all_blocks(runner: BlockRunner, ids: torch.Tensor, n_copies: int = 1) -> torch.Tensor:
    """Last hidden state of n_copies copies of a batch, run as one batch of streams."""
    with torch.no_grad():
        entry = runner.enter(ids)
        stream = entry.stream_BTD.repeat(n_copies, 1, 1)
        for block in range(runner.layout.n_blocks):
            stream = runner.run(block, stream, entry.calls)
        return runner.tail(stream)


@pytest.mark.parametrize("n_copies", [1, 3])
@pytest.mark.parametrize("n_sequences", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_block_by_block_is_the_models_own_forward_pass(family: str, n_sequences: int, n_copies: int) -> None:
    model, ids = tiny_model(family), tiny_ids(n_sequences)
    runner = BlockRunner(model, describe_model(model))
    with torch.no_grad():
        own = runner.layout.head.backbone(ids)
    same = tolerance(family, 1e-10)
    torch.testing.assert_close(through_all_blocks(runner, ids, n_copies), own.repeat(n_copies, 1, 1), rtol=same, atol=same)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_models_run_block_by_block(scheme: str) -> None:
    model = perturbed(Transformer(small_config(scheme)))
    runner = BlockRunner(model, describe_model(model))
    torch.testing.assert_close(through_all_blocks(runner, random_ids(), 2), model.hidden(random_ids()).repeat(2, 1, 1))


@pytest.mark.parametrize("n_tokens", [2, 4])
def test_a_table_as_long_as_the_batch_is_not_taken_for_one(n_tokens: int) -> None:
    model = perturbed(Transformer(small_config()))  # its rotary table has the shape (T, ...), here T = B
    ids = random_ids(n_tokens, n_tokens)
    runner = BlockRunner(model, describe_model(model))
    torch.testing.assert_close(through_all_blocks(runner, ids, 3), model.hidden(ids).repeat(3, 1, 1))


def test_each_block_keeps_its_own_attention_pattern() -> None:
    runner = BlockRunner(model := tiny_model("gemma3"), describe_model(model))
    calls = runner.enter(tiny_ids()).calls
    sliding, _, full = (call.filled(torch.zeros(2, 12, 16, dtype=torch.float64))[1]["attention_mask"] for call in calls)
    assert sliding is not None
    assert full is None or not torch.equal(full, sliding)


def test_no_block_computes_and_no_hook_stays_while_recording() -> None:
    model = tiny_model("llama")
    layout = describe_model(model)
    called: list[str] = []
    for name in layout.blocks:
        for module in model.get_submodule(name).modules():
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    BlockRunner(model, layout).enter(tiny_ids())
    assert called == []
    assert not any("forward" in vars(module) for module in model.modules())
    model(tiny_ids())
    assert set(called) == set(layout.blocks)


def test_recording_needs_no_weight_of_any_block() -> None:
    model = tiny_model("qwen2")
    layout = describe_model(model)
    ids = tiny_ids()
    here = BlockRunner(model, layout).enter(ids)
    for name in layout.blocks:
        model.get_submodule(name).to("meta")
    there = BlockRunner(model, layout).enter(ids)
    torch.testing.assert_close(there.stream_BTD, here.stream_BTD)


def test_modules_are_announced_before_they_are_used() -> None:
    model = tiny_model("llama")
    layout = describe_model(model)
    announced: list[tuple[str, ...]] = []

    @contextmanager
    def resident(names: tuple[str, ...]):
        announced.append(names)
        yield

    BlockRunner(model, layout, resident=resident).enter(tiny_ids())
    assert announced == [("model.embed_tokens",)]


def test_forward_that_a_library_has_replaced_is_put_back() -> None:
    model = tiny_model("llama")
    block = model.model.layers[1]
    replaced = block.forward
    block.forward = replaced
    BlockRunner(model, describe_model(model)).enter(tiny_ids())
    assert vars(block)["forward"] is replaced


@pytest.mark.parametrize("family", FAMILIES)
def test_watched_branches_are_what_the_sum_adds(family: str) -> None:
    """Also where the model multiplies a branch, or adds to it in place, after its module has returned it."""
    model, ids = tiny_model(family), tiny_ids()
    runner = BlockRunner(model, layout := describe_model(model))
    with torch.no_grad():
        entry = runner.enter(ids)
        seen = runner.watch(0, entry.stream_BTD, entry.calls)
    streams = {0: entry.stream_BTD, runner.boundaries_of(0)[1]: seen.output} | seen.streams
    for start in {layout.sublayers[i].boundary_in for i in seen.branches}:
        together = [i for i in seen.branches if layout.sublayers[i].boundary_in == start]
        first, before = layout.sublayers[together[0]], streams[start].view_as(seen.output)
        update = sum(seen.branches[i].view_as(seen.output) for i in together)
        after = before + update if first.combine is None else first.combine(before, update)
        torch.testing.assert_close(streams[first.boundary_out].view_as(seen.output), after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in PARALLEL])
def test_watching_sees_the_stream_between_the_sublayers(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids()
    layout = describe_model(model)
    runner = BlockRunner(model, layout)
    with torch.no_grad():
        entry = runner.enter(ids)
        seen = runner.watch(0, entry.stream_BTD, entry.calls)
    assert set(seen.streams) == {1}
    assert set(seen.branches) == {0, 1}
    if layout.sublayers[0].combine is None:
        torch.testing.assert_close(seen.streams[1].view_as(entry.stream_BTD), entry.stream_BTD + seen.branches[0])
        torch.testing.assert_close(seen.output, seen.streams[1].view_as(seen.output) + seen.branches[1].view_as(seen.output))


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_blocks_that_are_functions_of_the_stream_pass_the_check(family: str) -> None:
    model = tiny_model(family)
    BlockRunner(model, describe_model(model)).check(tiny_ids())


def test_blocks_that_exchange_more_than_the_stream_are_refused() -> None:
    model = tiny_model("llama")
    own = model.model.forward

    def forward(*args: object, **kwargs: object) -> object:
        output = own(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + 1  # whatever a loop may do beside its blocks
        return output

    model.model.forward = forward
    with pytest.raises(UnsupportedModelError, match="cannot be run block by block: its last hidden state differs"):
        BlockRunner(model, describe_model(model)).check(tiny_ids())


def test_a_block_that_changes_the_streams_width_is_refused() -> None:
    model = tiny_model("llama")
    runner = BlockRunner(model, describe_model(model))
    entry = runner.enter(tiny_ids())
    model.model.layers[1].register_forward_hook(lambda _, __, output: output[..., :8])
    with pytest.raises(UnsupportedModelError, match=r"'model.layers.1' turns a stream of shape \(2, 12, 16\)"):
        runner.run(1, entry.stream_BTD, entry.calls)


def test_the_last_blocks_output_is_before_the_final_norm() -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    runner, ids = BlockRunner(model, describe_model(model)), tiny_ids()
    with torch.no_grad():
        hidden_states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        entry = runner.enter(ids)
        stream = entry.stream_BTD
        torch.testing.assert_close(stream, hidden_states[0])
        for block in range(4):
            stream = runner.run(block, stream, entry.calls)
            if block < 3:
                torch.testing.assert_close(stream, hidden_states[block + 1])
    assert not torch.allclose(stream, hidden_states[-1])
    torch.testing.assert_close(runner.tail(stream), hidden_states[-1])
