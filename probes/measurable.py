"""What every probe asks of a model and a batch before it runs anything, so that what is wrong is named."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

from probes.errors import UnsupportedModelError
from probes.layout import ResidualLayout

__all__ = ["check_ids", "check_materialised"]


def check_materialised(model: nn.Module) -> None:
    """Refuse a model that has shapes and no values.

    Args:
        model: any.

    Raises:
        UnsupportedModelError: if a parameter or buffer is on the meta device; the message names the first and counts them.

    Example:
        >>> import torch
        >>> check_materialised(nn.Linear(2, 2, device="meta"))
        Traceback (most recent call last):
        probes.errors.UnsupportedModelError: Linear has 2 parameters or buffers on the meta device ...
    """
    named = chain(model.named_parameters(), model.named_buffers())
    absent = [name for name, tensor in named if tensor.is_meta]
    if absent:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(absent)} parameters or buffers on the meta device ('{absent[0]}' is the first): "
            "they have shapes and no values; load the weights first, or give the checkpoint to a command with --stream"
        )


def check_ids(model: nn.Module, layout: ResidualLayout, ids_BT: Tensor, index: int) -> None:
    """Refuse a token id that the embedding has no row for: the lookup itself would not say which.

    Args:
        model: of the layout.
        layout: names the embedding where the model does not.
        ids_BT: token ids.
        index: of the batch, for the message.

    Raises:
        ValueError: if an id is outside the vocabulary.
    """
    embedding = _token_embedding(model, layout)
    if embedding is None or not ids_BT.numel():
        return
    lowest, highest = (int(value) for value in ids_BT.aminmax())
    wrong = lowest if lowest < 0 else highest
    if not 0 <= wrong < embedding.num_embeddings:
        raise ValueError(
            f"batch {index} holds the token id {wrong}, outside the vocabulary of {embedding.num_embeddings} tokens "
            f"(ids 0 to {embedding.num_embeddings - 1}); was the text encoded by the tokenizer of another model?"
        )


def _token_embedding(model: nn.Module, layout: ResidualLayout) -> nn.Embedding | None:
    """The embedding that the ids are looked up in; the first of the layout where the model does not name it."""
    named = getattr(model, "get_input_embeddings", None)
    if callable(named) and isinstance(found := named(), nn.Embedding):
        return found
    owned = (module for name in layout.embedding_modules for module in model.get_submodule(name).modules())
    return next((module for module in owned if isinstance(module, nn.Embedding)), None)
