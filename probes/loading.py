"""From checked weight files to a model: the one place that calls the loaders of ``transformers``."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from probes.errors import CheckpointError, UnsupportedModelError
from probes.families import SUPPORTED_FAMILIES
from probes.gguf_file import GgufFile
from probes.gguf_settings import config_fields
from probes.leftovers import refuse_leftovers
from probes.placement import check_placement
from probes.streaming.files import FileReader
from probes.streaming.gguf_recipes import gguf_recipes
from probes.weight_files import WeightFiles

__all__ = [
    "Loaded",
    "check_complete",
    "check_fits",
    "drop_unavailable_attention",
    "folder_config",
    "gguf_config",
    "language_model_class",
    "load_gguf",
    "load_safetensors",
    "model_options",
    "quietly",
    "stale_duplicate",
    "unused_tensors",
]

_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "LMHead")
_FAR_MORE = 8
_MODEST_DEPTH = 256
_ATTENTIONS = (None, "eager", "sdpa")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and what its reader noticed."""

    model: nn.Module
    warnings: tuple[str, ...] = ()


@contextlib.contextmanager
def quietly() -> Iterator[list[str]]:
    """Keep progress bars and log lines of ``transformers`` off stderr; its warnings are collected in the yielded list."""
    collected: list[str] = []
    logger = logging.getLogger("transformers")
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [_Collector(collected)], False
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield collected
        collected.extend(f"{w.category.__name__}: {w.message}" for w in caught if not _is_housekeeping(w.category))
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        if "LOAD REPORT" in record.getMessage():  # what is missing or left over is refused or told by name
            return
        self._messages.append(f"transformers: {record.getMessage().strip()}")


def _is_housekeeping(category: type[Warning]) -> bool:
    """Whether a warning speaks to developers rather than about the model."""
    return issubclass(category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning))


def load_safetensors(
    folder: Path, files: WeightFiles, dtype: torch.dtype, *, device_map: str | dict[str, Any] | None = None
) -> Loaded:
    """A model from safetensors whose headers have been checked.

    Args:
        folder: holds config.json.
        files: every tensor of the checkpoint.
        dtype: of the parameters.
        device_map: where ``accelerate`` puts the parts, in its own words; None leaves all on the CPU.

    Returns:
        The model; tensors that it does not use are a warning.

    Raises:
        CheckpointError: if a parameter has no tensor, or one of another shape, or the table of devices is not of this model.
        UnsupportedModelError: if ``transformers`` has no language model of this family.
    """
    config = folder_config(folder)
    attention = drop_unavailable_attention(config)
    model_class = language_model_class(config)
    check_fits(folder, config, model_class, files)
    if isinstance(device_map, dict):
        check_placement(device_map, _skeleton(f"config.json in {folder}", config, model_class))
    with contextlib.ExitStack() as stack:
        tensors = _tensors(stack, files)
        noticed = _drop_stale_duplicates(model_class, config, tensors)
        try:
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                **model_options(dtype),
                **({} if device_map is None else {"device_map": device_map}),
            )
        except Exception as error:  # whatever the family's code raises at values or weights it did not expect
            raise CheckpointError(f"the weights in {folder} do not fit its config.json: {_reason(error)}") from error
    check_complete(folder, info, config)
    return Loaded(model, attention + noticed + unused_tensors(folder, model, info["unexpected_keys"]))


def load_gguf(file: GgufFile, dtype: torch.dtype) -> Loaded:
    """A model from a GGUF file whose header has been checked; its tensors are dequantised one by one.

    Args:
        file: the header.
        dtype: of the parameters.

    Returns:
        The model, its weights in the order and convention of ``transformers``.

    Raises:
        CheckpointError: if a parameter has no tensor in the file, or one of another size.
        UnsupportedModelError: if its architecture, a setting or a tensor of it cannot be read.
    """
    config = gguf_config(file)
    model_class = language_model_class(config)
    skeleton = _skeleton(f"the header of {file.path}", config, model_class)
    expected = {name: parameter.shape for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    tensors = {}
    for recipe in gguf_recipes(skeleton, file, FileReader([file.path])):
        (name,) = recipe.targets
        tensors[name] = torch.empty(expected[name], dtype=dtype)
        recipe.fill({name: tensors[name]})
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, **model_options(dtype)
        )
    except Exception as error:  # whatever the family's code raises at weights it did not expect
        raise CheckpointError(f"{file.path} cannot be loaded: {_reason(error)}") from error
    check_complete(file.path, info, config)
    return Loaded(model)


