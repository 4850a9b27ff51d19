"""Every command on every language-model family of ``transformers``: right numbers, or a refusal that names what is wrong."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from probes.depthwise_alignment import measure_depthwise_alignment
from probes.errors import UnsupportedModelError
from probes.families import SUPPORTED_FAMILIES, describe_model
from probes.gradient_norms import measure_gradient_norms
from probes.layer_removal import measure_layer_removal
from probes.layout import Objective, ResidualLayout
from probes.loading import language_model_class
from probes.text import IGNORED, TokenBatch
from tests._cli import run_keel
from tests.probes._all_families import KINDS, NOT_TINY, VOCAB, save_tiny, tiny_config, tiny_of_kind
from tests.probes._naive_removal import identity_in_place_of

STREAM_MIXED = "does not return the residual stream|not one norm"
HEAD_UNKNOWN = "its logits are not what its head makes of the last hidden state"
NO_SINGLE_LIST = "no single list of blocks|blocks do not run once each, in order"
REFUSED = {
    **dict.fromkeys(("cpmant", "deepseek_v4", "hy_v4", "xlnet", "longformer-masked", "reformer-masked"), STREAM_MIXED),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), STREAM_MIXED),
    **dict.fromkeys(("beam", "inkling_text", "nanochat", "recurrent_gemma", "vaultgemma", "xlstm"), HEAD_UNKNOWN),
    "neomme-masked": HEAD_UNKNOWN,
    **dict.fromkeys(("dory", "gemma3n_text", "hrm_text", "longcat_flash", "xlm"), NO_SINGLE_LIST),
    **dict.fromkeys(("albert-masked", "funnel-masked", "squeezebert-masked", "xlm-masked"), NO_SINGLE_LIST),
    **dict.fromkeys(("bert", "camembert", "data2vec-text", "ernie", "roberta", "xlm-roberta"), "is no masked language model"),
    **dict.fromkeys(("bert-generation", "reformer"), "neither a causal nor a masked language model"),
    "llama4_text": "no linear language-model head over a backbone",
    "zamba2": "a trial pass failed: KeyError",
}
"""Families that no layout is known for, with what is said; all others are measured."""
REMOVAL_REFUSED = {"zaya": "exchange more than the residual stream"}
"""Families whose gradients are measured and whose blocks cannot be removed."""
FLOAT32_ALONE = {"falcon_mamba", "mamba", "mamba2", "mra-masked", "nemotron_h", "xglm", "zaya"}
"""Families whose code computes partly in float32, whatever the weights are: measured in float32, others in float64."""


def has_a_class(kind: str) -> bool:
    """Whether there is one decoder or encoder to load, rather than two stacks or several modalities."""
    try:
        language_model_class(tiny_config(kind))
    except UnsupportedModelError:
        return False
    return True


def family_of(kind: str) -> str:
    return kind.removesuffix("-masked")


TINY = [kind for kind in KINDS if family_of(kind) not in NOT_TINY]
SINGLE = [kind for kind in TINY if has_a_class(kind)]
READ = [kind for kind in SINGLE if kind not in REFUSED]


def dtype_of(kind: str) -> torch.dtype:
    return torch.float32 if kind in FLOAT32_ALONE else torch.float64


@functools.lru_cache(maxsize=1)
def described(kind: str) -> tuple[nn.Module, ResidualLayout]:
    model = tiny_of_kind(kind, dtype_of(kind))
    return model, describe_model(model)


@pytest.fixture(scope="module", params=READ)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def batch_for(layout: ResidualLayout) -> TokenBatch:
    ids = torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    targets = torch.full_like(ids, IGNORED)
    if layout.objective is Objective.MASKED:
        targets[:, 2::5] = ids[:, 2::5]
        return TokenBatch(ids.masked_fill(targets != IGNORED, 3), targets)
    targets[:, :-1] = ids[:, 1:]
    return TokenBatch(ids, targets)


def own_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """From the model's own logits: nothing of the layout takes part."""
    logits = model(batch.inputs, use_cache=False).logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)


def tolerance(kind: str) -> float:
    return 2e-3 if dtype_of(kind) is torch.float32 else 1e-6


def test_gradient_norms_are_those_of_plain_autograd(kind: str) -> None:
    model, layout = described(kind)
    batch = batch_for(layout)
    result = measure_gradient_norms(model, [batch], layout=layout)
    loss = own_loss(model, batch)
    loss.backward()
    loss = loss.detach()
    own = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    found = {p.name: p.grad_norm.value for p in result.parameters if p.grad_norm.status.value != "none"}
    smallest = 1e-3 * tolerance(kind) * max(own.values())
    assert result.loss.value == pytest.approx(float(loss), rel=tolerance(kind))
    assert found == pytest.approx(own, rel=tolerance(kind), abs=smallest)


