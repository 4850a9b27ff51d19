"""Profiles over depth while training: equal to the probe's own, complete, safe on disk."""

import pandas as pd
import pytest
import torch

from probes.dynamics import COLUMNS, gradient_profile, join_profiles, merge_profiles, read_profiles, updates, write_profile
from probes.errors import OutputError
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer, residual_layout
from probes.text import TokenBatch
from probes.training import Trainer, train
from tests.probes._runs import numbers, small_corpus, small_run

STREAM = {"stream_grad_norm", "shortcut_grad_norm", "stream_rms", "token_cosine"}
BRANCH = {"branch_ratio", "param_grad_norm", "update_to_weight"}


def _batch() -> TokenBatch:
    windows = small_corpus().batch(seed=0, step=1, n_windows=4, seq_len=16)
    return TokenBatch(windows[:, :-1], windows[:, 1:])


def _frame(step: int) -> pd.DataFrame:
    model = Transformer(small_run().model)
    profile = gradient_profile(model, residual_layout(model), _batch())
    return profile.to_frame(scheme="keel", n_sublayers=4, seed=0, step=step)


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln", "highway"])
def test_a_profile_is_what_the_gradient_norm_probe_measures(scheme) -> None:
    model = Transformer(small_run(scheme=scheme).model)
    rows = gradient_profile(model, residual_layout(model), _batch()).rows
    found = {(sublayer, metric): value for sublayer, _, metric, value, _ in rows}
    result = measure_gradient_norms(model, [_batch()])
    assert found[-1, "loss"] == pytest.approx(result.loss.value)
    for sublayer in result.sublayers:
        stream = result.boundaries[sublayer.boundary_in]
        assert found[sublayer.index, "stream_grad_norm"] == pytest.approx(stream.stream_grad.value)
        assert found[sublayer.index, "shortcut_grad_norm"] == pytest.approx(stream.shortcut_grad.value)
        assert found[sublayer.index, "token_cosine"] == pytest.approx(stream.token_cosine.value)
        assert found[sublayer.index, "stream_rms"] == pytest.approx(stream.stream_rms.value)
        assert found[sublayer.index, "branch_ratio"] == pytest.approx(sublayer.branch_ratio.value)
        assert found[sublayer.index, "param_grad_norm"] == pytest.approx(sublayer.part.grad_norm.value)


def test_every_sublayer_has_every_metric_at_every_chosen_step() -> None:
    frame = train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus()).dynamics()
    assert tuple(frame.columns) == COLUMNS
    assert frame["value"].notna().all()
    counts = frame.groupby(["step", "metric"])["sublayer"].nunique().unstack()
    assert list(counts.index) == [1, 20, 50]
    assert (counts[sorted(BRANCH)] == 4).all(axis=None)
    assert (counts[sorted(STREAM)] == 5).all(axis=None)  # and one after the last
    assert set(frame["kind"]) == {"model", "attention", "ffn", "output"}
    assert not frame.duplicated(["step", "sublayer", "metric"]).any()


def test_measuring_changes_no_bit_of_the_training() -> None:
    measured = train(small_run(probe_steps=tuple(range(1, 51, 3))), corpus=small_corpus())
    assert numbers(measured.records) == numbers(train(small_run(), corpus=small_corpus()).records)


def test_profiles_are_the_same_where_activations_are_recomputed() -> None:
    frames = [
        train(small_run(probe_steps=(1, 30), activation_checkpointing=lean), corpus=small_corpus()).dynamics()
        for lean in (False, True)
    ]
    pd.testing.assert_frame_equal(*frames)


def test_the_parameter_gradient_is_that_of_the_step() -> None:
    trainer = Trainer(small_run(probe_steps=(1,), clip=0.0), small_corpus())
    record = trainer.advance()
    assert trainer.profile is not None
    inside = trainer.profile.query("metric == 'param_grad_norm'")["value"].pow(2).sum() ** 0.5
    model = Transformer(small_run().model)
    model.loss(_batch().inputs, _batch().targets).backward()
    others = [p.grad.norm() for name, p in model.named_parameters() if not name.startswith("blocks.")]
    assert inside**2 + torch.stack(others).square().sum().item() == pytest.approx(record.grad_norm**2, rel=1e-4)


def test_update_to_weight_by_hand() -> None:
    model = Transformer(small_run().model)
    with updates(model, residual_layout(model)) as rows, torch.no_grad():
        for parameter in model.get_submodule("blocks.1.ffn").parameters():
            parameter.mul_(1.25)
    assert [(sublayer, round(value, 6)) for sublayer, *_, value, _ in rows] == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.25)]


def test_profiles_are_appended_replaced_and_merged(tmp_path) -> None:
    frames = [_frame(step) for step in (3, 12, 40)]
    for frame in (frames[1], frames[0], frames[2], frames[1]):
        write_profile(tmp_path, frame)
    pd.testing.assert_frame_equal(read_profiles(tmp_path), join_profiles(frames))
    merge_profiles(tmp_path, last_step=12)
    pd.testing.assert_frame_equal(read_profiles(tmp_path), join_profiles(frames[:2]))
    assert [path.name for path in tmp_path.iterdir()] == ["dynamics.parquet"]
    merge_profiles(tmp_path, last_step=12)
    assert len(read_profiles(tmp_path)) == len(frames[0]) + len(frames[1])


def test_a_run_that_goes_on_after_its_profiles_were_merged_keeps_all(tmp_path) -> None:
    for step in (1, 5, 9):
        write_profile(tmp_path, _frame(step).assign(value=1.0))
    merge_profiles(tmp_path, last_step=9)
    for step in (5, 7):
        write_profile(tmp_path, _frame(step).assign(value=2.0))
    found = read_profiles(tmp_path)
    values = found.groupby("step", sort=False)["value"].first()
    assert list(values.items()) == [(1, 1.0), (5, 2.0), (7, 2.0), (9, 1.0)]
    merge_profiles(tmp_path, last_step=9)
    assert read_profiles(tmp_path).equals(found)
    assert [path.name for path in tmp_path.iterdir()] == ["dynamics.parquet"]


def test_without_profiles_the_frame_is_empty_with_its_columns(tmp_path) -> None:
    merge_profiles(tmp_path, last_step=3)
    assert tuple(read_profiles(tmp_path).columns) == COLUMNS
    assert read_profiles(tmp_path).empty


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "dynamics").write_text("in the way")
    with pytest.raises(OutputError, match="profiles written before are unharmed"):
        write_profile(tmp_path, _frame(1))


def test_post_ln_loses_its_gradient_on_the_shortcut_and_keel_keeps_it() -> None:
    kept = {}
    for scheme in ("post_ln", "keel"):
        model = Transformer(small_run(scheme=scheme, n_blocks=16, init_std=0.3).model)
        rows = gradient_profile(model, residual_layout(model), _batch()).rows
        shortcut = {sublayer: value for sublayer, _, metric, value, _ in rows if metric == "shortcut_grad_norm"}
        kept[scheme] = shortcut[2] / shortcut[32]
    assert kept["post_ln"] < 1e-2 * kept["keel"]
    assert kept["keel"] == pytest.approx(1, abs=0.1)
