"""Byte-level BPE through ``tokenizers``: train a small one, load a tokenizer.json, encode documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import TextError
from probes.tokenization import N_BYTES

__all__ = ["BpeEncoder", "check_size", "load_tokenizer", "train_tokenizer"]


def train_tokenizer(documents: Sequence[str], size: str | int) -> str:
    """Train a byte-level BPE.

    Args:
        documents: the text it is trained on; one side of a split, so that nothing of the other is seen.
        size: number of tokens, more than 256; fewer result where the text holds fewer pairs.

    Returns:
        The tokenizer as JSON, the content of a tokenizer.json. Equal texts give equal tokenizers.

    Raises:
        TextError: if the size is not a number above 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_size(size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=int(size), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    text: str = tokenizer.to_str()
    return text


def check_size(size: str | int) -> None:
    """Refuse what is no number of tokens for a BPE.

    Raises:
        TextError: if the size is not a number above 256.
    """
    if not str(size).isdecimal() or not N_BYTES < int(size) < 1 << 31:
        raise TextError(f"'bpe:{size}': a BPE tokenizer needs a number of tokens above {N_BYTES}, for example bpe:4096")


def load_tokenizer(path: Path) -> str:
    """The content of a tokenizer.json.

    Raises:
        TextError: if there is none, or it is not one.
    """
    from tokenizers import Tokenizer

    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"no tokenizer '{path}': give bytes, bpe:N (for example bpe:4096) or the path of a tokenizer.json"
        ) from error
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception
        raise TextError(f"{path} is not a tokenizer.json: {error}") from error
    return text


class BpeEncoder:
    """Documents to one stream of token ids.

    Args:
        tokenizer_json: content of a tokenizer.json.
    """

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self._backend: Any = Tokenizer.from_str(tokenizer_json)
        self.vocab_size = int(self._backend.get_vocab_size())

    def encode(self, documents: Sequence[str]) -> npt.NDArray[np.int32]:
        """Ids of the documents one after the other, each ended by a line end, without special tokens."""
        encodings = self._backend.encode_batch([f"{text}\n" for text in documents], add_special_tokens=False)
        return np.concatenate([np.asarray(encoding.ids, np.int32) for encoding in encodings])
