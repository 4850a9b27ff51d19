r"""One point of a sweep: what is run, a key that stands for it, and what it is going to cost.

Cost and memory are predictions, made before anything is built; they order the trials and cap how many run side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from probes.config import ModelConfig, count_parameters, estimate_memory
from probes.errors import KeelError
from probes.training_config import SHORTEST_RAMP, TrainingConfig, proportions

__all__ = ["SweepError", "Trial", "TrialKind", "predicted_flops", "predicted_memory", "setting_name", "setting_text"]

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
    def configuration(self) -> str:
        """Twelve hexadecimal digits that trials of equal everything but their seed share."""
        config = self.config
        return (self if config.seed != config.model.seed else replace(self, config=config.with_seed(0))).key

    @property
    def settings(self) -> dict[str, Any]:
        """Every field but the seeds, by its dotted name: ``kind``, ``batch_size``, ``model.width``, ``corpus.sources``."""
        values = self.to_dict()
        config = values.pop("config")
        for part in ("model", "corpus"):
            values |= {f"{part}.{name}": value for name, value in config.pop(part).items()}
        values |= config
        return {name: value for name, value in values.items() if name not in ("seed", "model.seed")}

    @property
    def label(self) -> str:
        """For people: ``keel, 64 sub-layers of width 64, peak 0.05 in 600 steps, batch_size 4, seed 0``.

        Named is every field that is not what a sweep has without being told, so that no two trials of a sweep are alike in it.
        """
        model = self.config.model
        size = f"{model.scheme}, {model.n_sublayers} sub-layers of width {model.width}"
        plain = self._plain().settings | {"steps": self.config.steps}
        others = [
            f"{setting_name(name)} {setting_text(value)}" for name, value in self.settings.items() if value != plain[name]
        ]
        ramp = f"peak {self.config.peak_lr:g} in {self.config.steps} steps"
        return ", ".join([size, ramp, *others, f"seed {self.config.seed}"])

    def _plain(self) -> Trial:
        """What a sweep makes of scheme, shape and ramp alone."""
        config, model = self.config, self.config.model
        plain = ModelConfig(
            scheme=model.scheme,
            n_blocks=model.n_blocks,
            context_length=config.seq_len,
            **proportions(model.width),
        )
        steps = max(config.steps, SHORTEST_RAMP)  # a plain training may be shorter than any ramp
        ramp = TrainingConfig(model=plain, peak_lr=config.peak_lr, steps=steps, validation_tokens=0)
        return Trial(config=ramp)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {"kind": self.kind, "early_stop": self.early_stop, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The trial whose :meth:`to_dict` this is."""
        return cls(kind=values["kind"], early_stop=values["early_stop"], config=TrainingConfig.from_dict(values["config"]))


def setting_name(dotted: str) -> str:
    """A field's name without the part that it belongs to."""
    return dotted.rpartition(".")[2]


def setting_text(value: Any) -> str:
    """A field's value in a word: ``0.5``, ``true``, ``alpha=1.5``, ``stdlib``.

    Example:
        >>> setting_text({"alpha": 1.5}), setting_text(["a", "b"]), setting_text(False), setting_text({})
        ('alpha=1.5', 'a+b', 'false', 'none')
    """
    if isinstance(value, Mapping):
        return "+".join(f"{name}={setting_text(each)}" for name, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "+".join(map(setting_text, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


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
