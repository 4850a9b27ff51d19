"""Text to token ids: the tokenizer of a checkpoint, or one token per byte where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeAlias

from probes.errors import CheckpointError, TextError

__all__ = [
    "TOKENIZER_FILES",
    "ByteTokenizer",
    "FastTokenizer",
    "MissingTokenizer",
    "Tokenizer",
    "folder_tokenizer",
    "gguf_tokenizer",
]

N_BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


Around: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""Token ids before and after a sequence."""


class Tokenizer(Protocol):
    """What the probes need of a tokenizer.

    Attributes:
        name: how results call it.
        vocab_size: ids run from 0 to this, exclusive.
        bos_token_id: token that can start a sequence, or None.
        start_token_id: token that the tokenizer itself puts before every sequence, as the model was trained, or None.
        mask_token_id: token that stands for a masked one, or None.
        special_around: tokens that the tokenizer itself puts before and after every sequence, such as [CLS] and [SEP].
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - documented above
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def bos_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def start_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def mask_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def special_around(self) -> Around: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token."""
        ...


class FastTokenizer:
    """A tokenizer of ``transformers``, backed by the ``tokenizers`` library, beside a model with ``n_embeddings`` tokens."""

    def __init__(self, backend: object, source: str, n_embeddings: int) -> None:
        self._backend, self._n_embeddings = backend, n_embeddings
        self.name = f"{type(backend).__name__} from {source}"
        self.vocab_size = len(backend)  # type: ignore[arg-type]  # every tokenizer has a length
        self.bos_token_id: int | None = getattr(backend, "bos_token_id", None)
        self.mask_token_id: int | None = getattr(backend, "mask_token_id", None)
        bare = self.encode("a")
        whole = list(backend.encode("a", add_special_tokens=True))  # type: ignore[attr-defined]
        self.start_token_id = whole[0] if whole[: len(bare)] != bare else None
        self.special_around = _around(bare, whole)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token.

        Raises:
            TextError: if the tokenizer cannot encode it, or the model has no embedding for one of its tokens.
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=False, verbose=False))  # type: ignore[attr-defined]
        except Exception as error:  # the tokenizers library raises nothing more special
            raise TextError(f"{self.name} cannot encode the text: {error}") from error
        if max(ids, default=0) >= self._n_embeddings:
            raise TextError(
                f"the text holds token {max(ids)}, the model knows {self._n_embeddings}: {self.name} is not its own"
            )
        return ids


def _around(bare: list[int], whole: list[int]) -> Around:
    """What stands around a text's own ids; nothing where they are not found in one piece."""
    places = [i for i in range(len(whole) - len(bare) + 1) if bare and whole[i : i + len(bare)] == bare]
    return (tuple(whole[: places[0]]), tuple(whole[places[0] + len(bare) :])) if places else ((), ())


class ByteTokenizer:
    """One token per byte of UTF-8.

    Example:
        >>> ByteTokenizer(256).encode("aé")
        [97, 195, 169]
    """

    name = "bytes"
    bos_token_id: int | None = None
    start_token_id: int | None = None
    mask_token_id: int | None = None
    special_around: Around = ((), ())

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < N_BYTES:
            raise CheckpointError(f"a byte-level tokenizer needs a vocabulary of {N_BYTES}, the model has {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8"))


class MissingTokenizer:
    """Stands where a checkpoint has no tokenizer and its vocabulary is too small for bytes: token ids can still be given."""

    name = "none"
    bos_token_id: int | None = None
    start_token_id: int | None = None
    mask_token_id: int | None = None
    special_around: Around = ((), ())

    def __init__(self, vocab_size: int, source: str) -> None:
        self.vocab_size, self._source = vocab_size, source

    def encode(self, text: str) -> list[int]:
        """Refused.

        Raises:
            TextError: always; it says what is missing.
        """
        raise TextError(
            f"{self._source} has no tokenizer and a vocabulary of {self.vocab_size} < {N_BYTES}, too small for bytes; "
            "put its tokenizer.json beside it"
        )


def folder_tokenizer(folder: Path, vocab_size: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer of a checkpoint folder, and warnings: fast tokenizers only, and no code from the folder is run."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return _fallback(vocab_size, str(folder), "no tokenizer file")
    return _load(folder, {}, vocab_size, str(folder))


def gguf_tokenizer(path: Path, vocab_size: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer stored in a GGUF file, and warnings."""
    return _load(path.parent, {"gguf_file": path.name}, vocab_size, str(path))


def _load(folder: Path, options: dict[str, str], vocab_size: int, source: str) -> tuple[Tokenizer, tuple[str, ...]]:
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True, **options
        )
    except Exception as error:  # the libraries raise anything here, from KeyError to their own
        return _fallback(vocab_size, source, f"its tokenizer cannot be read: {type(error).__name__}: {error}")
    if not getattr(backend, "is_fast", False):
        return _fallback(vocab_size, source, f"its tokenizer {type(backend).__name__} is not a fast one")
    n_plain = int(backend.vocab_size)  # without added special tokens, which no text asks for
    warnings = (f"the tokenizer has {n_plain} tokens, the model {vocab_size}",) if n_plain > vocab_size else ()
    try:
        return FastTokenizer(backend, source, vocab_size), warnings
    except Exception as error:  # one that is read but cannot encode a letter; again anything may be raised
        return _fallback(vocab_size, source, f"its tokenizer cannot encode a text: {type(error).__name__}: {error}")


def _fallback(vocab_size: int, source: str, why: str) -> tuple[Tokenizer, tuple[str, ...]]:
    if vocab_size < N_BYTES:
        return MissingTokenizer(vocab_size, source), (f"{source}: {why}; texts cannot be encoded",)
    return ByteTokenizer(vocab_size), (f"{source}: {why}; each byte of the text is taken as one token",)
