from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from keel_theory.schemes import SCHEMES
from keel_theory.spec import GateKind, NormKind, SublayerKind
from probes.blocks import Attention, Block, FeedForward, Norm, ResidualSublayer, rotary_table, rotate
from probes.config import ModelConfig
from probes.model import Transformer
from tests.probes._models import perturbed, random_ids, random_stream, small_config


def rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def zero_branches(model: Transformer) -> Transformer:
    with torch.no_grad():
        for sublayer in model.sublayers():
            function = sublayer.branch.function
            (function.output if isinstance(function, Attention) else function.down).weight.zero_()
    return model


def first_block(model: Transformer) -> Block:
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block


class TestKeelFirstBlock:
    @pytest.fixture
    def model(self) -> Transformer:
        config = small_config(n_blocks=2, width=4, ffn_width=4, n_heads=1, n_kv_heads=1, norm_eps=1e-12)
        return zero_branches(Transformer(config))

    def test_output_is_the_normalised_input(self, model: Transformer) -> None:
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
        out = first_block(model)(x)
        torch.testing.assert_close(out, rms(x), rtol=1e-10, atol=0)
        expected = torch.tensor([0.365, 0.730, 1.095, 1.461], dtype=torch.float64)
        torch.testing.assert_close(out[0, 0], expected, rtol=0, atol=5e-4)
        assert not torch.allclose(out, x)  # the whole block is not Pre-LN

    def test_norms_and_scales(self, model: Transformer) -> None:
        sublayers = model.sublayers()
        assert [s.norm_out is not None for s in sublayers] == [False, True, True, True]
        assert [s.branch.norm_in is not None for s in sublayers] == [True] * 4
        assert [s.shortcut_scale for s in sublayers] == [1.0, 1.0, 4.0, 4.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shapes_can_be_had_without_numbers(dtype) -> None:
    with torch.device("meta"):
        model = Transformer(small_config(compute_dtype=dtype))
    assert model(torch.zeros(2, 7, dtype=torch.int64, device="meta")).shape[:2] == (2, 7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu", "relu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_compute_dtype_is_autocast_of_the_branches_beside_a_float32_stream(scheme, ffn, dtype) -> None:
    """Bit for bit, output and gradients, in every sub-layer."""
    config = small_config(scheme=scheme, ffn=ffn, compute_dtype="float32")
    wide, narrow = Transformer(config), Transformer(replace(config, compute_dtype=dtype))
    narrow.load_state_dict(wide.state_dict())
    for one, other in zip(wide.sublayers(), narrow.sublayers(), strict=True):
        x = random_stream().float().requires_grad_()
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            expected = one.branch(x)
        expected.square().sum().backward()
        wanted = [x.grad, *(p.grad for p in one.branch.parameters())]
        y = x.detach().clone().requires_grad_()
        branch = other.branch(y)
        branch.square().sum().backward()
        assert branch.dtype is expected.dtype is torch.float32
        torch.testing.assert_close(branch, expected, rtol=0, atol=0)
        for got, grad in zip([y.grad, *(p.grad for p in other.branch.parameters())], wanted, strict=True):
            torch.testing.assert_close(got, grad, rtol=0, atol=0)


def test_small_branch_survives_a_large_alpha_under_bfloat16() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor, rotary: object) -> Tensor:
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
            return torch.full_like(x, 0.5)

    config = small_config(scheme_parameters={"alpha": 1024}, compute_dtype="bfloat16")
    sublayer = Transformer(config).sublayers()[2]
    sublayer.branch.function = Half()
    seen: list[Tensor] = []
    assert sublayer.norm_out is not None
    sublayer.norm_out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    sublayer(torch.ones(2, 3, 16))
    assert seen[0].dtype is torch.float32
    assert torch.equal(seen[0], torch.full((2, 3, 16), 1024.5))
    one = torch.ones((), dtype=torch.bfloat16)
    assert (1024 * one + 0.5 * one).item() == 1024.0  # what a bfloat16 stream makes of it


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sublayer_is_the_update_of_its_spec(scheme: str) -> None:
    model = perturbed(Transformer(small_config(scheme)))
    for sublayer in model.sublayers():
        stream = random_stream()
        torch.testing.assert_close(sublayer(stream), literal_update(sublayer, stream, stream), rtol=1e-12, atol=1e-12)


def literal_update(sublayer: ResidualSublayer, stream: Tensor, held: Tensor) -> Tensor:
    """The update written out from the spec; branch and gate read ``held``."""
    spec = sublayer.spec

    def norm(module: nn.Module | None, x: Tensor) -> Tensor:
        if module is None:
            return x
        assert isinstance(module, Norm)
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight

    gain = 1.0 if sublayer.branch.input_gain is None else sublayer.branch.input_gain.weight
    scaled = spec.input_scale * gain * norm(sublayer.branch.norm_in, held)
    branch = spec.branch_scale * norm(sublayer.branch.norm_branch, sublayer.branch.function(scaled))
    carried = sublayer.shortcut_scale * stream
    if spec.gate is GateKind.HIGHWAY:
        assert sublayer.gate is not None
        gate = torch.sigmoid(held @ sublayer.gate.weight.T + sublayer.gate.bias)
        branch, carried = gate * branch, (1 - gate) * carried
    return norm(sublayer.norm_out, carried + branch)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("index", [0, 1, 2, 5])
def test_shortcut_holds_branch_and_gate_constant(scheme: str, index: int) -> None:
    sublayer = perturbed(Transformer(small_config(scheme))).sublayers()[index]
    stream = random_stream().requires_grad_()
    gate = None if sublayer.gate is None else sublayer.gate(stream)
    branch = sublayer.branch(stream, None, gate)
    along_shortcut = sublayer.shortcut(stream, branch)
    torch.testing.assert_close(along_shortcut, sublayer(stream), rtol=1e-12, atol=1e-12)

    cotangent = random_stream().flip(0)
    (gradient,) = torch.autograd.grad(along_shortcut, stream, cotangent)
    (expected,) = torch.autograd.grad(literal_update(sublayer, stream, stream.detach()), stream, cotangent)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    (full,) = torch.autograd.grad(sublayer(stream), stream, cotangent)
    assert not torch.allclose(gradient, full, rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_branch_output_is_what_is_added(scheme: str) -> None:
    for sublayer in perturbed(Transformer(small_config(scheme))).sublayers():
        stream, seen = random_stream(), []
        sublayer.branch.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        out = sublayer(stream)
        torch.testing.assert_close(out, sublayer.combine(stream, seen[0], _gate(sublayer, stream)), rtol=0, atol=0)
        if sublayer.is_plain_sum:
            torch.testing.assert_close(out, stream + seen[0], rtol=0, atol=0)


def _gate(sublayer: ResidualSublayer, stream: Tensor) -> Tensor | None:
    return None if sublayer.gate is None else sublayer.gate(stream)


def test_hybrid_norm_is_its_papers_definition() -> None:
    """Y = Attn(Norm(Q), Norm(K), Norm(V)) + X, then X' = FFN(Norm(Y)) + Norm(Y); Zhuo et al. 2025, arXiv:2503.04598."""
    model = perturbed(Transformer(small_config("hybrid_norm", norm_eps=1e-12)))
    block = first_block(model)
    attention, ffn = block.attention.branch.function, block.ffn.branch.function
    assert isinstance(attention, Attention)
    assert isinstance(ffn, FeedForward)
    assert ffn.gate is not None
    assert attention.qkv_norms is not None
    assert isinstance(block.attention.norm_out, Norm)
    x = random_stream()
    y = slow_attention(attention, x, [norm.weight for norm in attention.qkv_norms]) + x
    u = rms(y) * block.attention.norm_out.weight
    hidden = nn.functional.silu(u @ ffn.gate.weight.T) * (u @ ffn.up.weight.T)
    torch.testing.assert_close(block(x), hidden @ ffn.down.weight.T + u, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 1), (4, 2), (4, 4)])
