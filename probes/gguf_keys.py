"""The settings of a GGUF file under the prefix of its architecture, read so that none is overlooked."""

from __future__ import annotations

import math
from collections.abc import Mapping

from probes.errors import CheckpointError, UnsupportedModelError
from probes.gguf_file import GgufArray, GgufFile

__all__ = ["Keys"]

# Values at which a setting changes nothing, whatever the architecture.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
}
# Settings that no computation of a dense decoder reads.
_IRRELEVANT = {
    "vocab_size",  # the rows of the embedding say it
    "rope.scaling.finetuned",  # how the model came to its scaling
    "tensor_data_layout",  # which rows are permuted follows from the architecture
}


class Keys:
    """The settings of a file's architecture; remembers which were asked for.

    Args:
        file: the header.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        prefix = f"{file.architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        self._asked: set[str] = set()

    def get(self, key: str) -> object:
        """A value or None; an array that gives every block the same number is that number.

        Raises:
            UnsupportedModelError: if the blocks differ.
        """
        self._asked.add(key)
        value = self._values.get(key)
        if not isinstance(value, GgufArray):
            return value
        if value.values is None or len(set(value.values)) != 1:
            raise self.refused(key, "one value for each block")
        return value.values[0]

    def array(self, key: str) -> tuple[int | float | bool, ...] | None:
        """The values of a short array of numbers, None where the key is something else or not there."""
        value = self._values.get(key)
        if not isinstance(value, GgufArray) or value.values is None:
            return None
        self._asked.add(key)
        return value.values

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: if it is none, or is missing and has no default.
        """
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks the setting '{self.file.architecture}.{key}'")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CheckpointError(f"{self.file.path}: '{self.file.architecture}.{key}' must be a number, got {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0.

        Raises:
            CheckpointError: if it is none, or is missing and has no default.
        """
        value = self.real(key, default)
        if value <= 0:
            raise CheckpointError(f"{self.file.path}: '{self.file.architecture}.{key}' must be above 0, got {value:g}")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number.

        Raises:
            CheckpointError: if it is none, is too small, or is missing and has no default.
        """
        value = self.real(key, default)
        if value != int(value) or value < least:
            raise CheckpointError(
                f"{self.file.path}: '{self.file.architecture}.{key}' must be a whole number of at least {least}, got {value:g}"
            )
        return int(value)

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.get(key)
        return None if value is None else str(value)

    def refused(self, key: str, value: object | None = None) -> UnsupportedModelError:
        """The error for a setting that is not applied."""
        value = self._values.get(key) if value is None else value
        return UnsupportedModelError(
            f"{self.file.path} sets '{self.file.architecture}.{key}' to {value}, which is not applied when a GGUF file of this "
            "architecture is read: the numbers would be another model's; use its safetensors"
        )

    def check_rest(self, neutral: Mapping[str, tuple[object, ...]], irrelevant: frozenset[str]) -> None:
        """Refuse what nobody asked for and may change the computation.

        Args:
            neutral: values at which a setting changes nothing in this architecture; some change nothing in any.
            irrelevant: settings, or first parts of their names, that change nothing at any value.

        Raises:
            UnsupportedModelError: naming the first such setting.
        """
        for key in sorted(self._values.keys() - self._asked - _IRRELEVANT - irrelevant):
            if key.partition(".")[0] not in irrelevant and self.get(key) not in neutral.get(key, _NEUTRAL.get(key, ())):
                raise self.refused(key)
