"""The probe against plain autograd, and what it leaves behind: nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from keel_theory.schemes import SCHEMES
from probes.config import tiny
from probes.errors import UnsupportedModelError
from probes.families import describe_model
from probes.gradient_norms import measure_gradient_norms
from probes.gradient_result import GradientNorms
from probes.layer_removal import measure_layer_removal
from probes.layout import BlockKind, Boundary, Head, Objective, ResidualLayout, Side, SublayerLayout, Tap
from probes.model import Transformer, residual_layout
from probes.norms import Status
from probes.text import IGNORED, TokenBatch, masked_batches
from tests.probes._models import small_config
from tests.probes._reference import plain_autograd, plain_shortcut
from tests.probes._tiny import FAMILIES, SEED, VOCAB, tiny_ids, tiny_model

RELATIVE = 1e-10


def own_model(scheme: str, **changes: object) -> Transformer:
    """A float64 model whose weights are wide enough for its branches to matter."""
    return Transformer(small_config(scheme, **changes))


def own_ids(model: Transformer, batch: int = 2, tokens: int = 9) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(5))


def as_batch(layout: ResidualLayout, ids: torch.Tensor) -> TokenBatch:
    if layout.objective is Objective.MASKED:
        batches = masked_batches(
            ids.flatten().tolist(), n_tokens=ids.numel(), seq_len=ids.shape[1], mask_id=3, batch_size=len(ids)
        )
        return batches[0]
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    return TokenBatch(ids, targets)


def assert_agrees(result: GradientNorms, model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> None:
    loss, streams, parameters = plain_autograd(model, layout, batch)
    assert result.loss.value == pytest.approx(loss, rel=RELATIVE)
    assert [b.stream_grad.value for b in result.boundaries] == pytest.approx(streams, rel=RELATIVE)
    measured = {p.name: p.grad_norm.value for p in result.parameters if p.grad_norm.status is not Status.NONE}
    assert measured == pytest.approx(parameters, rel=RELATIVE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_plain_autograd(family: str) -> None:
    model = tiny_model(family)
    layout = describe_model(model)
    batch = as_batch(layout, tiny_ids())
    assert_agrees(measure_gradient_norms(model, [batch]), model, layout, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_its_shortcut_only_gradient(family: str) -> None:
    model = tiny_model(family)
    layout = describe_model(model)
    batch = as_batch(layout, tiny_ids())
    result = measure_gradient_norms(model, [batch])
    expected = plain_shortcut(model, layout, batch)
    measured = [b.shortcut_grad.value for b in result.boundaries[: len(expected)]]
    assert measured == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("ffn", ["swiglu", "gelu", "relu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_agrees_with_plain_autograd(scheme: str, ffn: str) -> None:
    model = own_model(scheme, ffn=ffn)
    layout = residual_layout(model)
    batch = as_batch(layout, own_ids(model))
    assert_agrees(measure_gradient_norms(model, [batch]), model, layout, batch)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gives_its_shortcut_only_gradient(scheme: str) -> None:
    model = own_model(scheme)
    layout = residual_layout(model)
    batch = as_batch(layout, own_ids(model))
    _hold_gates(model)
    result = measure_gradient_norms(model, [batch])
    expected = plain_shortcut(model, layout, batch)
    measured = [b.shortcut_grad.value for b in result.boundaries[: len(expected)]]
    assert measured == pytest.approx(expected, rel=RELATIVE)


def _hold_gates(model: Transformer) -> None:
    """A gate that does not read the stream is constant for the reference as well."""
    with torch.no_grad():
        for sublayer in model.sublayers():
            if sublayer.gate is not None:
                sublayer.gate.weight.zero_()


@pytest.mark.parametrize(
    "options", [{"tied_embeddings": True}, {"learnable_alpha": True}, {"shared_blocks": True}, {"norm": "layer"}]
)
def test_model_options_agree_with_plain_autograd(options: dict[str, object]) -> None:
    model = own_model("keel", **options)
    layout = residual_layout(model)
    batch = as_batch(layout, own_ids(model))
    assert_agrees(measure_gradient_norms(model, [batch]), model, layout, batch)


def test_shortcut_of_post_ln_vanishes_and_of_keel_does_not() -> None:
    depth = 32
    falls = {}
    for scheme in ("post_ln", "keel"):
        model = own_model(scheme, n_blocks=depth)
        result = measure_gradient_norms(model, [own_ids(model)])
        top = result.boundaries[result.sublayers[-1].boundary_out]
        falls[scheme] = result.boundaries[0].shortcut_grad.value / top.stream_grad.value
    assert falls["post_ln"] < 1e-6
    assert falls["keel"] > 0.1


def test_mean_and_standard_error_over_batches() -> None:
    model = tiny_model("llama")
    ids = tiny_ids(batch=3)
    single = [measure_gradient_norms(model, [row[None]]).boundaries[0].stream_grad.value for row in ids]
    joint = measure_gradient_norms(model, [row[None] for row in ids]).boundaries[0].stream_grad
    values = torch.tensor(single, dtype=torch.float64)
    assert joint.value == pytest.approx(float(values.mean()))
    assert joint.standard_error == pytest.approx(float(values.std() / math.sqrt(3)))


def test_branch_ratio_and_token_cosine_by_hand() -> None:
    model = tiny_model("llama")
    layout = describe_model(model)
    result = measure_gradient_norms(model, [tiny_ids()])
    with torch.no_grad():
        stream = model.model.embed_tokens(tiny_ids())
    unit = stream / stream.norm(dim=-1, keepdim=True)
    cosines = unit @ unit.transpose(1, 2)
    off_diagonal = cosines[:, ~torch.eye(stream.shape[1], dtype=torch.bool)]
    assert result.boundaries[0].stream_rms.value == pytest.approx(float(stream.square().mean().sqrt()))
    assert result.boundaries[0].token_cosine.value == pytest.approx(float(off_diagonal.mean()))
    captured = {}
    handle = model.get_submodule(layout.sublayers[0].branch.module).register_forward_hook(
        lambda _, __, o: captured.update(x=o[0])
    )
    with torch.no_grad():
        model(tiny_ids())
    handle.remove()
    ratio = captured["x"].square().mean().sqrt() / stream.square().mean().sqrt()
    assert result.sublayers[0].branch_ratio.value == pytest.approx(float(ratio))


def test_identical_tokens_have_cosine_one() -> None:
    model = tiny_model("llama")
    result = measure_gradient_norms(model, [torch.full((2, 6), 7)])
    assert result.boundaries[0].token_cosine.value == pytest.approx(1.0)
    assert any("nearly alike" in sentence for sentence in result.verdict())


@pytest.mark.parametrize("training", [True, False])
def test_probing_leaves_everything_bit_equal(training: bool) -> None:
    model = _WithBuffers()
    model.train(training)
    model.norm.eval()  # a mixed mode must come back as it was
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    measure_gradient_norms(
        model, [torch.randint(0, 8, (2, 4), generator=torch.Generator().manual_seed(1))], layout=model.layout()
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert_no_hooks(model)


class _Restless(nn.Module):
    """Changes buffers and attributes in evaluation mode, in place and by replacing them, and draws random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("empty", None)
        self.seen, self.note, self.untouched = 0, None, torch.zeros(1).expand(5)
        self.total = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table = self.table + 1
        self.empty = torch.ones(1)
        self.register_buffer("grown", torch.ones(2))
        self.seen, self.note, self.added = self.seen + 1, "seen", 1.5
        self.total += 1
        return self.inner(x) + torch.rand(())


