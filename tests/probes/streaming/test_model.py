"""Opening checkpoints without reading them: shards, indices, tied weights, GGUF, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from probes.checkpoint import load_checkpoint
from probes.errors import CheckpointError, UnsupportedModelError
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from tests.probes._gguf import gguf_model, write_gguf
from tests.probes._models import small_config
from tests.probes._tiny import FAMILIES, N_BLOCKS, tiny_ids, tiny_model
from tests.probes.streaming._streamed import assert_same_norms, predicting, saved_family, two_batches

INDEX = "model.safetensors.index.json"


def test_nothing_but_vectors_is_read_at_first(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    with open_streamed(folder) as streamed:
        on_meta = {name: p.is_meta for name, p in streamed.model.named_parameters()}
        vectors = [p for p in streamed.model.parameters() if p.ndim == 1]
        assert streamed.stream.n_bytes_read == sum(p.nbytes for p in vectors)
    assert on_meta == {name: p.ndim > 1 for name, p in load_checkpoint(folder).model.named_parameters()}


@pytest.mark.parametrize("shard", ["1GB", "12KB"], ids=["one file", "shards"])
def test_one_file_and_shards_give_the_same(shard: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size=shard)
    checkpoint = load_checkpoint(tmp_path)
    with open_streamed(tmp_path) as streamed:
        got = measure_streamed_gradient_norms(streamed, two_batches())
    assert_same_norms(got, measure_gradient_norms(checkpoint.model, two_batches(), layout=checkpoint.layout))


def test_an_index_with_a_missing_shard_is_refused_by_shard_and_tensor(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    (folder / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor '.+' cannot be read: model-00002-of-00006.safetensors.* is missing"):
        open_streamed(folder)


def test_an_index_with_more_names_than_files_is_a_warning_where_every_tensor_is_there(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    moved = {name: f"part-{i:02}.safetensors" if i % 2 else file for i, (name, file) in enumerate(index["weight_map"].items())}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": moved}))
    with open_streamed(folder) as streamed:
        assert any("but the 6 present files hold every tensor" in warning for warning in streamed.checkpoint.warnings)
        got = measure_streamed_gradient_norms(streamed, two_batches())
    assert got.n_blocks == N_BLOCKS


def test_blocks_spread_over_shards_are_counted_once_in_numeric_order(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=12, num_attention_heads=4, head_dim=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    with open_streamed(tmp_path) as streamed:
        result = measure_streamed_gradient_norms(streamed, [predicting(tiny_ids())])
    assert [s.block for s in result.sublayers] == [block for block in range(12) for _ in range(2)]
    names = [p.name for p in result.parameters]
    assert len(names) == len(set(names))
    assert names.index("model.layers.9.mlp.up_proj.weight") < names.index("model.layers.10.mlp.up_proj.weight")


def test_a_tied_weight_is_one_record_with_the_summed_gradient(tmp_path: Path) -> None:
    folder = saved_family("llama-tied", tmp_path)
    (batch, _) = two_batches()
    model = load_checkpoint(folder).model
    logits = model(input_ids=batch.inputs).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.inputs[:, 1:].flatten()).backward()
    with open_streamed(folder) as streamed:
        result = measure_streamed_gradient_norms(streamed, [batch])
    (record,) = [p for p in result.parameters if "embed_tokens" in p.name or "lm_head" in p.name]
    assert record.also_named == ("lm_head.weight",)
    expected = torch.linalg.vector_norm(model.get_input_embeddings().weight.grad)
    assert record.grad_norm.value == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["equal", "stale"])
def test_a_second_copy_of_a_tied_weight_is_not_used_and_a_stale_one_is_a_warning(scale: float, tmp_path: Path) -> None:
    tiny_model("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = scale * tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = load_checkpoint(tmp_path)
    with open_streamed(tmp_path) as streamed:
        assert streamed.checkpoint.warnings == checkpoint.warnings
        assert any("stale" in warning for warning in checkpoint.warnings) == (scale != 1)
        got = measure_streamed_gradient_norms(streamed, two_batches())
    assert_same_norms(got, measure_gradient_norms(checkpoint.model, two_batches(), layout=checkpoint.layout))


def _without(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != name}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "lacks tensor 'model.layers.1.mlp.up_proj.weight'"),
        ("model.norm.weight", "lacks tensor 'model.norm.weight'"),
        ("lm_head.weight", "lacks tensor 'lm_head.weight'.*not tied"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    _without(tmp_path, name)
    with pytest.raises(CheckpointError, match=message):
        open_streamed(tmp_path)


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 20}))
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.0.mlp.*has shape \(.*\), its configuration asks for"):
        open_streamed(tmp_path)


def test_an_own_model_with_another_tensor_is_refused(tmp_path: Path) -> None:
    save_model(Transformer(small_config()), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"extra": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="unknown tensor"):
        open_streamed(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_and_tables_are_those_of_the_model_in_memory(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Positions in bfloat16 would be wrong from a few hundred on; routers and norms that a family keeps in float32 stay so."""
    tiny_model(family, torch.float32).save_pretrained(tmp_path)
    whole = load_checkpoint(tmp_path, dtype=dtype).model
    with open_streamed(tmp_path, dtype=dtype) as streamed:
        assert {n: p.dtype for n, p in streamed.model.named_parameters()} == {n: p.dtype for n, p in whole.named_parameters()}
        tables = dict(streamed.model.named_buffers())
    for name, buffer in whole.named_buffers():
        assert tables[name].dtype == buffer.dtype
        assert torch.equal(tables[name], buffer)


