from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keel_theory.schemes import SCHEMES
from probes.blocks import Attention, Linear, Norm
from probes.config import count_parameters, tiny
from probes.families import describe_model
from probes.layout import Side, Tap
from probes.model import Transformer, residual_layout
from tests.probes._models import perturbed, random_ids, random_stream, small_config


def read_taps(model: nn.Module, taps: list[Tap], ids: Tensor) -> list[Tensor]:
    """The tensors at the taps in one forward pass."""
    seen: dict[Tap, Tensor] = {}
    for tap in taps:
        module = model.get_submodule(tap.module)
        if tap.side is Side.OUTPUT:
            module.register_forward_hook(lambda m, args, out, tap=tap: seen.__setitem__(tap, out))
        else:
            module.register_forward_pre_hook(lambda m, args, tap=tap: seen.__setitem__(tap, args[0]))
    model(ids)
    return [seen[tap] for tap in taps]


@pytest.mark.parametrize("options", [{}, {"ffn": "gelu"}, {"shared_blocks": True}, {"tied_embeddings": True}], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_reaches_every_parameter(scheme: str, options: dict[str, Any]) -> None:
    model = perturbed(Transformer(small_config(scheme, **options)))
    model.loss(random_ids(), random_ids().flip(0)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_future_does_not_change_past_logits(scheme: str) -> None:
    model, ids = perturbed(Transformer(small_config(scheme))), random_ids()
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 19
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 4:], after[:, 4:], rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_stream_is_float32_at_every_boundary_of_a_half_precision_model(scheme: str, compute: str) -> None:
    model = Transformer(replace(tiny(scheme), compute_dtype=compute))
    layout = residual_layout(model)
    taps = [b.tap for b in layout.boundaries] + [s.branch for s in layout.sublayers if s.branch is not None]
    functions: list[torch.dtype] = []
    for sublayer in model.sublayers():
        sublayer.branch.function.register_forward_hook(lambda m, args, out: functions.append(out.dtype))
    streams = read_taps(model, taps, random_ids())
    assert {stream.dtype for stream in streams} == {torch.float32}
    assert set(functions) == {model.config.torch_compute_dtype}
    assert model(random_ids()).dtype is torch.float32


def test_stream_stays_float32_when_the_weights_are_cast_down() -> None:
    model = Transformer(tiny()).bfloat16()
    taps = [b.tap for b in residual_layout(model).boundaries]
    assert {stream.dtype for stream in read_taps(model, taps, random_ids())} == {torch.float32}


def test_bfloat16_compute_is_close_to_float32() -> None:
    full, half = (Transformer(replace(tiny("pre_ln"), compute_dtype=d)) for d in ("float32", "bfloat16"))
    exact, rounded = full.hidden(random_ids()), half.hidden(random_ids())
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.02


class TestReductions:
    @pytest.mark.parametrize(
        ("scheme", "parameters", "other"),
        [
            ("deepnorm", {"alpha": 1, "beta": 1}, "post_ln"),
            ("mix_ln", {"ratio": 0}, "pre_ln"),
            ("mix_ln", {"ratio": 1}, "post_ln"),
        ],
    )
    def test_same_seed_gives_the_same_model(self, scheme: str, parameters: dict[str, Any], other: str) -> None:
        model, ids = Transformer(small_config(scheme, scheme_parameters=parameters, n_blocks=4)), random_ids()
        assert torch.equal(model(ids), Transformer(small_config(other, n_blocks=4))(ids))
        assert not torch.equal(model(ids), Transformer(small_config(scheme, n_blocks=4))(ids))

    def test_keel_with_alpha_one_and_no_inner_norm_is_post_ln_from_the_second_sublayer_on(self) -> None:
        keel = Transformer(small_config("keel", scheme_parameters={"alpha": 1}))
        post_ln = Transformer(small_config("post_ln"))
        for sublayer in keel.sublayers():
            sublayer.branch.norm_in = None
        stream = random_stream()
        for ours, theirs in zip(keel.sublayers()[1:], post_ln.sublayers()[1:], strict=True):
            assert torch.equal(ours(stream), theirs(stream))
        assert not torch.allclose(keel.sublayers()[0](stream), post_ln.sublayers()[0](stream))


class TestInitialisation:
    def test_same_seed_same_weights_and_global_generator_untouched(self) -> None:
        before = torch.get_rng_state()
        first, second = (Transformer(small_config()) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        other = Transformer(small_config(seed=1))
        assert not torch.equal(first.embedding.weight, other.embedding.weight)

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_every_matrix_has_its_standard_deviation(self, scheme: str) -> None:
        config = replace(tiny(scheme), init_std=0.5, width=128, ffn_width=256)
        model = Transformer(config)
        specs = config.specs()
        for i, sublayer in enumerate(model.sublayers()):
            for name, module in sublayer.named_modules():
                if isinstance(module, Linear):
                    scaled = name.split(".")[-1] in ("value", "output", "up", "down") or name == "branch.function.gate"
                    std = 0.5 * (specs[i].init_gain if scaled else 1.0)
                    n = module.weight.numel()
                    assert abs(module.weight.std().item() / std - 1) < 5 / (2 * n) ** 0.5, name
                    assert abs(module.weight.mean().item() / std) < 5 / n**0.5, name
        assert abs(model.embedding.weight.std().item() / 0.5 - 1) < 5 / (2 * model.embedding.weight.numel()) ** 0.5

    def test_gates_start_at_their_bias_and_norms_at_one(self) -> None:
        model = Transformer(small_config("highway", scheme_parameters={"gate_bias": -3, "norm": "input"}))
        gates = [s.gate for s in model.sublayers()]
        assert all(gate is not None and torch.equal(gate.bias, torch.full_like(gate.bias, -3)) for gate in gates)
        norms = [module.weight for module in model.modules() if isinstance(module, Norm)]
        assert norms
        assert all(torch.equal(weight, torch.ones_like(weight)) for weight in norms)

    def test_dtypes_start_from_the_same_numbers(self) -> None:
        wide, narrow = (Transformer(replace(tiny(), compute_dtype=d)) for d in ("float64", "float32"))
        assert all(torch.equal(a.float(), b) for a, b in zip(wide.parameters(), narrow.parameters(), strict=True))

    def test_schemes_of_one_seed_share_branch_weights(self) -> None:
        keel, highway = (Transformer(small_config(scheme)).sublayers()[3].branch.function for scheme in ("keel", "highway"))
        assert torch.equal(keel.up.weight, highway.up.weight)

    def test_matrices_differ_from_each_other(self) -> None:
        model = Transformer(small_config(n_kv_heads=4))
        square = [s.branch.function for s in model.sublayers()[::2]]
        first = [a.query.weight for a in square] + [a.key.weight for a in square if isinstance(a, Attention)]
        assert len({float(w.detach().sum()) for w in first}) == len(first)


class TestLoss:
    def test_is_the_mean_cross_entropy_without_ignored_targets(self) -> None:
        model, ids = Transformer(small_config()), random_ids()
        targets = ids.flip(0).clone()
        targets[0, :3] = -100
        log_probabilities = model(ids).log_softmax(-1)
        kept = [-log_probabilities[b, t, targets[b, t]] for b in range(2) for t in range(7) if targets[b, t] >= 0]
        torch.testing.assert_close(model.loss(ids, targets), torch.stack(kept).mean(), rtol=1e-12, atol=0)

    def test_tied_head_reads_the_embedding(self) -> None:
        model = Transformer(small_config(tied_embeddings=True))
        assert model.head.weight is model.embedding.weight
        torch.testing.assert_close(model(random_ids()), model.hidden(random_ids()) @ model.embedding.weight.T)
        assert copy.deepcopy(model).head.weight is not model.head.weight

    def test_without_final_norm_the_head_reads_the_stream(self) -> None:
        model = Transformer(small_config("pre_ln", final_norm=False))
        stream = model.embedding(random_ids())
        for sublayer in model.sublayers():
            stream = sublayer(stream)
        torch.testing.assert_close(model.hidden(random_ids()), stream, rtol=1e-12, atol=1e-12)


class TestSharedBlocks:
    def test_weights_do_not_grow_with_depth_and_scales_follow_the_unrolled_depth(self) -> None:
        shallow, deep = (Transformer(small_config(shared_blocks=True, n_blocks=n)) for n in (2, 5))
        assert count_parameters(shallow.config) == count_parameters(deep.config)
        assert [s.shortcut_scale for s in deep.sublayers()] == [1.0, 1.0] + [10.0] * 8
        functions = {id(s.branch.function) for s in deep.sublayers()}
        assert len(functions) == 2

    def test_a_norm_that_the_first_block_lacks_is_shared_by_the_others(self) -> None:
        attentions = Transformer(small_config(shared_blocks=True)).sublayers()[::2]
        assert attentions[0].norm_out is None
        assert attentions[1].norm_out is not None
        assert attentions[1].norm_out is attentions[2].norm_out

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_equals_an_unshared_model_with_equal_weights(self, scheme: str) -> None:
        shared = perturbed(Transformer(small_config(scheme, shared_blocks=True)))
        unshared = Transformer(small_config(scheme))
        unshared.load_state_dict(shared.state_dict())
        assert torch.equal(shared(random_ids()), unshared(random_ids()))

    def test_learned_scales_are_one_per_unrolled_sublayer(self) -> None:
        model = Transformer(small_config(shared_blocks=True, learnable_alpha=True))
        assert len([name for name, _ in model.named_parameters() if name.endswith("shortcut_scale")]) == 6


class TestLayout:
    @pytest.mark.parametrize("options", [{}, {"shared_blocks": True}, {"final_norm": False, "learnable_alpha": True}], ids=str)
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_taps_show_the_stream_and_the_branches(self, scheme: str, options: dict[str, Any]) -> None:
        model, ids = perturbed(Transformer(small_config(scheme, **options))), random_ids()
        layout = residual_layout(model)
        branch_taps = [s.branch for s in layout.sublayers if s.branch is not None]
        seen = read_taps(model, [b.tap for b in layout.boundaries] + branch_taps, ids)
        streams, branches = seen[: len(layout.boundaries)], seen[len(layout.boundaries) :]
        assert len(branches) == 6
        assert torch.equal(streams[0], model.embedding.weight[ids])
        for sublayer, branch in zip(layout.sublayers, branches, strict=True):
            before, after = streams[sublayer.boundary_in], streams[sublayer.boundary_out]
            combined = before + branch if sublayer.combine is None else sublayer.combine(before, branch)
            torch.testing.assert_close(combined, after, rtol=1e-12, atol=1e-12)
        assert torch.equal(streams[-1], model.hidden(ids))
        assert torch.equal(layout.head.backbone(ids), model.hidden(ids))
        assert torch.equal(layout.head.logits(model.hidden(ids)), model(ids))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_every_parameter_has_an_owner_once(self, scheme: str) -> None:
        model = Transformer(small_config(scheme))
        layout = residual_layout(model)
        final = () if layout.final_norm is None else (layout.final_norm.module,)
        owners = [*layout.embedding_modules, *(m for s in layout.sublayers for m in s.modules), *final, *layout.head.modules]
        owned = [id(p) for name in owners for p in model.get_submodule(name).parameters()]
        assert sorted(owned) == sorted(id(p) for p in model.parameters())

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_norm_sites_are_all_norms_of_the_stream(self, scheme: str) -> None:
        model = Transformer(small_config(scheme))
        sites = [site for s in residual_layout(model).sublayers for site in s.norms]
        listed = [site.module for site in sites]
        assert sorted(listed) == sorted(
            name
            for name, m in model.named_modules()
            if isinstance(m, Norm) and "qkv_norms" not in name and name != "final_norm"
        )
        ends = {"in": "norm_in", "branch": "norm_branch", "out": "norm_out"}
        assert all(site.module.endswith(ends[site.role]) for site in sites)

    def test_keel_has_4n_minus_1_norms_and_pre_ln_an_identity_shortcut(self) -> None:
        keel = residual_layout(Transformer(small_config("keel")))
        assert sum(len(s.norms) for s in keel.sublayers) == 4 * 3 - 1
        assert [s.combine is None for s in keel.sublayers] == [True] + [False] * 5
        pre_ln = residual_layout(Transformer(small_config("pre_ln")))
        assert all(s.combine is None for s in pre_ln.sublayers)

    def test_names_are_relative_to_a_wrapper(self) -> None:
        wrapper = nn.Module()
        wrapper.inner = Transformer(small_config())
        layout = residual_layout(wrapper)
        assert layout.boundaries[1].tap.module == "inner.blocks.0.attention"
        assert layout.blocks == tuple(f"inner.blocks.{i}" for i in range(3))

    def test_the_family_table_finds_it(self) -> None:
        assert describe_model(Transformer(small_config())).family == "keel_dynamics"


@pytest.mark.parametrize(
    ("scheme", "options"),
    [(scheme, {}) for scheme in ("keel", "highway", "admin", "hybrid_norm")]
    + [("keel", {"learnable_alpha": True, "compute_dtype": "bfloat16"}), ("keel", {"shared_blocks": True})],
    ids=str,
)
def test_one_graph_without_breaks(scheme: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = Transformer(small_config(scheme, n_blocks=2, **options))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(random_ids()), model(random_ids()), rtol=1e-5, atol=1e-6)


def test_second_derivative_through_the_plain_attention_kernel() -> None:
    sublayer = Transformer(small_config()).sublayers()[2]
    stream = random_stream(1, 3)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: sublayer(x).square(), stream.requires_grad_())


def test_512_blocks_build_copy_run_and_differentiate() -> None:
    config = small_config(n_blocks=512, ffn_width=16, n_heads=2, compute_dtype="float32", init_std=0.02)
    model = copy.deepcopy(Transformer(config))
    assert len(residual_layout(model).boundaries) == 1026
    model.loss(random_ids(), random_ids().flip(0)).backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0
    assert len(str(model)) > 0
