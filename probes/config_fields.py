"""Fields of a config.json that its family does not know: harmless, worth a remark, or a request for another computation.

``transformers`` keeps such a field and computes as if it were not there. A model of another residual scheme that was saved
under the name of a known family would so be measured as what it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probes.errors import UnsupportedModelError

__all__ = ["check_config_fields", "check_leftover_tensors"]

_HARMLESS = re.compile(
    r"^_|^(model_type|architectures|auto_map|transformers_version|torch_dtype|dtype|quantization_config|task_specific_params"
    r"|rope_theta|rope_scaling|rope_parameters|partial_rotary_factor|rotary_\w*|n_ctx|n_positions|max_sequence_length|seq_length"
    r"|pretraining_tp|tensor_parallel\w*|use_cache|cache_implementation|gradient_checkpointing|use_flash_attn|attn_implementation"
    r"|tokenizer_class|prefix|summary_\w+|finetuning_task|id2label|label2id|problem_type|\w*_token_ids?|\w*(dropout|pdrop|drop_rate)\w*"
    r"|initializer_range|init_std|init_method_std|unsloth\w*|gradient_accumulation_steps|pruned_heads|directionality"
    r"|pooler_\w+"
    r"|\w*version|language|license|name_or_path|num_labels|output_\w+|return_dict|use_bfloat16|fp32_residual_connection"
    r"|layer_norm_eps\w*|rms_norm_eps\w*|norm_eps\w*|\w*loss\w*|router_\w+|head_dim|training_\w+)$"
)
"""Fields of published configurations that say nothing of the computation, or say it in an older form."""
_COMPUTES = re.compile(
    r"(^|_)(keel|alpha\w*|beta|lambda|residual\w*|shortcut\w*|skip|highway|deepnorm|deep_norm|sandwich|peri|pre|post|norm\w*|ln\d?"
    r"|layernorm\w*|rmsnorm\w*|sublayer\w*|scal(e|ed|es|ing|ar)\w*|multiplier\w*|gate[ds]?|gating|softcap\w*|softcapping|logit\w*cap\w*"
    r"|mup|mu_?p|gain\w*|qk|parallel\w*|recurrence|looped|loops?|shared)(_|$)"
)
"""Words of fields that change what a block computes."""
_LOUD_VALUES = re.compile(r"keel|post|peri|sandwich|deep.?norm|highway|hybrid|mix|resi", re.IGNORECASE)
_IN_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.(.+)$")
_RESIDUAL_TENSOR = re.compile(r"norm|(^|[._])ln|scale|alpha|gamma|gate|lambda|residual|shortcut|gain", re.IGNORECASE)
_CACHED = re.compile(r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|rotary_emb\.\w+)$")


def check_config_fields(path: Path, settings: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Refuse a request for another computation; remark on other fields that the family does not know.

    Args:
        path: config.json, for messages.
        settings: its content.
        config: as ``transformers`` reads it.

    Returns:
        A remark with the names, or nothing.

    Raises:
        UnsupportedModelError: naming the field.
    """
    known = _known_fields(type(config))
    unknown = {name: value for name, value in settings.items() if name not in known and not _HARMLESS.match(name)}
    for name, value in unknown.items():
        if _asks(name, value):
            raise UnsupportedModelError(
                f"{path} has \"{name}\": {_short(value)}, which the family '{config.model_type}' does not compute: its blocks "
                f"would be measured without it. Take the field out (or set it to null) if the weights are those of a plain "
                f"{config.model_type}"
            )
    loud = [name for name, value in unknown.items() if not _neutral(value)]
    if not loud:
        return ()
    more = f" and {len(loud) - 4} more" if len(loud) > 4 else ""
    return (f"config.json has fields that the family '{config.model_type}' does not use: {', '.join(loud[:4])}{more}",)


def _known_fields(config_class: Any) -> set[str]:
    default = config_class()
    inherited = {name for name in dir(config_class) if not name.startswith("__")}
    return {*default.to_dict(), *vars(default), *inherited, *getattr(config_class, "attribute_map", {})}


def _asks(name: str, value: object) -> bool:
    if _neutral(value):
        return False
    if isinstance(value, str):
        return bool(_COMPUTES.search(name.lower()) and _LOUD_VALUES.search(value))
    return bool(_COMPUTES.search(name.lower()))


def _neutral(value: object) -> bool:
    """Whether a value says that nothing is done: no, none, empty, zero, a factor of one."""
    if isinstance(value, str):
        return value.strip().lower() in {"", "none", "no", "false", "default", "null"}
    return value in (None, [], {}) or (value in (0, 1) and value is not True)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_leftover_tensors(place: Path, names: list[str], n_blocks: int) -> None:
    """Refuse norms, scales and gates inside the blocks that the family has no place for.

    Args:
        place: for messages.
        names: of tensors that the model does not use.
        n_blocks: of the model; tensors of further blocks (heads for several tokens) are no part of it.

    Raises:
        UnsupportedModelError: naming the first.
    """
    for name in sorted(names):
        inside = _IN_BLOCK.search(name)
        if inside and int(inside[1]) < n_blocks and not _CACHED.search(name) and _RESIDUAL_TENSOR.search(inside[2]):
            raise UnsupportedModelError(
                f"{place} holds tensor '{name}', for which the family of its config.json has no place: its blocks compute "
                "something else, and would be measured without it. Use a family that has it, or take it out of the file"
            )
