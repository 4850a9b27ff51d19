"""Rotary positions of a GGUF file in the words of ``transformers``.

In llama.cpp the angle of dimension pair j is position / (base^(2j/d) · s · f_j), where s is the factor of linear scaling and
f_j comes from a tensor of the file, and cosine and sine are multiplied by an attention factor; YaRN interpolates between s = 1
and s by frequency. Source: llama.cpp, ``ggml_rope_ext`` and ``llama-model.cpp``.
"""

from __future__ import annotations

import math
from typing import Any

from probes.errors import CheckpointError, UnsupportedModelError
from probes.gguf_keys import Keys

__all__ = ["ROPE_TENSORS", "rope_parameters"]

_FACTORS, _LONG, _SHORT = ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DEFAULT_BASE = 10_000.0
_TYPES = ("none", "linear", "yarn", "longrope")


def rope_parameters(keys: Keys, head_width: int, context: int, partial: bool) -> dict[str, Any]:
    """The rotary positions that a file asks for.

    Args:
        keys: its settings.
        head_width: of one attention head.
        context: positions the model was made for.
        partial: whether the family can leave a part of each head without positions.

    Returns:
        What the configuration of ``transformers`` calls ``rope_parameters``.

    Raises:
        CheckpointError: if a number or tensor has no sensible value.
        UnsupportedModelError: if ``transformers`` has no such positions.
    """
    rotated = keys.whole("rope.dimension_count", head_width)
    if rotated != head_width and not (partial and rotated < head_width):
        raise keys.refused("rope.dimension_count")
    common: dict[str, Any] = {"rope_theta": keys.positive("rope.freq_base", _DEFAULT_BASE)}
    if partial:
        common["partial_rotary_factor"] = rotated / head_width
    kind = keys.text("rope.scaling.type") or "linear"
    if kind not in _TYPES:
        raise keys.refused("rope.scaling.type")
    factor = _factor(keys)
    attention = keys.positive("rope.scaling.attn_factor", 1.0) * keys.positive("rope.scaling.yarn_attn_factor", 1.0)
    original = keys.whole("rope.scaling.original_context_length", context)
    if kind == "yarn":
        return common | _yarn(keys, factor, attention, original)
    _check_no_yarn(keys)
    factors = _factors(keys, rotated // 2)
    factor = 1.0 if kind == "none" else factor
    if factors is None and kind == "longrope":
        raise UnsupportedModelError(f"{keys.file.path} states longrope positions, and holds no tensor '{_LONG}'")
    if factors is None and attention == 1.0:
        return common | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor})
    long, short = factors or ([1.0] * (rotated // 2),) * 2
    return common | {
        "rope_type": "longrope",
        "long_factor": [factor * value for value in long],
        "short_factor": [factor * value for value in short],
        "factor": max(1.0, context / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _factor(keys: Keys) -> float:
    """The scale of positions, under its present or its old name; 0 stands for none."""
    old = keys.real("rope.scale_linear", 0.0)
    factor = keys.real("rope.scaling.factor", old) or 1.0
    if factor < 0:
        raise keys.refused("rope.scaling.factor", factor)
    return factor


def _yarn(keys: Keys, factor: float, attention: float, original: int) -> dict[str, Any]:
    if any(name in keys.file.tensors for name in ROPE_TENSORS):
        raise keys.refused("rope.scaling.type", "yarn beside a tensor of rotary factors")
    extrapolation = keys.real("rope.scaling.yarn_ext_factor", -1.0)  # below 0: as the kind of scaling has it
    if extrapolation >= 0 and extrapolation != 1.0:
        raise keys.refused("rope.scaling.yarn_ext_factor")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        "original_max_position_embeddings": original,
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _check_no_yarn(keys: Keys) -> None:
    """Settings of YaRN mean nothing to other scalings, but one that asks for its interpolation is a contradiction."""
    if keys.real("rope.scaling.yarn_ext_factor", -1.0) > 0:
        raise keys.refused("rope.scaling.yarn_ext_factor")
    for key in ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"):
        keys.get(key)


def _factors(keys: Keys, n_pairs: int) -> tuple[list[float], list[float]] | None:
    """Divisors of the frequencies for long and for short sequences, or None where the file holds none."""
    there = [name for name in ROPE_TENSORS if name in keys.file.tensors]
    if not there:
        return None
    if there not in ([_FACTORS], [_LONG, _SHORT]):
        raise UnsupportedModelError(
            f"{keys.file.path} holds {', '.join(there)}: one alone, or the last two together, are known"
        )
    read = [[float(value) for value in keys.file.values(name).ravel()] for name in there]
    for name, values in zip(there, read, strict=True):
        if len(values) != n_pairs or not all(math.isfinite(value) and value > 0 for value in values):
            raise CheckpointError(f"{keys.file.path}: tensor '{name}' must hold {n_pairs} positive numbers")
    return read[0], read[-1]
