"""A model without some of its blocks, as a checkpoint that loads anywhere and computes what removal by identity computed.

Deleting blocks from a list is not enough: the number of blocks, everything that a configuration lists per block (attention
types, say), and the index by which each block finds its place in the key-value cache move along.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from keel_theory.depth_expression import DepthExpression
from keel_theory.spec import ParameterValue, ProfileKind, ResidualSpec
from probes.block_runner import BlockRunner
from probes.checkpoint import Checkpoint, load_checkpoint
from probes.config import ModelConfig
from probes.errors import CheckpointError, OutputError, UnsupportedModelError
from probes.layout import ResidualLayout
from probes.loading import quietly
from probes.model import Transformer
from probes.preserve import preserved
from probes.removal_units import RemovalError, Unit
from probes.saving import save_model
from probes.tokenization import FastTokenizer, SentencePieceTokenizer

__all__ = ["check_pruning", "prune_transformer", "pruned", "refusal", "save_pruned"]

_N_CHECKED = 16
_INDEX_LISTS = ("mlp_only_layers", "moe_layers")
"""Settings that list the blocks, by index, that have something."""
_FIRST_BLOCKS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Settings that say how many of the first blocks have something."""
_COUNTS_BLOCKS = ("layer", "block", "dense", "sparse")


def save_pruned(checkpoint: Checkpoint, removed: Unit, folder: str | Path) -> None:
    """Write the model without some blocks, read it back, and compare its logits with removal by identity.

    Args:
        checkpoint: the full model; it is as before afterwards.
        removed: whole blocks.
        folder: a new or empty one; it holds the complete checkpoint or nothing.

    Raises:
        RemovalError: if the unit is not made of whole blocks, none would be left, or a scheme's rule gives a block that stays
            another update at its new place.
        OutputError: if the folder cannot be written, or is not empty.
        CheckpointError: if what was written does not give the same logits.
    """
    folder = Path(folder)
    check_pruning(checkpoint, removed, folder)
    blocks = frozenset(checkpoint.layout.sublayers[i].block for i in removed.sublayers)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.resolve().parent) as temporary:
            staged = Path(temporary) / folder.name
            _write(checkpoint, blocks, staged)
            _check(checkpoint, removed, staged)
            if folder.exists():
                folder.rmdir()
            staged.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot write a model to '{folder}': {reason}") from error


