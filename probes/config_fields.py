"""Fields of a config.json that its family does not know: harmless, worth a remark, or a request for another computation.

``transformers`` keeps such a field and computes as if it were not there. A model of another residual scheme that was saved
under the name of a known family would so be measured as what it is not. A field is known where the family's configuration
declares it or its source reads it; of the others the name and the value decide.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from probes.computation_words import speaks_of_computation, words
from probes.errors import UnsupportedModelError
from probes.families import OWN_FAMILY

__all__ = ["check_config_fields", "unknown_fields"]

# A word that says: training, initial values, storage, tokens, text generation or provenance; no part of a trained forward pass.
_HARMLESS_WORDS = re.compile(
    r"dropout|drop|pdrop|jitter|initializer|initialization|std|loss|coeff?|aux|lr|learning|train|training|trained|pretraining"
    r"|pretrained|version|dtype|torchscript|url|license|date|author|description|languages?|checkpointing|cache|flash|fused?"
    r"|fusion|tp|pp|ep|seed|generation|summary|tasks?|unsloth|labels?|ids?|index|tokenizer|ctx|context|length|pooler"
    r"|classifier|onnx|deepspeed|optimizer|dataset|upcast|bf|fp|js"
)
_HARMLESS = re.compile(
    r"auto_map|architectures|_?name_or_path|name|prefix|use_bfloat16|pruned_heads|tie_encoder_decoder|is_decoder"
    r"|add_cross_attention|cross_attention_hidden_size|output_attentions|output_past|_?attn_implementation(_autoset)?|tie_weights_"
    r"|is_llama_config|directionality|block_size|init_std|init_method(_std)?|init_device|model_parallel|slow_but_exact"
    r"|n_positions|max_position_embeddings|max_window_layers|num_nextn_predict_layers|reference_compile"
)
# Published configurations that state what their family does anyway: family -> field -> value.
_STATED: dict[str, dict[str, tuple[object, ...]]] = {
    "gptj": {"rotary": (True,), "scale_attn_weights": (True,)},
    "starcoder2": {
        "scale_attn_weights": (True,),
        "norm_type": ("layer_norm",),
        "mlp_type": ("default",),
        "activation_function": ("gelu", "gelu_pytorch_tanh"),
    },
    "bloom": {"offset_alibi": (100,), "skip_bias_add": (True,), "skip_bias_add_qkv": (False,)},
    "falcon": {"rotary": (True,)},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "seq_aux": (True,), "moe_layer_freq": (1,)},
    "albert": {"down_scale_factor": (1,), "gap_size": (0,), "net_structure_type": (0,)},
    "gemma2": {"sliding_window_size": (4096,)},
    "gpt_oss": {"swiglu_limit": (7.0,)},
    "modernbert": {"position_embedding_type": ("absolute",)},
}
# A field of older versions -> the one that says the same now.
_SAME_AS = {
    "rope_pct": "partial_rotary_factor",
    "rope_percent": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
    "hidden_act": "hidden_activation",
    "experts_per_token": "num_experts_per_tok",
}
_OFF = ("", "none", "null", "default", "standard", "off", "no", "false")
_ON = ("true", "yes", "on", "1")
_SMALL = frozenset(("eps", "epsilon"))
# Fields of which "no" is the request: the norms go behind the branches, or attention looks ahead.
_NO_ASKS = frozenset(("pre_norm", "prenorm", "norm_first", "pre_layernorm", "do_layer_norm_before", "causal", "is_causal"))
_FACTORS = ("scal", "multipl", "factor", "gain", "alpha", "beta", "gamma", "lambda", "tau", "temperature")
_COUNTS = frozenset(("num", "n", "size", "mod", "freq", "frequency", "interval", "degree", "count", "groups"))


def check_config_fields(path: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse a request for another computation; remark on other fields that the family does not know.

    Args:
        path: config.json, for messages.
        settings: its content; the family is one of ``transformers`` or the toolkit's.

    Returns:
        A remark with the names, or nothing.

    Raises:
        UnsupportedModelError: naming the field.
    """
    family = settings["model_type"]
    unknown = unknown_fields(settings)
    turned_off = [name for name in unknown if name in _NO_ASKS and settings[name] is False]
    _check_partial_rotation(path, settings)
    loud = [name for name in unknown if not _is_harmless(name, settings[name]) and not _is_stated(name, settings)]
    for name in turned_off + loud:
        if name in turned_off or _asks_for_more(name, settings[name]):
            raise UnsupportedModelError(
                f"{path} has \"{name}\": {_short(settings[name])}, which the family '{family}' does not compute: its blocks "
                "would be measured without it. Take the field out (or set it to null) if the weights are those of a plain "
                f"{family}"
            )
    if not loud:
        return ()
    more = f" and {len(loud) - 4} more" if len(loud) > 4 else ""
    return (f"config.json has fields that the family '{family}' does not use: {', '.join(loud[:4])}{more}",)


