"""The cheap numbers beside removal, each against an independent way to the same number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from keel_theory.schemes import SCHEMES
from probes.block_runner import BlockRunner
from probes.families import describe_model
from probes.layout import ResidualLayout, Side, Tap
from probes.model import Transformer
from probes.removal_estimates import ESTIMATES, ForwardProxies, RemovalEstimates, estimate_removals
from probes.removal_sweep import removal_losses
from probes.removal_units import joint_unit, removal_units
from probes.taps import input_of, stream_of
from probes.text import IGNORED, TokenBatch
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._naive_removal import next_token_batch
from tests.probes._tiny import FAMILIES, tiny_ids, tiny_model, tolerance


def streams_of(model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Stream at every boundary, branch of every sub-layer, and the mean loss, with one graph over the whole model."""
    boundaries: dict[int, Tensor] = {}
    branches: dict[int, Tensor] = {}
    handles = [_keep(model, b.tap, boundaries, i) for i, b in enumerate(layout.boundaries)]
    handles += [_keep(model, s.branch, branches, i, Tensor.clone) for i, s in enumerate(layout.sublayers)]  # before falcon's +=
    hidden = layout.head.backbone(batch.inputs)
    logits = layout.head.logits(hidden.flatten(0, 1))
    for handle in handles:
        handle.remove()
    loss = nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    n_boundaries = layout.sublayers[-1].boundary_out + 1
    return [boundaries[i] for i in range(n_boundaries)], [branches[i] for i in range(len(branches))], loss


def _keep(
    model: nn.Module, tap: Tap, into: dict[int, Tensor], index: int, seen: Callable[[Tensor], Tensor] = lambda t: t
) -> object:
    module = model.get_submodule(tap.module)
    if tap.side is Side.INPUT:
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: into.__setitem__(index, input_of(args, kwargs)), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, __, output: into.__setitem__(index, seen(stream_of(output))))


def estimates(model: nn.Module, kind: str, *batches: TokenBatch, span: int = 1) -> RemovalEstimates:
    layout = describe_model(model)
    return estimate_removals(BlockRunner(model, layout), batches, removal_units(layout, kind, span))


