import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from probes.errors import UnsupportedModelError
from probes.families import SUPPORTED_FAMILIES, describe_model, effective_gain, owned_names
from probes.layout import BlockKind, Objective, ResidualLayout, Side, Tap
from probes.taps import input_of, stream_of
from tests.probes._tiny import FAMILIES, N_BLOCKS, PARALLEL, SAME_LAYOUT, VOCAB, WIDTH, tiny_ids, tiny_model

TINY = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}


@contextmanager
def captured(model: nn.Module, taps: set[Tap]) -> Iterator[dict[Tap, Tensor]]:
    seen: dict[Tap, Tensor] = {}
    hooks = []
    for tap in taps:
        module = model.get_submodule(tap.module)
        if tap.side is Side.INPUT:

            def keep(module: nn.Module, args: tuple, kwargs: dict, tap: Tap = tap) -> None:
                seen[tap] = input_of(args, kwargs)

            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        else:

            def keep_output(module: nn.Module, args: tuple, output: object, tap: Tap = tap) -> None:
                seen[tap] = stream_of(output).clone()  # falcon adds its attention to what its FFN has returned

            hooks.append(module.register_forward_hook(keep_output))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run(model: nn.Module, layout: ResidualLayout) -> tuple[list[Tensor], list[Tensor | None], tuple[Tensor, ...]]:
    """Boundaries and branches as (B, T, D), and the model's own hidden states."""
    boundaries = [b.tap for b in layout.boundaries]
    branches = [s.branch for s in layout.sublayers]
    ids = tiny_ids()
    with captured(model, {t for t in (*boundaries, *branches) if t is not None}) as seen:
        hidden = model(ids, output_hidden_states=True).hidden_states
    flat = [seen[t].reshape(*ids.shape, -1) for t in boundaries]
    return flat, [None if t is None else seen[t].reshape(*ids.shape, -1) for t in branches], hidden


@pytest.fixture(params=(*FAMILIES, *SAME_LAYOUT))
def tiny(request) -> tuple[nn.Module, ResidualLayout]:
    model = tiny_model(request.param)
    return model, describe_model(model)


def test_every_family_of_the_table_has_a_tiny_model():
    assert {tiny_model(name).config.model_type for name in (*FAMILIES, *SAME_LAYOUT)} == set(SUPPORTED_FAMILIES)


def test_the_readme_names_every_family_of_the_table():
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    [sentence] = re.findall(
        r"Known sub-layer by sub-layer: (.*?), and the toolkit's own models", readme.replace("; and the", ", and the")
    )
    named = set(re.findall(r"[a-z0-9_]+(?:-[a-z0-9]+)*(?: \(text\))?", sentence))
    assert {name.replace("_text", " (text)") if name == "gemma3_text" else name for name in SUPPORTED_FAMILIES} <= named


POST_LN = {"bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie"}


def test_every_sublayer_obeys_the_sum_rule(tiny):
    model, layout = tiny
    boundaries, branches, _ = run(model, layout)
    for start in {s.boundary_in for s in layout.sublayers}:
        together = [i for i, s in enumerate(layout.sublayers) if s.boundary_in == start]
        first = layout.sublayers[together[0]]
        x, branch = boundaries[start], sum(layout.sublayers[i].added(branches[i]) for i in together)
        expected = x + branch if first.combine is None else first.combine(x, branch)
        assert branch.abs().max() > 1e-3
        torch.testing.assert_close(boundaries[first.boundary_out], expected, rtol=1e-12, atol=1e-12)


def test_post_ln_families_alone_normalise_the_shortcut(tiny):
    model, layout = tiny
    post_ln = model.config.model_type in POST_LN or not getattr(model.config, "do_layer_norm_before", True)
    assert {s.combine is not None for s in layout.sublayers} == {post_ln}
    assert {n.role == "out" for s in layout.sublayers for n in s.norms} == {post_ln}


