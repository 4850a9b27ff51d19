"""Count models against a loop over the text, in both of their tables."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch

from probes.ngram_losses import NgramLosses, bigram_entropy, unigram_entropy

DENSE, SPARSE = 4096, 4097
"""The largest vocabulary whose pairs are held in a dense table, and the smallest whose are not."""

TEXT = np.random.default_rng(3).choice(12, 400, p=np.arange(1, 13) / 78).astype(np.int32)
TABLES = pytest.mark.parametrize("vocab_size", [12, DENSE, SPARSE, 150_000])


def windows(tokens: npt.NDArray[np.int32], starts: list[int], seq_len: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64))


def naive(tokens: list[int], batch: list[list[int]]) -> tuple[float, float]:
    """The same by counting and dividing, token by token."""
    counts, pairs = Counter(tokens), Counter(itertools.pairwise(tokens))
    firsts = Counter(tokens[:-1])
    predicted = [(before, token) for window in batch for before, token in itertools.pairwise(window)]
    single = [-math.log(counts[token] / len(tokens)) for _, token in predicted]
    after = [-math.log(pairs[before, token] / firsts[before]) for before, token in predicted]
    return sum(single) / len(single), sum(after) / len(after)


@TABLES
@pytest.mark.parametrize(("starts", "seq_len"), [([0], 1), ([0, 7, 391], 8), ([5, 5, 100, 367], 32)])
def test_losses_are_those_of_counting_by_hand(vocab_size: int, starts: list[int], seq_len: int) -> None:
    batch = windows(TEXT, starts, seq_len)
    assert NgramLosses(TEXT, vocab_size).of(batch) == pytest.approx(naive(TEXT.tolist(), batch.tolist()), rel=1e-12)


@pytest.mark.parametrize("start", range(0, 380, 40))
def test_sparse_and_dense_tables_agree_bit_for_bit(start: int) -> None:
    batch = windows(TEXT, [start, start + 3], 16)
    dense, sparse = NgramLosses(TEXT, DENSE), NgramLosses(TEXT, SPARSE)
    assert dense.of(batch) == sparse.of(batch)
    assert (dense.unigram_entropy, dense.bigram_entropy) == (sparse.unigram_entropy, sparse.bigram_entropy)


@TABLES
def test_means_over_the_whole_text_are_the_entropies(vocab_size: int) -> None:
    losses = NgramLosses(TEXT, vocab_size)
    single, pair = losses.of(windows(TEXT, [0], len(TEXT) - 1))
    first = -math.log(np.equal(TEXT, TEXT[0]).mean())  # the only token that no window predicts
    assert ((len(TEXT) - 1) * single + first) / len(TEXT) == pytest.approx(losses.unigram_entropy, rel=1e-12)
    assert pair == pytest.approx(losses.bigram_entropy, rel=1e-12)


@TABLES
@pytest.mark.parametrize(
    ("batch", "infinite"),
    [
        ([[0, 1, 2, 3]], (False, False)),
        ([[3, 2]], (False, True)),
        ([[11, 11]], (True, True)),
        ([[0, 1], [1, 11]], (True, True)),
        ([[11, 0]], (False, True)),
    ],
    ids=["known", "unknown pair", "beyond all pairs", "unknown token", "after an unknown token"],
)
def test_what_the_text_does_not_hold_is_infinite(vocab_size: int, batch: list[list[int]], infinite: tuple[bool, bool]) -> None:
    losses = NgramLosses(np.array([0, 1, 2, 3, 0], np.int32), vocab_size).of(torch.tensor(batch))
    assert tuple(map(math.isinf, losses)) == infinite
    assert all(loss >= 0 for loss in losses)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3], "takes at least 2 tokens, got 1"),
        ([0, 5], r"below vocab_size 5, got 0 to 5"),
        ([-1, 4], r"at least 0 and below vocab_size 5, got -1 to 4"),
    ],
)
def test_what_is_no_text_is_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramLosses(np.array(tokens, np.int32), vocab_size=5)


def test_entropies_by_hand() -> None:
    uniform = np.arange(8, dtype=np.int32)
    assert unigram_entropy(uniform) == pytest.approx(np.log(8))
    # after 0 comes 0 or 1 with equal probability, after 1 always 0
    tokens = np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0], np.int32)
    assert bigram_entropy(tokens) == pytest.approx(6 / 9 * np.log(2))


def test_entropies_of_rare_large_ids_equal_those_of_the_same_pattern_of_small_ids() -> None:
    tokens = np.random.default_rng(0).integers(0, 7, 500).astype(np.int32)
    assert bigram_entropy(tokens * 9000) == pytest.approx(bigram_entropy(tokens))