@pytest.mark.parametrize("fail", [False, True], ids=["success", "exception"])
def test_what_a_module_changes_in_evaluation_mode_is_put_back(fail: bool) -> None:
    model = _WithBuffers(fail=fail).eval()
    model.stem = restless = _Restless(model.stem)
    buffers, attributes = dict(restless._buffers), dict(vars(restless))
    random_state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken on purpose") if fail else nullcontext():
        measure_gradient_norms(model, [torch.tensor([[1, 2, 3]])], layout=model.layout())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert restless._buffers.keys() == buffers.keys()
    assert all(restless._buffers[name] is buffer for name, buffer in buffers.items())
    assert restless.calls == 0
    assert torch.equal(restless.table, torch.arange(3.0))
    assert vars(restless).keys() == attributes.keys()
    assert all(vars(restless)[name] is value for name, value in attributes.items())
    assert not restless.total.any()


def test_a_dynamic_rotary_table_is_put_back() -> None:
    short = tiny_model("llama").config.to_dict() | {"max_position_embeddings": 8}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(**short | {"rope_parameters": rope})
    model = transformers.LlamaForCausalLM(config).double().eval()
    rotary = model.model.rotary_emb
    table, content, longest = rotary.inv_freq, rotary.inv_freq.clone(), rotary.max_seq_len_cached
    measure_gradient_norms(model, [tiny_ids()])
    assert rotary.inv_freq is table
    assert torch.equal(table, content)
    assert rotary.max_seq_len_cached is longest
    with torch.no_grad():
        model(tiny_ids())
    assert rotary.inv_freq is not table  # the model does replace it