def test_combine_is_differentiable_in_the_stream_alone(tiny):
    model, layout = tiny
    for sublayer in layout.sublayers:
        if sublayer.combine is None:
            continue
        x, branch = (torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
        sublayer.combine(x, branch).square().mean(-1).sum().backward()
        assert x.grad.abs().max() > 0
        assert branch.grad is None
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", [*FAMILIES, *SAME_LAYOUT])
def test_boundaries_run_from_embedding_to_final_norm(family: str) -> None:
    layout = describe_model(tiny_model(family))
    parallel = family in PARALLEL
    assert layout.n_blocks == len(layout.blocks) == N_BLOCKS
    assert len(layout.sublayers) == 2 * N_BLOCKS
    inner = N_BLOCKS if parallel else 2 * N_BLOCKS
    assert len(layout.boundaries) == 1 + inner + (layout.final_norm is not None)
    assert [b.block for b in layout.boundaries] == sorted(b.block for b in layout.boundaries)
    assert len({b.name for b in layout.boundaries}) == len(layout.boundaries)
    assert [s.kind for s in layout.sublayers] == [BlockKind.ATTENTION, BlockKind.FFN] * N_BLOCKS
    assert [s.block for s in layout.sublayers] == [i // 2 for i in range(2 * N_BLOCKS)]


def test_boundary_zero_is_the_embedding_and_the_last_block_is_not_the_last_hidden_state(tiny):
    model, layout = tiny
    boundaries, _, hidden = run(model, layout)
    assert torch.equal(boundaries[0], hidden[0])
    if layout.final_norm is None:
        projected = getattr(model.config, "word_embed_proj_dim", WIDTH) != WIDTH
        assert projected or torch.equal(boundaries[-1], hidden[-1])
    else:
        assert torch.equal(boundaries[-1], hidden[-1])
        assert not torch.allclose(boundaries[-2], hidden[-1])


def test_block_boundaries_are_the_models_own_hidden_states(tiny):
    model, layout = tiny
    boundaries, _, hidden = run(model, layout)
    leaving = [
        next(i for i, b in reversed(list(enumerate(layout.boundaries))) if b.tap == Tap(block, Side.OUTPUT))
        for block in layout.blocks
    ]
    for index, position in enumerate(leaving[:-1]):
        assert torch.equal(boundaries[position], hidden[index + 1])


def test_backbone_and_head_give_the_models_logits_exactly(tiny):
    model, layout = tiny
    ids = tiny_ids()
    logits = model(ids).logits
    hidden = layout.head.backbone(ids)
    assert hidden.requires_grad
    assert torch.equal(layout.head.logits(hidden), logits)
    torch.testing.assert_close(layout.head.logits(hidden.flatten(0, 1)), logits.flatten(0, 1), rtol=1e-12, atol=1e-12)
    if layout.head.linear is not None:
        plain = nn.functional.linear(hidden, layout.head.linear.weight, layout.head.linear.bias)
        torch.testing.assert_close(layout.head.shaped_(plain.detach()), logits, rtol=1e-14, atol=0)
    assert (layout.head.linear is None) == (model.config.model_type in POST_LN)
    assert (layout.head.softcap is None) == (model.config.model_type != "gemma2")


def test_every_parameter_belongs_to_exactly_one_part(tiny):
    model, layout = tiny
    owners = owned_names(layout)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owning = [owner for owner, module in owners if name.startswith(f"{module}.")]
        assert len(owning) == 1, f"{name} belongs to {owning}"
        twins = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
        assert len(twins) <= 2
    for owner, module in owners:
        has_none = owner == "embedding" or isinstance(model.get_submodule(module), OlmoLayerNorm)
        assert has_none or any(True for _ in model.get_submodule(module).parameters())


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "gpt2", "opt", "bert"])
def test_tied_weight_belongs_to_embedding_and_head(family):
    model = tiny_model(family)
    owners = owned_names(describe_model(model))
    tied = model.get_input_embeddings().weight
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is tied]
    assert [next(o for o, m in owners if n.startswith(f"{m}.")) for n in names] == ["embedding", "head"]


def test_effective_gain_is_the_factor_that_the_norm_applies(tiny):
    model, layout = tiny
    sites = [n for s in layout.sublayers for n in s.norms] + ([layout.final_norm] if layout.final_norm else [])
    assert sites
    for site in sites:
        norm = model.get_submodule(site.module)
        signs = torch.ones(WIDTH, dtype=torch.float64)
        signs[1::2] = -1  # mean 0, mean square 1: LayerNorm and RMSNorm both leave it as it is
        measured = (norm(signs) - norm(-signs)) / 2 * signs
        torch.testing.assert_close(effective_gain(model, site).double(), measured, rtol=2e-5, atol=0)
        assert site.unit_offset == model.config.model_type.startswith(("gemma", "nemotron"))


def test_effective_gain_of_a_norm_without_weight_is_one():
    config = transformers.OPTConfig(
        **TINY, word_embed_proj_dim=WIDTH, ffn_dim=24, max_position_embeddings=32, layer_norm_elementwise_affine=False
    )
    model = transformers.OPTForCausalLM(config)
    site = describe_model(model).sublayers[0].norms[0]
    assert torch.equal(effective_gain(model, site), torch.ones(WIDTH))


