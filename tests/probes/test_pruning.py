"""A saved pruned model is the model that removal by identity measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from torch import nn

from keel_theory.schemes import SCHEMES
from probes import pruning
from probes.checkpoint import Checkpoint, load_checkpoint
from probes.config import tiny
from probes.errors import CheckpointError, OutputError
from probes.families import describe_model
from probes.model import Transformer
from probes.pruning import prune_transformer, pruned, save_pruned
from probes.removal_units import RemovalError, joint_unit
from probes.saving import save_model
from probes.tokenization import MissingTokenizer
from tests.probes._gguf import gguf_model, write_gguf
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._naive_removal import identity_in_place_of
from tests.probes._tiny import FAMILIES, N_BLOCKS, VOCAB, tiny_ids, tiny_model

SAME = {"rtol": 1e-9, "atol": 1e-9}


def as_checkpoint(model: nn.Module) -> Checkpoint:
    layout = describe_model(model)
    return Checkpoint(
        model=model,
        layout=layout,
        tokenizer=MissingTokenizer(VOCAB, "a test"),
        source="a test",
        family=layout.family,
        n_parameters=sum(p.numel() for p in model.parameters()),
        stored_dtype="F64",
    )


def logits_without(model: nn.Module, blocks: list[int], ids: torch.Tensor) -> torch.Tensor:
    layout = describe_model(model)
    with torch.no_grad(), identity_in_place_of(model, joint_unit(layout, "block", blocks).sublayers):
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("blocks", [[0], [1], [0, 2]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_reloads_with_transformers_and_gives_the_same_logits(
    family: str, blocks: list[int], tmp_path: Path
) -> None:
    model, ids = tiny_model(family), tiny_ids()
    expected, before = logits_without(model, blocks, ids), dict(vars(model.config))
    save_pruned(as_checkpoint(model), joint_unit(describe_model(model), "block", blocks), tmp_path / "pruned")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "pruned")
    assert config.num_hidden_layers == N_BLOCKS - len(blocks)
    has_experts = any(sublayer.expert_parameters for sublayer in describe_model(model).sublayers)
    options = {"experts_implementation": "eager"} if has_experts else {}  # as in tiny_model
    again, info = type(model).from_pretrained(tmp_path / "pruned", dtype=torch.float64, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids, use_cache=False).logits, expected, **SAME)
    assert dict(vars(model.config)) == before
    assert len(describe_model(model).blocks) == N_BLOCKS


@pytest.mark.parametrize("removed", range(4))
def test_generation_with_and_without_cache_agrees_for_every_removed_block(removed: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, bos_token_id=1
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pruned(model, describe_model(model), [removed]) as smaller:
        cached, plain = (smaller.generate(tiny_ids(1, 5), use_cache=use, **options) for use in (True, False))
        assert [block.self_attn.layer_idx for block in smaller.model.layers] == [0, 1, 2]
    assert torch.equal(cached, plain)
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2, 3]


def test_the_full_model_is_back_after_an_exception() -> None:
    model, ids = tiny_model("gemma3"), tiny_ids()
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    with pytest.raises(KeyboardInterrupt), pruned(model, describe_model(model), [0, 1]):  # noqa: PT012
        assert model.config.layer_types == ["full_attention"]
        raise KeyboardInterrupt
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)


@pytest.mark.parametrize("blocks", [[1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_models_keep_every_update_or_are_refused(scheme: str, blocks: list[int], tmp_path: Path) -> None:
    model = perturbed(Transformer(small_config(scheme)))
    ids = random_ids()
    unit = joint_unit(describe_model(model), "block", blocks)
    if (scheme, blocks) == ("layernorm_scaling", [1]):  # its factor 1/sqrt(l) follows the place
        with pytest.raises(RemovalError, match="block 2 would become block 1, where the scheme's rule gives"):
            prune_transformer(model, blocks)
        return
    smaller = prune_transformer(model, blocks)
    with torch.no_grad(), identity_in_place_of(model, unit.sublayers):
        expected = model(ids)
    torch.testing.assert_close(smaller(ids), expected, **SAME)
    save_pruned(as_checkpoint(model), unit, tmp_path / "pruned")
    torch.testing.assert_close(load_checkpoint(tmp_path / "pruned").model(ids), expected, **SAME)


def test_keel_keeps_the_alpha_of_its_full_depth() -> None:
    smaller = prune_transformer(Transformer(small_config("keel")), [1])
    assert [sublayer.shortcut_scale for sublayer in smaller.sublayers()] == [1.0, 1.0, 6.0, 6.0]


def test_keel_without_its_first_block_is_refused() -> None:
    with pytest.raises(RemovalError, match=r"scheme 'keel' cannot be saved.*block 1 would become block 0.*attention sub-layer"):
        prune_transformer(Transformer(small_config("keel")), [0])


@pytest.mark.parametrize("changes", [{"learnable_alpha": True}, {"shared_blocks": True}, {"tied_embeddings": True}], ids=str)
def test_variants_of_own_models(changes: dict[str, bool]) -> None:
    model = perturbed(Transformer(small_config("keel", **changes)))
    with torch.no_grad(), identity_in_place_of(model, joint_unit(describe_model(model), "block", [2]).sublayers):
        expected = model(random_ids())
    torch.testing.assert_close(prune_transformer(model, [2])(random_ids()), expected, **SAME)


def test_sublayers_and_whole_models_cannot_be_saved_without(tmp_path: Path) -> None:
    checkpoint = as_checkpoint(tiny_model("llama"))
    with pytest.raises(RemovalError, match=r"only whole blocks.*\(block 1\); use --unit block"):
        save_pruned(checkpoint, joint_unit(checkpoint.layout, "sublayer", [2]), tmp_path / "pruned")
    with pytest.raises(RemovalError, match="all 3 blocks would be removed"):
        save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [0, 1, 2]), tmp_path / "pruned")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint = as_checkpoint(tiny_model("llama"))
    with pytest.raises(OutputError, match="exists and is not empty; name a new folder"):
        save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [1]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_saved_model_with_other_logits_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3")  # whose last block, alone of the three, attends to everything
    checkpoint = as_checkpoint(model)
    monkeypatch.setattr(
        "probes.pruning._per_block_settings", lambda config, n_blocks: {"layer_types": ["full_attention"] * n_blocks}
    )
    with pytest.raises(CheckpointError, match="does not give the logits of removal by identity"):
        save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [2]), tmp_path / "pruned")
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    save_model(Transformer(tiny("pre_ln")), tmp_path / "full")
    checkpoint = load_checkpoint(tmp_path / "full")
    save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [1, 2]), tmp_path / "pruned")
    again = load_checkpoint(tmp_path / "pruned")
    assert again.tokenizer.encode("ab") == checkpoint.tokenizer.encode("ab") == [97, 98]
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["model"]["n_blocks"] == 2


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
def test_a_gguf_file_is_saved_as_plain_weights_and_stays_as_it_was(
    kind: gguf.GGMLQuantizationType | None, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), "llama", quantise=kind)
    checkpoint = load_checkpoint(path)
    before, config = dict(vars(checkpoint.model)), dict(vars(checkpoint.model.config))
    expected = logits_without(checkpoint.model, [1], tiny_ids())
    save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [1]), tmp_path / "pruned")
    assert vars(checkpoint.model) == before
    assert dict(vars(checkpoint.model.config)) == config
    assert "quantization_config" not in json.loads((tmp_path / "pruned" / "config.json").read_text())
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pruned")
    with torch.no_grad():
        assert torch.equal(again(tiny_ids(), use_cache=False).logits, expected)


def _granite() -> nn.Module:
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(residual_multiplier=0.7, **BLOCK_BY_BLOCK))


def _falcon() -> nn.Module:
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=3, num_attention_heads=4)
    )


def _smollm3() -> nn.Module:
    return transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(no_rope_layers=[1, 1, 0], pad_token_id=0, **BLOCK_BY_BLOCK)
    )


BLOCK_BY_BLOCK = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("build", [_granite, _falcon, _smollm3])
def test_families_known_block_by_block_are_saved(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build().double().eval()
    checkpoint = as_checkpoint(model)
    with torch.no_grad(), pruned(model, checkpoint.layout, [1]) as smaller:
        expected = smaller(tiny_ids(), use_cache=False).logits
    save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [1]), tmp_path / "pruned")
    again = load_checkpoint(tmp_path / "pruned")
    assert again.layout.n_blocks == 2
    with torch.no_grad():
        torch.testing.assert_close(again.model(tiny_ids(), use_cache=False).logits, expected, **SAME)


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """No file grows beyond 2000 bytes: room for a configuration, not for the weights."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("build", [lambda: tiny_model("llama"), lambda: Transformer(tiny("pre_ln"))], ids=["llama", "own"])
def test_a_full_disk_is_one_message_and_leaves_nothing(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    checkpoint = as_checkpoint(build())
    unit = joint_unit(checkpoint.layout, "block", [1])
    with _full_disk(), pytest.raises(OutputError, match=r"cannot write a model to .*(File too large|FileTooLarge)"):
        save_pruned(checkpoint, unit, tmp_path / "pruned")
    assert list(tmp_path.iterdir()) == []
    save_pruned(checkpoint, unit, tmp_path / "pruned")


def _qwen3_moe(**changes: object) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **BLOCK_BY_BLOCK, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **changes
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _dots1() -> nn.Module:
    config = transformers.Dots1Config(
        **BLOCK_BY_BLOCK,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    )
    return transformers.Dots1ForCausalLM(config)


DENSE_BLOCKS = {
    "by index": (lambda: _qwen3_moe(mlp_only_layers=[1]), [0], {"mlp_only_layers": [0]}),
    "as many as blocks": (lambda: _qwen3_moe(mlp_only_layers=[0, 1, 2]), [0], {"mlp_only_layers": [0, 1]}),
    "by period": (
        lambda: _qwen3_moe(decoder_sparse_step=2),
        [0],
        {"mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "the first ones": (_dots1, [0], {"first_k_dense_replace": 1}),
}


@pytest.mark.parametrize(("build", "blocks", "settings"), DENSE_BLOCKS.values(), ids=DENSE_BLOCKS)
def test_dense_blocks_among_experts_keep_their_kind(
    build: Callable[[], nn.Module], blocks: list[int], settings: dict[str, object], tmp_path: Path
) -> None:
    checkpoint = as_checkpoint(build().eval())
    save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", blocks), tmp_path / "pruned")
    written = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert {name: written[name] for name in settings} == settings
    kinds = [type(block.mlp) for i, block in enumerate(checkpoint.model.model.layers) if i not in blocks]
    assert [type(block.mlp) for block in load_checkpoint(tmp_path / "pruned").model.model.layers] == kinds


def test_blocks_counted_in_an_unknown_way_are_refused_by_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(name for name in pruning._FIRST_BLOCKS if name != "moe_layer_start_index")
    monkeypatch.setattr(pruning, "_FIRST_BLOCKS", known)
    config = transformers.Ernie4_5_MoeConfig(
        **BLOCK_BY_BLOCK, moe_num_experts=4, moe_k=2, moe_intermediate_size=8, moe_layer_start_index=1, moe_layer_end_index=2
    )
    checkpoint = as_checkpoint(transformers.Ernie4_5_MoeForCausalLM(config).eval())
    with pytest.raises(CheckpointError, match=r"'ernie4_5_moe' cannot be saved .*moe_layer_start_index.*nothing was kept"):
        save_pruned(checkpoint, joint_unit(checkpoint.layout, "block", [0]), tmp_path / "pruned")
    assert list(tmp_path.iterdir()) == []
