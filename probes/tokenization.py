"""Text to token ids: the tokenizer of a checkpoint, another that is asked for, or one token per byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeAlias

from probes.errors import CheckpointError, TextError
from probes.gguf_splits import apply_stated_split
from probes.weight_files import read_json

__all__ = [
    "ByteTokenizer",
    "FastTokenizer",
    "MissingTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "asked_tokenizer",
    "folder_tokenizer",
    "gguf_tokenizer",
    "tokenizer_files",
]

N_BYTES = 256
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
)
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model")
_SAMPLE = "the quick brown fox jumps over 12 lazy dogs."
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")
_MASKS = ("[MASK]", "<mask>")
_NO_BACKEND = "Couldn't instantiate the backend tokenizer"
_SENTENCEPIECE_NEEDED = (
    "reading it needs sentencepiece: pip install 'keel-dynamics[sentencepiece]', or pip install sentencepiece protobuf"
)


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
    """A tokenizer of ``transformers`` beside a model with ``n_embeddings`` tokens."""

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
        return _within(ids, self._n_embeddings, self.name)

    def pieces(self, text: str) -> list[str]:
        """The text's tokens as the vocabulary writes them."""
        return list(self._backend.convert_ids_to_tokens(self.encode(text)))  # type: ignore[attr-defined]

    def lacks_part_of(self, text: str) -> bool:
        """Whether a part of the text is unknown to the vocabulary."""
        return getattr(self._backend, "unk_token_id", None) in self.encode(text)

    def save(self, folder: Path) -> None:
        """Write its files into a folder."""
        self._backend.save_pretrained(folder)  # type: ignore[attr-defined]


class SentencePieceTokenizer:
    """A sentencepiece model beside a language model with ``n_embeddings`` tokens.

    Args:
        path: of the model.
        n_embeddings: of the language model.
        starts: whether the first token of its vocabulary's kind goes before every sequence, as the model was trained.

    Raises:
        CheckpointError: if the file is no sentencepiece model, or the package to read it is not installed.
    """

    def __init__(self, path: Path, n_embeddings: int, *, starts: bool) -> None:
        self._path, self._n_embeddings = path, n_embeddings
        self._processor = _processor(path)
        self.name = f"sentencepiece from {path}"
        self.vocab_size = int(self._processor.get_piece_size())
        first = int(self._processor.bos_id())
        self.bos_token_id = first if first >= 0 else None
        self.start_token_id = self.bos_token_id if starts else None
        masks = (int(self._processor.piece_to_id(piece)) for piece in _MASKS)
        self.mask_token_id = next((i for i in masks if i != int(self._processor.unk_id())), None)
        self.special_around = ((() if self.start_token_id is None else (self.start_token_id,)), ())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token.

        Raises:
            TextError: if the model has no embedding for one of its tokens.
        """
        return _within(list(self._processor.encode(text)), self._n_embeddings, self.name)

    def pieces(self, text: str) -> list[str]:
        """The text's tokens as the vocabulary writes them."""
        return list(self._processor.encode(text, out_type=str))

    def save(self, folder: Path) -> None:
        """Write its file into a folder."""
        (folder / self._path.name).write_bytes(self._path.read_bytes())


def _processor(path: Path) -> Any:
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if _TIKTOKEN_LINE.match(stored):
        raise CheckpointError(
            f"{path} is a tiktoken file, which states neither how a text is split nor which tokens are special; convert it "
            "to a tokenizer.json once (AutoTokenizer of its family, save_pretrained) and name that"
        )
    if find_spec("sentencepiece") is None:
        raise CheckpointError(f"{path} is a sentencepiece model; {_SENTENCEPIECE_NEEDED}")
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=stored)
        processor.encode("a")
    except Exception as error:  # the library raises whatever its C++ part meets
        raise CheckpointError(f"{path} is not a readable sentencepiece model") from error
    return processor


def _within(ids: list[int], n_embeddings: int, name: str) -> list[int]:
    if max(ids, default=0) >= n_embeddings:
        raise TextError(f"the text holds token {max(ids)}, the model knows {n_embeddings}: {name} is not its own")
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
    """Stands where a checkpoint has no tokenizer that can be read: token ids can still be given from Python.

    Args:
        vocab_size: of the model.
        why: what is missing, or what cannot be read.
    """

    name = "none"
    bos_token_id: int | None = None
    start_token_id: int | None = None
    mask_token_id: int | None = None
    special_around: Around = ((), ())

    def __init__(self, vocab_size: int, why: str) -> None:
        self.vocab_size, self._why = vocab_size, why

    def encode(self, text: str) -> list[int]:
        """Refused.

        Raises:
            TextError: always; it says what is missing and what would work.
        """
        raise TextError(
            f"{self._why}\nput the model's tokenizer.json beside it, or name a tokenizer by --tokenizer PATH "
            "(--tokenizer bytes takes each byte of the text as one token)"
        )


Read = tuple[Tokenizer, tuple[str, ...]]


