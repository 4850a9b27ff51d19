"""The alignment of updates with their own depth-wise gradient, on own models and on families."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

from keel_theory.depthwise_training import depthwise_step
from keel_theory.schemes import SCHEMES
from probes.config import ModelConfig
from probes.depthwise_alignment import AlignmentStatus, measure_depthwise_alignment, pooled
from probes.errors import UnsupportedModelError
from probes.families import describe_model
from probes.gradient_capture import tapped
from probes.layout import ResidualLayout
from probes.model import Transformer
from tests.probes._tiny import FAMILIES, PARALLEL, tiny_ids, tiny_model


def _own(scheme: str, **values: object) -> Transformer:
    return Transformer(
        ModelConfig(
            scheme=scheme, n_blocks=2, width=16, ffn_width=24, compute_dtype="float64", init_std=0.3, vocab_size=64, **values
        )
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_agrees_with_differences_of_the_loss(scheme: str) -> None:
    """The last FFN of each scheme at one position, against the NumPy twin, which sees the loss alone."""
    model = _own(scheme)
    result = measure_depthwise_alignment(model, describe_model(model), tiny_ids(1, 1))
    sublayer = list(model.sublayers())[-1]
    with torch.no_grad():
        stream = model.embedding(tiny_ids(1, 1))
        for earlier in list(model.sublayers())[:-1]:
            stream = earlier(stream)
        gate = None if sublayer.gate is None else sublayer.gate
        step = depthwise_step(
            stream[0, 0].numpy(),
            lambda x: sublayer.branch(
                torch.from_numpy(x)[None, None], None, None if gate is None else gate(torch.from_numpy(x)[None, None])
            )[0, 0].numpy(),
            np.eye(16),
        )
    assert result.sublayers[-1].alignment == pytest.approx(step.alignment, abs=1e-7)
    assert result.sublayers[-1].target_ratio == pytest.approx(step.target_ratio, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_visible_branch_is_measured(family: str) -> None:
    model = tiny_model(family)
    result = measure_depthwise_alignment(model, describe_model(model), tiny_ids())
    assert [row.kind for row in result.sublayers] == ["attention", "ffn"] * 3
    assert all(-1 <= row.alignment <= 1 and row.target_ratio > 0 for row in result.sublayers)
    frame = result.to_frame()
    assert len(frame) == 6 * 6
    assert frame["value"].notna().all()


def _update(model: torch.nn.Module, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The FFN's update as the code of each block writes it."""
    family = model.config.model_type
    if family.startswith("granite"):
        ffn = block.block_sparse_moe if family == "granitemoe" else block.mlp
        return ffn(block.post_attention_layernorm(x)) * model.config.residual_multiplier
    if family == "falcon" and model.config.num_ln_in_parallel_attn == 2:
        return block.mlp(block.ln_mlp(x))
    return block.mlp((block.ln_1 if family == "gptj" else block.input_layernorm)(x))


@pytest.mark.parametrize(
    "family", ["granite", "granitemoe", *(f for f in sorted(PARALLEL) if f not in ("gpt_neox", "codegen"))]
)
def test_an_update_is_what_the_block_adds(family: str) -> None:
    """With its multiplier, and without the attention that falcon adds to the tensor that its FFN has returned."""
    model, ids = tiny_model(family), tiny_ids(1, 5)
    layout = describe_model(model)
    result = measure_depthwise_alignment(model, layout, ids)
    streams: dict[int, torch.Tensor] = {}
    with torch.no_grad(), tapped(model, {b.tap: partial(streams.__setitem__, i) for i, b in enumerate(layout.boundaries)}):
        model(ids)
    for row in result.sublayers[1::2]:
        x = streams[layout.sublayers[row.sublayer].boundary_in].detach().requires_grad_()
        u = _update(model, model.get_submodule(layout.blocks[row.block]), x)
        (target,) = torch.autograd.grad(u, x, x.detach())
        x, u = x.detach(), u.detach()
        cosine = torch.nn.functional.cosine_similarity(u, u + target, dim=-1)
        assert row.alignment == pytest.approx(float(cosine.mean()), abs=1e-9)
        assert row.step_ratio == pytest.approx(float((u.norm(dim=-1) / x.norm(dim=-1)).mean()), rel=1e-9)