def folder_config(folder: Path) -> Any:
    """The configuration of a family of ``transformers``.

    Raises:
        CheckpointError: if the family refuses its values.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a configuration of the right form with values the family refuses
        raise CheckpointError(f"config.json in {folder} is refused by transformers: {_reason(error)}") from error
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json in {folder}: architectures must be a list of names, got {names!r}")
    return config


def _reason(error: Exception) -> str:
    """What a library says, with the kind of error where the text alone says little."""
    return str(error) if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__}: {error}"


def drop_unavailable_attention(config: Any) -> tuple[str, ...]:
    """Let ``transformers`` choose the attention where a configuration names one that not every machine has.

    Args:
        config: changed in place.

    Returns:
        The warning, if one was named.
    """
    asked = getattr(config, "_attn_implementation", None)
    if asked in _ATTENTIONS:
        return ()
    config._attn_implementation = None
    return (f"config.json asks for the attention '{asked}'; the built-in one is used, which computes the same",)


def check_fits(folder: Path, config: Any, model_class: Any, files: WeightFiles) -> None:
    """Compare a configuration with the headers of its weights before memory is taken.

    Args:
        folder: holds config.json, for messages.
        config: of a family of ``transformers``.
        model_class: its language model.
        files: every tensor of the checkpoint.

    Raises:
        CheckpointError: if the family's code refuses the configuration, it asks for far more blocks or values than there
            are, a tensor has another shape, or a weight is stored as integers.
    """
    n_blocks = getattr(config, "num_hidden_layers", None)
    _check_n_blocks(folder, n_blocks, len(files.tensors))
    skeleton = _skeleton(f"config.json in {folder}", config, model_class)
    prefix = f"{skeleton.base_model_prefix}."
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    for name, stored in files.tensors.items():
        parameter = parameters.get(name, parameters.get(prefix + name, parameters.get(name.removeprefix(prefix))))
        if not stored.is_float and (parameter is not None or name.endswith(".weight")):
            raise CheckpointError(
                f"tensor '{name}' in {stored.file} is stored as integers ({stored.dtype}): its numbers are not the weights; "
                "use an unquantised checkpoint (F32, F16, BF16)"
            )
        if parameter is not None and tuple(parameter.shape) != stored.shape:
            raise CheckpointError(
                f"{folder}: tensor '{name}' has shape {stored.shape}, its configuration asks for {tuple(parameter.shape)}"
            )
    _check_n_values(f"config.json in {folder}", skeleton, files.n_values)


def _skeleton(what: str, config: Any, model_class: Any) -> Any:
    """The model without memory for its parameters and buffers."""
    try:
        with torch.device("meta"):
            return model_class._from_config(copy.deepcopy(config))
    except Exception as error:  # KeyError, AssertionError, ImportError, ...: each family checks in its own way
        raise CheckpointError(f"{what} is refused by transformers: {_reason(error)}") from error


def _check_n_values(what: str, skeleton: nn.Module, stored: int) -> None:
    asked = sum(parameter.numel() for parameter in skeleton.parameters())
    if asked > _FAR_MORE * max(stored, 1):
        raise CheckpointError(f"{what} asks for {asked} values, the weights hold {stored}")


def _check_n_blocks(place: Path, n_blocks: object, n_tensors: int) -> None:
    """Every block has a tensor; a few missing ones are named later, once the model is built."""
    if isinstance(n_blocks, int) and n_blocks > max(n_tensors, _MODEST_DEPTH):
        raise CheckpointError(f"{place}: the configuration asks for {n_blocks} blocks, the weights are {n_tensors} tensors")


def gguf_config(file: GgufFile) -> Any:
    """The configuration in a GGUF file, completed by what the file states or implies.

    Raises:
        CheckpointError: if a setting is missing, has no sensible value, or asks for far more than the file holds.
        UnsupportedModelError: if its architecture, or a setting of it, cannot be read.
    """
    from transformers import CONFIG_MAPPING

    _check_n_blocks(file.path, file.setting("block_count"), len(file.tensors))
    family, fields = config_fields(file)
    try:
        config = CONFIG_MAPPING[family](**fields | _special_tokens(file, CONFIG_MAPPING[family], fields))
    except Exception as error:  # each family checks its values in its own way
        raise CheckpointError(f"the header of {file.path} is refused by transformers: {_reason(error)}") from error
    embedding, width = file.tensors.get("token_embd.weight"), getattr(config, "hidden_size", None)
    if embedding is not None and width is not None and embedding.shape[-1] != width:
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight' has shape {embedding.shape}, the header asks for width {width}"
        )
    stored = sum(_size(tensor.shape) for tensor in file.tensors.values())
    what = f"the header of {file.path}"
    _check_n_values(what, _skeleton(what, config, language_model_class(config)), stored)
    return config


def model_options(dtype: torch.dtype) -> dict[str, Any]:
    """Shapes that do not fit are reported by name below; the grouped product of experts does not exist in float64."""
    return {"ignore_mismatched_sizes": True} | ({"experts_implementation": "eager"} if dtype is torch.float64 else {})


def language_model_class(config: Any) -> Any:
    """The language model of a family: masked for an encoder, causal otherwise."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"family '{family}' is an encoder-decoder; decoder-only and encoder-only models are supported"
        )
    if config.get_text_config() is not config:
        raise UnsupportedModelError(f"family '{family}' is multimodal; its text model alone can be probed, saved on its own")
    trained = (getattr(config, "architectures", None) or [""])[0]
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not trained.endswith(("ForCausalLM", "LMHeadModel"))
    mapping = MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise UnsupportedModelError(
            f"family '{family}' has no language model; supported families: {', '.join(SUPPORTED_FAMILIES)}"
        )
    return mapping[type(config)]