def check_pruning(checkpoint: Checkpoint, removed: Unit | None, folder: Path) -> None:
    """Refuse early what :func:`save_pruned` would refuse late.

    Args:
        checkpoint: the full model.
        removed: what is to go; None where that is not known yet.
        folder: where the pruned model is to be written.

    Raises:
        RemovalError: if the unit is not made of whole blocks, none would be left, or a scheme's rule gives a block that stays
            another update at its new place.
        OutputError: if the folder is not empty, or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"'{folder}' exists and is not empty; name a new folder for the pruned model")
    _check_writable(folder)
    reason = None if removed is None else refusal(checkpoint, removed)
    if reason is not None:
        raise RemovalError(reason)


def refusal(checkpoint: Checkpoint, removed: Unit) -> str | None:
    """Why a model cannot be saved without a unit, as far as that is known without writing it.

    Args:
        checkpoint: the full model.
        removed: what is to go.

    Returns:
        The reason in a sentence, or None where nothing speaks against it.
    """
    try:
        _check_removal(checkpoint, removed)
    except RemovalError as error:
        return str(error)
    return None


def _check_removal(checkpoint: Checkpoint, removed: Unit) -> None:
    layout, gone = checkpoint.layout, frozenset(removed.sublayers)
    blocks = {layout.sublayers[i].block for i in gone}
    partial = sorted(s.block for i, s in enumerate(layout.sublayers) if s.block in blocks and i not in gone)
    if partial:
        raise RemovalError(
            "only whole blocks can be saved without: no configuration describes a block that lacks one of its sub-layers "
            f"(block {partial[0]}); use --unit block"
        )
    if len(blocks) == layout.n_blocks:
        raise RemovalError(f"all {layout.n_blocks} blocks would be removed; at least one must stay")
    own = _own(checkpoint.model)
    if own is not None:
        _pruned_config(own.config, [i for i in range(layout.n_blocks) if i not in blocks])


def _check_writable(folder: Path) -> None:
    """Make a folder, for a moment, in the nearest place above that exists."""
    above = next(place for place in folder.resolve().parents if place.exists())
    try:
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=above).cleanup()
    except OSError as error:
        raise OutputError(f"cannot write a model to '{folder}': {error.strerror or error}") from error


def _write(checkpoint: Checkpoint, blocks: frozenset[int], folder: Path) -> None:
    own = _own(checkpoint.model)
    if own is not None:
        save_model(prune_transformer(own, sorted(blocks)), folder, tokenizer=checkpoint.tokenizer.name)
    else:
        with pruned(checkpoint.model, checkpoint.layout, sorted(blocks)) as smaller, quietly():
            smaller.save_pretrained(folder)  # type: ignore[operator]  # every transformers model has it
    tokenizer = checkpoint.tokenizer
    if isinstance(tokenizer, (FastTokenizer, SentencePieceTokenizer)):
        with quietly():
            tokenizer.save(folder)


def _own(model: nn.Module) -> Transformer | None:
    return next((module for module in model.modules() if isinstance(module, Transformer)), None)


def _check(checkpoint: Checkpoint, removed: Unit, folder: Path) -> None:
    model, layout = checkpoint.model, checkpoint.layout
    first = next(model.parameters())
    ids = torch.arange(_N_CHECKED, device=first.device)[None] % checkpoint.tokenizer.vocab_size
    try:
        again = load_checkpoint(folder, dtype=None if _own(model) is not None else first.dtype, device=first.device)
    except (CheckpointError, UnsupportedModelError) as error:
        raise CheckpointError(
            f"family '{layout.family}' cannot be saved without these blocks: its configuration counts blocks in a way that is "
            f"not known here (it may be {', '.join(_block_settings(model.config)) or 'any setting'}), and the saved weights do "
            "not fit it; nothing was kept"
        ) from error
    with torch.no_grad(), preserved(model), preserved(again.model):  # not around the loading, which may differentiate
        skipped = _logits_without(BlockRunner(model, layout), frozenset(removed.sublayers), ids).double()
        reloaded = again.layout.head.logits(again.layout.head.backbone(ids).flatten(0, 1)).double()
    difference = torch.linalg.vector_norm(skipped - reloaded) / torch.linalg.vector_norm(skipped)
    if torch.isfinite(skipped).all() and not difference <= torch.finfo(first.dtype).eps ** 0.5:
        raise CheckpointError(
            f"the saved model does not give the logits of removal by identity (relative difference {float(difference):.2g}): "
            f"its family '{layout.family}' counts blocks in a way that is not known here; nothing was kept"
        )


def _logits_without(runner: BlockRunner, removed: frozenset[int], ids_BT: Tensor) -> Tensor:
    entry = runner.enter(ids_BT)
    stream = entry.stream_BTD
    for block in range(runner.layout.n_blocks):
        if not removed.issuperset(runner.sublayers_of[block]):
            stream = runner.run(block, stream, entry.calls)
    return runner.layout.head.logits(runner.tail(stream).flatten(0, 1))


@contextmanager
def pruned(model: nn.Module, layout: ResidualLayout, blocks: Sequence[int]) -> Iterator[nn.Module]:
    """A ``transformers`` model without some blocks, in place; the full model is back on the way out.

    Args:
        model: the full model.
        layout: its layout.
        blocks: 0-based indices to leave out.

    Yields:
        The same object with fewer blocks: it runs, generates with its cache, and saves.
    """
    gone = set(blocks)
    kept = [i for i in range(layout.n_blocks) if i not in gone]
    owner_name, _, list_name = layout.blocks[0].rpartition(".")[0].rpartition(".")
    owner = model.get_submodule(owner_name)
    all_blocks = model.get_submodule(layout.blocks[0].rpartition(".")[0])
    assert isinstance(all_blocks, nn.ModuleList)
    settings = _per_block_settings(model.config, layout.n_blocks)
    changed = {name: type(value)(value[i] for i in kept) for name, value in settings.items()}
    changed |= _indexed_settings(model.config, kept)
    whole_config = dict(vars(model.config))  # saving writes into it as well
    read_by = vars(model).pop("hf_quantizer", None)  # of a GGUF file, whose weights are plain numbers by now
    try:
        vars(model.config).pop("quantization_config", None)
        setattr(owner, list_name, nn.ModuleList(all_blocks[i] for i in kept))
        _number(all_blocks[i] for i in kept)
        for name, value in ({"num_hidden_layers": len(kept)} | changed).items():
            setattr(model.config, name, value)
        yield model
    finally:
        setattr(owner, list_name, all_blocks)
        _number(all_blocks)
        vars(model.config).clear()
        vars(model.config).update(whole_config)
        if read_by is not None:
            vars(model)["hf_quantizer"] = read_by


def _per_block_settings(config: Any, n_blocks: int) -> dict[str, Any]:
    """Settings that list one value per block, such as ``layer_types``."""
    return {
        name: value
        for name, value in vars(config).items()
        if "layer" in name and name not in _INDEX_LISTS and isinstance(value, (list, tuple)) and len(value) == n_blocks
    }


def _indexed_settings(config: Any, kept: Sequence[int]) -> dict[str, Any]:
    """Settings that name blocks by their index or period, as they are once only some blocks are left."""
    place = {old: new for new, old in enumerate(kept)}
    changed: dict[str, Any] = {}
    for name in _INDEX_LISTS:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            changed[name] = type(value)(place[i] for i in value if i in place)
    for name in _FIRST_BLOCKS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            changed[name] = sum(old < value for old in kept)
    step = getattr(config, "decoder_sparse_step", None) or 1
    if step > 1:  # every block between is dense: said by index, since the period is broken
        dense = {*config.mlp_only_layers, *(old for old in kept if (old + 1) % step)}
        changed |= {"decoder_sparse_step": 1, "mlp_only_layers": [place[old] for old in kept if old in dense]}
    return changed


def _block_settings(config: Any) -> list[str]:
    """Names of settings that seem to be about blocks."""
    own = (name for name in vars(config) if name != "num_hidden_layers" and not name.startswith("_"))
    return sorted(name for name in own if any(word in name for word in _COUNTS_BLOCKS))


def _number(blocks: Iterable[nn.Module]) -> None:
    """Each block's place in the cache, wherever it is kept."""
    for index, block in enumerate(blocks):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]  # a plain attribute


