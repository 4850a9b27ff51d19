"""Streamed gradient norms are those of the whole model in memory, for every family and every scheme of the toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keel_theory.schemes import SCHEMES
from probes.checkpoint import load_checkpoint
from probes.errors import OutputError
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer
from probes.saving import save_model
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.text import IGNORED, TokenBatch
from tests.probes._models import perturbed, random_ids, small_config
from tests.probes._tiny import FAMILIES, N_BLOCKS, tiny_ids
from tests.probes.streaming._streamed import assert_same_norms, predicting, saved_family, two_batches


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_numbers_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    folder = saved_family(family, tmp_path)
    checkpoint = load_checkpoint(folder)
    batches = two_batches(checkpoint.layout)
    expected = measure_gradient_norms(checkpoint.model, batches, layout=checkpoint.layout)
    with open_streamed(folder) as streamed:
        got = measure_streamed_gradient_norms(streamed, batches)
    assert_same_norms(got, expected)
    assert got.warnings == expected.warnings


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        *((scheme, {}) for scheme in SCHEMES),
        *((scheme, {name: True}) for scheme in ("keel", "highway") for name in ("tied_embeddings", "shared_blocks")),
        ("keel", {"learnable_alpha": True}),
    ],
)
def test_every_scheme_gives_the_numbers_of_the_model_in_memory(scheme: str, changes: dict[str, bool], tmp_path: Path) -> None:
    save_model(perturbed(Transformer(small_config(scheme, **changes))), tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    batches = [predicting(random_ids()), predicting(random_ids(3, 5))]
    expected = measure_gradient_norms(checkpoint.model, batches, layout=checkpoint.layout)
    with open_streamed(tmp_path) as streamed:
        got = measure_streamed_gradient_norms(streamed, batches)
    assert_same_norms(got, expected)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "opt-projected"])
def test_a_head_read_in_windows_of_rows_gives_the_same(family: str, tmp_path: Path) -> None:
    folder = saved_family(family, tmp_path)
    checkpoint = load_checkpoint(folder)
    batches = two_batches()
    expected = measure_gradient_norms(checkpoint.model, batches, layout=checkpoint.layout)
    with open_streamed(folder, window_bytes=7 * 16 * 8) as streamed:  # 7 rows of 64
        assert streamed.stream.head is not None
        assert streamed.stream.head.rows_at_once < len(streamed.stream.head)
        got = measure_streamed_gradient_norms(streamed, batches)
    assert_same_norms(got, expected)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"])
def test_other_dtypes_agree_to_their_rounding(dtype: torch.dtype, relative: float, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path, shard="6KB", dtype=torch.float32)
    checkpoint = load_checkpoint(folder, dtype=dtype)
    batches = two_batches()
    expected = measure_gradient_norms(checkpoint.model, batches, layout=checkpoint.layout)
    with open_streamed(folder, dtype=dtype) as streamed:
        got = measure_streamed_gradient_norms(streamed, batches)
    assert_same_norms(got, expected, relative)
    assert got.dtype == str(dtype).removeprefix("torch.")


def test_block_inputs_on_disk_change_no_number(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path / "model")
    spill = tmp_path / "spill"
    spill.mkdir()
    with open_streamed(folder) as streamed:
        here = measure_streamed_gradient_norms(streamed, two_batches())
        there = measure_streamed_gradient_norms(streamed, two_batches(), max_memory=0, spill_folder=spill)
    assert here.to_frame().equals(there.to_frame())
    assert not list(spill.iterdir())


def test_block_inputs_that_do_not_fit_onto_the_disk_are_refused_before_anything_is_computed(tmp_path, monkeypatch) -> None:
    folder = saved_family("llama", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 100})())
    with open_streamed(folder) as streamed:
        with pytest.raises(OutputError, match="do not fit into"):
            measure_streamed_gradient_norms(streamed, two_batches(), max_memory=0, spill_folder=tmp_path)
        assert streamed.model.get_input_embeddings().weight.is_meta


def test_every_block_is_read_twice_and_the_head_once(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    batch = predicting(tiny_ids())
    with open_streamed(folder) as streamed:
        stream = streamed.stream
        opening = stream.n_bytes_read
        measure_streamed_gradient_norms(streamed, [batch])
        blocks = sum(stream.block_bytes(k) for k in range(N_BLOCKS))
        rows = 2 * len(torch.unique(batch.inputs)) * 16 * 8
        embedding_and_head = 2 * 64 * 16 * 8  # the embedding whole once, for its norm
        assert stream.n_bytes_read - opening == 2 * blocks + embedding_and_head + rows


def test_progress_counts_every_block_in_both_directions(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    steps: list[tuple[int, int]] = []
    with open_streamed(folder) as streamed:
        measure_streamed_gradient_norms(streamed, two_batches(), on_step=lambda *step: steps.append(step))
    n_steps = 2 * N_BLOCKS + 2
    assert steps == [(i, n_steps) for i in range(n_steps + 1)]


def test_the_model_is_as_before_afterwards(tmp_path: Path) -> None:
    folder = saved_family("mixtral", tmp_path)
    with open_streamed(folder) as streamed:
        before = {name: (id(p), p.is_meta) for name, p in streamed.model.named_parameters()}
        first = measure_streamed_gradient_norms(streamed, two_batches())
        assert {name: (id(p), p.is_meta) for name, p in streamed.model.named_parameters()} == before
        assert all(p.grad is None for p in streamed.model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in streamed.model.modules())
        again = measure_streamed_gradient_norms(streamed, two_batches())
    assert first.to_frame().equals(again.to_frame())


@pytest.mark.parametrize(
    ("batches", "message"),
    [([], "no batch"), ([TokenBatch(torch.tensor([[5]]), torch.tensor([[IGNORED]]))], "batch 0 predicts no token")],
    ids=["none", "one token"],
)
def test_nothing_to_measure_on_is_refused(batches: list[TokenBatch], message: str, tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    with open_streamed(folder) as streamed, pytest.raises(ValueError, match=message):
        measure_streamed_gradient_norms(streamed, batches)
