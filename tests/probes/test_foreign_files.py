"""Files that are not what their names say, wrapped and quantised weights: told by name, in memory and streamed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from probes.checkpoint import load_checkpoint
from probes.config import tiny
from probes.config_fields import check_config_fields
from probes.errors import CheckpointError, KeelError, UnsupportedModelError
from probes.foreign_files import unwrapped_names
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.model import open_streamed
from probes.weight_files import read_safetensors_header
from tests._cli import run_keel
from tests.probes._gguf import gguf_model, write_gguf
from tests.probes._tiny import tiny_ids, tiny_model

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + 32 * b"4d" + b"\nsize 12345\n"
CONTENTS = {
    "Git LFS pointer": (LFS, r"is a Git LFS pointer, not the file itself: run git lfs pull"),
    "web page": (b"<!DOCTYPE html>\n<html><head></head></html>", r"is a web page, not the file"),
    "empty": (b"", r"is empty: fetch it again"),
    "pickle": (b"\x80\x02}q\x00.", r"is a pickle; unpickling runs code"),
    "zip of torch.save": (b"PK\x03\x04" + bytes(60), r"is a zip archive, as torch.save writes them"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(60), r"is an HDF5 file"),
    "git-annex pointer": (
        b"/annex/objects/SHA256E-s9--4d.bin\n",
        r"is a git-annex pointer, not the file itself: run git annex",
    ),
    "answer of a server": (b'{"error": "Repository not found"}', r"is an answer of a server: fetch it again"),
    "xz": (b"\xfd7zXZ" + bytes(60), r"is compressed with xz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(60), r"is compressed with zstd"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), r"is compressed with gzip"),
    "GGUF by another name": (b"GGUF" + bytes(60), r"is a GGUF file: give it a name that ends in \.gguf"),
}
ROLES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "model.safetensors.index.json")
OPENERS = {"in memory": load_checkpoint, "streamed": open_streamed}
by_opener = pytest.mark.parametrize("read", OPENERS.values(), ids=OPENERS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@by_opener
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("content", "message"), CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_something_else_is_told_by_name(folder, read, role, content, message):
    (folder / role).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{role.replace('.', '[.]')} {message}"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [value for key, value in CONTENTS.items() if "GGUF" not in key],
    ids=[k for k in CONTENTS if "GGUF" not in k],
)
@by_opener
def test_a_gguf_file_that_is_something_else_is_told_by_name(tmp_path, read, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m[.]gguf {message}"):
        read(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "arguments", [("grad-norm",), ("grad-norm", "--stream"), ("layer-removal", "--dry-run"), ("alignment",)]
)
def test_every_command_says_so_and_ends_with_two(folder, monkeypatch, capsys, arguments):
    (folder / "model.safetensors").write_bytes(LFS)
    code, out, err = run_keel(monkeypatch, capsys, arguments[0], folder, *arguments[1:])
    assert (code, out) == (2, "")
    assert "is a Git LFS pointer, not the file itself: run git lfs pull" in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx", "weights.npz"])
def test_weights_of_another_framework_are_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"weights for .* alone \({name}\); save the model as safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".distcp"])
def test_a_file_of_another_format_is_named_with_the_cure(tmp_path, suffix):
    (tmp_path / f"weights{suffix}").write_bytes(b"????????")
    with pytest.raises(CheckpointError, match=rf"weights\{suffix} is .*safetensors"):
        load_checkpoint(tmp_path / f"weights{suffix}")
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        load_checkpoint(f"absent{suffix}")


@by_opener
@pytest.mark.parametrize("field", ["quantization_config", "compression_config", "quantization"])
def test_a_word_of_quantisation_in_the_config_is_enough(folder, read, field):
    with_fields(folder, {field: {"bits": 4}})
    with pytest.raises(CheckpointError, match=r"is quantised \(unnamed\)"):
        read(folder)


@by_opener
@pytest.mark.parametrize("part", ["lokr_w1", "hada_w1_a", "ia3_l", "lora_up.weight", "lora_magnitude_vector.default.weight"])
def test_other_adapters_in_the_weights_are_told(folder, read, part):
    tensors = load_file(folder / "model.safetensors") | {f"model.layers.0.mlp.up_proj.{part}": torch.zeros(2, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds a LoRA adapter \(tensor .*merge it into its base model"):
        read(folder)


@by_opener
def test_weights_of_an_adapter_without_its_settings_are_not_silent(folder, read):
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 4)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"an adapter beside it \(adapter_model\.safetensors\), which is not applied"):
        read(folder)


def test_a_folder_with_a_gguf_file_says_which_to_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf_model("llama"), "llama")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"m\.gguf: name that file"):
        load_checkpoint(tmp_path)


# --- wrappers ---

PREFIXES = (
    *("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "base_model.model.", "module.base_model.model."),
    *("_fsdp_wrapped_module.", "_forward_module.module."),
)


def renamed(path: Path, new) -> None:
    tensors = load_file(path)
    metadata = {"format": "pt"}
    save_file({new(name): tensor for name, tensor in tensors.items()}, path, metadata=metadata)


@by_opener
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_wrapper_is_taken_off_and_told(folder, read, prefix):
    plain = load_checkpoint(folder).model
    renamed(folder / "model.safetensors", lambda name: prefix + name)
    checkpoint = read(folder)
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    assert any(f"'{prefix}' is taken off the names of the tensors" in warning for warning in checkpoint.warnings)
    if read is load_checkpoint:
        ids = tiny_ids()
        assert torch.equal(plain(ids).logits, checkpoint.model(ids).logits)


@pytest.mark.parametrize("part", ["model.layers.0.", "model.layers.0.self_attn."])
def test_blocks_that_were_compiled_one_by_one(folder, part):
    plain = load_checkpoint(folder).model
    renamed(folder / "model.safetensors", lambda name: name.replace(part, f"{part}_orig_mod."))
    checkpoint = load_checkpoint(folder)
    assert torch.equal(plain(tiny_ids()).logits, checkpoint.model(tiny_ids()).logits)
    assert any("torch.compile" in warning for warning in checkpoint.warnings)


@by_opener
def test_a_prefix_of_some_tensors_only_explains_nothing(folder, read):
    renamed(folder / "model.safetensors", lambda name: f"module.{name}" if "layers.0" in name else name)
    with pytest.raises(KeelError, match=r"lacks tensor 'model\.layers\.0\."):
        read(folder)


@by_opener
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_model_of_the_toolkit_inside_a_wrapper(tmp_path, read, prefix):
    save_model(Transformer(tiny()), tmp_path)
    renamed(tmp_path / "model.safetensors", lambda name: prefix + name)
    checkpoint = read(tmp_path)
    assert any("taken off" in warning for warning in getattr(checkpoint, "checkpoint", checkpoint).warnings)


def test_names_that_would_become_one_stay_as_they_are():
    names = ["model._orig_mod.a", "model.a"]
    assert unwrapped_names(names) == ({name: name for name in names}, None)


# --- quantised, adapters, encoders without a head ---

STORED = {
    "GPTQ or AWQ": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "compressed-tensors": ("weight_packed", "weight_shape"),
    "float8 or int8 with scales": ("weight", "weight_scale_inv"),
    "HQQ": ("W_q", "meta"),
}


@by_opener
@pytest.mark.parametrize(("method", "parts"), STORED.items(), ids=STORED)
def test_quantised_weights_are_told_without_a_word_in_the_config(folder, read, method, parts):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj."
    tensors.pop(f"{name}weight")
    tensors |= {name + part: torch.zeros(4, dtype=torch.int32) for part in parts}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"is quantised \({method}; tensor 'model\.layers\.0\.mlp.*dequantised"):
        read(folder)


@by_opener
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_lora_weights_are_told(folder, read, prefix):
    tensors = {f"{prefix}model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds a LoRA adapter \(tensor .*lora_A.*merge it into its base model"):
        read(folder)


@by_opener
@pytest.mark.parametrize("with_weights", [True, False])
def test_an_adapter_beside_a_model_is_not_silent(folder, read, with_weights):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    if with_weights:
        save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 4)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"an adapter beside it \(adapter_config\.json\), which is not applied"):
        read(folder)


@by_opener
@pytest.mark.parametrize("family", ["bert"])
def test_an_encoder_without_a_head_says_what_is_missing(tmp_path, read, family):
    tiny_model(family, torch.float32).base_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertModel"]
    with pytest.raises(CheckpointError, match=r"lacks tensor 'cls\..*architectures = \[\"BertModel\"\], a model without"):
        read(tmp_path)


# --- configurations that ask for something else ---

ASKED = {
    "keel": True,
    "use_keel": True,
    "alpha": 48,
    "residual_scale": 0.5,
    "residual_alpha": [1.0, 2.0],
    "post_norm": True,
    "use_post_norm": True,
    "norm_placement": "post",
    "norm_position": "sandwich",
    "qk_norm": True,
    "attention_multiplier": 0.3,
    "scale_depth": 1.4,
    "highway_gate": True,
    "final_logit_softcapping": 30.0,
    "mup_width_multiplier": 2.0,
    "parallel_residual": True,
}
ASKED |= {
    "_keel": True,
    "rezero": True,
    "hyper_connections": 4,
    "mhc": 4,
    "scheme": "post-norm",
    "block_type": "keel",
    "postNorm": True,
    "clip_qkv": 8.0,
    "alibi": True,
    "sliding_window": 4,
    "branch_weight": 0.5,
    "router_scale": 3.0,
    "rotary_gate": True,
    "norm_type": "layernorm",
    "residual": {"kind": "keel"},
    "hourglass": True,
}
NEUTRAL = (None, False, 0, "", [], {}, "none")


def with_fields(folder: Path, fields: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@by_opener
@pytest.mark.parametrize(("field", "value"), ASKED.items(), ids=ASKED)
def test_a_field_that_asks_for_another_computation_is_refused(folder, read, field, value):
    with_fields(folder, {field: value})
    with pytest.raises(UnsupportedModelError, match=rf'config\.json has "{field}": .*does not compute'):
        read(folder)


@by_opener
@pytest.mark.parametrize("field", ["pre_norm", "prenorm", "norm_first", "pre_layernorm", "causal"])
def test_a_no_that_asks_for_another_computation_is_refused(folder, read, field):
    with_fields(folder, {field: False})
    with pytest.raises(UnsupportedModelError, match=rf'config\.json has "{field}": false, which the family'):
        read(folder)


@by_opener
@pytest.mark.parametrize("inside", [False, True])
def test_partial_rotation_of_a_family_that_rotates_whole_heads_is_refused(folder, read, inside):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with_fields(folder, {"rope_parameters": rope} if inside else {"partial_rotary_factor": 0.5})
    with pytest.raises(
        UnsupportedModelError, match=r'"partial_rotary_factor": 0\.5, and the family .llama. rotates whole heads'
    ):
        read(folder)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path, length):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    content = path.read_bytes()
    old = int.from_bytes(content[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + content[8 : 8 + old].ljust(length) + content[8 + old :])
    assert list(read_safetensors_header(path)) == ["a"]


@pytest.mark.parametrize("value", NEUTRAL, ids=repr)
def test_neutral_values_pass(folder, value):
    with_fields(folder, dict.fromkeys(ASKED, value))
    checkpoint = load_checkpoint(folder)
    assert not any("does not use" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize("field", ["residual_scale", "alpha", "embedding_multiplier", "rope_factor", "num_streams"])
@pytest.mark.parametrize("value", [1, 1.0])
def test_a_factor_or_a_count_of_one_passes(folder, field, value):
    with_fields(folder, {field: value})
    load_checkpoint(folder)


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "yes", "keel", 0.5, [48], {"alpha": 48}])
def test_a_switch_is_on_however_it_is_written(folder, value):
    with_fields(folder, {"keel": value})
    with pytest.raises(UnsupportedModelError, match=r'config\.json has "keel": .*does not compute'):
        load_checkpoint(folder)


def test_position_embeddings_that_the_family_does_not_compute_are_refused(tmp_path):
    tiny_model("bert", torch.float32).save_pretrained(tmp_path)
    with_fields(tmp_path, {"position_embedding_type": "relative_key"})
    with pytest.raises(UnsupportedModelError, match=r'has "position_embedding_type": "relative_key"'):
        load_checkpoint(tmp_path)


@by_opener
def test_a_field_beside_a_model_of_the_toolkit_is_refused_too(tmp_path, read):
    save_model(Transformer(tiny()), tmp_path)
    with_fields(tmp_path, {"keel": True})
    with pytest.raises(UnsupportedModelError, match=r'has "keel": true'):
        read(tmp_path)


def _language_models() -> list[str]:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    language = {*MODEL_FOR_CAUSAL_LM_MAPPING, *MODEL_FOR_MASKED_LM_MAPPING}
    return [family for family in CONFIG_MAPPING if CONFIG_MAPPING[family] in language]


@pytest.mark.parametrize("family", _language_models())
def test_what_a_family_writes_itself_passes_in_silence(family):
    from transformers import CONFIG_MAPPING

    try:
        settings = CONFIG_MAPPING[family]().to_dict()
    except Exception as error:
        pytest.skip(f"no default configuration: {type(error).__name__}")
    assert check_config_fields(Path("config.json"), settings | {"model_type": family}) == ()


def test_other_unknown_fields_are_remarked_on(folder):
    with_fields(folder, {"my_run": "a7", "sampler_runs": 12})
    assert any("does not use: my_run, sampler_runs" in warning for warning in load_checkpoint(folder).warnings)


PUBLISHED = {
    "llama": {
        "_name_or_path": "x", "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "use_cache": True, "transformers_version": "4.40.0", "max_sequence_length": 2048, "unsloth_version": "2024.9",
        "mlp_bias": False, "attention_dropout": 0.0, "pad_token_id": 2, "_flash_attn_2_enabled": True,
    },
    "mistral": {"sliding_window": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": False},
    "qwen2": {"max_window_layers": 21, "use_sliding_window": False, "sliding_window": 32768, "use_mrope": False},
    "gemma2": {"query_pre_attn_scalar": 8, "cache_implementation": "hybrid", "attn_logit_softcapping": 50.0},
    "gpt2": {
        "n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True}}, "summary_type": "cls_index",
        "summary_use_proj": True, "resid_pdrop": 0.1, "initializer_range": 0.02, "activation_function": "gelu_new",
    },
    "bert": {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_fc_layers": 3, "gradient_checkpointing": False,
        "position_embedding_type": "absolute", "classifier_dropout": None, "id2label": {"0": "A", "1": "B"},
    },
    "phi3": {"original_max_position_embeddings": 64, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "auto_map": {"AutoConfig": "c.C"}},
    "opt": {"do_layer_norm_before": True, "word_embed_proj_dim": 16, "prefix": "</s>", "dropout": 0.1, "layerdrop": 0.0},
}  # fmt: skip
OTHERS: dict[str, dict] = {
    "gptj": {"rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "gradient_checkpointing": False},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "gemma3_text": {"rope_local_base_freq": 10000, "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
    "starcoder2": {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "mlp_type": "default", "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    },
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "offset_alibi": 100,
        "pretraining_pp": 4, "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
    },
    "stablelm": {"rope_pct": 0.25, "partial_rotary_factor": 0.25, "rotary_scaling_factor": 1.0, "norm_eps": 1e-5},
    "albert": {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0, "layers_to_keep": []},
    "roberta": {"position_embedding_type": "absolute", "gradient_checkpointing": False},
    "electra": {"position_embedding_type": "absolute", "summary_last_dropout": 0.1},
    "distilbert": {"tie_weights_": True, "sinusoidal_pos_embds": False},
    "modernbert": {"position_embedding_type": "absolute", "global_attn_every_n_layers": 3, "reference_compile": True},
    "deepseek_v3": {
        "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "seq_aux": True,
    },
    "gpt_oss": {"experts_per_token": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "initial_context_length": 4096},
    "phi3": {"interpolate_factor": 1, "lm_head_bias": False, "full_attn_mod": 1, "partial_rotary_factor": 0.75},
    "gemma2": {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_older_fields_of_published_configurations_pass(family):
    check_config_fields(Path("config.json"), {"model_type": family} | OTHERS[family])


@pytest.mark.parametrize("family", PUBLISHED)
def test_fields_of_published_configurations_pass(tmp_path, family):
    tiny_model(family, torch.float32).save_pretrained(tmp_path)
    with_fields(
        tmp_path, {k: v for k, v in PUBLISHED[family].items() if k not in json.loads((tmp_path / "config.json").read_text())}
    )
    load_checkpoint(tmp_path)


LEFT_OVER = (
    "model.layers.0.post_norm.weight",
    "model.layers.1.residual_scale",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.ffn_gate.weight",
    "model.layers.0.ln_3.bias",
    "model.layers.0.alpha",
    "model.layers.0.res_weight",
    "model.layers.0.hyper.mix",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.3.input_layernorm.weight",
    "model.post_norm.weight",
    "model.embed_tokens.scale",
    "lm_head.scale",
    "final_norm.weight",
    "alpha",
)


@by_opener
@pytest.mark.parametrize("name", LEFT_OVER)
def test_a_norm_or_scale_that_the_family_has_no_place_for_is_refused(folder, read, name):
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"holds tensor '{name}', for which the family"):
        read(folder)


@by_opener
@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "other.thing"])
def test_other_leftovers_are_remarked_on_or_known(folder, read, name):
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    warnings = getattr(opened := read(folder), "checkpoint", opened).warnings
    assert all(len(warning.splitlines()) == 1 and warning.isprintable() for warning in warnings)


def test_values_are_those_without_the_wrapper(tmp_path):
    model = Transformer(tiny())
    save_model(model, tmp_path)
    renamed(tmp_path / "model.safetensors", lambda name: f"_orig_mod.{name}")
    again = load_checkpoint(tmp_path).model
    for (_, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        np.testing.assert_array_equal(one.detach().numpy(), other.detach().numpy())