def asked_tokenizer(asked: str | Path, vocab_size: int) -> Read:
    """The tokenizer that a user names, and warnings.

    Args:
        asked: ``bytes``; a folder; or a tokenizer.json, sentencepiece or GGUF file.
        vocab_size: of the model.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    path = Path(asked).expanduser()
    if str(asked) == ByteTokenizer.name:
        return ByteTokenizer(vocab_size), ()
    if path.is_dir():
        return _read_folder(path, vocab_size)
    if not path.is_file():
        raise CheckpointError(f"there is no tokenizer '{asked}': give a folder, a file, or bytes")
    if path.suffix == ".gguf":
        return _read_gguf_alone(path, vocab_size)
    if path.suffix == ".json":
        return _of_transformers(None, vocab_size, str(path), tokenizer_file=str(path))
    return SentencePieceTokenizer(path, vocab_size, starts=_starts(path.parent)), ()


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder, the fullest first."""
    return [path for name in _TOKENIZER_FILES for path in sorted(folder.glob(name)) if path.is_file()]


def folder_tokenizer(folder: Path, vocab_size: int) -> Read:
    """The tokenizer of a checkpoint folder, and warnings: no code from the folder is run."""
    return _or_missing(lambda: _read_folder(folder, vocab_size), vocab_size)


def gguf_tokenizer(path: Path, vocab_size: int) -> Read:
    """The tokenizer stored in a GGUF file, and warnings."""
    return _or_missing(lambda: _read_gguf_alone(path, vocab_size), vocab_size)


def _read_gguf_alone(path: Path, vocab_size: int) -> Read:
    """The file's own vocabulary: ``transformers`` would take that of a tokenizer.json beside it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        return _of_transformers(Path(folder), vocab_size, str(path), gguf_file=path.name)


def _or_missing(read: Callable[[], Read], vocab_size: int) -> Read:
    try:
        return read()
    except CheckpointError as error:
        return MissingTokenizer(vocab_size, str(error)), ()


def _read_folder(folder: Path, vocab_size: int) -> Read:
    """What ``transformers`` reads, or a sentencepiece file as it is where that reads it otherwise or not at all."""
    there = tokenizer_files(folder)
    if not there:
        raise CheckpointError(f"{folder} has no tokenizer file")
    models = [] if there[0].name == "tokenizer.json" else [path for path in there if path.name in _SENTENCEPIECE_FILES]
    if models:
        return _read_sentencepiece(models[0], vocab_size)
    tokenizer, noticed = _of_transformers(folder, vocab_size, str(folder))
    if [path.name for path in there] == ["tokenizer_config.json"] and tokenizer.lacks_part_of(_SAMPLE):
        raise _NoVocabularyError(f"{folder} has a tokenizer_config.json and no file with a vocabulary")
    return tokenizer, noticed


def _read_sentencepiece(path: Path, vocab_size: int) -> Read:
    """Families of ``tokenizer.model`` use its ids; others shift them or change the text first, as their classes know."""
    plain = SentencePieceTokenizer(path, vocab_size, starts=_starts(path.parent))
    if path.name == "tokenizer.model":
        return plain, ()
    try:
        tokenizer, noticed = _of_transformers(path.parent, vocab_size, str(path.parent))
    except _NoVocabularyError:
        if path.name == "spiece.model":
            return plain, ()
        raise
    except CheckpointError as error:
        if find_spec("google.protobuf") is None:
            raise CheckpointError(f"{path} is a sentencepiece model; {_SENTENCEPIECE_NEEDED}") from error
        raise
    if tokenizer.pieces(_SAMPLE) != plain.pieces(_SAMPLE):
        raise CheckpointError(f"{path}: transformers splits a text otherwise than sentencepiece does")
    return tokenizer, noticed


class _NoVocabularyError(CheckpointError):
    """The class of the family knows none of the folder's files."""


def _starts(folder: Path) -> bool:
    """Whether the first token goes before every sequence; so it does with sentencepiece unless the folder says otherwise."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path, "the tokenizer's settings") if path.is_file() else {}
    return bool(settings.get("add_bos_token", True))


def _of_transformers(folder: Path | None, vocab_size: int, source: str, **files: str) -> tuple[FastTokenizer, tuple[str, ...]]:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend: Any
    fast: Any = PreTrainedTokenizerFast
    try:
        if folder is None:
            backend = fast(**files)
        else:  # a file that says all of itself, and a folder of a bare tokenizer.json, need no family
            reader: Any = fast if files or not (folder / "config.json").is_file() else AutoTokenizer
            backend = reader.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **files)
        noticed = apply_stated_split(Path(source), backend) if "gguf_file" in files else ()
        tokenizer = FastTokenizer(backend, source, vocab_size)
    except CheckpointError:
        raise
    except Exception as error:  # the libraries raise anything here, from KeyError to their own
        if _NO_BACKEND in str(error):
            raise _NoVocabularyError(f"{source} has no file with a vocabulary that its family's tokenizer knows") from error
        raise CheckpointError(f"{source}: its tokenizer cannot be read: {_first_line(error)}") from error
    if set(range(len(backend))) <= set(backend.all_special_ids):
        raise _NoVocabularyError(f"{source} has no file with a vocabulary that its family's tokenizer knows")
    n_plain = int(backend.vocab_size)  # without added special tokens, which no text asks for
    larger = (f"the tokenizer has {n_plain} tokens, the model {vocab_size}",) if n_plain > vocab_size else ()
    return tokenizer, noticed + larger


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
