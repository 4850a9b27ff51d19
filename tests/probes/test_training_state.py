"""A borrowed model comes back bit for bit: whatever it held, however the training ended."""

import copy
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn

from probes.training_state import borrowed


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor, not another content
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def _step(model, optimizer) -> None:
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


OPTIMIZERS = {
    "adamw with history": (lambda p: _adamw(p, amsgrad=True), 3),
    "adamw fused": (lambda p: _adamw(p, fused=True), 3),
    "adamw without history": (_adamw, 0),
    "adamw with a tensor as rate": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), capturable=False, foreach=False), 2),
    "sgd with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3),
    "two groups": (lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.01}]), 2),
}


@pytest.fixture(params=OPTIMIZERS)
def trained(request):
    make, n_steps = OPTIMIZERS[request.param]
    model = _Net()
    optimizer = make(list(model.parameters()))
    for _ in range(n_steps):
        _step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k)
    if n_steps:
        optimizer.step()
        scheduler.step()
    model.eval()
    model.first.train()
    model.first.weight.grad = torch.full((8, 4), 0.125)
    return model, optimizer, scheduler


def _everything(model, optimizer, scheduler) -> dict[str, object]:
    return {
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "identities": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "modes": [m.training for m in model.modules()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "flags": {n: v for n, v in vars(optimizer).items() if isinstance(v, (bool, int, float))},
    }


def _assert_equal(a: object, b: object, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert torch.equal(a, b), path
        assert a.dtype == b.dtype, path
    elif isinstance(a, dict):
        assert isinstance(b, dict), path
        assert a.keys() == b.keys(), path
        for key in a:
            _assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list):
        assert isinstance(b, list), path
        assert len(a) == len(b), path
        for i, pair in enumerate(zip(a, b, strict=True)):
            _assert_equal(*pair, f"{path}/{i}")
    else:
        assert a == b, path


def _ravage(model, optimizer, scheduler) -> None:
    model.train()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(7.0)
        else:
            group["lr"] = 7.0
    for _ in range(3):
        _step(model, optimizer)
        scheduler.step()
    model.last.weight.requires_grad_(False)
    random.random()
    np.random.rand()  # noqa: NPY002 - the global generator is what is to be restored


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_everything_is_as_before(trained, ending) -> None:
    before = _everything(*trained)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)

    def use() -> None:
        with borrowed(*trained):
            _ravage(*trained)
            if ending is not None:
                raise ending("in the middle")

    if ending is None:
        use()
    else:
        with pytest.raises(ending, match="in the middle"):
            use()
    _assert_equal(before, _everything(*trained))
    assert trained[0].last.weight.requires_grad
    assert (random.random(), np.random.rand()) == expected[:2]  # noqa: NPY002
    assert torch.equal(torch.rand(3), expected[2])


def test_training_goes_on_as_if_nothing_had_been(trained) -> None:
    twin = copy.deepcopy(trained[:2])
    with borrowed(*trained):
        _ravage(*trained)
    for model, optimizer in (trained[:2], twin):
        model.zero_grad()
        torch.manual_seed(3)
        _step(model, optimizer)
    _assert_equal(trained[0].state_dict(), twin[0].state_dict())


def test_parameters_that_only_the_optimizer_knows_come_back_too() -> None:
    model, extra = _Net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=1.0)
    with borrowed(model, optimizer):
        extra.sum().backward()
        optimizer.step()
        assert extra.sum() == 0
    assert torch.equal(extra, torch.ones(2))
    assert extra.grad is None


def test_ctrl_c_during_the_restoration_waits_for_its_end() -> None:
    class Scheduler:
        value = 1

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            signal.raise_signal(signal.SIGINT)
            self.value = state["value"]

    model, scheduler = _Net(), Scheduler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.last.weight.detach().clone()

    def use() -> None:
        with borrowed(model, optimizer, scheduler):
            scheduler.value = 2
            with torch.no_grad():
                model.last.weight.add_(1)

    torch.manual_seed(8)
    expected = torch.rand(2)
    torch.manual_seed(8)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, RUF100 - the interruption has no message
        use()
    assert scheduler.value == 1
    assert torch.equal(model.last.weight, before)
    assert torch.equal(torch.rand(2), expected)