def prune_transformer(model: Transformer, blocks: Sequence[int]) -> Transformer:
    """One of the toolkit's own models without some blocks: every block that stays keeps its update, alpha included.

    Args:
        model: the full model.
        blocks: 0-based indices to leave out.

    Returns:
        A new model. Where its scheme's parameters depend on the depth, they are written down as the numbers they were.

    Raises:
        RemovalError: if the scheme's rule gives a block that stays another update at its new place.
    """
    gone = set(blocks)
    kept = [i for i in range(model.config.n_blocks) if i not in gone]
    smaller = Transformer(_pruned_config(model.config, kept), initialise=False)
    sublayers, targets = model.sublayers(), smaller.sublayers()
    for new, old in enumerate(kept):
        for j in range(2):
            targets[2 * new + j].load_state_dict(sublayers[2 * old + j].state_dict())
    smaller.embedding.load_state_dict(model.embedding.state_dict())
    smaller.head.load_state_dict(model.head.state_dict())
    if smaller.final_norm is not None and model.final_norm is not None:
        smaller.final_norm.load_state_dict(model.final_norm.state_dict())
    return smaller.to(model.embedding.weight.device).train(model.training)


def _pruned_config(config: ModelConfig, kept: Sequence[int]) -> ModelConfig:
    wanted = [_function(config, config.specs()[2 * i + j]) for i in kept for j in range(2)]
    scheme = config.residual_scheme
    as_stated = replace(config, n_blocks=len(kept))
    as_numbers = replace(as_stated, scheme_parameters=_as_numbers(scheme.parameters, config.n_sublayers))
    for candidate in (as_stated, as_numbers):
        if [_function(candidate, spec) for spec in candidate.specs()] == wanted:
            return candidate
    place = next(i for i, spec in enumerate(as_numbers.specs()) if _function(as_numbers, spec) != wanted[i])
    raise RemovalError(
        f"scheme '{config.scheme}' cannot be saved without these blocks: block {kept[place // 2]} would become block "
        f"{place // 2}, where the scheme's rule gives its {('attention', 'FFN')[place % 2]} sub-layer another update; remove "
        "other blocks"
    )


def _as_numbers(parameters: Mapping[str, ParameterValue], n_sublayers: int) -> dict[str, ParameterValue]:
    """Expressions in the depth as their values at the full depth; words stay words."""
    return {name: _number_at(value, n_sublayers) for name, value in parameters.items()}


def _number_at(value: ParameterValue, n_sublayers: int) -> ParameterValue:
    try:
        return DepthExpression.of(value)(n_sublayers)
    except ValueError:
        return value


def _function(config: ModelConfig, spec: ResidualSpec) -> ResidualSpec:
    """A spec without what only initialisation reads, or what a learned parameter replaces."""
    learned = config.learnable_alpha or spec.profile is ProfileKind.ADMIN
    return replace(spec, init_gain=1.0, gate_bias=0.0, shortcut_scale=1.0 if learned else spec.shortcut_scale)
