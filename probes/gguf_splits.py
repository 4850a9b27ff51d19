"""How a GGUF file splits a text before its merges: as it states, where ``transformers`` leaves that out.

A file names its split by one word and keeps the pattern nowhere. ``transformers`` knows some of the words and takes GPT-2's
split for every other. Source of what each word stands for: llama.cpp, ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.errors import CheckpointError
from probes.gguf_file import read_gguf

__all__ = ["apply_stated_split"]

_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "granite-docling")
_DIGITS_APART = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2")
_AS_QWEN2 = ("stablelm2", "hunyuan", "solar-open")
_UNSTATED = (None, "default")


def apply_stated_split(path: Path, backend: Any) -> tuple[str, ...]:
    """Make a tokenizer that ``transformers`` built from a GGUF file split texts as the file states.

    Args:
        path: the file.
        backend: the tokenizer, changed in place.

    Returns:
        A remark where the file states no split.

    Raises:
        CheckpointError: if it states one that is not known.
    """
    metadata = read_gguf(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _without_first_space(backend.backend_tokenizer)
    return _byte_level(path, metadata.get("tokenizer.ggml.pre"), backend.backend_tokenizer) if kind == "gpt2" else ()


def _without_first_space(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import Metaspace

    if isinstance(tokenizer.pre_tokenizer, Metaspace):
        tokenizer.pre_tokenizer.prepend_scheme = "never"


def _byte_level(path: Path, stated: object, tokenizer: Any) -> tuple[str, ...]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if stated in _UNSTATED:
        return (f"{path.name} does not state how its tokenizer splits a text (tokenizer.ggml.pre); GPT-2's way is taken",)
    if stated in _DIGITS_APART:
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif stated in _AS_QWEN2:
        split = Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), behavior="isolated")
        tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    elif stated not in _AS_GPT2 and stated not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(f"{path}: its tokenizer splits texts as '{stated}' (tokenizer.ggml.pre), which is not known here")
    return ()
