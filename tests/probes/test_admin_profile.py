from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from probes.admin_profile import profile_admin
from probes.model import Transformer
from tests.probes._models import random_ids, small_config


def branch_variances(model: Transformer, batches: list[Tensor]) -> list[float]:
    """Population variance of every branch output over all batches, seen by hooks during an ordinary forward pass."""
    seen: list[list[Tensor]] = [[] for _ in model.sublayers()]
    hooks = [
        sublayer.branch.register_forward_hook(lambda m, args, out, i=i: seen[i].append(out.detach().flatten()))
        for i, sublayer in enumerate(model.sublayers())
    ]
    for batch in batches:
        model(batch)
    for hook in hooks:
        hook.remove()
    return [torch.cat(outputs).var(correction=0).item() for outputs in seen]


def test_squared_scales_are_the_input_variance_plus_the_branch_variances_before() -> None:
    """With LayerNorm the state has variance one, so the recursion is the sum in Admin's rule."""
    model, batches = Transformer(small_config("admin", norm="layer", norm_eps=1e-12)), [random_ids(), random_ids(3, 5)]
    omegas = profile_admin(model, batches)
    embedded = torch.cat([model.embedding(ids).flatten() for ids in batches]).var(correction=0).item()
    variances = branch_variances(model, batches)
    assert omegas[0] == 1.0
    assert omegas[1] ** 2 == pytest.approx(embedded + variances[0], rel=1e-10)
    for i in range(1, 6):
        assert omegas[i] ** 2 == pytest.approx(embedded + sum(variances[:i]), rel=1e-9)


def test_scales_are_set_as_returned_and_still_learned() -> None:
    model = Transformer(small_config("admin"))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    omegas = profile_admin(model, [random_ids()])
    for sublayer, omega in zip(model.sublayers(), omegas, strict=True):
        assert isinstance(sublayer.shortcut_scale, torch.nn.Parameter)
        assert torch.equal(sublayer.shortcut_scale, torch.full((16,), omega, dtype=torch.float64))
        assert sublayer.shortcut_scale.requires_grad
    assert omegas[1] != pytest.approx(math.sqrt(2.0), rel=0.01)  # the spec's placeholder is gone
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if "shortcut_scale" not in n)


def test_profiling_twice_gives_the_same() -> None:
    model = Transformer(small_config("admin"))
    assert profile_admin(model, [random_ids()]) == profile_admin(model, [random_ids()])


def test_spec_gives_the_starting_value_before_profiling() -> None:
    scales = [s.shortcut_scale for s in Transformer(small_config("admin")).sublayers()]
    expected = [spec.shortcut_scale for spec in small_config("admin").specs()]
    assert [torch.as_tensor(scale).unique().item() for scale in scales] == expected


def test_other_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme 'post_ln' has no profiled shortcut scale"):
        profile_admin(Transformer(small_config("post_ln")), [random_ids()])


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        profile_admin(Transformer(small_config("admin")), [])


def test_vanished_variance_is_refused() -> None:
    model = Transformer(small_config("admin"))
    torch.nn.init.zeros_(model.embedding.weight)
    with pytest.raises(ValueError, match=r"the variance after sub-layer 0 is 0\.0"):
        profile_admin(model, [random_ids()])
