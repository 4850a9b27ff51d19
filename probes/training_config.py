"""What a training run is made of: one frozen, hashable configuration with a stable key."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

from probes.config import ModelConfig
from probes.corpus import CorpusConfig
from probes.device import named_device
from probes.errors import KeelError

__all__ = ["SHORTEST_RAMP", "Schedule", "TrainingConfig", "TrainingConfigError", "evenly_spaced", "proportions"]

Schedule: TypeAlias = Literal["ramp", "cosine"]

SHORTEST_RAMP = 50
"""Optimizer steps; a shorter ramp has too few points to tell a noisy loss from a diverging one."""

_HEAD_WIDTH = 16
_MOST_HEADS = 16
_SEEDS = 1 << 63  # seeds are the keys of a 64-bit counter-based generator


class TrainingConfigError(KeelError, ValueError):
    """A field of a training configuration is outside its domain. The message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One training run; equal configurations on one machine give equal losses, bit for bit on a CPU.

    The optimizer is AdamW on all parameters alike, norm weights included. Branches compute in ``model.compute_dtype``, which
    is where bfloat16 autocast is chosen; stream, weights, gradients and optimizer state are float32.

    Attributes:
        model: of the model, its initial seed included.
        corpus: the text.
        steps: optimizer steps.
        batch_size: windows per optimizer step.
        accumulation: micro-batches that an optimizer step is cut into; divides batch_size and does not change the data.
        seq_len: tokens that a window predicts.
        schedule: ``ramp``, linear from 0 to the peak over all steps (the stress test); or ``cosine``, linear warm-up and
            then a cosine down to final_lr.
        peak_lr: highest learning rate.
        warmup: optimizer steps of the warm-up (cosine only).
        final_lr: learning rate of the last step (cosine only).
        beta1: of AdamW.
        beta2: of AdamW.
        adam_eps: of AdamW.
        weight_decay: of AdamW.
        clip: largest norm of the whole gradient; 0 never clips.
        activation_checkpointing: whether a block's activations are computed again during the backward pass.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        seed: of the order of the data.
        probe_steps: 1-based optimizer steps at which the gradients' profile over depth is measured, before the update.
        validation_tokens: tokens that the validation loss after the last step is a mean over; 0 leaves it out.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    steps: int = 600
    batch_size: int = 8
    accumulation: int = 1
    seq_len: int = 64
    schedule: Schedule = "ramp"
    peak_lr: float = 5e-2
    warmup: int = 0
    final_lr: float = 1e-7
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    activation_checkpointing: bool = False
    device: str = "cpu"
    seed: int = 0
    probe_steps: tuple[int, ...] = ()
    validation_tokens: int = 1 << 14

    def __post_init__(self) -> None:
        """Check every field."""
        _check_parts(self)
        object.__setattr__(self, "probe_steps", tuple(sorted(set(self.probe_steps))))
        _check_integers(self)
        _check_numbers(self)
        if self.schedule not in get_args(Schedule):
            raise TrainingConfigError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}")
        if self.schedule == "ramp" and self.steps < SHORTEST_RAMP:
            raise TrainingConfigError(f"steps of a ramp must be at least {SHORTEST_RAMP}, got {self.steps}")
        if self.schedule == "ramp" and self.warmup:
            raise TrainingConfigError(f"warmup belongs to schedule 'cosine', a ramp has none; got {self.warmup}")
        if self.schedule == "cosine" and not self.warmup < self.steps:
            raise TrainingConfigError(f"warmup must end before the last of {self.steps} steps, got {self.warmup}")
        if self.batch_size % self.accumulation:
            raise TrainingConfigError(f"batch_size {self.batch_size} is not divisible by accumulation {self.accumulation}")
        if self.probe_steps and not 1 <= self.probe_steps[0] <= self.probe_steps[-1] <= self.steps:
            raise TrainingConfigError(f"probe_steps must be in 1..{self.steps}, got {list(self.probe_steps)}")

    def learning_rate(self, step: int) -> float:
        r"""The learning rate of an optimizer step.

        .. math:: \eta_k = \eta_{peak}\,k / n \quad\text{(ramp)}

        Args:
            step: 1-based optimizer step k.

        Returns:
            Dimensionless.

        Source: Chen & Wei 2026, arXiv:2601.19895, section 5.1 (ramp).

        Example:
            >>> round(TrainingConfig(steps=5000).learning_rate(30), 12)
            0.0003
        """
        if self.schedule == "ramp":
            return self.peak_lr * step / self.steps
        if step <= self.warmup:
            return self.peak_lr * step / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.final_lr + (self.peak_lr - self.final_lr) * (1 + math.cos(math.pi * done)) / 2

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that stand for the configuration, the same in every process and on every machine."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def with_seed(self, seed: int) -> TrainingConfig:
        """The same run with another seed, of the initial weights and of the order of the data."""
        return replace(self, seed=seed, model=replace(self.model, seed=seed))

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {
            "model": self.model.to_dict(),
            "corpus": self.corpus.to_dict(),
            "probe_steps": list(self.probe_steps),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingConfig:
        """The configuration whose :meth:`to_dict` this is; fields that are left out have their default.

        Raises:
            TrainingConfigError: if a field is unknown or of the wrong type; the message names it.
        """
        _check_table("the training configuration", values)
        for name in _NESTED:
            _check_table(name, values.get(name, {}))
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise TrainingConfigError(f"unknown training configuration field(s): {', '.join(unknown)}")
        nested = {name: _NESTED[name].from_dict(values[name]) for name in _NESTED if name in values}
        return cls(**{**values, **nested})

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Dotted names of the fields in which a stored :meth:`to_dict` differs from this one's."""
        return sorted(_differing(self.to_dict(), other, ""))


def evenly_spaced(steps: int, n: int) -> tuple[int, ...]:
    """At most n optimizer steps, the first and the last among them, as evenly as integers allow.

    Example:
        >>> evenly_spaced(100, 3)
        (1, 50, 100)
    """
    if n <= 1:
        return (steps,) if n == 1 else ()
    return tuple(sorted({1 + (i * (steps - 1)) // (n - 1) for i in range(n)}))


def proportions(width: int, *, head_width: int = _HEAD_WIDTH, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A model's shape that follows its width: FFN three times as wide, up to sixteen heads, half as many key-value heads.

    Args:
        width: of the residual stream.
        head_width: that the heads have, where no more than sixteen of them make up the width.
        given: fields that are asked for; they have the last word.

    Returns:
        ``width``, ``ffn_width``, ``n_heads``, ``n_kv_heads``, and what is given.

    Raises:
        TrainingConfigError: if the width does not split into such heads; the message names the nearest that do.

    Example:
        >>> proportions(64)
        {'width': 64, 'ffn_width': 192, 'n_heads': 4, 'n_kv_heads': 2}
    """
    given = given or {}
    shape = _shape(width, head_width)
    if width >= 1 and "n_heads" not in given and not _splits(width, head_width):
        below = next((w for w in range(width - 1, 0, -1) if _splits(w, head_width)), None)
        above = next(w for w in count(width + 1) if _splits(w, head_width))
        raise TrainingConfigError(
            f"width {width} does not split into {shape['n_heads']} head(s) of an even width and half as many key-value heads; "
            f"the nearest that do: {above if below is None else f'{below}, {above}'}"
        )
    return {**shape, **given}


def _shape(width: int, head_width: int) -> dict[str, int]:
    n_heads = max(1, min(_MOST_HEADS, width // head_width))
    return {"width": width, "ffn_width": 3 * width, "n_heads": n_heads, "n_kv_heads": max(1, n_heads // 2)}


def _splits(width: int, head_width: int) -> bool:
    n_heads, n_kv_heads = (_shape(width, head_width)[name] for name in ("n_heads", "n_kv_heads"))
    return width % (2 * n_heads) == 0 and n_heads % n_kv_heads == 0


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> list[str]:
    names = []
    for name in mine.keys() | theirs.keys():
        a, b = mine.get(name), theirs.get(name)
        if name in ("model", "corpus") and isinstance(a, Mapping) and isinstance(b, Mapping):
            names += _differing(a, b, f"{prefix}{name}.")
        elif name not in mine or name not in theirs or a != b:
            names.append(prefix + name)
    return names


_LEAST: Mapping[str, int] = {
    "steps": 1,
    "batch_size": 1,
    "accumulation": 1,
    "seq_len": 1,
    "warmup": 0,
    "seed": 0,
    "validation_tokens": 0,
}


_NESTED: Mapping[str, type[ModelConfig] | type[CorpusConfig]] = {"model": ModelConfig, "corpus": CorpusConfig}


def _check_table(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise TrainingConfigError(f"{name} must be a table of fields, got {given!r}")


def _check_parts(config: TrainingConfig) -> None:
    """Fields that are neither integer nor number."""
    for name, kind in _NESTED.items():
        if not isinstance(getattr(config, name), kind):
            raise TrainingConfigError(f"{name} must be a {kind.__name__}, got {getattr(config, name)!r}")
    if not isinstance(config.probe_steps, (tuple, list)) or not all(map(_is_integer, config.probe_steps)):
        raise TrainingConfigError(f"probe_steps must be a list of integers, got {config.probe_steps!r}")
    if not isinstance(config.activation_checkpointing, bool):
        raise TrainingConfigError(f"activation_checkpointing must be true or false, got {config.activation_checkpointing!r}")
    if not isinstance(config.device, str):
        raise TrainingConfigError(f"device must be a name such as 'cpu', got {config.device!r}")
    named_device(config.device, error=TrainingConfigError)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integers(config: TrainingConfig) -> None:
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if not (_is_integer(value) and least <= value < _SEEDS):
            raise TrainingConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_numbers(config: TrainingConfig) -> None:
    def finite(name: str) -> float:
        value: float = getattr(config, name)
        if not (_is_integer(value) or isinstance(value, float)) or not abs(value) <= sys.float_info.max:
            raise TrainingConfigError(f"{name} must be a finite number, got {value!r}")
        return value

    for name in ("peak_lr", "adam_eps"):
        if finite(name) <= 0:
            raise TrainingConfigError(f"{name} must be above 0, got {getattr(config, name)}")
    for name in ("final_lr", "weight_decay", "clip"):
        if finite(name) < 0:
            raise TrainingConfigError(f"{name} must be at least 0, got {getattr(config, name)}")
    for name in ("beta1", "beta2"):
        if not 0 <= finite(name) < 1:
            raise TrainingConfigError(f"{name} must be at least 0 and below 1, got {getattr(config, name)}")
    if config.final_lr > config.peak_lr:
        raise TrainingConfigError(f"final_lr {config.final_lr} must not be above peak_lr {config.peak_lr}")
