r"""What a batch itself makes of the loss: the loss, on that very batch, of models that count tokens and pairs of tokens.

Most of the step-to-step noise of a training loss is which windows were drawn. A model that knows nothing but the frequencies of
the training text is wrong on the same windows by a known amount, which does not depend on the run: a control variate.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["NgramLosses", "bigram_entropy", "unigram_entropy"]

_Tokens: TypeAlias = npt.NDArray[np.int32]
_Ids: TypeAlias = npt.NDArray[np.int64]
_Counts: TypeAlias = npt.NDArray[np.intp]
_Nats: TypeAlias = npt.NDArray[np.float64]

_DENSE_PAIRS = 1 << 20  # 8 MB
_FEWEST = 2  # tokens that make a pair


class NgramLosses:
    r"""Losses of the count models of a training text.

    .. math:: -\ln p(x_t), \qquad -\ln p(x_t \mid x_{t-1})

    with p the frequencies in the training text, where nothing is smoothed: a token or a pair that does not occur there has an
    infinite loss, and so has a batch with one. Windows that are cut from the training text hold none.

    Args:
        tokens: the training stream, ids, shape (N,), N >= 2.
        vocab_size: ids run from 0 to this, exclusive.

    Raises:
        ValueError: if there are fewer than 2 tokens, or an id is not below ``vocab_size``.

    Example:
        >>> import torch
        >>> losses = NgramLosses(np.array([0, 1, 0, 1, 0, 1, 0, 1], np.int32), vocab_size=2)
        >>> token, pair = losses.of(torch.tensor([[0, 1, 0]]))
        >>> round(token / math.log(2), 12), pair
        (1.0, 0.0)
    """

    def __init__(self, tokens: _Tokens, vocab_size: int) -> None:
        _check(tokens, vocab_size)
        self._vocab_size = vocab_size
        counts = np.bincount(tokens, minlength=vocab_size)
        firsts = counts.copy()
        firsts[tokens[-1]] -= 1  # the last token comes before none
        ids, pair_counts = _counted_pairs(tokens, vocab_size)
        self._token_nats = _filled(vocab_size, np.flatnonzero(counts), np.log(len(tokens) / counts[counts > 0]))
        self._pairs = _PairTable(ids, np.log(firsts[ids // vocab_size] / pair_counts), vocab_size)
        self.unigram_entropy = _entropy(counts[counts > 0])
        r"""Entropy of the token frequencies, :math:`-\sum_v p_v \ln p_v`, nats per token."""
        self.bigram_entropy = max(0.0, _entropy(pair_counts) - _entropy(firsts[firsts > 0]))
        r"""Entropy of a token given the one before it, :math:`H(x_{t-1}, x_t) - H(x_{t-1})`, nats per token."""

    def of(self, windows: Tensor) -> tuple[float, float]:
        """Mean losses over the predicted tokens of a batch.

        Args:
            windows: ids below ``vocab_size``, shape (B, seq_len + 1), int64; tokens 1 and on are predicted.

        Returns:
            Of the model of single tokens and of the model of pairs, nats per token; infinite where a token or pair does not
            occur in the training text. Status: exact.
        """
        ids: _Ids = windows.cpu().numpy()
        pairs = ids[:, :-1] * self._vocab_size + ids[:, 1:]
        return float(self._token_nats[ids[:, 1:]].mean()), float(self._pairs.nats(pairs).mean())


class _PairTable:
    """Nats of every pair: a dense table of a small vocabulary, else the pairs that occur, sorted."""

    def __init__(self, ids: _Ids, nats: _Nats, vocab_size: int) -> None:
        self._ids = None if _is_dense(vocab_size) else ids
        self._nats = _filled(vocab_size**2, ids, nats) if _is_dense(vocab_size) else nats

    def nats(self, pairs: _Ids) -> _Nats:
        if self._ids is None:
            return self._nats[pairs]
        places = np.minimum(np.searchsorted(self._ids, pairs), len(self._ids) - 1)
        return np.where(self._ids[places] == pairs, self._nats[places], np.inf)


def _check(tokens: _Tokens, vocab_size: int) -> None:
    if len(tokens) < _FEWEST:
        raise ValueError(f"counting pairs takes at least {_FEWEST} tokens, got {len(tokens)}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids must be at least 0 and below vocab_size {vocab_size}, got {low} to {high}")


def _is_dense(vocab_size: int) -> bool:
    return vocab_size**2 <= _DENSE_PAIRS


def _counted_pairs(tokens: _Tokens, vocab_size: int) -> tuple[_Ids, _Counts]:
    """The pairs that occur, as first * vocab_size + second, sorted; and how often each does."""
    pairs = tokens[:-1].astype(np.int64)
    pairs *= vocab_size
    pairs += tokens[1:]
    if not _is_dense(vocab_size):
        ids, counts = np.unique(pairs, return_counts=True)
        return ids, counts
    dense = np.bincount(pairs)
    ids = np.flatnonzero(dense)
    return ids, dense[ids]


def _filled(size: int, ids: _Ids, nats: _Nats) -> _Nats:
    """A table of nats, infinite but for these ids."""
    table = np.full(size, np.inf)
    table[ids] = nats
    return table


def _entropy(counts: _Counts) -> float:
    p = counts / counts.sum()
    return max(0.0, -math.fsum(p * np.log(p)))


def unigram_entropy(tokens: _Tokens) -> float:
    r"""Entropy of the token frequencies, :math:`-\sum_v p_v \ln p_v`.

    Args:
        tokens: ids, shape (N,), N >= 2.

    Returns:
        Nats per token. Status: exact for the empirical frequencies.

    Example:
        >>> bool(np.isclose(unigram_entropy(np.array([0, 1, 0, 1], np.int32)), np.log(2)))
        True
    """
    return NgramLosses(tokens, int(tokens.max()) + 1).unigram_entropy


def bigram_entropy(tokens: _Tokens) -> float:
    r"""Entropy of a token given the one before it, :math:`H(x_{t-1}, x_t) - H(x_{t-1})`.

    Args:
        tokens: ids, shape (N,), N >= 2.

    Returns:
        Nats per token. Status: exact for the empirical frequencies; of a text that is short beside the number of pairs it
        is too low.

    Example:
        >>> bigram_entropy(np.array([0, 1, 0, 1, 0], np.int32))
        0.0
    """
    return NgramLosses(tokens, int(tokens.max()) + 1).bigram_entropy
