"""One sub-layer, read from a :class:`keel_theory.spec.ResidualSpec`; no scheme is known by name here.

Shape suffixes: B batch, T tokens, D width, H query heads, G key-value heads, K head width, F inner width of the FFN.

Dtypes: the residual stream, the norms and the weights are float32 (float64 for float64 models). Only the branch's function
(attention, FFN) computes in the model's compute dtype, by autocast where that is narrower than the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel_theory.spec import GateKind, NormKind, ProfileKind, ResidualSpec, SublayerKind
from probes.config import ModelConfig

__all__ = [
    "Attention",
    "Block",
    "Branch",
    "FeedForward",
    "Gain",
    "Gate",
    "Linear",
    "Norm",
    "ResidualSublayer",
    "Rotary",
    "build_parts",
    "rotary_table",
    "rotate",
]

Rotary: TypeAlias = "tuple[Tensor, Tensor]"
"""Cosine and sine of position times frequency, each of shape (T, K / 2)."""


class Linear(nn.Linear):
    """A linear map that computes in its input's dtype. Its initial values come from the model's seeded draw.

    Args:
        in_width: of the input.
        out_width: of the output.
        dtype: of the weight.
        bias: whether there is one.
        init_gain: factor on the initial standard deviation.
    """

    def __init__(
        self, in_width: int, out_width: int, dtype: torch.dtype, *, bias: bool = False, init_gain: float = 1.0
    ) -> None:
        super().__init__(in_width, out_width, bias=bias, dtype=dtype)
        self.init_gain = init_gain

    def reset_parameters(self) -> None:
        """Leave the memory as it is: no draw from the global generator."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis with a learned weight and no bias, computed in float32 or wider."""

    def __init__(self, kind: NormKind, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = self.weight.to(wide.dtype)
        if self.kind is NormKind.LAYER:
            return functional.layer_norm(wide, weight.shape, weight, None, self.eps).to(x.dtype)
        return functional.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.kind.value}, {self.weight.numel()}, eps={self.eps}"


