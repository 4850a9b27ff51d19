"""The stress test: on the toolkit's models and on someone's own."""

import itertools
import math

import pytest
import torch
from torch import nn

from probes.errors import KeelError
from probes.judgement import Outcome, Status
from probes.max_learning_rate import StressTest, cpu_preset, gpu_preset, landmarks_for, stress_test, stress_test_model
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


@pytest.mark.parametrize("name", ["steps", "peak_lr", "accumulation"])
def test_values_that_are_not_positive_are_refused_by_name(name) -> None:
    options = {"steps": 10, name: 0}
    with pytest.raises(TrainingConfigError, match=f"{name} must be above 0, got 0"):
        stress_test_model(*_own(), _batches(2), _loss, **options)