def test_experts_are_found_by_the_first_dimension():
    model = tiny_model("mixtral")
    layout = describe_model(model)
    assert [bool(s.expert_parameters) for s in layout.sublayers] == [False, True] * N_BLOCKS
    model.zero_grad()
    model(torch.full((1, 2), 5)).logits.square().sum().backward()  # two equal tokens cannot reach all four experts
    for sublayer in layout.sublayers[1::2]:
        routed = model.get_submodule(f"{layout.blocks[sublayer.block]}.mlp.gate")
        assert routed.top_k < routed.num_experts
        for name in sublayer.expert_parameters:
            gradient = model.get_parameter(name).grad
            silent = [e for e in range(routed.num_experts) if not gradient[e].any()]
            assert gradient.shape[0] == routed.num_experts
            assert 0 < len(silent) < routed.num_experts


@pytest.mark.parametrize(
    ("family", "objective"), [("llama", Objective.CAUSAL), ("opt-post-norm", Objective.CAUSAL), ("bert", Objective.MASKED)]
)
def test_objective_is_the_familys(family, objective):
    assert describe_model(tiny_model(family)).objective is objective


def test_describing_leaves_the_model_as_it_was(tiny):
    model, _ = tiny
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    describe_model(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(**TINY, bos_token_id=1, eos_token_id=2))


def _mpt() -> nn.Module:
    config = transformers.MptConfig(vocab_size=VOCAB, d_model=WIDTH, n_layers=3, n_heads=4, max_seq_len=32)
    return transformers.MptForCausalLM(config)


def _gpt_neox_japanese() -> nn.Module:
    return transformers.GPTNeoXJapaneseForCausalLM(
        transformers.GPTNeoXJapaneseConfig(**TINY, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
    )


def _cohere2_moe() -> nn.Module:
    config = transformers.Cohere2MoeConfig(
        **TINY,
        intermediate_size=24,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        logit_scale=0.5,
    )
    model = transformers.Cohere2MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # the grouped product does not exist in float64
    return model


def _granitemoehybrid() -> nn.Module:
    config = transformers.GraniteMoeHybridConfig(
        **TINY,
        intermediate_size=24,
        shared_intermediate_size=24,
        num_key_value_heads=4,
        layer_types=["attention"] * 3,
        mamba_n_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        logits_scaling=3.0,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _roberta_prelayernorm() -> nn.Module:
    config = transformers.RobertaPreLayerNormConfig(**TINY, intermediate_size=24, max_position_embeddings=32, pad_token_id=1)
    return transformers.RobertaPreLayerNormForMaskedLM(config)


def _distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=WIDTH, n_layers=3, n_heads=4, hidden_dim=24, max_position_embeddings=32
    )
    return transformers.DistilBertForMaskedLM(config)


def _electra() -> nn.Module:
    """Its embedding, and with it its head, is narrower than its stream."""
    config = transformers.ElectraConfig(**TINY, embedding_size=8, intermediate_size=24, max_position_embeddings=32)
    return transformers.ElectraForMaskedLM(config)


def _mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, state_size=4, bos_token_id=1, eos_token_id=2
        )
    )


def _other_scale() -> nn.Module:
    model = _cohere2_moe()
    model.logit_scale = 0.7  # not what the configuration says
    return model


def _two_way() -> nn.Module:
    return transformers.ElectraForCausalLM(_electra().config)


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    )


GENERIC = {
    "bloom": (_bloom, True, Objective.CAUSAL),
    "mpt": (_mpt, True, Objective.CAUSAL),
    "mamba": (_mamba, True, Objective.CAUSAL),
    "cohere2_moe": (_cohere2_moe, True, Objective.CAUSAL),
    "granitemoehybrid": (_granitemoehybrid, True, Objective.CAUSAL),
    "roberta-prelayernorm": (_roberta_prelayernorm, False, Objective.MASKED),
    "distilbert": (_distilbert, False, Objective.MASKED),
    "electra": (_electra, False, Objective.MASKED),
}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(f, d) for f in GENERIC for d in (torch.float32, torch.bfloat16) if (f, d) != ("mamba", torch.bfloat16)],
    ids=str,
)
def test_head_of_another_family_gives_its_logits_exactly(family: str, dtype: torch.dtype) -> None:
    build, is_linear, objective = GENERIC[family]
    model = build().to(dtype).eval()
    layout = describe_model(model)
    ids = tiny_ids()
    logits = model(ids).logits
    assert torch.equal(layout.head.logits(layout.head.backbone(ids)).to(logits.dtype), logits)
    assert (layout.head.linear is not None) == is_linear
    if layout.head.linear is not None:
        plain = layout.head.linear(layout.head.backbone(ids)).detach()
        torch.testing.assert_close(layout.head.shaped_(plain).to(logits.dtype), logits)
    assert layout.objective is objective
    assert all(any(True for _ in model.get_submodule(name).parameters()) for name in layout.head.modules)