class Gate(Linear):
    """T = sigmoid(W x + bias), elementwise, the Highway layer's transform gate."""

    def __init__(self, width: int, bias: float, dtype: torch.dtype) -> None:
        super().__init__(width, width, dtype, bias=True)
        nn.init.constant_(self.bias, bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return torch.sigmoid(super().forward(x))


def rotary_table(n_tokens: int, head_width: int, theta: float, *, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Cosine and sine of the rotary angles, computed in float64 and rounded once.

    Args:
        n_tokens: T, of any length.
        head_width: K, even.
        theta: base of the frequencies.
        dtype: of the result.
        device: of the result.

    Returns:
        Cosine and sine, each of shape (T, K / 2).
    """
    where = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64, device=where) / head_width)
    angles = torch.outer(torch.arange(n_tokens, dtype=torch.float64, device=where), frequencies)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (i, i + K/2) of the last axis by the angle of their position; x has shape (..., T, K)."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads, without biases."""

    def __init__(self, config: ModelConfig, spec: ResidualSpec) -> None:
        super().__init__()
        d, dtype = config.width, config.stream_dtype
        kv_width = config.n_kv_heads * config.head_width
        self.head_width = config.head_width
        self.rope_theta = config.rope_theta
        self.grouped = config.n_kv_heads != config.n_heads
        self.query = Linear(d, d, dtype)
        self.key = Linear(d, kv_width, dtype)
        self.value = Linear(d, kv_width, dtype, init_gain=spec.init_gain)
        self.output = Linear(d, d, dtype, init_gain=spec.init_gain)
        self.qkv_norms = nn.ModuleList(_norm(config, self.head_width) for _ in range(3)) if spec.qkv_norm else None

    def forward(self, x_BTD: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: D102
        if rotary is None:
            rotary = self._rotary(x_BTD)
        q_BHTK, k_BGTK, v_BGTK = (self._heads(p(x_BTD)) for p in (self.query, self.key, self.value))
        if self.qkv_norms is not None:
            q_BHTK, k_BGTK, v_BGTK = (n(t) for n, t in zip(self.qkv_norms, (q_BHTK, k_BGTK, v_BGTK), strict=True))
        out_BHTK = functional.scaled_dot_product_attention(
            rotate(q_BHTK, rotary), rotate(k_BGTK, rotary), v_BGTK, is_causal=True, enable_gqa=self.grouped
        )
        out_BTD: Tensor = self.output(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x_BTE: Tensor) -> Tensor:
        n_sequences, n_tokens, _ = x_BTE.shape
        return x_BTE.view(n_sequences, n_tokens, -1, self.head_width).transpose(1, 2)

    def _rotary(self, x_BTD: Tensor) -> Rotary:
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        return rotary_table(x_BTD.shape[1], self.head_width, self.rope_theta, dtype=dtype, device=x_BTD.device)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class FeedForward(nn.Module):
    """SwiGLU, or a plain FFN with GELU or ReLU, without biases."""

    def __init__(self, config: ModelConfig, spec: ResidualSpec) -> None:
        super().__init__()
        d, f, dtype = config.width, config.ffn_width, config.stream_dtype
        self.activation = _ACTIVATIONS[config.ffn]
        self.gate = Linear(d, f, dtype, init_gain=spec.init_gain) if config.ffn == "swiglu" else None
        self.up = Linear(d, f, dtype, init_gain=spec.init_gain)
        self.down = Linear(f, d, dtype, init_gain=spec.init_gain)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None = None) -> Tensor:
        """The FFN of each token; rotary is there so that every branch is called alike."""
        up_BTF = self.up(x_BTD)
        inner_BTF = self.activation(up_BTF) if self.gate is None else self.activation(self.gate(x_BTD)) * up_BTF
        out_BTD: Tensor = self.down(inner_BTF)
        return out_BTD


class Gain(nn.Module):
    """A learned elementwise factor, started at one."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.weight


def build_parts(config: ModelConfig, specs: Sequence[ResidualSpec], kind: SublayerKind) -> dict[str, nn.Module]:
    """The modules with weights that at least one of the sub-layers needs; several sub-layers may then share them."""
    d, first = config.width, specs[0]
    parts: dict[str, nn.Module] = {
        "function": Attention(config, first) if kind is SublayerKind.ATTENTION else FeedForward(config, first)
    }
    for name in ("norm_in", "norm_branch", "norm_out"):
        if any(getattr(spec, name) is not NormKind.NONE for spec in specs):
            parts[name] = _norm(config, d)
    if any(spec.input_gain for spec in specs):
        parts["input_gain"] = Gain(d, config.stream_dtype)
    if any(spec.gate is GateKind.HIGHWAY for spec in specs):
        parts["gate"] = Gate(d, first.gate_bias, config.stream_dtype)
    return parts


def _norm(config: ModelConfig, width: int) -> Norm:
    return Norm(NormKind(config.norm), width, config.norm_eps, config.stream_dtype)


class Branch(nn.Module):
    r"""What is added to the shortcut: ``b T(x) * N_branch(F(s g * N_in(x)))``, with T only where there is a gate.

    The output has the stream's dtype and is exactly the tensor that :meth:`ResidualSublayer.combine` adds.
    """

    def __init__(self, config: ModelConfig, spec: ResidualSpec, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        narrow = config.torch_compute_dtype is not config.stream_dtype
        self.autocast_dtype = config.torch_compute_dtype if narrow else None
        self.input_scale = spec.input_scale
        self.branch_scale = spec.branch_scale
        self.norm_in = parts["norm_in"] if spec.norm_in is not NormKind.NONE else None
        self.input_gain = parts["input_gain"] if spec.input_gain else None
        self.function = parts["function"]
        self.norm_branch = parts["norm_branch"] if spec.norm_branch is not NormKind.NONE else None

    def forward(self, stream_BTD: Tensor, rotary: Rotary | None = None, gate_BTD: Tensor | None = None) -> Tensor:  # noqa: D102
        x = stream_BTD if self.norm_in is None else self.norm_in(stream_BTD)
        if self.input_gain is not None:
            x = self.input_gain(x)
        if self.input_scale != 1.0:
            x = x * self.input_scale
        with self._precision(x.device):
            branch: Tensor = self.function(x, rotary).to(stream_BTD.dtype)
        if self.norm_branch is not None:
            branch = self.norm_branch(branch)
        if self.branch_scale != 1.0:
            branch = branch * self.branch_scale
        return branch if gate_BTD is None else branch * gate_BTD

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Mixed precision of the function alone; a caller's own is left as it is where the model asks for none."""
        if self.autocast_dtype is None or device.type == "meta":  # which has shapes alone
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


class ResidualSublayer(nn.Module):
    r"""One residual update ``x' = N_out(a x + branch)``, or ``N_out(a (1 - T(x)) * x + branch)`` with a Highway gate.

    The shortcut scale a is a Python float, multiplied in the stream's dtype, or a learned parameter: a vector (D,) where it is
    profiled (Admin), a scalar where the configuration asks for a learnable alpha.

    Args:
        config: of the model.
        spec: of this sub-layer.
        kind: what the branch computes.
        parts: modules shared with other sub-layers; built anew if not given.
    """

    def __init__(
        self, config: ModelConfig, spec: ResidualSpec, kind: SublayerKind, parts: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        parts = build_parts(config, (spec,), kind) if parts is None else parts
        self.spec = spec
        self.kind = kind
        self.branch = Branch(config, spec, parts)
        self.gate = parts["gate"] if spec.gate is GateKind.HIGHWAY else None
        self.norm_out = parts["norm_out"] if spec.norm_out is not NormKind.NONE else None
        self.shortcut_scale = _shortcut_scale(config, spec)

    def forward(self, stream_BTD: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: D102
        gate_BTD = None if self.gate is None else self.gate(stream_BTD)
        return self.combine(stream_BTD, self.branch(stream_BTD, rotary, gate_BTD), gate_BTD)

    def combine(self, stream_BTD: Tensor, branch_BTD: Tensor, gate_BTD: Tensor | None = None) -> Tensor:
        """The stream after the sub-layer, from the stream before it and the output of :class:`Branch`."""
        carried = stream_BTD if gate_BTD is None else (1.0 - gate_BTD) * stream_BTD
        if isinstance(self.shortcut_scale, Tensor):
            summed = self.shortcut_scale * carried + branch_BTD
        else:
            summed = torch.add(branch_BTD, carried, alpha=self.shortcut_scale)
        out: Tensor = summed if self.norm_out is None else self.norm_out(summed)
        return out

    def shortcut(self, stream_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        """The values of :meth:`forward`, differentiable in the stream along the shortcut only.

        Args:
            stream_BTD: the stream before the sub-layer.
            branch_BTD: the output of :class:`Branch` for it; held constant, as is the gate.

        Returns:
            The stream after the sub-layer, shape (B, T, D).
        """
        gate_BTD = None if self.gate is None else self.gate(stream_BTD.detach()).detach()
        return self.combine(stream_BTD, branch_BTD.detach(), gate_BTD)

    @property
    def is_plain_sum(self) -> bool:
        """Whether the update is ``x + branch``, so that its shortcut is the identity."""
        scale_is_one = not isinstance(self.shortcut_scale, Tensor) and self.shortcut_scale == 1.0
        return scale_is_one and self.norm_out is None and self.gate is None

    def extra_repr(self) -> str:  # noqa: D102
        learned = isinstance(self.shortcut_scale, Tensor)
        return f"shortcut_scale={'learned' if learned else self.shortcut_scale}"


def _shortcut_scale(config: ModelConfig, spec: ResidualSpec) -> float | nn.Parameter:
    if spec.profile is ProfileKind.ADMIN:
        return nn.Parameter(torch.full((config.width,), spec.shortcut_scale, dtype=config.stream_dtype))
    if config.learnable_alpha:
        return nn.Parameter(torch.tensor(spec.shortcut_scale, dtype=config.stream_dtype))
    return spec.shortcut_scale


class Block(nn.Module):
    """A Transformer block: attention, then FFN."""

    def __init__(self, attention: ResidualSublayer, ffn: ResidualSublayer) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = ffn

    def forward(self, stream_BTD: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: D102
        out: Tensor = self.ffn(self.attention(stream_BTD, rotary), rotary)
        return out
