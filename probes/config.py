"""What a model of the paper's kind is made of: a frozen configuration, presets, and its size before it is built."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch

from keel_theory.schemes import get_scheme
from keel_theory.spec import (
    GateKind,
    NormKind,
    ParameterValue,
    ProfileKind,
    ResidualSpec,
    Scheme,
    SublayerKind,
    alternating_kinds,
)
from probes.errors import KeelError

__all__ = [
    "PRESETS",
    "ComputeDtype",
    "ConfigError",
    "FfnKind",
    "MemoryEstimate",
    "ModelConfig",
    "ModelNorm",
    "count_parameters",
    "describe",
    "estimate_memory",
    "narrow",
    "small",
    "tiny",
    "wide",
]

FfnKind: TypeAlias = Literal["swiglu", "gelu", "relu"]
ModelNorm: TypeAlias = Literal["rms", "layer"]
ComputeDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
_SchemeParameters: TypeAlias = "Mapping[str, ParameterValue] | tuple[tuple[str, ParameterValue], ...]"

_POSITIVE_INTEGERS = ("n_blocks", "width", "ffn_width", "n_heads", "n_kv_heads", "vocab_size", "context_length")
_POSITIVE_NUMBERS = ("norm_eps", "rope_theta", "init_std")
_FLAGS = ("tied_embeddings", "final_norm", "learnable_alpha", "shared_blocks")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "ffn": get_args(FfnKind),
    "norm": get_args(ModelNorm),
    "compute_dtype": get_args(ComputeDtype),
}
_MOST: Mapping[str, int] = {"n_blocks": 1_000_000, "seed": (1 << 63) - 1}
_MOST_OF_OTHERS = (1 << 31) - 1
_BYTES_OF_VOCABULARY = 256


class ConfigError(KeelError, ValueError):
    """A field of a model configuration is outside its domain. The message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer in one residual scheme. The defaults run on a CPU in seconds.

    Attributes:
        scheme: name of the residual scheme.
        scheme_parameters: its parameters; a mapping is accepted and stored as sorted pairs. Empty: the published values.
        n_blocks: number of Transformer blocks; each has an attention and an FFN sub-layer.
        width: of the residual stream.
        ffn_width: inner width of the FFN.
        n_heads: query heads; the head width is width / n_heads and must be even (rotary pairs).
        n_kv_heads: key and value heads; divides n_heads.
        vocab_size: number of tokens; 256 is one token per byte.
        ffn: gated SwiGLU, or a plain FFN with GELU or ReLU.
        norm: what every normalisation is: RMSNorm (the paper's) or LayerNorm; a learned weight, no bias.
        norm_eps: added to the mean square inside every normalisation.
        rope_theta: base of the rotary frequencies.
        init_std: standard deviation of every weight matrix at the start, before the scheme's init_gain.
        tied_embeddings: whether the head uses the embedding's matrix.
        final_norm: whether the last hidden state is normalised once more before the head.
        learnable_alpha: whether each sub-layer's shortcut scale is a learned scalar, started at the rule's value.
        shared_blocks: whether all blocks share the weights of branches, norms, gains and gates (Universal Transformer).
            Scales and the first-layer rule still follow the unrolled sub-layer. A norm that only some blocks use is one
            shared weight; the others skip it. A rule whose init_gain, qkv_norm or gate_bias changes with depth is refused.
        context_length: longest sequence the model is meant for, tokens; longer ones still run.
        seed: of the initial weights.
        compute_dtype: what the branches compute in: bfloat16 and float16 by ``torch.autocast``. Residual stream, norms,
            weights and logits are float32, or float64 where this is float64.
    """

    model_type: ClassVar[str] = "keel_dynamics"

    scheme: str = "keel"
    scheme_parameters: _SchemeParameters = ()
    n_blocks: int = 4
    width: int = 64
    ffn_width: int = 192
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = _BYTES_OF_VOCABULARY
    ffn: FfnKind = "swiglu"
    norm: ModelNorm = "rms"
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    init_std: float = 0.02
    tied_embeddings: bool = False
    final_norm: bool = True
    learnable_alpha: bool = False
    shared_blocks: bool = False
    context_length: int = 256
    seed: int = 0
    compute_dtype: ComputeDtype = "float32"

    def __post_init__(self) -> None:
        """Check every field, and that the scheme has a value at this depth."""
        object.__setattr__(self, "scheme_parameters", _pairs(self.scheme_parameters))
        _check_types(self)
        if self.width % self.n_heads:
            raise ConfigError(f"width {self.width} is not divisible by n_heads {self.n_heads}")
        if self.head_width % 2:
            raise ConfigError(f"the head width {self.head_width} (width / n_heads) must be even for rotary embeddings")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        if self.shared_blocks:
            _check_shareable(self)
        self.specs()

    @property
    def n_sublayers(self) -> int:
        """Attention and FFN counted separately: twice the blocks."""
        return 2 * self.n_blocks

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.n_heads

    @property
    def residual_scheme(self) -> Scheme:
        """The scheme with this configuration's parameters and normalisation."""
        return get_scheme(self.scheme).with_parameters(**dict(self.scheme_parameters)).with_norm(NormKind(self.norm))

    @property
    def torch_compute_dtype(self) -> torch.dtype:
        """What the branches compute in."""
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream and the weights: float32, or float64 where the branches compute in float64."""
        return torch.promote_types(self.torch_compute_dtype, torch.float32)

    def specs(self) -> tuple[ResidualSpec, ...]:
        """One spec per unrolled sub-layer, first to last."""
        return self.residual_scheme.specs(self.n_sublayers)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"scheme_parameters": dict(self.scheme_parameters)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration whose :meth:`to_dict` this is.

        Raises:
            ConfigError: if a field is unknown, missing or out of its domain; the message names it.
        """
        known = {f.name for f in fields(cls)}
        for problem, names in (("unknown", set(values) - known), ("missing", known - set(values))):
            if names:
                raise ConfigError(f"{problem} model configuration field(s): {', '.join(sorted(names))}")
        return cls(**values)


def _pairs(parameters: _SchemeParameters) -> tuple[tuple[str, ParameterValue], ...]:
    """Parameters as sorted pairs, whichever way they were given."""
    try:
        pairs = tuple(sorted(dict(parameters).items()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheme_parameters must be a table of names and values, got {parameters!r}") from error
    if not pairs and parameters not in ({}, ()):
        raise ConfigError(f"scheme_parameters must be a table of names and values, got {parameters!r}")
    return pairs


def _check_types(config: ModelConfig) -> None:
    for name in (*_POSITIVE_INTEGERS, "seed"):
        value = getattr(config, name)
        lowest = 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"{name} must be an integer of at least {lowest}, got {value!r}")
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if value > most:
            raise ConfigError(f"{name} must be at most {most}, got a larger one")
    for name in _POSITIVE_NUMBERS:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise ConfigError(f"{name} must be a positive finite number, got {value!r}")
    for name in _FLAGS:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name} must be true or false, got {getattr(config, name)!r}")
    if not isinstance(config.scheme, str):
        raise ConfigError(f"scheme must be a name, got {config.scheme!r}")
    for name, value in dict(config.scheme_parameters).items():
        if not isinstance(name, str):
            raise ConfigError(f"scheme_parameters: a name must be a text, got {name!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ConfigError(f"scheme_parameters: '{name}' must be a number or a text, got {value!r}")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}")


def _check_shareable(config: ModelConfig) -> None:
    for name in ("init_gain", "qkv_norm", "gate_bias"):
        for kind in range(2):
            values = {getattr(spec, name) for spec in config.specs()[kind::2]}
            if len(values) > 1:
                raise ConfigError(
                    f"shared_blocks: {name} of scheme '{config.scheme}' changes with depth, so blocks cannot share weights"
                )


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters of the model, each shared or tied weight once, without building it.

    Example:
        >>> count_parameters(narrow(512))
        3222798336
    """
    matrices = config.vocab_size * config.width * (1 if config.tied_embeddings else 2)
    norm = config.width if config.final_norm else 0
    scales = sum(_scale_size(config, spec) for spec in config.specs())
    sublayers = list(zip(config.specs(), alternating_kinds(config.n_sublayers), strict=True))
    if config.shared_blocks:
        shared = (_shared_size(config, [s for s, k in sublayers if k is kind], kind) for kind in SublayerKind)
        return matrices + norm + scales + sum(shared)
    return matrices + norm + scales + sum(sum(_weights(config, spec, kind).values()) for spec, kind in sublayers)


def _shared_size(config: ModelConfig, specs: list[ResidualSpec], kind: SublayerKind) -> int:
    """Each named weight once, if any of the sub-layers has it."""
    return sum(dict(chain.from_iterable(_weights(config, spec, kind).items() for spec in specs)).values())


def _weights(config: ModelConfig, spec: ResidualSpec, kind: SublayerKind) -> dict[str, int]:
    """Sizes of one sub-layer's weights by name, without its shortcut scale."""
    d = config.width
    norms = {name: d for name in ("norm_in", "norm_branch", "norm_out") if getattr(spec, name) is not NormKind.NONE}
    gain = {"input_gain": d} if spec.input_gain else {}
    gate = {"gate": d * d + d} if spec.gate is GateKind.HIGHWAY else {}
    if kind is SublayerKind.FFN:
        return {"ffn": (3 if config.ffn == "swiglu" else 2) * d * config.ffn_width} | norms | gain | gate
    kv_width = config.n_kv_heads * config.head_width
    qkv_norm = {"qkv_norm": 3 * config.head_width} if spec.qkv_norm else {}
    return {"attention": 2 * d * d + 2 * d * kv_width} | qkv_norm | norms | gain | gate


def _scale_size(config: ModelConfig, spec: ResidualSpec) -> int:
    if spec.profile is ProfileKind.ADMIN:
        return config.width
    return 1 if config.learnable_alpha else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory that grows with the parameters alone; activations come on top.

    Attributes:
        weights: bytes.
        gradients: bytes.
        adamw_state: bytes of the two moments.
    """

    weights: int
    gradients: int
    adamw_state: int

    @property
    def training(self) -> int:
        """Weights, gradients and optimizer state together, bytes."""
        return self.weights + self.gradients + self.adamw_state


def estimate_memory(config: ModelConfig) -> MemoryEstimate:
    """Memory of weights, gradients and AdamW's state, bytes.

    Example:
        >>> estimate_memory(narrow(512)).training / 1e9
        51.564773376
    """
    weights = count_parameters(config) * config.stream_dtype.itemsize
    return MemoryEstimate(weights=weights, gradients=weights, adamw_state=2 * weights)


def describe(config: ModelConfig) -> str:
    """Depth, parameters and memory in one line.

    Example:
        >>> describe(narrow(512))
        '256 blocks / 512 sub-layers, 3.22 B parameters, 12.9 GB in float32'
    """
    blocks = f"{config.n_blocks} block{'s' if config.n_blocks > 1 else ''} / {config.n_sublayers} sub-layers"
    size = _in_units(count_parameters(config), {1e9: "B", 1e6: "M", 1e3: "k"})
    memory = _in_units(estimate_memory(config).weights, {1e9: "GB", 1e6: "MB", 1e3: "kB"})
    return f"{blocks}, {size} parameters, {memory} in {str(config.stream_dtype).removeprefix('torch.')}"


def _in_units(value: float, units: Mapping[float, str]) -> str:
    """Three significant digits with the largest fitting unit."""
    for size, unit in units.items():
        if value >= size:
            number = value / size
            return f"{number:.{max(0, 2 - int(math.log10(number)))}f} {unit}"
    return f"{value:.0f}"


def tiny(scheme: str = "keel") -> ModelConfig:
    """4 blocks of width 64 over bytes."""
    return ModelConfig(scheme=scheme)


def small(scheme: str = "keel") -> ModelConfig:
    """12 blocks of width 256 over bytes: a real training run on a CPU in minutes."""
    return ModelConfig(scheme=scheme, n_blocks=12, width=256, ffn_width=768, n_heads=8, n_kv_heads=4, context_length=512)


def narrow(n_sublayers: int, scheme: str = "keel") -> ModelConfig:
    """The paper's narrow models (Table 8): width 1024, FFN 3072, 16 query and 8 key-value heads.

    The paper does not print its vocabulary, and its "3B" at 512 sub-layers is the size of the blocks alone (3.221 B). With
    one token per byte, 256 tokens, the whole model stays at that size: 3.223 B.
    """
    return _table_8(n_sublayers, scheme, width=1024, ffn_width=3072)


def wide(n_sublayers: int, scheme: str = "keel") -> ModelConfig:
    """The paper's wide models (Table 8): width 2048, FFN 6144, 16 query and 8 key-value heads; one token per byte."""
    return _table_8(n_sublayers, scheme, width=2048, ffn_width=6144)


def _table_8(n_sublayers: int, scheme: str, *, width: int, ffn_width: int) -> ModelConfig:
    if n_sublayers < 2 or n_sublayers % 2:
        raise ConfigError(f"a block has 2 sub-layers, so their number is even and at least 2, got {n_sublayers}")
    return ModelConfig(
        scheme=scheme,
        n_blocks=n_sublayers // 2,
        width=width,
        ffn_width=ffn_width,
        n_heads=16,
        n_kv_heads=8,
        context_length=4096,
    )


PRESETS: Mapping[str, Callable[[str], ModelConfig]] = MappingProxyType(
    {
        "tiny": tiny,
        "small": small,
        "narrow-64": lambda scheme: narrow(64, scheme),
        "narrow-128": lambda scheme: narrow(128, scheme),
        "narrow-256": lambda scheme: narrow(256, scheme),
        "narrow-512": lambda scheme: narrow(512, scheme),
        "narrow-1024": lambda scheme: narrow(1024, scheme),
        "wide-128": lambda scheme: wide(128, scheme),
    }
)
"""Named configurations, each a function of the scheme's name. The number is the number of sub-layers."""
