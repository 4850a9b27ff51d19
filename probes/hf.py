"""The toolkit's models in ``transformers``: importing this module registers them with the Auto classes.

Example:
    >>> import tempfile
    >>> from transformers import AutoModelForCausalLM
    >>> from probes.config import tiny
    >>> from probes.model import Transformer
    >>> from probes.saving import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(Transformer(tiny()), folder)
    ...     model = AutoModelForCausalLM.from_pretrained(folder)
    >>> type(model).__name__
    'KeelDynamicsForCausalLM'
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from probes.config import ModelConfig
from probes.model import Transformer
from probes.saving import FORMAT_VERSION, parse_config

__all__ = ["KeelDynamicsConfig", "KeelDynamicsForCausalLM"]


class KeelDynamicsConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]  # of transformers' __init_subclass__
    """``config.json`` as :mod:`probes.saving` writes it; ``model`` holds the fields of a :class:`ModelConfig`."""

    model_type = ModelConfig.model_type
    format_version: int = FORMAT_VERSION
    tokenizer: str = "bytes"
    model: dict[str, Any] | None = None

    def model_config(self) -> ModelConfig:
        """The toolkit's configuration; without ``model``, the default one."""
        if self.model is None:
            return ModelConfig()
        return parse_config({name: getattr(self, name) for name in ("model_type", "format_version", "model")}, "config.json")


class KeelDynamicsForCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]  # of transformers' __init_subclass__
    """A :class:`Transformer` that ``transformers`` can load, save and train."""

    config_class = KeelDynamicsConfig
    base_model_prefix = "transformer"

    def __init__(self, config: KeelDynamicsConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(config.model_config())
        self._tied_weights_keys = self._aliases = _aliases(self)
        self.config.tie_word_embeddings = bool(self._aliases)  # transformers reads the keys only then
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """Logits, and the mean next-token loss where labels are given.

        Args:
            input_ids: (B, T).
            labels: (B, T), the same ids; shifted by one here, -100 does not count.
        """
        logits_BTV = self.transformer(input_ids)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits_BTV)

    def save_pretrained(  # type: ignore[override]  # the options between these two are keywords here
        self, save_directory: str | PathLike[Any], *, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Write a folder that :func:`probes.saving.load_model` reads too: the weights have the Transformer's own names."""
        prefix = f"{self.base_model_prefix}."
        named = self.state_dict() if state_dict is None else state_dict
        own = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name not in self._aliases}
        super().save_pretrained(save_directory, state_dict=own, **kwargs)

    def get_input_embeddings(self) -> nn.Module:  # noqa: D102
        return self.transformer.embedding

    def get_output_embeddings(self) -> nn.Module:  # noqa: D102
        return self.transformer.head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the Transformer has drawn its weights, and a checkpoint brings all of them."""


def _aliases(model: nn.Module) -> dict[str, str]:
    """Second and further names of shared parameters, each with the first."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


AutoConfig.register(ModelConfig.model_type, KeelDynamicsConfig)
AutoModelForCausalLM.register(KeelDynamicsConfig, KeelDynamicsForCausalLM)