def test_removals_are_the_identity_in_place_of_each_block(kind: str) -> None:
    model, layout = described(kind)
    batch = batch_for(layout)
    if kind in REMOVAL_REFUSED:
        with pytest.raises(UnsupportedModelError, match=f"family '{layout.family}' cannot.*{REMOVAL_REFUSED[kind]}"):
            measure_layer_removal(model, [batch], layout=layout)
        return
    result = measure_layer_removal(model, [batch], layout=layout)
    with torch.no_grad():
        naive = [float(own_loss(model, batch))]
        for cost in result.costs:
            with identity_in_place_of(model, cost.unit.sublayers):
                naive.append(float(own_loss(model, batch)))
    losses = [result.loss.value, *(cost.loss.value for cost in result.costs)]
    assert losses == pytest.approx(naive, rel=tolerance(kind))


def test_alignment_is_a_cosine_or_a_refusal_by_name(kind: str) -> None:
    model, layout = described(kind)
    if any(sublayer.branch is None for sublayer in layout.sublayers):
        with pytest.raises(UnsupportedModelError, match=f"branches of family '{layout.family}' are not visible"):
            measure_depthwise_alignment(model, layout, batch_for(layout).inputs)
        return
    rows = measure_depthwise_alignment(model, layout, batch_for(layout).inputs).sublayers
    assert len(rows) == len(layout.sublayers)
    assert all(row.alignment is not None and abs(row.alignment) <= 1 + 1e-6 for row in rows)


@pytest.fixture(scope="module")
def saved(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / family_of(kind)
    save_tiny(kind, folder)
    (folder.parent / "text.txt").write_text("Gradientsliveordiewithdepth" * 2, encoding="utf-8")
    return folder


COMMANDS = (("grad-norm",), ("layer-removal",), ("alignment",))
STREAMED = (("grad-norm", "--stream"), ("layer-removal", "--stream"))


def test_commands_read_the_saved_model_or_refuse_it_by_name(kind, saved, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ("--text", saved.parent / "text.txt", "--tokens", 24, "--seq-len", 12, "--json")
    losses = []
    streams = json_family(saved) in SUPPORTED_FAMILIES or kind == "falcon"  # one that is refused stands for all
    for command, *more in (*COMMANDS, *(STREAMED if streams else ())):
        code, out, err = run_keel(monkeypatch, capsys, command, saved, *options, *more)
        assert (code, "Traceback" in err) in ((0, False), (2, False)), err
        if code == 2:
            assert family_of(kind) in err
            assert command != "grad-norm" or more
            assert len(err.splitlines()) <= 5
            continue
        rows = json.loads(out).get("rows", [])
        losses += [row["value"] for row in rows if row["metric"] == "loss"]
    n_readings = (4 if json_family(saved) in SUPPORTED_FAMILIES else 2) - (kind in REMOVAL_REFUSED)
    assert losses == pytest.approx([losses[0]] * n_readings, rel=1e-5)


def json_family(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_families_without_a_layout_are_refused_by_name(kind: str) -> None:
    model = tiny_of_kind(kind, torch.float32)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]) as refusal:
        describe_model(model)
    assert family_of(kind).split("_")[0] in str(refusal.value)


@pytest.mark.parametrize("kind", sorted(set(TINY) - set(SINGLE)))
def test_several_stacks_or_modalities_are_refused_by_name(kind: str) -> None:
    config = tiny_config(kind)
    two_stacks = getattr(config, "is_encoder_decoder", False)
    reason = "is an encoder-decoder" if two_stacks else "is multimodal|has no language model"
    with pytest.raises(UnsupportedModelError, match=f"family '{config.model_type}' ({reason})"):
        language_model_class(config)


@pytest.mark.parametrize("kind", sorted(FLOAT32_ALONE - {"zaya"}))
def test_families_that_work_in_float32_alone_say_so(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"may work in float32 alone: use --dtype float32"):
        describe_model(tiny_of_kind(kind, torch.float64))


def test_every_family_has_its_place() -> None:
    assert set(NOT_TINY) <= {family_of(kind) for kind in KINDS}
    assert set(REFUSED) | set(REMOVAL_REFUSED) | FLOAT32_ALONE <= set(SINGLE)
