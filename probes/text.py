"""Text and token batches for the probes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probes.errors import TextError
from probes.layout import Objective

if TYPE_CHECKING:
    from probes.checkpoint import Checkpoint

__all__ = [
    "IGNORED",
    "TokenBatch",
    "causal_batches",
    "checkpoint_batches",
    "default_text",
    "masked_batches",
    "read_text",
    "sequence_length",
]

IGNORED = -100
"""Target of a position that is not predicted."""

_MASKED_SHARE = 0.15
_SEQ_LEN = 512
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "context_length")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Inputs and what is to be predicted at each position.

    Attributes:
        inputs: token ids, shape (B, T).
        targets: token ids, shape (B, T); ``IGNORED`` where nothing is predicted.
    """

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on a device."""
        return TokenBatch(self.inputs.to(device), self.targets.to(device))

    @property
    def n_predictions(self) -> int:
        """How many positions are predicted."""
        return int((self.targets != IGNORED).sum())


def default_text() -> str:
    """English prose that is on every machine: the language reference carried by the standard library's ``pydoc``."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def read_text(source: str | None) -> tuple[str, str]:
    """Text to probe with.

    Args:
        source: a file, ``-`` for standard input, or None for :func:`default_text`.

    Returns:
        The text, and a description of where it came from.

    Raises:
        TextError: if there is no such file, standard input is closed, or the content is not UTF-8 text.
    """
    if source is None:
        return default_text(), "English prose of the standard library (pydoc_data.topics)"
    if not source:
        raise TextError("the name of the text is empty; --text takes a file, or - for standard input")
    name, raw = ("standard input", _read_stdin()) if source == "-" else (source, _read_file(Path(source)))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is not UTF-8 text (byte {error.start}); give a plain text file") from error
    if "\x00" in text:
        raise TextError(f"{name} holds a NUL character at position {text.index(chr(0))}: a binary file; give a plain text file")
    return text, name


def _read_stdin() -> bytes:
    if sys.stdin is None:  # closed by the shell: <&-
        raise TextError("cannot read the text: standard input is closed; pipe a text in, or name a file")
    try:
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        raise TextError(f"cannot read the text from standard input: {error}; pipe a text in, or name a file") from error


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise TextError(f"{path} is a folder; --text takes a file, or - for standard input") from None
    except OSError as error:
        raise TextError(f"cannot read the text {path}: {error.strerror}") from error


def causal_batches(
    ids: Sequence[int], *, n_tokens: int, seq_len: int, batch_size: int = 1, prefix: int | None = None
) -> list[TokenBatch]:
    """Consecutive chunks of a text for next-token prediction.

    Args:
        ids: the text's token ids.
        n_tokens: how many of them to use at the most.
        seq_len: tokens per sequence, prefix included.
        batch_size: sequences per batch; every batch has the same size when the text allows, the last may be smaller.
        prefix: token that starts every sequence (the model's BOS), or None.

    Returns:
        Batches of shape (B, T); a last sequence shorter than the others stands in a batch of its own, and is left out when
        it holds no prediction.

    Raises:
        TextError: if not even one prediction can be made.
    """
    head = [] if prefix is None else [prefix]
    body = seq_len - len(head)
    used = list(ids[:n_tokens])
    sequences = [head + used[start : start + body] for start in range(0, len(used), body)] if body > 0 else []
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    if not sequences:
        raise TextError(f"a text of {len(used)} token(s) holds no prediction; at least two tokens are needed")
    return [_causal(group) for group in _groups(sequences, batch_size)]