def test_an_exception_inside_leaves_no_hook_and_no_mode_behind() -> None:
    model = _WithBuffers(fail=True)
    model.train()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        measure_gradient_norms(model, [torch.tensor([[1, 2, 3]])], layout=model.layout())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_no_hooks(model)


def assert_no_hooks(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


class _Residual(nn.Module):
    """x += f(x) in place, with an in-place activation: what full backward hooks cannot live with."""

    def __init__(self, width: int, *, fail: bool = False) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 12), nn.ReLU(inplace=True), nn.Linear(12, width)
        self.dropout = nn.Dropout(0.5)
        self.fail = fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("broken on purpose")
        x += self.dropout(self.down(self.act(self.up(1.0 * x))))
        return x


class _WithBuffers(nn.Module):
    """Two residual blocks, batch statistics and dropout."""

    def __init__(self, width: int = 6, vocabulary: int = 8, *, fail: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([_Residual(width), _Residual(width, fail=fail)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary)
        self.double()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)

    def layout(self) -> ResidualLayout:
        taps = [Tap("stem", Side.OUTPUT), Tap("blocks.1", Side.INPUT), Tap("blocks.1", Side.OUTPUT)]
        return ResidualLayout(
            family="test",
            objective=Objective.CAUSAL,
            n_blocks=2,
            boundaries=tuple(Boundary(name=f"boundary {i}", block=i - 1, tap=tap) for i, tap in enumerate(taps)),
            sublayers=tuple(
                SublayerLayout(
                    block=i, kind=BlockKind.BLOCK, boundary_in=i, boundary_out=i + 1, branch=None, modules=(f"blocks.{i}",)
                )
                for i in range(2)
            ),
            embedding_modules=("embed", "stem"),
            final_norm=None,
            head=Head(backbone=self.hidden, logits=self.head, linear=self.head, modules=("head",)),
            blocks=("blocks.0", "blocks.1"),
        )


def test_in_place_operations_do_not_disturb_the_probe() -> None:
    model = _WithBuffers().eval()
    ids = torch.tensor([[1, 2, 3, 4], [2, 2, 5, 1]])
    result = measure_gradient_norms(model, [ids], layout=model.layout())
    logits = model.head(model.hidden(ids))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    assert {p.name: p.grad_norm.value for p in result.parameters} == pytest.approx(expected, rel=RELATIVE)


def _compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def _compiled_fullgraph(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def _compiled_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler itself
@pytest.mark.parametrize("compiled", [_compiled_whole, _compiled_fullgraph, _compiled_in_place, _compiled_blocks])
def test_a_compiled_model_that_has_run_gives_the_eager_records(compiled: object) -> None:
    model = own_model("keel", n_blocks=1)
    ids = own_ids(model)
    eager = measure_gradient_norms(model, [ids])
    fast = compiled(model)
    fast(ids)  # the first call compiles; hooks added later would never run
    probed = measure_gradient_norms(fast, [ids])
    assert len(probed.boundaries) == len(eager.boundaries) == 4
    for one, other in zip(probed.boundaries, eager.boundaries, strict=True):
        assert one.stream_grad.value == pytest.approx(other.stream_grad.value, rel=1e-5)
    assert [p.grad_norm.value for p in probed.parameters] == pytest.approx(
        [p.grad_norm.value for p in eager.parameters], rel=1e-5
    )
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler itself
@pytest.mark.parametrize("family", ["llama", "mixtral", "bert"])
def test_blocks_replaced_by_compiled_ones_give_the_eager_records(family: str) -> None:
    model = tiny_model(family)
    batch = as_batch(describe_model(model), tiny_ids())
    eager = measure_gradient_norms(model, [batch])
    blocks = model.get_submodule(describe_model(model).blocks[0].removesuffix(".0"))
    for i, block in enumerate(blocks):
        blocks[i] = torch.compile(block, backend="aot_eager")
    if family == "llama":
        model(tiny_ids())  # the first call compiles
    probed = measure_gradient_norms(model, [batch])
    assert probed.to_dict() == eager.to_dict()
    assert_no_hooks(model)
    torch._dynamo.reset()


def test_zero_none_and_nonfinite_are_different_entries() -> None:
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()  # its branch is zero: no gradient gets to gate and up
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    result = measure_gradient_norms(model, [tiny_ids()])
    status = {p.name: p.grad_norm.status for p in result.parameters}
    assert status["model.layers.0.mlp.up_proj.weight"] is Status.ZERO
    assert status["model.layers.0.mlp.down_proj.weight"] is Status.OK
    assert status["model.layers.1.self_attn.q_proj.weight"] is Status.NONE
    frame = result.to_frame()
    assert set(frame.place) >= {f"block {i} {kind}" for i in range(3) for kind in ("attention", "ffn")}  # nothing is dropped


@pytest.mark.parametrize(("poison", "status", "word"), [(math.inf, Status.INF, "infinite"), (math.nan, Status.NAN, "NaN")])
def test_a_non_finite_gradient_is_named_and_the_others_stay(poison: float, status: Status, word: str) -> None:
    model = tiny_model("llama")
    layout = describe_model(model)
    weight = model.model.layers[1].mlp.down_proj.weight
    handle = weight.register_hook(lambda gradient: torch.full_like(gradient, poison))
    result = measure_gradient_norms(model, [tiny_ids()])
    handle.remove()
    by_name = {p.name: p.grad_norm for p in result.parameters}
    clean = {p.name: p.grad_norm for p in measure_gradient_norms(model, [tiny_ids()], layout=layout).parameters}
    name = "model.layers.1.mlp.down_proj.weight"
    assert by_name.pop(name).status is status
    clean.pop(name)
    assert {n: e.value for n, e in by_name.items()} == {n: e.value for n, e in clean.items()}
    assert any(word in sentence and name in sentence for sentence in result.verdict())
    assert result.block_grads[1].status is status
    assert result.block_grads[0].status is Status.OK


def test_nan_weights_give_nan_rows_not_a_crash() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[0] = math.nan
    result = measure_gradient_norms(model, [tiny_ids()])
    assert result.loss.status is Status.NAN
    assert all(math.isnan(b.stream_grad.value) for b in result.boundaries)
    assert result.to_dict()["rows"][0]["value"] is None


def test_float32_underflow_is_told_apart_from_zero() -> None:
    model = tiny_model("llama", torch.float32)
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: torch.full_like(gradient, 1e-42))
    result = measure_gradient_norms(model, [tiny_ids()])
    handle.remove()
    reading = next(p.grad_norm for p in result.parameters if p.name == "model.layers.0.mlp.up_proj.weight")
    assert reading.status is Status.UNDERFLOW
    assert reading.value > 0


def test_a_tied_weight_is_one_record_with_both_names() -> None:
    model = tiny_model("llama-tied")
    result = measure_gradient_norms(model, [tiny_ids()])
    [tied] = [p for p in result.parameters if "embed_tokens" in p.name]
    assert tied.also_named == ("lm_head.weight",)
    assert not any(part.name == "head" for part in result.parts)
    assert result.n_parameters == sum(p.numel() for p in model.parameters())


def test_a_tied_weight_with_unit_gradient_counts_once() -> None:
    """A 5 x 2 weight with a gradient of ones has norm sqrt(10); counted twice it would be sqrt(20)."""
    model = tiny_model("llama-tied")
    weight = model.model.embed_tokens.weight
    result = measure_gradient_norms(model, [tiny_ids()])
    _, _, parameters = plain_autograd(model, describe_model(model), as_batch(describe_model(model), tiny_ids()))
    [tied] = [p for p in result.parameters if "embed_tokens" in p.name]
    assert tied.n_entries == weight.numel()
    assert tied.grad_norm.value == pytest.approx(parameters["model.embed_tokens.weight"], rel=RELATIVE)


def test_experts_without_tokens_are_named() -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # equal scores: top-2 always picks the same experts
    result = measure_gradient_norms(model, [tiny_ids()])
    name = "model.layers.0.mlp.experts.down_proj"
    assert len(result.idle_experts[name]) == 2
    assert any("without tokens" in sentence and name in sentence for sentence in result.verdict())


def test_a_zeroed_projection_does_not_make_experts_idle() -> None:
    model = tiny_model("mixtral")
    used = measure_gradient_norms(model, [tiny_ids()])
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()  # no gradient gets to gate_up_proj of any expert
    result = measure_gradient_norms(model, [tiny_ids()])
    status = {p.name: p.grad_norm.status for p in result.parameters}
    assert status["model.layers.0.mlp.experts.gate_up_proj"] is Status.ZERO
    assert not any(name.startswith("model.layers.0.") for name in [*used.idle_experts, *result.idle_experts])


def test_idle_experts_are_held_by_every_parameter_of_the_sublayer_and_told_in_one_sentence() -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
        model.model.layers[0].mlp.experts.down_proj.zero_()
    result = measure_gradient_norms(model, [tiny_ids()])
    down, gate_up = (f"model.layers.0.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj"))
    assert len(result.idle_experts[down]) == 2
    assert result.idle_experts[gate_up] == result.idle_experts[down]
    [sentence] = [s for s in result.verdict() if "without tokens" in s and "layers.0." in s]
    assert f"{down} and {gate_up}: " in sentence