def test_a_family_whose_stream_is_found_by_running_it_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"family 'bloom' cannot be streamed.*llama, mistral"):
        open_streamed(tmp_path)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {})],
    ids=["llama", "llama tied", "gemma2"],
)
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
def test_gguf_is_read_block_by_block_in_the_convention_of_transformers(kind, arch, changes, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_model(arch, **changes), arch, quantise=kind)
    checkpoint = load_checkpoint(path)
    with open_streamed(path) as streamed:
        assert streamed.checkpoint.warnings == checkpoint.warnings
        got = measure_streamed_gradient_norms(streamed, two_batches())
    assert_same_norms(got, measure_gradient_norms(checkpoint.model, two_batches(), layout=checkpoint.layout), relative=1e-4)


_MEASURE = """
import sys, threading, time
import torch
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.removal import measure_streamed_layer_removal
from tests.probes.streaming._streamed import predicting

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, running = 0, True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.002)

batch = predicting(torch.arange(16).view(1, 16))
with open_streamed(sys.argv[1]) as streamed:
    streamed.stream.reads_ahead = False
    measure_streamed_layer_removal(streamed, [predicting(torch.arange(2).view(1, 2))])  # libraries take their memory now
    streamed.stream.reads_ahead = True
    streamed.stream.forget()
    before = anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    if sys.argv[2] == "gradients":
        measure_streamed_gradient_norms(streamed, [batch])
    else:
        measure_streamed_layer_removal(streamed, [batch])
    running = False
    thread.join()
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("probe", ["gradients", "removal"])
def test_memory_stays_far_below_the_checkpoint(probe: str, tmp_path: Path) -> None:
    """Twelve blocks of 12.6 MB and two matrices of 8 MB: never more than two blocks, a window and a gradient are in memory."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=12,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="40MB")
    n_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert n_bytes > 160e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), probe], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 0.4 * n_bytes


@pytest.mark.parametrize(
    ("order", "expected"), [((0, 1), [[1], [2]]), ((2, 1), [[], [0]]), ((1, 2), [[], []])], ids=["up", "down", "goes on"]
)
def test_the_next_block_is_read_once_the_direction_is_known(order, expected, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    with open_streamed(folder) as streamed:
        read_ahead = []
        for block in order:
            with streamed.stream.resident((streamed.layout.blocks[block],)):
                read_ahead.append(sorted(streamed.stream._pending))
    assert read_ahead == expected