def _check_partial_rotation(path: Path, settings: Mapping[str, Any]) -> None:
    """Families that rotate a part of each head say which in their defaults; others read over the field."""
    name, rope = "partial_rotary_factor", settings.get("rope_parameters") or settings.get("rope_scaling")
    factor = settings.get(name, rope.get(name) if isinstance(rope, dict) else None)
    if factor is None or factor == 1:
        return
    family = settings["model_type"]
    if name not in json.dumps(_defaults(family), default=str):
        raise UnsupportedModelError(
            f"{path} has \"{name}\": {_short(factor)}, and the family '{family}' rotates whole heads: its positions would be "
            "other ones. Take the field out if the weights were trained without it"
        )


def unknown_fields(settings: Mapping[str, Any]) -> list[str]:
    """Fields that the family neither declares nor reads, nor any model of ``transformers``.

    Args:
        settings: of a config.json, its ``model_type`` included.
    """
    config_class, source = _config_class(settings["model_type"]), _source(settings["model_type"])
    known = _written(settings["model_type"]) | set(config_class.attribute_map) | _for_generation()
    return [name for name in settings if name not in known and not hasattr(config_class, name) and not _reads(source, name)]


def _declared(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


@cache
def _written(family: str) -> frozenset[str]:
    """What the family itself writes into config.json, beside what its class declares."""
    return frozenset(_defaults(family)) | _declared(_config_class(family))


@cache
def _defaults(family: str) -> Mapping[str, Any]:
    try:
        return dict(_config_class(family)().to_dict())
    except Exception:  # a class that needs an argument, in its own way
        return {}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _config_class(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family == OWN_FAMILY:
        from probes.hf import KeelDynamicsConfig

        return KeelDynamicsConfig
    return CONFIG_MAPPING[family]


@cache
def _for_generation() -> frozenset[str]:
    """Settings of text generation, which older versions wrote into config.json."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())  # type: ignore[no-untyped-call]  # the library leaves it untyped


@cache
def _source(family: str) -> str:
    """The family's own files, which may read a field that its class does not declare."""
    config_class = _config_class(family)
    modules = [
        each.__module__ for each in config_class.__mro__ if each.__module__.startswith(("transformers.models.", "probes."))
    ]
    modules += [module.replace("configuration_", "modeling_") for module in modules]
    if "rope_parameters" in _declared(config_class):
        modules.append("transformers.modeling_rope_utils")
    places = [find_spec(module) for module in dict.fromkeys(modules)]
    return "\n".join(Path(place.origin).read_text(encoding="utf-8") for place in places if place is not None and place.origin)


def _reads(source: str, name: str) -> bool:
    quoted = rf"""["']{re.escape(name)}["']"""
    ways = (
        rf"config\.{re.escape(name)}\b",
        rf"attr\([\w.]*config, {quoted}",
        rf"kwargs[\w.]*[(\[]{quoted}",
        f"{quoted} in kwargs",
    )
    return any(re.search(way, source) for way in ways)


def _is_harmless(name: str, value: object) -> bool:
    """Whether the name is of no account, or the value says that nothing is done: no, none, empty, zero, a factor of one."""
    parts = words(name)
    if _HARMLESS.fullmatch(name) or any(_HARMLESS_WORDS.fullmatch(part) for part in parts):
        return True
    if isinstance(value, str):
        return value.strip().lower() in _OFF
    if value is None or value is False or value in ([], {}, 0):
        return True
    factor = any(part.startswith(_FACTORS) for part in parts) or not _COUNTS.isdisjoint(parts)
    return value == 1 and value is not True and factor


def _is_stated(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a field says what the family does anyway, or what another field says."""
    family, value = settings["model_type"], settings[name]
    if value in _STATED.get(family, {}).get(name, ()):
        return True
    if name == "position_embedding_type":
        return value == "absolute" and "rope_parameters" not in _declared(_config_class(family))
    return name in _SAME_AS and settings.get(_SAME_AS[name]) == value


def _asks_for_more(name: str, value: object) -> bool:
    """A switch that is on, a number with a fraction, a kind of something, or what speaks of the forward pass."""
    if not _SMALL.isdisjoint(words(name)):
        return False
    named = isinstance(value, str) and ("type" in words(name) or value.strip().lower() in _ON)
    switch = value == 1 or isinstance(value, float)
    return named or switch or any(speaks_of_computation(text) for text in (name, str(value)))