def _openai_gpt() -> nn.Module:
    """Post-LN, and of a family that is read block by block."""
    torch.manual_seed(SEED)
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=3, n_head=4)
    return transformers.OpenAIGPTLMHeadModel(config).double().eval()


def test_a_shortcut_that_is_not_known_has_no_shortcut_only_gradient() -> None:
    model = _openai_gpt()
    layout = describe_model(model)
    batch = as_batch(layout, tiny_ids())
    result = measure_gradient_norms(model, [batch])
    assert_agrees(result, model, layout, batch)
    top = result.sublayers[-1].boundary_out
    assert result.boundaries[top].shortcut_grad.value == result.boundaries[top].stream_grad.value
    assert {b.shortcut_grad.status for b in result.boundaries[:top]} == {Status.NONE}
    assert not any("shortcut" in sentence for sentence in result.verdict())
    assert any("the full gradient is multiplied by" in sentence for sentence in result.verdict())


def test_a_narrow_stream_under_a_large_shortcut_scale_is_warned_of() -> None:
    model = tiny_model("llama", torch.bfloat16)
    layout = describe_model(model)
    scaled = replace(layout, sublayers=tuple(replace(s, shortcut_scale=1024.0) for s in layout.sublayers))
    [warning] = measure_gradient_norms(model, [tiny_ids()], layout=scaled).warnings
    assert "bfloat16" in warning
    assert "1024" in warning
    assert measure_gradient_norms(model, [tiny_ids()], layout=layout).warnings == ()
    assert measure_gradient_norms(own_model("keel"), [torch.arange(8)[None]]).warnings == ()


