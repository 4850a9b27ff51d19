r"""One point of a sweep: what is run, a key that stands for it, and what it is going to cost.

Cost and memory are predictions, made before anything is built; they order the trials and cap how many run side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from probes.config import count_parameters, estimate_memory
from probes.errors import KeelError
from probes.training_config import TrainingConfig

__all__ = [
    "LABELLED",
    "SweepError",
    "Trial",
    "TrialKind",
    "distinguishing",
    "labels",
    "predicted_flops",
    "predicted_memory",
    "setting_name",
    "setting_text",
]

TrialKind: TypeAlias = Literal["stress", "train"]

LABELLED = ("model.scheme", "model.n_blocks", "model.width", "peak_lr", "steps")
"""Fields that every label names, beside the seed."""
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
        """For people: ``keel, 8 sub-layers of width 64, peak 0.05 in 600 steps, seed 0``; see :func:`labels` for several."""
        return self.label_with(())

    def label_with(self, names: Iterable[str]) -> str:
        """The label with these settings besides.

        Args:
            names: dotted, of :attr:`settings`.

        Example:
            >>> Trial(config=TrainingConfig()).label_with(["batch_size"])
            'keel, 8 sub-layers of width 64, peak 0.05 in 600 steps, batch_size 8, seed 0'
        """
        config, model, settings = self.config, self.config.model, self.settings
        size = f"{model.scheme}, {model.n_sublayers} sub-layers of width {model.width}"
        ramp = f"peak {config.peak_lr:g} in {config.steps} steps"
        others = [f"{setting_name(name)} {setting_text(settings[name])}" for name in names]
        return ", ".join([size, ramp, *others, f"seed {config.seed}"])

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {"kind": self.kind, "early_stop": self.early_stop, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The trial whose :meth:`to_dict` this is."""
        return cls(kind=values["kind"], early_stop=values["early_stop"], config=TrainingConfig.from_dict(values["config"]))


def labels(trials: Sequence[Trial]) -> dict[str, str]:
    """Labels of trials that are shown together: besides scheme, size, ramp and seed, only what tells these trials apart.

    Args:
        trials: any.

    Returns:
        By key; no two alike.

    Example:
        >>> a, b = (Trial(config=TrainingConfig(batch_size=size)) for size in (2, 4))
        >>> sorted(labels([a, b]).values())[0]
        'keel, 8 sub-layers of width 64, peak 0.05 in 600 steps, batch_size 2, seed 0'
    """
    further = distinguishing(trials)
    return {trial.key: trial.label_with(further) for trial in trials}


def distinguishing(trials: Sequence[Trial], shown: Collection[str] = LABELLED) -> tuple[str, ...]:
    """Fields in which trials differ that are alike in all that is shown of them anyway.

    Args:
        trials: any.
        shown: dotted names of the fields that are shown.

    Returns:
        Dotted names, in the order of the configuration.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        settings = trial.settings
        alike.setdefault(json.dumps([settings[name] for name in shown]), []).append(settings)
    differing = {
        name for group in alike.values() for settings in group for name in settings if settings[name] != group[0][name]
    }
    return tuple(name for trial in trials[:1] for name in trial.settings if name in differing)


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
