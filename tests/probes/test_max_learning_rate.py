"""The stress test: on the toolkit's models and on someone's own."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from probes.control_variates import without_batches
from probes.divergence import JudgeThresholds, Landmarks, StreamingJudge
from probes.errors import CheckpointError, KeelError
from probes.judgement import Outcome, Status
from probes.max_learning_rate import StressTest, cpu_preset, gpu_preset, landmarks_for, stress_test, stress_test_model
from probes.run_folder import batch_losses
from probes.training import train
from probes.training_config import TrainingConfigError
from tests.probes._runs import numbers, small_corpus, small_run


@pytest.fixture(scope="module")
def breaking() -> StressTest:
    """A ramp so steep that it ends in not-a-number."""
    return stress_test(small_run(scheme="pre_ln", peak_lr=1e30, clip=0.0), corpus=small_corpus(), n_seeds=2)


def test_a_run_that_breaks_is_judged(breaking) -> None:
    for run in breaking.runs:
        assert run.judgement.outcome is Outcome.NON_FINITE
        assert not run.judgement.lower_bound
        assert run.judgement.resolution == pytest.approx(1e30 / 50)
        assert run.judgement.onset_step is not None
        lr_before = 1e30 * (run.judgement.onset_step - 1) / 50
        assert run.judgement.max_lr == pytest.approx(lr_before)
    assert [run.seed for run in breaking.runs] == [0, 1]
    assert not breaking.summary.median_is_bound


def test_a_run_that_holds_is_a_lower_bound() -> None:
    test = stress_test(small_run(), corpus=small_corpus())
    assert test.runs[0].judgement.outcome is Outcome.HEALTHY
    assert test.summary.median == 0.02
    assert test.summary.median_is_bound
    assert test.summary.low is None
    assert "no divergence up to the end of the ramp" in test.verdict()


def test_seeds_differ_and_their_median_has_an_interval(breaking) -> None:
    first, second = (run.training.records[0].loss for run in breaking.runs)
    assert first != second
    rates = [run.judgement.max_lr for run in breaking.runs]
    assert breaking.summary.n_seeds == 2
    assert min(rates) <= breaking.summary.median <= max(rates)
    assert breaking.summary.words() in breaking.verdict()
    assert "median of 2 seeds" in breaking.verdict()


def test_stopping_early_changes_no_verdict_and_the_folder_resumes(tmp_path) -> None:
    config = small_run(scheme="pre_ln", steps=100, peak_lr=50.0)
    early = stress_test(config, corpus=small_corpus(), folder=tmp_path)
    to_end = stress_test(config, corpus=small_corpus(), early_stop=False)
    assert early.runs[0].judgement == to_end.runs[0].judgement
    assert early.runs[0].judgement.diverged
    n_early = len(early.runs[0].training.records)
    assert n_early < len(to_end.runs[0].training.records)
    assert numbers(early.runs[0].training.records) == numbers(to_end.runs[0].training.records[:n_early])
    again = stress_test(config, corpus=small_corpus(), folder=tmp_path)
    assert again.runs[0].judgement == early.runs[0].judgement


def test_a_reference_lets_degradation_be_judged() -> None:
    config = small_run()
    reference = stress_test(config, corpus=small_corpus()).runs[0].training.records

    def status(**options) -> Status:
        (run,) = stress_test(config, corpus=small_corpus(), **options).runs
        return next(c.status for c in run.judgement.criteria if c.criterion.value == "degradation")

    assert status() is Status.CANNOT_JUDGE
    assert status(landmarks=landmarks_for(small_corpus(), reference)) is Status.NOT_MET


def test_the_judge_hears_what_each_batch_makes_of_the_loss(monkeypatch) -> None:
    feed, heard = StreamingJudge.feed, []

    def listening(self, *arguments, batch_losses=None):
        heard.append(batch_losses)
        return feed(self, *arguments, batch_losses=batch_losses)

    monkeypatch.setattr(StreamingJudge, "feed", listening)
    (run,) = stress_test(small_run(), corpus=small_corpus()).runs
    assert heard == [record.batch_losses for record in run.training.records]
    assert all(np.isfinite(heard).ravel())


def test_a_reference_run_stands_without_its_own_batches() -> None:
    records = train(small_run(steps=150), corpus=small_corpus()).records
    losses = np.array([record.loss for record in records])
    known = landmarks_for(small_corpus(), records)
    assert known.reference_steps.tolist() == list(range(1, 151))
    assert known.reference_losses.tolist() == without_batches(losses, batch_losses(records)).tolist()
    assert np.diff(known.reference_losses)[50:].std() < 0.8 * np.diff(losses)[50:].std()
    bare = [replace(record, unigram_loss=None) for record in records]
    assert landmarks_for(small_corpus(), bare).reference_losses.tolist() == losses.tolist()


def test_frame_and_dictionary_hold_every_seed(breaking) -> None:
    frame = breaking.to_frame()
    assert frame.groupby("seed").size().to_dict() == {0: 5, 1: 5}
    assert set(frame["scheme"]) == {"pre_ln"}
    stored = breaking.to_dict()
    assert stored["n_sublayers"] == 4
    assert [run["judgement"]["outcome"] for run in stored["runs"]] == ["non_finite"] * 2


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (small_run(schedule="cosine"), {}, "schedule must be 'ramp' for a stress test"),
        (small_run(), {"n_seeds": 0}, "at least 1 seed, got 0"),
    ],
)
def test_what_is_no_stress_test_is_refused(config, options, message) -> None:
    with pytest.raises(TrainingConfigError, match=message):
        stress_test(config, corpus=small_corpus(), **options)


def test_presets_are_ramps_of_the_stated_depth() -> None:
    assert cpu_preset("keel").model.n_sublayers == 64
    deep = gpu_preset("keel", 512)
    assert (deep.model.n_sublayers, deep.device, deep.model.compute_dtype) == (512, "cuda", "bfloat16")
    assert {c.schedule for c in (cpu_preset("keel"), deep)} == {"ramp"}


# Someone's own model


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def _batches(n: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        x = torch.randn(8, 4, generator=generator)
        yield x, x.sum(dim=1, keepdim=True)


def _loss(model: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def _own():
    model = _Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_the_rate_rises_once_per_optimizer_step() -> None:
    model, optimizer = _own()
    rates, losses = [], []

    def loss(net, batch):
        rates.append(optimizer.param_groups[0]["lr"])
        value = _loss(net, batch)
        losses.append(value.item())
        return value

    test = stress_test_model(model, optimizer, _batches(40), loss, steps=10, accumulation=4)
    assert [r.lr for r in test.records] == pytest.approx([0.005 * k for k in range(1, 11)])
    assert rates == [r.lr for r in test.records for _ in range(4)]
    means = [sum(losses[i : i + 4]) / 4 for i in range(0, 40, 4)]
    assert [r.loss for r in test.records] == pytest.approx(means)
    assert test.n_left_over == 0


def test_a_last_window_that_is_not_full_is_reported() -> None:
    test = stress_test_model(*_own(), _batches(15), _loss, steps=10, accumulation=4)
    assert len(test.records) == 3
    assert test.n_left_over == 3


def test_data_that_end_early_are_no_divergence() -> None:
    test = stress_test_model(*_own(), _batches(5), _loss, steps=10)
    assert test.judgement.outcome is Outcome.INCOMPLETE
    assert test.judgement.lower_bound
    assert test.judgement.max_lr == pytest.approx(0.025)


def test_no_full_window_is_refused() -> None:
    with pytest.raises(KeelError, match=r"2 micro-batch\(es\) do not fill one optimizer step of 4"):
        stress_test_model(*_own(), _batches(2), _loss, steps=10, accumulation=4)


def test_it_is_plain_training_while_it_lasts() -> None:
    torch.manual_seed(4)
    model, optimizer = _own()
    twin = _Net()
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    torch.manual_seed(5)
    test = stress_test_model(model, optimizer, _batches(6), _loss, steps=6, peak_lr=0.06)
    torch.manual_seed(5)
    twin.train()
    for step, batch in enumerate(_batches(6), start=1):
        plain.param_groups[0]["lr"] = 0.01 * step
        loss = _loss(twin, batch)
        plain.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        assert test.records[step - 1].loss == pytest.approx(loss.item(), rel=1e-5)
        assert test.records[step - 1].grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_parameter_groups_keep_the_ratio_of_their_rates() -> None:
    model = _Net()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": torch.tensor(0.025)}])
    seen = []

    def loss(net, batch):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        return _loss(net, batch)

    stress_test_model(model, optimizer, _batches(2), loss, steps=2, peak_lr=0.4)
    assert seen == [pytest.approx([0.2, 0.05]), pytest.approx([0.4, 0.1])]
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.025])


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_model_and_optimizer_come_back_bit_for_bit(ending) -> None:
    model, optimizer = _own()
    for batch in _batches(3):
        _loss(model, batch).backward()
        optimizer.step()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(6)
    expected = torch.rand(3)
    torch.manual_seed(6)
    calls = itertools.count()

    def loss(net, batch):
        if ending is not None and next(calls) == 3:
            raise ending("in the middle")
        return _loss(net, batch)

    def run() -> None:
        stress_test_model(model, optimizer, _batches(10), loss, steps=10)

    if ending is None:
        run()
    else:
        with pytest.raises(ending, match="in the middle"):
            run()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = [optimizer.state[p] for p in model.parameters()]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(after, moments, strict=True) for k in b)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(module.training for module in model.modules())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(torch.rand(3), expected)


def test_a_loss_that_breaks_ends_the_ramp_at_the_step_before() -> None:
    model, optimizer = _own()

    def loss(net, batch):
        value = _loss(net, batch)
        return value * math.nan if optimizer.param_groups[0]["lr"] > 0.031 else value

    test = stress_test_model(model, optimizer, _batches(20), loss, steps=10)
    assert test.judgement.outcome is Outcome.NON_FINITE
    assert test.judgement.max_lr == pytest.approx(0.03)
    assert len(test.records) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer above 0, got 0"),
        ({"steps": 10.5}, "steps must be an integer above 0, got 10.5"),
        ({"steps": True}, "steps must be an integer above 0, got True"),
        ({"accumulation": 0}, "accumulation must be an integer above 0, got 0"),
        ({"accumulation": 1.5}, "accumulation must be an integer above 0, got 1.5"),
        ({"peak_lr": 0.0}, "peak_lr must be above 0, got 0.0"),
        ({"peak_lr": math.inf}, "peak_lr must be a finite number, got inf"),
        ({"peak_lr": "big"}, "peak_lr must be a finite number, got 'big'"),
        ({"clip": -1.0}, "clip must be at least 0"),
        ({"clip": math.nan}, "clip must be a finite number, got nan"),
    ],
    ids=str,
)
def test_values_outside_their_domain_are_refused_by_name(options, message) -> None:
    with pytest.raises(TrainingConfigError, match=re.escape(message)):
        stress_test_model(*_own(), _batches(2), _loss, **{"steps": 10, **options})


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = _Net()
    with pytest.raises(TrainingConfigError, match="LBFGS needs a closure for each step"):
        stress_test_model(model, torch.optim.LBFGS(model.parameters()), _batches(2), _loss, steps=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.expand(8), r"must return a scalar, the mean over the micro-batch, got shape \(8,\)"),
        (lambda value: value.detach(), "with its graph, got one that needs no gradient"),
        (lambda value: value.item(), "must return a scalar tensor, got float"),
    ],
    ids=["one per sample", "no graph", "a number"],
)
def test_a_loss_that_is_no_scalar_with_a_graph_is_refused(change, message) -> None:
    model, optimizer = _own()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainingConfigError, match=message):
        stress_test_model(model, optimizer, _batches(2), lambda net, batch: change(_loss(net, batch)), steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_of_one_element_is_a_scalar() -> None:
    test = stress_test_model(*_own(), _batches(2), lambda net, batch: _loss(net, batch).reshape(1), steps=2)
    assert len(test.records) == 2


@pytest.mark.parametrize("n_batches", [39, 38, 36])
def test_a_ramp_whose_last_step_has_not_run_is_incomplete(n_batches) -> None:
    test = stress_test_model(*_own(), _batches(n_batches), _loss, steps=10, accumulation=4)
    assert len(test.records) == 9
    assert test.judgement.outcome is Outcome.INCOMPLETE
    assert "end at step 9 of 10" in test.judgement.verdict()


@pytest.mark.parametrize(
    "options",
    [{"early_stop": False}, {"thresholds": JudgeThresholds(rise=1e9)}],
    ids=["to the end", "other thresholds"],
)
def test_a_run_that_was_stopped_early_is_not_taken_for_a_whole_one(tmp_path, options) -> None:
    config = small_run(scheme="pre_ln", steps=100, peak_lr=50.0)
    known = Landmarks()
    early = stress_test(config, corpus=small_corpus(), folder=tmp_path, landmarks=known)
    done = len(early.runs[0].training.records)
    with pytest.raises(CheckpointError, match=rf"seed_0 was stopped early there, at step {done} of 100, .* another folder"):
        stress_test(config, corpus=small_corpus(), folder=tmp_path, landmarks=known, **options)