def test_every_parameter_frozen_still_measures_the_stream() -> None:
    model = tiny_model("llama")
    expected = measure_gradient_norms(model, [tiny_ids()])
    model.requires_grad_(False)
    result = measure_gradient_norms(model, [tiny_ids()])
    assert [b.stream_grad.value for b in result.boundaries] == pytest.approx([b.stream_grad.value for b in expected.boundaries])
    assert {p.grad_norm.status for p in result.parameters} == {Status.NONE}


def test_a_depth_of_512_blocks_is_measured() -> None:
    model = own_model("keel", n_blocks=512, compute_dtype="float32", init_std=0.02)
    result = measure_gradient_norms(model, [torch.arange(8)[None]])
    assert result.n_sublayers == 1024
    assert {b.stream_grad.status for b in result.boundaries} == {Status.OK}


def test_no_batch_and_no_prediction_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no batch"):
        measure_gradient_norms(model, [])
    with pytest.raises(ValueError, match="predicts no token"):
        measure_gradient_norms(model, [torch.tensor([[1]])])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.arange(4)], r"has the shape \(4,\); shape \(B, T\) is needed"),
        ([TokenBatch(torch.arange(4), torch.arange(4))], r"has the shape \(4,\); shape \(B, T\) is needed"),
        (torch.arange(8).view(2, 4), r"a single Tensor was given as batches: give a list of batches"),
        (TokenBatch(*torch.arange(8).view(2, 1, 4)), r"a single TokenBatch was given as batches: give a list of batches"),
        ([torch.tensor([[1, 64]])], r"batch 0 holds the token id 64, outside the vocabulary of 64 tokens \(ids 0 to 63\)"),
        ([torch.tensor([[1, 2]]), torch.tensor([[1, -7]])], r"batch 1 holds the token id -7, outside the vocabulary of 64"),
    ],
    ids=["one sequence", "one sequence with targets", "bare tensor", "bare batch", "too large", "negative"],
)
def test_batches_of_another_form_are_refused(batches: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_gradient_norms(tiny_model("llama"), batches)


def test_an_id_outside_the_vocabulary_of_an_own_model_is_named() -> None:
    model = own_model("keel")
    size = model.config.vocab_size
    with pytest.raises(ValueError, match=rf"token id {size}, outside the vocabulary of {size} tokens"):
        measure_gradient_norms(model, [torch.tensor([[1, size]])])


def test_frame_is_tidy_and_complete() -> None:
    model = tiny_model("llama")
    result = measure_gradient_norms(model, [tiny_ids()])
    frame = result.to_frame()
    assert not frame.duplicated(["place", "index", "sublayer", "kind", "metric"]).any()
    counts = frame.groupby("metric").size()
    assert counts["stream_grad_norm"] == len(result.boundaries) == 2 * 3 + 2
    assert counts["branch_ratio"] == result.n_sublayers == 6
    assert counts["param_grad_norm"] == 6 + 3 + len(result.parts)


def test_block_and_part_norms_are_roots_of_sums_of_squares() -> None:
    result = measure_gradient_norms(tiny_model("llama"), [tiny_ids()])
    squares = [p.grad_norm.value**2 for s in result.sublayers if s.block == 1 for p in s.part.parameters]
    assert result.block_grads[1].value == pytest.approx(math.sqrt(math.fsum(squares)))


def test_norm_gains_are_effective_gains() -> None:
    model = tiny_model("gemma2")
    result = measure_gradient_norms(model, [tiny_ids()])
    name = "model.layers.0.input_layernorm"
    stored = model.get_submodule(name).weight.detach()
    assert result.sublayers[0].norm_gains[name] == pytest.approx(float((1 + stored).abs().max()))


def measured(n_blocks: int, spoil: Callable[[Transformer], None] = lambda model: None) -> GradientNorms:
    model = own_model("pre_ln", n_blocks=n_blocks)
    with torch.no_grad():
        spoil(model)
    return measure_gradient_norms(model, [own_ids(model)])


def nan_above_the_first_block(model: Transformer) -> None:
    next(iter(model.blocks[1].parameters())).fill_(math.nan)


def all_zero(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def test_nothing_is_compared_over_the_depth_of_one_block() -> None:
    verdict = " ".join(measured(1).verdict())
    assert "median over" not in verdict
    assert "x that at the last block" not in verdict
    assert "at the input of the only block: " in verdict


def test_tokens_are_not_said_to_stay_apart_over_a_stream_of_nan() -> None:
    verdict = " ".join(measured(3, nan_above_the_first_block).verdict())
    assert "Tokens stay apart" not in verdict
    assert "boundaries with a cosine the largest mean cosine" in verdict
    assert "No block's" not in verdict


def test_zeros_have_no_median_no_cosine_and_no_ratio() -> None:
    result = measured(3, all_zero)
    verdict = " ".join(result.verdict())
    assert "median over" not in verdict
    assert "Tokens" not in verdict
    assert {s.branch_ratio.status for s in result.sublayers} == {Status.NONE}
    assert {b.token_cosine.status for b in result.boundaries[:-1]} == {Status.NAN}


def test_positions_without_a_stream_have_no_direction() -> None:
    """Two equal tokens and one of zeros: the cosine is that of the two."""
    model = own_model("pre_ln")
    with torch.no_grad():
        model.embedding.weight[5] = 0.0
    result = measure_gradient_norms(model, [torch.tensor([[4, 4, 5]])])
    assert result.boundaries[0].token_cosine.value == pytest.approx(1.0)


def test_shapes_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = Transformer(tiny("keel"), initialise=False)
    with pytest.raises(UnsupportedModelError, match=r"on the meta device .*: they have shapes and no values; load the weights"):
        measure_gradient_norms(model, [torch.arange(6)[None]])
    with pytest.raises(UnsupportedModelError, match="on the meta device"):
        measure_layer_removal(model, [TokenBatch(torch.arange(6)[None], torch.arange(6)[None])])
