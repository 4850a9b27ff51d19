"""Small sharded checkpoints, batches for them, and what it means that two results are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from probes.gradient_result import Estimate, GradientNorms
from probes.layout import Objective, ResidualLayout
from probes.removal_result import LayerRemoval
from probes.text import IGNORED, TokenBatch
from tests.probes._tiny import tiny_ids, tiny_model

RELATIVE = 1e-9
NOISE = 1e-14
"""A gradient that is exactly zero in theory (a key's bias) is rounding noise of this share of the largest one."""


def saved_family(family: str, folder: Path, *, shard: str = "12KB", dtype: torch.dtype = torch.float64) -> Path:
    """A tiny model of a family in several shards."""
    tiny_model(family, dtype).save_pretrained(folder, max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def predicting(ids: Tensor, layout: ResidualLayout | None = None) -> TokenBatch:
    """Next tokens, or every third token for a masked language model."""
    targets = torch.full_like(ids, IGNORED)
    if layout is not None and layout.objective is Objective.MASKED:
        targets[:, ::3] = ids[:, ::3]
    else:
        targets[:, :-1] = ids[:, 1:]
    return TokenBatch(ids, targets)


def two_batches(layout: ResidualLayout | None = None) -> list[TokenBatch]:
    """Batches of different sizes."""
    return [predicting(tiny_ids(), layout), predicting(tiny_ids(3, 10).flip(0, 1), layout)]


def assert_same_norms(got: GradientNorms, expected: GradientNorms, relative: float = RELATIVE) -> None:
    """Every reading of two runs of the gradient probe."""
    assert (
        got.to_frame()
        .drop(columns=["value", "standard_error"])
        .equals(expected.to_frame().drop(columns=["value", "standard_error"]))
    )
    for a, b in zip(got.boundaries, expected.boundaries, strict=True):
        for name in ("stream_grad", "shortcut_grad", "stream_rms", "token_cosine"):
            _assert_same(getattr(a, name), getattr(b, name), relative)
    for a, b in zip(got.sublayers, expected.sublayers, strict=True):
        _assert_same(a.branch_rms, b.branch_rms, relative)
        _assert_same(a.branch_ratio, b.branch_ratio, relative)
        assert a.norm_gains == b.norm_gains
    largest = max(p.grad_norm.value for p in expected.parameters)
    for a, b in zip(got.parameters, expected.parameters, strict=True):
        assert (a.name, a.also_named, a.n_entries) == (b.name, b.also_named, b.n_entries)
        assert math.isclose(a.weight_norm, b.weight_norm, rel_tol=relative)
        _assert_same(a.grad_norm, b.grad_norm, relative, NOISE * largest)
    assert got.idle_experts == expected.idle_experts
    assert (got.n_parameters, got.n_tokens, got.batch_shape) == (expected.n_parameters, expected.n_tokens, expected.batch_shape)
    _assert_same(got.loss, expected.loss, relative)


def _assert_same(a: Estimate, b: Estimate, relative: float, absolute: float = 0.0) -> None:
    assert a.status is b.status
    both_nan = math.isnan(a.value) and math.isnan(b.value)
    assert both_nan or math.isclose(a.value, b.value, rel_tol=relative, abs_tol=absolute), (a, b)


def losses(result: LayerRemoval) -> list[float]:
    """The full model's loss, and what each removal adds."""
    return [result.loss.value, *(cost.delta_loss.value for cost in result.costs)]


def estimates(result: LayerRemoval) -> list[Sequence[float]]:
    """The cheap numbers of each removal."""
    return [list(cost.estimates.values()) for cost in result.costs]