@pytest.mark.parametrize("build", [_bloom, _gpt_neox_japanese, _cohere2_moe], ids=["bloom", "gpt_neox_japanese", "cohere2_moe"])
def test_another_family_is_described_block_by_block(build: Callable[[], nn.Module]):
    model = build().double()  # in training mode, as built
    layout = describe_model(model)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    model.eval()
    ids = tiny_ids()
    with captured(model, {b.tap for b in layout.boundaries}) as seen:
        output = model(ids, output_hidden_states=True)
    assert [s.kind for s in layout.sublayers] == [BlockKind.BLOCK] * 3
    assert all(s.branch is None for s in layout.sublayers)
    streams = [seen[b.tap] for b in layout.boundaries]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(streams[:3], output.hidden_states[:3], strict=True))
    assert torch.equal(streams[-1], output.hidden_states[-1])
    assert not torch.allclose(streams[-2], output.hidden_states[-1])
    assert torch.equal(layout.head.logits(layout.head.backbone(ids)), output.logits)
    owners = owned_names(layout)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert sum(name.startswith(f"{module}.") for _, module in owners) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_other_scale, r"family 'cohere2_moe' is not supported: its logits are not what its head makes.*llama, mistral"),
        (_two_way, r"family 'electra' is not supported: it is not causal: a token has a share in the logits of an earlier"),
        (_t5, r"family 't5' is an encoder-decoder"),
        (lambda: tiny_model("llama").model, r"LlamaModel of family 'llama' has no module 'model'; a model with its causal"),
        (lambda: nn.Linear(2, 2), r"family 'Linear' is not supported: it has no linear language-model head"),
    ],
    ids=["another scale", "not causal", "encoder-decoder", "no head", "no language model"],
)
def test_a_model_whose_stream_is_not_found_is_refused(build: Callable[[], nn.Module], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        describe_model(build())


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        *((family, {"is_decoder": True}, f"{family} configured as a decoder") for family in sorted(POST_LN)),
        *((family, {"chunk_size_feed_forward": 2}, f"{family} with chunk_size_feed_forward") for family in sorted(POST_LN)),
        ("falcon-new", {"parallel_attn": False}, "falcon with new_decoder_architecture and without parallel_attn"),
        ("falcon", {"parallel_attn": False}, "block 0 of this falcon has no module 'post_attention_layernorm'"),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}, "block 0 .* no module 'ln_attn'"),
        ("stablelm-parallel", {"use_parallel_residual": False}, "no module 'post_attention_layernorm'"),
    ],
)
def test_a_configuration_outside_its_description_is_refused(family: str, setting: dict[str, object], message: str):
    model = tiny_model(family)
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        describe_model(model)


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.RobertaForCausalLM(tiny_model("roberta").config),
        lambda: transformers.BertLMHeadModel(tiny_model("bert").config),
        lambda: transformers.BertForPreTraining(tiny_model("bert").config),
        lambda: tiny_model("xlm-roberta").roberta,
    ],
    ids=["causal roberta", "causal bert", "pretraining", "no head"],
)
def test_an_encoder_that_is_no_masked_language_model_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedModelError, match="is no masked language model; a model with its masked language-model head"):
        describe_model(build())


def test_a_parameter_without_a_place_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].adapter = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(UnsupportedModelError, match=r"parameter 'model.layers.1.adapter.weight' of family 'llama'"):
        describe_model(model)


class _Broken(nn.Module):
    """A block list whose blocks do not pass one stream on: each reads the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        x = self.embed(input_ids)
        return sum(layer(x) for layer in self.layers)


class _BrokenForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.lm_head = _Broken(), nn.Linear(WIDTH, VOCAB)
        self.config = transformers.PretrainedConfig(num_hidden_layers=2)
        self.config.model_type = "side_by_side"

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        return self.lm_head(self.base_model(input_ids, use_cache))


def test_blocks_that_do_not_form_a_chain_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"family 'side_by_side'.*output of 'base_model.layers.0' is not the input"):
        describe_model(_BrokenForCausalLM())


def test_a_stream_in_another_dtype_than_its_head_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"family 'mamba' is not supported: .* last hidden state in torch.float32"):
        describe_model(_mamba().bfloat16())


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("no backward kernel")


def test_a_model_that_cannot_be_differentiated_is_refused_by_name() -> None:
    model = _bloom()
    model.transformer.h[1].register_forward_hook(lambda _m, _a, out: (_Undifferentiable.apply(stream_of(out)),))
    with pytest.raises(
        UnsupportedModelError, match=r"'bloom' is not supported: it cannot be differentiated.*no backward kernel"
    ):
        describe_model(model)


def test_a_trial_pass_that_fails_is_refused_by_name() -> None:
    model = _bloom()
    model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("mat1 and mat2")))
    with pytest.raises(UnsupportedModelError, match=r"family 'bloom' is not supported: a trial pass failed: mat1 and mat2"):
        describe_model(model)
