r"""One point of a sweep: what is run, a key that stands for it, and what it is going to cost.

Cost and memory are predictions, made before anything is built; they order the trials and cap how many run side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from probes.config import count_parameters, estimate_memory
from probes.errors import KeelError
from probes.training_config import TrainingConfig

__all__ = ["SweepError", "Trial", "TrialKind", "predicted_flops", "predicted_memory"]

TrialKind: TypeAlias = Literal["stress", "train"]

_PROCESS_BYTES = 500_000_000  # interpreter, torch and a text of 13 MB, measured


class SweepError(KeelError, ValueError):
    """A sweep that cannot be read or run. The message names the key, the file or the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep.

    Attributes:
        kind: ``stress``, judged as a stress test; or ``train``, only trained.
        config: of the run.
        early_stop: whether a stress test ends once its divergence is certain. The verdict is the same without; the Max LR by
            each criterion is known in full only without.
    """

    kind: TrialKind = "stress"
    config: TrainingConfig
    early_stop: bool = True

    def __post_init__(self) -> None:
        """Check every field; plain training has nothing to stop early for, so that it has one key."""
        if self.kind not in get_args(TrialKind):
            raise SweepError(f"kind must be one of {', '.join(get_args(TrialKind))}, got {self.kind!r}")
        if not isinstance(self.early_stop, bool):
            raise SweepError(f"early_stop must be true or false, got {self.early_stop!r}")
        if self.kind == "stress" and self.config.schedule != "ramp":
            raise SweepError(
                f"a stress test needs schedule 'ramp', got {self.config.schedule!r}; plain training is kind 'train'"
            )
        if self.kind == "train":
            object.__setattr__(self, "early_stop", False)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits, the same in every process and on every machine; the name of the trial's folder."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """For people: ``keel, 64 sub-layers of width 64, peak 0.05 in 600 steps, seed 0``."""
        model = self.config.model
        size = f"{model.scheme}, {model.n_sublayers} sub-layers of width {model.width}"
        return f"{size}, peak {self.config.peak_lr:g} in {self.config.steps} steps, seed {self.config.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {"kind": self.kind, "early_stop": self.early_stop, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The trial whose :meth:`to_dict` this is."""
        return cls(kind=values["kind"], early_stop=values["early_stop"], config=TrainingConfig.from_dict(values["config"]))


def predicted_flops(config: TrainingConfig) -> float:
    r"""Floating-point operations of the whole run, forward and backward.

    .. math:: 6\,P\,N + 6\,n_\text{blocks}\,D\,T\,N

    with P the parameters that multiply (all but the embedding), N the tokens of all steps, T the window and D the width; the
    second term is causal attention. A third more where activations are computed again.

    Status: leading order; norms, softmax and the optimizer are left out.

    Args:
        config: of the run.

    Returns:
        Operations, dimensionless.
    """
    model = config.model
    tokens = float(config.steps) * config.batch_size * config.seq_len
    multiplying = count_parameters(model) - (0 if model.tied_embeddings else model.vocab_size * model.width)
    forward_and_backward = (6 * multiplying + 6 * model.n_blocks * model.width * config.seq_len) * tokens
    return forward_and_backward * (4 / 3 if config.activation_checkpointing else 1)


def predicted_memory(config: TrainingConfig) -> int:
    """Peak memory of the process that trains: weights, gradients, AdamW, activations of a micro-batch, and torch itself.

    Status: an estimate from the tensors that the backward pass keeps.

    Args:
        config: of the run.

    Returns:
        Bytes.
    """
    model = config.model
    tokens = config.batch_size // config.accumulation * config.seq_len
    width = model.torch_compute_dtype.itemsize
    stream = model.stream_dtype.itemsize
    attention = 4 * model.width * width + 3 * model.width * stream
    ffn = 4 * model.ffn_width * width + 3 * model.width * stream
    per_block = tokens * (attention + ffn)
    kept = (
        per_block + model.n_blocks * tokens * model.width * stream
        if config.activation_checkpointing
        else (model.n_blocks * per_block)
    )
    logits = 3 * tokens * model.vocab_size * stream
    return _PROCESS_BYTES + estimate_memory(model).training + kept + logits