def assert_taylor_is_the_gradient_times_the_update(model: nn.Module, batch: TokenBatch) -> None:
    layout = describe_model(model)
    streams, branches, loss = streams_of(model, layout, batch)
    gradients = torch.autograd.grad(loss, streams)
    streams, branches = ([tensor.detach() for tensor in tensors] for tensors in (streams, branches))
    blocks, sublayers = [], []
    for block in range(layout.n_blocks):
        inside = [s for s in layout.sublayers if s.block == block]
        before, after = inside[0].boundary_in, inside[-1].boundary_out
        update = streams[after].flatten() - streams[before].flatten()
        blocks.append(-float(gradients[after].flatten() @ update))
    for i, sublayer in enumerate(layout.sublayers):
        difference = streams[sublayer.boundary_out].flatten() - streams[sublayer.boundary_in].flatten()
        update = sublayer.added(branches[i]).flatten() if sublayer.combine is None else difference
        sublayers.append(-float(gradients[sublayer.boundary_out].flatten() @ update))
    assert estimates(model, "block", batch).taylor == pytest.approx(blocks, rel=1e-8, abs=1e-10)
    assert estimates(model, "sublayer", batch).taylor == pytest.approx(sublayers, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_taylor_is_the_gradient_times_the_update(family: str) -> None:
    assert_taylor_is_the_gradient_times_the_update(tiny_model(family), next_token_batch(tiny_ids()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_taylor_in_every_scheme(scheme: str) -> None:
    model = perturbed(Transformer(small_config(scheme)))
    assert_taylor_is_the_gradient_times_the_update(model, next_token_batch(random_ids()))


def test_taylor_tends_to_the_exact_difference_as_the_branch_shrinks() -> None:
    errors = []
    for size in (1e-2, 1e-3, 1e-4):
        model, batch = perturbed(Transformer(small_config("pre_ln"))), next_token_batch(random_ids())
        with torch.no_grad():
            model.blocks[1].ffn.branch.function.down.weight.mul_(size)
        layout = describe_model(model)
        runner = BlockRunner(model, layout)
        unit = joint_unit(layout, "sublayer", [3])
        [losses] = removal_losses(runner, [batch], [frozenset(unit.sublayers)])
        exact = float((losses[1] - losses[0]).mean())
        errors.append(abs(estimate_removals(runner, [batch], [unit]).taylor[0] - exact))
    assert errors[1] / errors[0] == pytest.approx(1e-2, rel=0.3)  # the rest is of second order in the branch
    assert errors[2] / errors[1] == pytest.approx(1e-2, rel=0.05)


def test_proxies_are_their_definitions() -> None:
    model, batch = tiny_model("gemma2"), next_token_batch(tiny_ids())
    layout = describe_model(model)
    streams = [stream.detach() for stream in streams_of(model, layout, batch)[0]]
    measured = estimates(model, "block", batch, span=2)
    for start, (influence, angle, ratio) in enumerate(
        zip(measured.block_influence, measured.angular_distance, measured.relative_contribution, strict=True)
    ):
        before, after = streams[2 * start].detach(), streams[2 * start + 4].detach()
        cosine = nn.functional.cosine_similarity(before, after, dim=-1)
        assert influence == pytest.approx(1 - float(cosine.mean()), rel=1e-9)
        assert angle == pytest.approx(float(cosine[:, -1].arccos().mean()) / math.pi, rel=1e-9)
        assert ratio == pytest.approx(float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean()), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "span"), [("block", 1), ("block", 2), ("sublayer", 1), ("sublayer", 2), ("attn", 2), ("ffn", 1)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_proxies_gathered_on_the_way_are_those_of_the_whole_pass(family: str, kind: str, span: int) -> None:
    model, batches = tiny_model(family), [next_token_batch(tiny_ids()), next_token_batch(tiny_ids(1, 5))]
    layout = describe_model(model)
    runner, units = BlockRunner(model, layout), removal_units(layout, kind, span)
    proxies = ForwardProxies(runner, batches, units)
    removal_losses(runner, batches, [frozenset(unit.sublayers) for unit in units], watcher=proxies)
    expected = estimate_removals(runner, batches, units)
    assert proxies.estimates.taylor == ()
    for name in ESTIMATES[1:]:
        same = pytest.approx(getattr(expected, name), rel=tolerance(family, 1e-9), abs=1e-12)
        assert getattr(proxies.estimates, name) == same
    assert not any(proxies._kept)  # nothing is held for units that have ended


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "bert"])
@pytest.mark.parametrize(("kind", "span"), [("block", 2), ("sublayer", 2)])
def test_batches_carried_together_and_streams_on_disk_change_nothing(family: str, kind: str, span: int, tmp_path: Path) -> None:
    model, batches = tiny_model(family), [next_token_batch(tiny_ids()), next_token_batch(tiny_ids(1, 5))]
    layout = describe_model(model)
    runner, units = BlockRunner(model, layout), removal_units(layout, kind, span)
    steps: list[tuple[int, int]] = []
    together = estimate_removals(
        runner, batches, units, together=True, max_memory=0, spill_folder=tmp_path, on_step=lambda *step: steps.append(step)
    )
    one_by_one = estimate_removals(runner, batches, units)
    for name in ESTIMATES:
        assert getattr(together, name) == pytest.approx(getattr(one_by_one, name), rel=1e-9, abs=1e-12)
    assert steps == [(i, 2 * layout.n_blocks) for i in range(1, 2 * layout.n_blocks + 1)]
    assert list(tmp_path.iterdir()) == []


def test_proxies_of_one_branch_of_a_parallel_block() -> None:
    model, batch = tiny_model("gpt_neox"), next_token_batch(tiny_ids())
    layout = describe_model(model)
    streams, branches = ([t.detach() for t in tensors] for tensors in streams_of(model, layout, batch)[:2])
    measured = estimates(model, "ffn", batch)
    expected = [float((branches[2 * b + 1].norm(dim=-1) / streams[b].norm(dim=-1)).mean()) for b in range(layout.n_blocks)]
    assert measured.relative_contribution == pytest.approx(expected, rel=1e-9)


def test_scattered_units_add_up_their_pieces() -> None:
    model, batch = tiny_model("llama"), next_token_batch(tiny_ids())
    layout = describe_model(model)
    runner = BlockRunner(model, layout)
    single = estimate_removals(runner, [batch], removal_units(layout, "sublayer"))
    joint = estimate_removals(runner, [batch], [joint_unit(layout, "sublayer", [0, 3])])
    assert joint.taylor[0] == pytest.approx(single.taylor[0] + single.taylor[3], rel=1e-9)


def test_batches_are_weighted_by_what_they_hold() -> None:
    model = tiny_model("llama")
    long, short = next_token_batch(tiny_ids(2, 12)), next_token_batch(tiny_ids(1, 5))
    both, one, two = (estimates(model, "block", *batches) for batches in ([long, short], [long], [short]))
    for name, weights in (("taylor", (22, 4)), ("block_influence", (24, 5)), ("angular_distance", (2, 1))):
        pairs = zip(getattr(one, name), getattr(two, name), strict=True)
        expected = [(weights[0] * a + weights[1] * b) / sum(weights) for a, b in pairs]
        assert getattr(both, name) == pytest.approx(expected, rel=1e-9)


def test_parameters_are_left_as_they_were() -> None:
    model = tiny_model("llama")
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    estimates(model, "block", next_token_batch(tiny_ids()))
    assert not frozen.requires_grad
    assert all(p.requires_grad for p in model.parameters() if p is not frozen)
    assert all(p.grad is None for p in model.parameters())
    assert ESTIMATES == ("taylor", "block_influence", "angular_distance", "relative_contribution")