def _tensors(stack: contextlib.ExitStack, files: WeightFiles) -> dict[str, Tensor]:
    """Tensors mapped from their files: memory is taken when a value is read."""
    opened = {}
    for path in files.files:
        try:
            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return {name: opened[stored.file].get_tensor(stored.stored_as) for name, stored in files.tensors.items()}


def _drop_stale_duplicates(model_class: Any, config: Any, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """Where the configuration ties two weights and the file holds two that differ, keep the embedding's."""
    tied: Mapping[str, str] = getattr(model_class, "_tied_weights_keys", None) or {}
    if not getattr(config, "tie_word_embeddings", False):
        return ()
    noticed = []
    for duplicate, kept in tied.items():
        if duplicate in tensors and kept in tensors:
            second = tensors.pop(duplicate)
            if not torch.equal(second, tensors[kept]):
                noticed.append(stale_duplicate(duplicate, kept))
    return tuple(noticed)


def stale_duplicate(duplicate: str, kept: str) -> str:
    """The warning for a tied weight that the file holds twice, with different values."""
    return (
        f"config.json ties '{duplicate}' to '{kept}', but the file holds a different one: it is stale and not used "
        "(set tie_word_embeddings to false in config.json if it is meant)"
    )


def check_complete(place: Path, info: Mapping[str, Any], config: Any) -> None:
    """Refuse a model of which any parameter would keep its random initial value."""
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{place}: tensor '{name}' has shape {tuple(stored)}, its configuration asks for {tuple(expected)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        trained = (getattr(config, "architectures", None) or [""])[0]
        if trained and not trained.endswith(_WITH_HEAD):
            raise CheckpointError(
                f"{place} lacks tensor '{missing[0]}'{more}: config.json says architectures = [\"{trained}\"], a "
                "model without a language-model head, as sentence encoders are; it has no loss: use a checkpoint with a head"
            )
        tie = (
            "" if getattr(config, "tie_word_embeddings", False) else "; config.json says the head is not tied to the embedding"
        )
        raise CheckpointError(f"{place} lacks tensor '{missing[0]}'{more}{tie if missing[0].startswith('lm_head') else ''}")


def unused_tensors(place: Path, model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """The warning for tensors that the model does not use, if there are any; parts of its computation are refused."""
    unused = sorted(names)
    refuse_leftovers(place, model, unused)
    if not unused:
        return ()
    return (f"{len(unused)} tensor(s) of the file belong to no part of the model and are not used (first: {unused[0]})",)


def _special_tokens(file: GgufFile, config_class: Any, fields: Mapping[str, Any]) -> dict[str, int | None]:
    """First and last token as the file has them; a family's usual padding only where the vocabulary has it."""
    stated = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    tokens: dict[str, int | None] = {name: token for name, token in stated.items() if isinstance(token, int)}
    padding = getattr(config_class, "pad_token_id", None)
    if isinstance(padding, int) and padding >= fields.get("vocab_size", padding + 1):
        tokens["pad_token_id"] = None
    return tokens


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