@pytest.mark.parametrize(
    ("scheme", "orthogonal"), [("pre_ln", True), ("keel", True), ("post_ln", False), ("branch_norm", False)]
)
def test_an_inner_norm_makes_the_target_term_orthogonal_to_the_stream(scheme: str, orthogonal: bool) -> None:
    model = _own(scheme, norm_eps=1e-14)
    rows = measure_depthwise_alignment(model, describe_model(model), tiny_ids()).sublayers
    sizes = np.array([abs(row.target_stream_cosine) for row in rows])
    assert (sizes < 1e-9).all() == orthogonal
    assert orthogonal or sizes.max() > 1e-2


def _silence(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()


def test_a_branch_of_zero_is_said_to_have_no_update() -> None:
    model = _own("pre_ln")
    _silence(list(model.sublayers())[1].branch.function)
    result = measure_depthwise_alignment(model, describe_model(model), tiny_ids())
    silent, others = result.sublayers[1], [row for row in result.sublayers if row.sublayer != 1]
    assert silent.updated_share == 0.0
    assert [silent.alignment, silent.target_ratio, silent.stream_cosine, silent.step_ratio] == [None] * 4
    assert all(row.updated_share == 1.0 and row.alignment is not None for row in others)
    frame = result.to_frame()
    assert set(frame.loc[frame["value"].isna(), "sublayer"]) == {1}
    assert (frame["status"] == "no update").equals(frame["value"].isna())


def test_positions_without_an_update_do_not_spoil_the_mean_of_the_others() -> None:
    """A branch that is zero for one token id: the mean is that over the other positions."""
    model = _own("pre_ln")
    ids = tiny_ids(1, 6)
    sublayer = list(model.sublayers())[1]
    full = measure_depthwise_alignment(model, describe_model(model), ids[:, :5]).sublayers[1]
    sublayer.branch.function.register_forward_hook(lambda _, args, out: torch.cat([out[:, :5], 0 * out[:, 5:]], dim=1))
    partly = measure_depthwise_alignment(model, describe_model(model), ids).sublayers[1]
    assert partly.updated_share == pytest.approx(5 / 6)
    assert partly.alignment == pytest.approx(full.alignment, abs=1e-12)
    assert partly.step_ratio == pytest.approx(full.step_ratio)


def test_batches_are_pooled_by_their_positions() -> None:
    """Equal lengths in one batch or in two are the same mean; a silent position weighs nothing."""
    model = _own("pre_ln")
    ids = tiny_ids(4, 6)
    layout = describe_model(model)
    whole = measure_depthwise_alignment(model, layout, ids)
    parts = pooled(model, layout, [ids[:1], ids[1:]])
    assert parts.n_tokens == whole.n_tokens == 24
    for one, other in zip(whole.sublayers, parts.sublayers, strict=True):
        assert dataclasses.asdict(other) == pytest.approx(dataclasses.asdict(one), abs=1e-12)


def test_pooling_leaves_out_a_batch_without_an_update() -> None:
    model = _own("pre_ln")
    layout = describe_model(model)
    full = measure_depthwise_alignment(model, layout, tiny_ids(1, 5)).sublayers[1]
    branch = list(model.sublayers())[1].branch.function
    branch.register_forward_hook(lambda _, args, out: out if out.shape[1] == 5 else 0 * out)
    row = pooled(model, layout, [tiny_ids(1, 5), tiny_ids(1, 3)]).sublayers[1]
    assert row.updated_share == pytest.approx(5 / 8)
    assert row.alignment == pytest.approx(full.alignment)


def test_frozen_models_are_measured_too() -> None:
    model = _own("keel")
    free = measure_depthwise_alignment(model, describe_model(model), tiny_ids())
    model.requires_grad_(False)
    assert measure_depthwise_alignment(model, describe_model(model), tiny_ids()) == free


def test_model_is_left_as_it_was() -> None:
    model = _own("post_ln").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measure_depthwise_alignment(model, describe_model(model), tiny_ids())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_are_gone_after_an_exception() -> None:
    model = _own("keel")
    with pytest.raises(IndexError, match="out of range"):
        measure_depthwise_alignment(model, describe_model(model), torch.tensor([[10**6]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hidden_branches_are_refused() -> None:
    model = _own("keel")
    layout = describe_model(model)
    hidden = dataclasses.replace(layout, sublayers=tuple(dataclasses.replace(s, branch=None) for s in layout.sublayers))
    with pytest.raises(UnsupportedModelError, match="not visible"):
        measure_depthwise_alignment(model, hidden, tiny_ids())


def test_a_wrong_boundary_is_refused() -> None:
    model = _own("keel")
    layout = describe_model(model)
    last = len(layout.boundaries) - 1
    wrong = dataclasses.replace(layout, sublayers=(dataclasses.replace(layout.sublayers[0], boundary_in=last),))
    with pytest.raises(UnsupportedModelError, match="block 0 attention: the branch does not depend on the stream"):
        measure_depthwise_alignment(model, wrong, tiny_ids())


BAD_WEIGHTS = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e307}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
@pytest.mark.parametrize("index", [0, 1, 3])
def test_one_bad_weight_is_no_missing_update(bad: str, index: int) -> None:
    """What it reaches is not finite and is said to be so; what lies before it is as it was."""
    model = _own("pre_ln")
    layout = describe_model(model)
    before = measure_depthwise_alignment(model, layout, tiny_ids()).sublayers[:index]
    with torch.no_grad():
        matrix = next(p for p in list(model.sublayers())[index].branch.function.parameters() if p.ndim == 2)
        matrix[0, :] = BAD_WEIGHTS[bad]
    result = measure_depthwise_alignment(model, layout, tiny_ids())
    assert result.sublayers[:index] == before
    reached = result.sublayers[index]
    assert reached.status("alignment") is AlignmentStatus.NAN
    assert reached.updated_share == 1.0
    assert "have no update" not in " ".join(result.verdict())
    assert "are not a number (NaN)" in " ".join(result.verdict())
    frame = result.to_frame()
    assert set(frame.loc[frame["value"].isna(), "status"]) <= {"nan", "undefined"}


def test_nan_in_one_batch_of_several_stays_in_the_mean() -> None:
    model = _own("pre_ln")
    layout = describe_model(model)
    with torch.no_grad():
        model.embedding.weight[5] = float("nan")
    row = pooled(model, layout, [torch.full((1, 3), 4), torch.full((1, 3), 5)]).sublayers[0]
    assert row.status("alignment") is AlignmentStatus.NAN


def _odd_branch(scale: float) -> tuple[Transformer, ResidualLayout]:
    """A branch u = A x with a skew A and a symmetric part of this scale: its own gradient is (A + A^T) x."""
    model = _own("pre_ln")
    sublayer = list(model.sublayers())[1]
    matrix = torch.zeros(16, 16, dtype=torch.float64)
    matrix[0, 1], matrix[1, 0] = 1.0, -1.0
    matrix += scale * torch.eye(16, dtype=torch.float64)
    sublayer.branch.forward = lambda stream, rotary=None, gate=None: sublayer.branch.function(stream @ matrix.T)
    sublayer.branch.function = torch.nn.Identity()
    return model, describe_model(model)


def test_a_gradient_of_exactly_zero_has_no_alignment_and_says_so() -> None:
    model, layout = _odd_branch(0.0)
    result = measure_depthwise_alignment(model, layout, tiny_ids())
    row = result.sublayers[1]
    assert row.alignment is None
    assert row.status("alignment") is AlignmentStatus.UNDEFINED
    assert row.target_ratio == pytest.approx(1.0)
    record = row.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False))["status"]["alignment"] == "undefined"
    assert "their own gradient is exactly zero (block 0 ffn)" in " ".join(result.verdict())
    whole, layout = _odd_branch(0.5)
    assert measure_depthwise_alignment(whole, layout, tiny_ids()).sublayers[1].status("alignment") is AlignmentStatus.MEASURED


def test_a_stream_of_zero_has_no_cosine_with_it() -> None:
    model = _own("pre_ln")
    silent = next(iter(model.sublayers())).branch.function
    silent.register_forward_hook(lambda _, args, out: 0 * out + 1)
    with torch.no_grad():
        model.embedding.weight.zero_()
    row = measure_depthwise_alignment(model, describe_model(model), tiny_ids(1, 3)).sublayers[0]
    assert [row.status(name) for name in ("stream_cosine", "step_ratio")] == [AlignmentStatus.UNDEFINED] * 2


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_updates_of_any_size_have_an_alignment(scale: float) -> None:
    model = _own("pre_ln")
    layout = describe_model(model)
    index = len(layout.sublayers) - 1
    with torch.no_grad():
        for matrix in (list(model.sublayers())[index].branch.function.down.weight,):
            matrix.mul_(scale)
    row = measure_depthwise_alignment(model, layout, tiny_ids()).sublayers[index]
    assert row.updated_share == 1.0
    assert -1 <= row.alignment <= 1
    assert 0 < row.step_ratio < float("inf")


def test_shapes_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = _own("keel")
    with pytest.raises(UnsupportedModelError, match=r"on the meta device .*shapes and no values; load the weights first"):
        measure_depthwise_alignment(model, describe_model(_own("keel")), tiny_ids())