def test_attention_equals_its_slow_twin(n_heads: int, n_kv_heads: int) -> None:
    config = small_config("pre_ln", n_heads=n_heads, n_kv_heads=n_kv_heads)
    attention = perturbed(Transformer(config)).sublayers()[2].branch.function
    assert isinstance(attention, Attention)
    x = random_stream()
    torch.testing.assert_close(attention(x), slow_attention(attention, x, None), rtol=1e-10, atol=1e-10)


def slow_attention(attention: Attention, x_BTD: Tensor, gains: list[Tensor] | None) -> Tensor:
    """One sequence, one head, one query at a time; complex numbers for the rotation."""
    head_width = attention.head_width
    n_heads = attention.query.weight.shape[0] // head_width
    n_groups = attention.key.weight.shape[0] // head_width
    out = torch.zeros_like(x_BTD)
    for b, h, t in torch.cartesian_prod(
        torch.arange(x_BTD.shape[0]), torch.arange(n_heads), torch.arange(x_BTD.shape[1])
    ).tolist():
        g = h * n_groups // n_heads
        q = head_vector(attention.query.weight, x_BTD[b, t], h, head_width, gains and gains[0])
        keys = [head_vector(attention.key.weight, x_BTD[b, s], g, head_width, gains and gains[1]) for s in range(t + 1)]
        values = [head_vector(attention.value.weight, x_BTD[b, s], g, head_width, gains and gains[2]) for s in range(t + 1)]
        rotated = rotated_by(q, t, attention.rope_theta)
        scores = [torch.dot(rotated, rotated_by(k, s, attention.rope_theta)) for s, k in enumerate(keys)]
        weights = (torch.stack(scores) / math.sqrt(head_width)).softmax(0)
        mixed = (weights[:, None] * torch.stack(values)).sum(0)
        out[b, t] += attention.output.weight[:, h * head_width : (h + 1) * head_width] @ mixed
    return out


