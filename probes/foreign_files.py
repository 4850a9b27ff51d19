"""Files and names that are not what they stand for: each is told by name, with what would work.

A checkpoint that was fetched without its large files, saved from a wrapped model, or quantised, has the right file names and
the wrong content. What is read here are first bytes and names of tensors, never values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from probes.errors import CheckpointError

__all__ = ["WRAPPERS", "check_content", "check_tensor_names", "foreign_format", "foreign_weights", "unwrapped_names"]

_LFS = "is a Git LFS pointer, not the file itself: run git lfs pull in its folder"
_PICKLED = "is a pickle; unpickling runs code from the file, so it is never done. Convert it to safetensors where you trust it"
_CONTENT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"version https://git-lfs"), _LFS),
    (re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE), "is a web page, not the file: fetch it again"),
    (re.compile(rb"\x80[\x02-\x05]"), _PICKLED),
    (re.compile(rb"PK\x03\x04"), f"is a zip archive, as torch.save writes them, and {_PICKLED}"),
    (re.compile(rb"\x89HDF\r\n"), "is an HDF5 file (Keras); save the model as safetensors"),
    (re.compile(rb"\x1f\x8b"), "is compressed with gzip: unpack it first"),
    (re.compile(rb"/annex/objects/"), "is a git-annex pointer, not the file itself: run git annex get in its folder"),
    (re.compile(rb"\xfd7zXZ"), "is compressed with xz: unpack it first"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "is compressed with zstd: unpack it first"),
    (re.compile(rb'\s*\{\s*"error"'), "is an answer of a server: fetch it again"),
    (re.compile(rb"Entry not found|Invalid username|Access to model"), "is an answer of a server: fetch it again"),
)
"""How a file begins, and what that says."""
_SAFETENSORS = re.compile(rb".{5}\x00{3}\{", re.DOTALL)  # the length of a header, and its first bracket
_MAGIC = {".gguf": re.compile(rb"GGUF")}
_FORMATS = {
    "*.h5": "Keras (HDF5)",
    "*.keras": "Keras",
    "*.msgpack": "Flax",
    "*.onnx": "ONNX",
    "*.npz": "NumPy",
    "*.tflite": "TensorFlow Lite",
    "*.mlmodel": "Core ML",
    "*.distcp": "torch's distributed checkpoints",
}
_PICKLES = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl"))
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
    "module": "DistributedDataParallel or DataParallel",
    "base_model.model": "PEFT",
}
"""What a wrapper puts before the names of the tensors of the model inside."""
_WRAPPED = re.compile(rf"^(?:(?:{'|'.join(map(re.escape, WRAPPERS))})\.)+")
_INSIDE = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_QUANTISED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.(g_idx|qzeros)$"), "GPTQ or AWQ"),
    (re.compile(r"\.qweight$"), "GPTQ or AWQ"),
    (re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB)$|\.quant_state\."), "bitsandbytes"),
    (re.compile(r"\.(weight_packed|weight_zero_point)$"), "compressed-tensors"),
    (re.compile(r"\.(weight_scale|weight_scale_inv|input_scale|[kv]_scale)$"), "float8 or int8 with scales"),
    (re.compile(r"proj_(blocks|scales)$"), "MXFP4"),
    (re.compile(r"\.(W_q|qscale)$"), "HQQ"),
)
_LORA = re.compile(
    r"[._](lora_[ABE]|lora_(up|down|embedding_[AB]|magnitude_vector)|hada_w\d_[ab]|lokr_w\d(_[ab])?|ia3_l|oft_[rs]|vera_lambda_[bd]"
    r"|prompt_embeddings|base_layer)(\.|$)"
)


def check_content(path: Path) -> None:
    """Refuse a file that begins like something else than its name says.

    Args:
        path: any file of a checkpoint.

    Raises:
        CheckpointError: naming what it is, and the cure.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(256)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not head:
        raise CheckpointError(f"{path} is empty: fetch it again")
    if _SAFETENSORS.match(head):
        return
    for begins, what in _CONTENT:
        if begins.match(head):
            raise CheckpointError(f"{path} {what}")
    for suffix, begins in _MAGIC.items():
        if begins.match(head) and path.suffix != suffix:
            raise CheckpointError(f"{path} is a {suffix[1:].upper()} file: give it a name that ends in {suffix}")


def check_tensor_names(place: Path, names: Iterable[str]) -> None:
    """Refuse weights that are stored in pieces of another kind.

    Args:
        place: folder or file, for messages.
        names: of all tensors.

    Raises:
        CheckpointError: naming the method and a tensor.
    """
    for name in names:
        if _LORA.search(name):
            raise CheckpointError(
                f"{place} holds a LoRA adapter (tensor '{name}'): merge it into its base model first (peft's merge_and_unload, "
                "then save_pretrained)"
            )
        for pattern, method in _QUANTISED:
            if pattern.search(name):
                raise CheckpointError(
                    f"{place} is quantised ({method}; tensor '{name}'): its stored numbers are not the weights, and no "
                    "gradient passes them; use the unquantised checkpoint, or a GGUF file, which is dequantised"
                )


def unwrapped_names(names: Iterable[str]) -> tuple[Mapping[str, str], str | None]:
    """Names as the model itself calls its tensors, where a wrapper was saved with it.

    Args:
        names: of all tensors.

    Returns:
        {name without the wrappers: name as stored}, and a remark, None where every name is as it was. A prefix goes only where
        every tensor has it; ``torch.compile`` of single blocks leaves its mark inside the names, and that goes everywhere.

    Example:
        >>> unwrapped_names(["module._orig_mod.head.weight", "module._orig_mod.norm.weight"])[0]["head.weight"]
        'module._orig_mod.head.weight'
        >>> unwrapped_names(["module.a", "b"])[1] is None
        True
    """
    names = list(names)
    prefixes = {match[0] if (match := _WRAPPED.match(name)) else "" for name in names}
    shared = prefixes.pop() if len(prefixes) == 1 else ""
    plain = {_INSIDE.sub("", name[len(shared) :]): name for name in names}
    if len(plain) < len(names) or list(plain) == names:
        return {name: name for name in names}, None
    inside = {found[0] for name in names for found in _INSIDE.finditer(name[len(shared) :])}
    mark = "' and '".join(filter(None, (shared, *sorted(inside - {shared}))))
    wrappers = [whose for wrapper, whose in WRAPPERS.items() if re.search(rf"(^|[.' ]){re.escape(wrapper)}\.", mark)]
    return plain, f"'{mark}' is taken off the names of the tensors: the model was saved inside {' and '.join(wrappers)}"


def foreign_weights(folder: Path) -> str | None:
    """Weights in a format that is not read, in words; None where the folder holds none that are known."""
    for pattern, framework in _FORMATS.items():
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            return f"{folder} holds weights for {framework} alone ({found[0]}); save the model as safetensors (save_pretrained)"
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    return f"{folder} holds no .safetensors file, but {gguf[0]}: name that file" if gguf else None


def foreign_format(path: Path) -> str | None:
    """What a file of another format is by its suffix, in words with the cure; None where the suffix is none that is known."""
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        return f"{path} {_PICKLED}"
    framework = _FORMATS.get(f"*{suffix}") if suffix else None
    return f"{path} is for {framework}; save the model as safetensors (save_pretrained)" if framework else None