def _groups(sequences: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Groups of equal length, in order: no padding is ever needed."""
    groups: list[list[list[int]]] = []
    for sequence in sequences:
        if groups and len(groups[-1]) < batch_size and len(groups[-1][0]) == len(sequence):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def _causal(sequences: list[list[int]]) -> TokenBatch:
    inputs = torch.tensor(sequences, dtype=torch.long)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, :-1] = inputs[:, 1:]
    return TokenBatch(inputs, targets)


def masked_batches(
    ids: Sequence[int],
    *,
    n_tokens: int,
    seq_len: int,
    mask_id: int,
    batch_size: int = 1,
    seed: int = 0,
    around: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> list[TokenBatch]:
    """Consecutive chunks of a text for masked-token prediction: 15 % of its positions, at least one, become ``mask_id``.

    Args:
        ids: the text's token ids.
        n_tokens: how many of them to use at the most.
        seq_len: tokens per sequence, those around it included.
        mask_id: the model's mask token.
        batch_size: sequences per batch.
        seed: of the choice of positions.
        around: tokens before and after each sequence, as the model was trained ([CLS] and [SEP]); never masked.

    Returns:
        Batches of shape (B, T), as :func:`causal_batches`.

    Raises:
        TextError: if the text has fewer than two tokens, or a sequence has no room for two beside those around it.
    """
    generator = torch.Generator().manual_seed(seed)
    n_around = sum(map(len, around))
    if n_around and seq_len < n_around + 2:
        raise TextError(
            f"a sequence of {seq_len} tokens holds {n_around} special ones of the tokenizer and no two of the text; a seq_len "
            f"of at least {n_around + 2} works"
        )
    plain = causal_batches(ids, n_tokens=n_tokens, seq_len=seq_len - n_around, batch_size=batch_size)
    return [_surrounded(_masked(batch.inputs, mask_id, generator), around) for batch in plain]


def _surrounded(batch: TokenBatch, around: tuple[Sequence[int], Sequence[int]]) -> TokenBatch:
    """With tokens before and after each sequence that are read and not predicted."""
    before, after = (torch.tensor(ids, dtype=torch.long).expand(len(batch.inputs), -1) for ids in around)
    return TokenBatch(
        torch.cat([before, batch.inputs, after], dim=1),
        torch.cat([torch.full_like(before, IGNORED), batch.targets, torch.full_like(after, IGNORED)], dim=1),
    )


def _masked(inputs: Tensor, mask_id: int, generator: torch.Generator) -> TokenBatch:
    n_masked = max(1, round(_MASKED_SHARE * inputs.shape[1]))
    order = torch.rand(inputs.shape, generator=generator).argsort(dim=1)
    chosen = torch.zeros_like(inputs, dtype=torch.bool).scatter_(1, order[:, :n_masked], True)
    return TokenBatch(inputs.masked_fill(chosen, mask_id), inputs.masked_fill(~chosen, IGNORED))


def checkpoint_batches(
    checkpoint: Checkpoint,
    text: str,
    *,
    n_tokens: int,
    seq_len: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    source: str = "the text",
) -> list[TokenBatch]:
    """Batches of a text as a checkpoint was trained to read it: its tokenizer, its start token, its objective.

    Args:
        checkpoint: the model, its layout and tokenizer.
        text: any text.
        n_tokens: how many tokens to use at the most.
        seq_len: tokens per sequence, the tokenizer's special tokens included; 512, or the model's context where that is
            shorter, by default.
        batch_size: sequences per batch.
        seed: of the masked positions, for masked language models.
        source: how messages call the text.

    Returns:
        Batches of shape (B, T), all sequences of the same length where the text has enough tokens: a shorter rest is left out.

    Raises:
        TextError: if the text is too short, a token is outside the model's vocabulary, or seq_len exceeds the context.
    """
    length = sequence_length(checkpoint, seq_len)
    tokenizer = checkpoint.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise TextError(f"{source} has {len(ids)} token(s); at least two are needed for one prediction")
    if checkpoint.layout.objective is Objective.MASKED:
        if tokenizer.mask_token_id is None:
            raise TextError(f"{checkpoint.source}: a masked language model needs a tokenizer with a mask token")
        batches = masked_batches(
            ids,
            n_tokens=n_tokens,
            seq_len=length,
            mask_id=tokenizer.mask_token_id,
            batch_size=batch_size,
            seed=seed,
            around=tokenizer.special_around,
        )
    else:
        start = tokenizer.start_token_id
        batches = causal_batches(ids, n_tokens=n_tokens, seq_len=length, batch_size=batch_size, prefix=start)
    _check_vocabulary(batches, checkpoint)
    longest = max(batch.inputs.shape[1] for batch in batches)
    return [batch for batch in batches if batch.inputs.shape[1] == longest]


def sequence_length(checkpoint: Checkpoint, seq_len: int | None, *, default: int = _SEQ_LEN) -> int:
    """How long the sequences that a checkpoint reads shall be.

    Args:
        checkpoint: the model.
        seq_len: tokens per sequence as asked for, or None.
        default: where it is None, unless the model's context is shorter.

    Returns:
        Tokens per sequence.

    Raises:
        TextError: if what is asked for exceeds the context; the message says both.
    """
    context = _context(checkpoint.model)
    if seq_len is None:
        return default if context is None else min(default, context)
    if context is not None and seq_len > context:
        raise TextError(
            f"sequences of {seq_len} tokens are longer than the context of {checkpoint.source}, {context} tokens; a seq_len of "
            f"at most {context} works"
        )
    return seq_len


def _context(model: object) -> int | None:
    """The longest sequence that a model has positions for; tables that keep rows up to a padding index free have fewer."""
    config = getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in _CONTEXT_FIELDS]
    tables = (
        module.num_embeddings - module.padding_idx - 1
        for name, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None
    )
    return min((limit for limit in (*limits, *tables) if isinstance(limit, int)), default=None)


def _check_vocabulary(batches: list[TokenBatch], checkpoint: Checkpoint) -> None:
    """A token outside the embedding would otherwise fail deep inside the model."""
    largest = max(int(batch.inputs.max()) for batch in batches)
    vocabulary = getattr(getattr(checkpoint.model, "config", None), "vocab_size", None)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise TextError(
            f"the tokenizer gives token {largest}, outside the model's vocabulary of {vocabulary}: they do not match"
        )
