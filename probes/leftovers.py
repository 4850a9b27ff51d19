"""Tensors of a file that its family has no place for: harmless ones, and those that take part in the computation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from probes.computation_words import speaks_of_computation
from probes.errors import UnsupportedModelError

__all__ = ["refuse_leftovers"]

# Tables, masks and heads for other purposes that old versions and other trainers store beside the language model.
_HARMLESS = re.compile(
    r"(^|\.)(mtp|pooler|seq_relationship|classifier|score|v_head|value_head|qa_outputs|inv_freq|freqs_cis|freqs|masked_bias"
    r"|position_ids|token_type_ids|attn\.bias|attention\.bias|causal_mask|num_batches_tracked|cos_cached|sin_cached"
    r"|sinusoidal_pos_embds?|embed_positions\.weights)(\.|$)"
)


def refuse_leftovers(place: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a file with tensors that its blocks or its trunk would have used.

    Args:
        place: the folder, for messages.
        model: what the file's other tensors are the parameters of.
        names: of the tensors that are left.

    Raises:
        UnsupportedModelError: if what the model lacks is a norm, a scale, a gate, a bias of a used map, or a further block.
    """
    modules = {name for name, _ in model.named_modules()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in names:
        if _HARMLESS.search(name):
            continue
        variants = (name, prefix + name, name.removeprefix(prefix))
        parent, lacking = max((_split(variant, modules) for variant in variants), key=lambda split: len(split[0]))
        if speaks_of_computation(lacking) or lacking == "weight" or lacking.split(".")[0].isdigit():
            family = getattr(getattr(model, "config", None), "model_type", "")
            raise UnsupportedModelError(
                f"{place} holds tensor '{name}', for which the family '{family}' of its config.json has no place"
                f"{f' in {parent}' if parent else ''}: the model would be measured without it. Use a family that has it, or "
                "take it out of the file"
            )


def _split(name: str, modules: set[str]) -> tuple[str, str]:
    """The longest beginning that is a module of the model, and the rest."""
    parts = name.split(".")
    n_known = max(n for n in range(len(parts)) if not n or ".".join(parts[:n]) in modules)
    return ".".join(parts[:n_known]), ".".join(parts[n_known:])
