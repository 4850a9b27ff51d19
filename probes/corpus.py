r"""Text to train on: documents, a split without leakage, token streams, and a sampler that needs nothing but a step number.

**Split.** Documents that occur twice are kept once. Then whole documents go to validation, chosen by the hash of their content
(with fewer than 20 documents, the last part of each, cut at the end of a line). At last every paragraph of validation that
training also holds (64 characters or more between blank lines: licences, copied functions) is taken out of validation. Windows
are cut from one side's own stream, so none reaches across the split.

**Sampler.** The windows of an optimizer step are a function of (seed, step) alone, by a counter-based generator; a run that
resumes at step k needs no other position.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probes.errors import TextError
from probes.ngram_losses import NgramLosses
from probes.text_documents import has_columns, is_there, read_documents
from probes.tokenization import N_BYTES

__all__ = ["Corpus", "CorpusConfig", "build_corpus", "check_sources"]

_Tokens: TypeAlias = npt.NDArray[np.int32]

_FEW_DOCUMENTS = 20
_SHARED_PARAGRAPH = 64
_MOST_BYTES = 1 << 63
_SAMPLER_KEY = 0x6B65656C  # another key than other users of the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """Which text, and how it becomes tokens.

    Attributes:
        sources: ``stdlib`` (sources and prose of Python's standard library), text files, folders, folders that
            ``datasets`` saved, or ``hub:NAME`` / ``hub:NAME@SUBSET`` for a data set of the hub or a folder of Parquet files.
        tokenizer: ``bytes``; ``bpe:N``, a byte-level BPE of N tokens trained on the training side; or a tokenizer.json.
        column: of a data set, holds the text.
        max_bytes: reading stops after this many bytes of UTF-8.
        validation_share: of the text, between 0 and 0.5.
    """

    sources: tuple[str, ...] = ("stdlib",)
    tokenizer: str = "bytes"
    column: str = "text"
    max_bytes: int = 1 << 26
    validation_share: float = 0.05

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "sources", _names(self.sources))
        for name in ("tokenizer", "column"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise TextError(f"{name} must be a text, got {getattr(self, name)!r}")
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or not 1 <= self.max_bytes < _MOST_BYTES:
            raise TextError(f"max_bytes must be an integer of at least 1, got {self.max_bytes!r}")
        share = self.validation_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 0.5:
            raise TextError(f"validation_share must be a number above 0 and at most 0.5, got {share!r}")

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CorpusConfig:
        """The configuration whose :meth:`to_dict` this is; fields that are left out have their default.

        Raises:
            TextError: if a field is unknown or of the wrong type; the message names it.
        """
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise TextError(f"unknown field(s) of a text: {', '.join(unknown)}")
        return cls(**values)


def _names(sources: object) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    names = (sources,) if isinstance(sources, str) else tuple(sources) if isinstance(sources, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TextError(f"sources must name at least one text, got {sources!r}; 'stdlib' is on every machine")
    return names


class _Split(NamedTuple):
    train: list[str]
    validation: list[str]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Two streams of tokens.

    Attributes:
        config: what it was built from.
        train: token ids of the training side, shape (N,).
        validation: token ids of the validation side.
        vocab_size: ids run from 0 to this, exclusive.
        tokenizer_json: the BPE tokenizer, or None for bytes.
        n_documents: distinct documents.
        n_duplicates: documents left out since an equal one was there.
        n_skipped: files of a folder that are not text.
        shared_share: share of the validation text that was removed since training holds it too.
    """

    config: CorpusConfig
    train: _Tokens
    validation: _Tokens
    vocab_size: int
    tokenizer_json: str | None
    n_documents: int
    n_duplicates: int
    n_skipped: int
    shared_share: float

    @cached_property
    def content_hash(self) -> str:
        """Of both streams and the tokenizer: equal hashes mean equal training data, on any machine."""
        digest = hashlib.sha256(f"{self.vocab_size}/{len(self.train)}/{self.tokenizer_json}".encode())
        for stream in (self.train, self.validation):
            digest.update(stream.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def ngram_losses(self) -> NgramLosses:
        """Of models that know how often each token and each pair occurs in training: their loss on any batch of it."""
        return NgramLosses(self.train, self.vocab_size)

    @property
    def unigram_entropy(self) -> float:
        """Loss of a model that knows the frequency of each token and nothing else, nats per token."""
        return self.ngram_losses.unigram_entropy

    @property
    def bigram_entropy(self) -> float:
        """Loss of a model that also knows the token before, nats per token."""
        return self.ngram_losses.bigram_entropy

    def check_window(self, seq_len: int) -> None:
        """Refuse a text that does not hold one window on either side.

        Args:
            seq_len: tokens that a window predicts.

        Raises:
            TextError: if a side has fewer than ``seq_len + 1`` tokens.
        """
        for side, stream in (("training", self.train), ("validation", self.validation)):
            if len(stream) <= seq_len:
                raise TextError(
                    f"the text has {len(stream)} token(s) for {side}, a window of seq_len {seq_len} needs {seq_len + 1}; "
                    "give more text or a shorter seq_len"
                )

    def batch(self, *, seed: int, step: int, n_windows: int, seq_len: int) -> Tensor:
        """The training windows of one optimizer step: a pure function of its arguments.

        Args:
            seed: of the sampler.
            step: 1-based optimizer step.
            n_windows: windows to cut, with replacement, from all positions alike.
            seq_len: tokens that a window predicts.

        Returns:
            Token ids, shape (n_windows, seq_len + 1), int64.
        """
        generator = np.random.Philox(
            key=np.array([seed, _SAMPLER_KEY], np.uint64), counter=np.array([0, 0, 0, step], np.uint64)
        )
        starts = generator.random_raw(n_windows) % np.uint64(len(self.train) - seq_len)
        return _windows(self.train, starts.astype(np.int64), seq_len)

    def validation_batches(self, *, n_tokens: int, batch_size: int, seq_len: int) -> Iterator[Tensor]:
        """Validation windows that do not overlap, spread evenly over the whole side.

        Args:
            n_tokens: predictions wanted in all, at least one window's.
            batch_size: windows per batch.
            seq_len: tokens that a window predicts.

        Yields:
            Token ids, shape (B, seq_len + 1), int64.
        """
        available = (len(self.validation) - 1) // seq_len
        chosen = np.linspace(0, available - 1, max(1, min(available, n_tokens // seq_len))).astype(np.int64) * seq_len
        for first in range(0, len(chosen), batch_size):
            yield _windows(self.validation, chosen[first : first + batch_size], seq_len)

    def summary(self) -> dict[str, Any]:
        """What a result says of its text, ready for JSON."""
        return {
            **self.config.to_dict(),
            "content_hash": self.content_hash,
            "n_train_tokens": len(self.train),
            "n_validation_tokens": len(self.validation),
            "vocab_size": self.vocab_size,
            "n_documents": self.n_documents,
            "n_duplicates": self.n_duplicates,
            "n_skipped": self.n_skipped,
            "shared_share": self.shared_share,
            "unigram_entropy": self.unigram_entropy,
            "bigram_entropy": self.bigram_entropy,
            "python_stdlib": platform.python_version() if "stdlib" in self.config.sources else None,
        }


def _windows(stream: _Tokens, starts: npt.NDArray[np.int64], seq_len: int) -> Tensor:
    return torch.from_numpy(stream[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))


def build_corpus(config: CorpusConfig | None = None, *, tokenizer_json: str | None = None) -> Corpus:
    """Read, split and encode a text.

    Args:
        config: which text and tokenizer; the defaults when None.
        tokenizer_json: a tokenizer that was trained before, used in place of training ``bpe:N`` anew.

    Returns:
        Both streams.

    Raises:
        TextError: if a source cannot be read or is empty, or the tokenizer cannot be used; the message names it.
    """
    config = config or CorpusConfig()
    check_sources(config)
    found = read_documents(config.sources, column=config.column, max_bytes=config.max_bytes)
    documents = list(dict.fromkeys(found.documents))
    train, validation = _split(documents, config.validation_share)
    validation, shared_share = _without_shared(validation, train)
    if not (train and validation):
        raise TextError(
            f"the text of {', '.join(config.sources)} ({sum(map(len, documents))} characters) is too small to be split into "
            "training and validation"
        )
    encode, vocab_size, tokenizer_json = _tokenizer(config.tokenizer, train, tokenizer_json)
    return Corpus(
        config=config,
        train=encode(train),
        validation=encode(validation),
        vocab_size=vocab_size,
        tokenizer_json=tokenizer_json,
        n_documents=len(documents),
        n_duplicates=len(found.documents) - len(documents),
        n_skipped=found.n_skipped,
        shared_share=shared_share,
    )


def _split(documents: Sequence[str], share: float) -> _Split:
    if len(documents) < _FEW_DOCUMENTS:
        cuts = [(text, _cut(text, share)) for text in documents]
        return _Split([t[:cut] for t, cut in cuts if cut > 0], [t[cut:] for t, cut in cuts if cut < len(t)])
    wanted, taken = share * sum(map(len, documents)), 0
    chosen = set()
    for text in sorted(documents, key=_digest):
        if taken >= wanted:
            break
        if taken + len(text) <= 1.5 * wanted:
            chosen.add(text)
            taken += len(text)
    return _Split([t for t in documents if t not in chosen], [t for t in documents if t in chosen])


def _cut(text: str, share: float) -> int:
    """Where the last part begins: after the line end nearest before the wanted place, or there if the line began long ago."""
    wanted = round(len(text) * (1 - share))
    line_end = text.rfind("\n", 0, wanted) + 1
    return line_end if line_end > wanted - len(text) * share else wanted


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _without_shared(validation: Sequence[str], train: Iterable[str]) -> tuple[list[str], float]:
    """Validation without the paragraphs that training holds, and the share of characters that went."""
    known = {paragraph for text in train for paragraph in _paragraphs(text) if len(paragraph) >= _SHARED_PARAGRAPH}
    kept = ["\n\n".join(p for p in text.split("\n\n") if p.strip() not in known) for text in validation]
    before, after = sum(map(len, validation)), sum(map(len, kept))
    return [text for text in kept if text.strip()], 1 - after / before if before else 0.0


def _paragraphs(text: str) -> Iterator[str]:
    return (paragraph.strip() for paragraph in text.split("\n\n"))


def check_sources(config: CorpusConfig) -> None:
    """Refuse a text that cannot be read, without reading it.

    Args:
        config: which text and tokenizer.

    Raises:
        TextError: if a file or folder is not there, a column is named and nothing has columns, or the tokenizer cannot be used.
    """
    missing = next((source for source in config.sources if not is_there(source)), None)
    if missing is not None:
        raise TextError(f"there is no text file or folder {missing}")
    column = next(f.default for f in fields(CorpusConfig) if f.name == "column")
    if config.column != column and not any(map(has_columns, config.sources)):
        raise TextError(
            f"column '{config.column}' belongs to data sets, and {', '.join(config.sources)} is plain text; leave it out"
        )
    if config.tokenizer != "bytes":
        from probes.bpe import check_size, load_tokenizer

        if config.tokenizer.startswith("bpe:"):
            check_size(config.tokenizer.removeprefix("bpe:"))
        else:
            load_tokenizer(Path(config.tokenizer))


class _Encoder(NamedTuple):
    encode: Any  # list[str] -> _Tokens
    vocab_size: int
    tokenizer_json: str | None


def _tokenizer(name: str, train: Sequence[str], stored: str | None) -> _Encoder:
    if name == "bytes":
        return _Encoder(_encode_bytes, N_BYTES, None)
    from probes.bpe import load_tokenizer, train_tokenizer

    if name.startswith("bpe:"):
        text = stored if stored is not None else train_tokenizer(train, name.removeprefix("bpe:"))
    else:
        text = load_tokenizer(Path(name))
    from probes.bpe import BpeEncoder

    encoder = BpeEncoder(text)
    return _Encoder(encoder.encode, encoder.vocab_size, text)


def _encode_bytes(documents: Sequence[str]) -> _Tokens:
    """One token per byte of UTF-8; documents end with a line end."""
    joined = "\n".join(documents).encode("utf-8")
    return np.frombuffer(joined, np.uint8).astype(np.int32)
