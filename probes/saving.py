"""Models of the toolkit on disk: ``config.json`` and ``model.safetensors``, written atomically, never pickled.

``config.json`` names the model type ``keel_dynamics``, a format version and every field of the configuration, so that a
model in one residual scheme can never load as a model in another: readers that do not know the type refuse it, and this one
refuses an unknown scheme or field by name. The weights carry a copy of the configuration and are refused beside another.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from keel_theory.depth_expression import DepthExpressionError
from keel_theory.spec import SchemeError
from probes.config import ComputeDtype, ConfigError, ModelConfig, count_parameters
from probes.errors import CheckpointError, OutputError
from probes.foreign_files import unwrapped_names
from probes.model import Transformer

__all__ = ["FORMAT_VERSION", "check_origin", "check_stored", "load_model", "parse_config", "read_config", "save_model"]

FORMAT_VERSION = 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_MAX_BLOCKS = 100_000  # beyond it even the list of specs takes minutes
_FAR_MORE = 8
_FLOATS = ("F64", "F32", "F16", "BF16")
_ARCHITECTURE = "KeelDynamicsForCausalLM"


def save_model(model: Transformer, folder: str | Path, tokenizer: str = "bytes") -> None:
    """Write a model; a crash leaves what was there before, or a pair of files that :func:`load_model` refuses.

    Args:
        model: its weights and configuration are written, each shared weight once.
        folder: made if needed; other files in it are left alone.
        tokenizer: how text becomes ids; ``bytes`` is one token per byte.

    Raises:
        OutputError: if the folder cannot be written.
    """
    folder = Path(folder).resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            staged = Path(temporary) / "staged"
            staged.mkdir()
            _write(model, staged, tokenizer)
            _move(staged, folder)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OutputError(f"cannot write a model to {folder}: {reason}") from error


def _write(model: Transformer, folder: Path, tokenizer: str) -> None:
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    fields = model.config.to_dict()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt", ModelConfig.model_type: json.dumps(fields, sort_keys=True)})
    config = {
        "model_type": ModelConfig.model_type,
        "format_version": FORMAT_VERSION,
        "architectures": [_ARCHITECTURE],
        "dtype": str(model.config.stream_dtype).removeprefix("torch."),
        "tokenizer": tokenizer,
        "model": fields,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _move(staged: Path, folder: Path) -> None:
    """A new folder appears in one step; in an existing one the files are replaced one by one."""
    if not folder.exists():
        staged.rename(folder)
        return
    for name in (_WEIGHTS, _CONFIG):
        (staged / name).replace(folder / name)


def load_model(folder: str | Path, *, compute_dtype: ComputeDtype | None = None) -> Transformer:
    """Read a model that :func:`save_model` (or ``save_pretrained``) wrote.

    Args:
        folder: holds config.json and model.safetensors.
        compute_dtype: computes in this dtype instead of the stored one.

    Raises:
        CheckpointError: if a file is missing or broken, the configuration holds an unknown scheme, field or value, or the
            tensors are not exactly those of the configuration; the message names what and where.
    """
    folder = Path(folder)
    stored = read_config(folder)
    config = stored if compute_dtype is None else ModelConfig.from_dict(stored.to_dict() | {"compute_dtype": compute_dtype})
    path = folder / _WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {_WEIGHTS}")
    try:
        with safe_open(path, framework="pt") as file:
            check_origin(file.metadata() or {}, stored, path)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            check_stored({name: (part.get_dtype(), math.prod(part.get_shape())) for name, part in slices.items()}, config, path)
            model = Transformer(config, initialise=False)
            _fill(model, file, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return model


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a saved model.

    Raises:
        CheckpointError: if there is none of this type and format version, or it holds an unknown scheme, field or value.
    """
    path = Path(folder) / _CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no {_CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return parse_config(stored, str(path))


def parse_config(stored: Any, where: str) -> ModelConfig:
    """The configuration in the content of a ``config.json``.

    Args:
        stored: the parsed JSON.
        where: how messages call its place.

    Raises:
        CheckpointError: if it is not of this type and format version, or holds an unknown scheme, field or value.
    """
    if not isinstance(stored, Mapping) or stored.get("model_type") != ModelConfig.model_type:
        raise CheckpointError(f"{where} does not describe a model of the type {ModelConfig.model_type}")
    version, values = stored.get("format_version"), stored.get("model")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{where} has format version {version!r}; this version of the toolkit reads {FORMAT_VERSION}")
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where} has no model configuration under 'model'")
    n_blocks = values.get("n_blocks")
    if isinstance(n_blocks, int) and n_blocks > _MAX_BLOCKS:
        raise CheckpointError(f"{where}: n_blocks = {n_blocks}; at most {_MAX_BLOCKS} can be read")
    try:
        return ModelConfig.from_dict(values)
    except (ConfigError, SchemeError, DepthExpressionError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_origin(metadata: Mapping[str, str], config: ModelConfig, path: Path) -> None:
    """Compare the configuration inside a weight file with the one beside it.

    Raises:
        CheckpointError: if they differ.
    """
    saved = metadata.get(ModelConfig.model_type)
    if saved is None:  # written by transformers
        return
    try:
        of_weights = json.loads(saved)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the configuration in its metadata is not valid JSON: {error}") from error
    if not isinstance(of_weights, dict):
        raise CheckpointError(
            f"{path}: the configuration in its metadata is not a JSON object but a {type(of_weights).__name__}"
        )
    for name, value in config.to_dict().items():
        if of_weights.get(name) != value:
            raise CheckpointError(
                f"{path} was saved with {name} = {of_weights.get(name)!r}, but {_CONFIG} beside it says {value!r}; "
                "the two files do not belong together"
            )


def check_stored(stored: Mapping[str, tuple[str, int]], config: ModelConfig, path: Path) -> None:
    """Compare a configuration with the headers of its weights before memory is taken.

    Args:
        stored: type and number of elements of every tensor, by name.
        config: what they are said to be the weights of.
        path: of the weights, for messages.

    Raises:
        CheckpointError: if a tensor is stored as integers, or the configuration asks for far more values than there are.
    """
    for name, (dtype, _) in stored.items():
        if dtype not in _FLOATS:
            raise CheckpointError(f"tensor '{name}' in {path} is stored as {dtype}: weights are floating-point numbers")
    asked, present = count_parameters(config), sum(size for _, size in stored.values())
    if stored and asked > _FAR_MORE * max(present, 1):
        raise CheckpointError(f"{path} holds {present} values, {_CONFIG} beside it asks for {asked}")


@torch.no_grad()
def _fill(model: Transformer, file: Any, path: Path) -> None:
    parameters, (stored_as, _) = dict(model.named_parameters()), unwrapped_names(file.keys())
    stored = set(stored_as)
    for problem, names in (("lacks", set(parameters) - stored), ("holds unknown", stored - set(parameters))):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise CheckpointError(
                f"{path} {problem} tensor(s): {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
    for name, parameter in parameters.items():
        tensor = file.get_tensor(stored_as[name])
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the configuration needs {tuple(parameter.shape)}"
            )
        parameter.copy_(tensor)