def head_vector(weight: Tensor, x_D: Tensor, head: int, head_width: int, gain: Tensor | None) -> Tensor:
    vector = weight[head * head_width : (head + 1) * head_width] @ x_D
    return vector if gain is None else rms(vector) * gain


def rotated_by(x_K: Tensor, position: int, theta: float) -> Tensor:
    half = len(x_K) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x_K[:half], x_K[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag))


class TestRotary:
    @pytest.mark.parametrize("shift", [1, 5, 40])
    def test_scores_depend_on_the_distance_only(self, shift: int) -> None:
        q, k = random_stream(1, 2)[0, :, :8]
        cos, sin = rotary_table(64, 8, 1e4, dtype=torch.float64, device=torch.device("cpu"))

        def score(i: int, j: int) -> Tensor:
            return rotate(q, (cos[i], sin[i])) @ rotate(k, (cos[j], sin[j]))

        torch.testing.assert_close(score(9 + shift, 4 + shift), score(9, 4), rtol=1e-12, atol=1e-12)
        assert not torch.isclose(score(9 + shift, 4), score(9, 4), rtol=1e-6)

    def test_length_is_preserved(self) -> None:
        x = random_stream()
        table = rotary_table(7, 16, 1e4, dtype=torch.float64, device=torch.device("cpu"))
        torch.testing.assert_close(rotate(x, table).norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)

    def test_longer_table_begins_like_the_shorter(self) -> None:
        short, long = (rotary_table(n, 8, 1e4, dtype=torch.float32, device=torch.device("cpu")) for n in (16, 4096))
        assert torch.equal(short[0], long[0][:16])
        assert torch.equal(short[1], long[1][:16])

    def test_runs_beyond_the_context_length(self) -> None:
        model = Transformer(small_config(context_length=4))
        ids = random_ids(1, 12)
        torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=1e-9, atol=1e-12)


class TestNorm:
    @pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER])
    def test_definition(self, kind: NormKind) -> None:
        norm, x = Norm(kind, 16, 1e-3, torch.float64), random_stream()
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, 16))
        centred = x - x.mean(-1, keepdim=True) if kind is NormKind.LAYER else x
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)

    def test_computes_in_float32_for_a_bfloat16_input(self) -> None:
        x = random_stream().bfloat16()
        expected = rms(x.double()).bfloat16()
        assert torch.equal(Norm(NormKind.RMS, 16, 1e-12, torch.float32)(x), expected)


class TestLearnableAlpha:
    def test_starts_at_the_rule_and_computes_the_same(self) -> None:
        learned, fixed = (Transformer(small_config(learnable_alpha=flag)) for flag in (True, False))
        assert [torch.as_tensor(s.shortcut_scale).item() for s in learned.sublayers()] == [1.0, 1.0, 6.0, 6.0, 6.0, 6.0]
        ids = random_ids()
        torch.testing.assert_close(learned(ids), fixed(ids), rtol=1e-12, atol=1e-12)

    def test_every_scale_is_a_scalar_with_a_gradient(self) -> None:
        model = Transformer(small_config(learnable_alpha=True))
        model.loss(random_ids(), random_ids()).backward()
        for sublayer in model.sublayers():
            assert isinstance(sublayer.shortcut_scale, nn.Parameter)
            assert sublayer.shortcut_scale.shape == ()
            assert sublayer.shortcut_scale.grad is not None
            assert sublayer.shortcut_scale.grad != 0

    def test_fixed_scale_is_a_number_outside_the_state(self) -> None:
        model = Transformer(small_config())
        assert all(isinstance(s.shortcut_scale, float) for s in model.sublayers())
        assert not [name for name in model.state_dict() if "shortcut_scale" in name]
        assert not list(model.buffers())


def config_of(kind: str) -> ModelConfig:
    return replace(small_config("pre_ln"), ffn=kind)  # type: ignore[arg-type]  # parametrized over the literal's values


@pytest.mark.parametrize(
    ("kind", "activation"), [("relu", torch.relu), ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))]
)
def test_plain_ffn(kind: str, activation: type[Tensor]) -> None:
    config = config_of(kind)
    sublayer = ResidualSublayer(config, config.specs()[1], SublayerKind.FFN)
    ffn = sublayer.branch.function
    assert isinstance(ffn, FeedForward)
    nn.init.normal_(ffn.up.weight)
    nn.init.normal_(ffn.down.weight)
    x = random_stream()
    torch.testing.assert_close(ffn(x), activation(x @ ffn.up.weight.T) @ ffn.down.weight.T, rtol=1e-12, atol=1e-12)
