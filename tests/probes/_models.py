"""Small float64 models of the toolkit with weights that hide nothing: norms and gains are not one, scales are large."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probes.config import ModelConfig
from probes.model import Transformer


def small_config(scheme: str = "keel", **changes: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "n_blocks": 3,
        "width": 16,
        "ffn_width": 24,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 19,
        "init_std": 0.3,
        "compute_dtype": "float64",
    }
    return ModelConfig(scheme=scheme, **(defaults | changes))


def perturbed(model: Transformer, size: float = 0.2) -> Transformer:
    """The model with noise on every parameter, from a generator of its own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype))
    return model


def random_ids(n_sequences: int = 2, n_tokens: int = 7, vocab_size: int = 19) -> Tensor:
    return torch.randint(vocab_size, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(2))


def random_stream(n_sequences: int = 2, n_tokens: int = 7, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n_sequences, n_tokens, width, generator=generator, dtype=torch.float64)
