"""What a dry run says: bytes to the byte, arithmetic by hand, and no weights in memory afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from probes.model import Transformer
from probes.removal_units import removal_units
from probes.saving import save_model
from probes.streaming.forecast import forecast_gradient_norms, forecast_layer_removal
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.removal import measure_streamed_layer_removal
from tests.probes._models import random_ids, small_config
from tests.probes._tiny import FAMILIES, N_BLOCKS, tiny_ids
from tests.probes.streaming._streamed import predicting, saved_family, two_batches

WINDOWS = pytest.mark.parametrize("window", [None, 600], ids=["whole head", "head in windows"])


@WINDOWS
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_both_probes_are_exact(family: str, window: int | None, tmp_path: Path) -> None:
    folder = saved_family(family, tmp_path)
    with open_streamed(folder, window_bytes=window) as streamed:
        batches = two_batches(streamed.layout)
        units = removal_units(streamed.layout, "sublayer", 1)
        gradients = forecast_gradient_norms(streamed, batches)
    with open_streamed(folder, window_bytes=window) as streamed:
        removal = forecast_layer_removal(streamed, batches, units)
    with open_streamed(folder, window_bytes=window) as streamed:
        measure_streamed_gradient_norms(streamed, batches)
        assert streamed.stream.n_bytes_read == gradients.bytes_read
    with open_streamed(folder, window_bytes=window) as streamed:
        measure_streamed_layer_removal(streamed, batches, unit="sublayer")
        assert streamed.stream.n_bytes_read == removal.bytes_read


class _Flops(TorchDispatchMode):
    """Counts the operations of matrix products, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.total += 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        return out


EXTRAS = pytest.mark.parametrize(
    "extras",
    [{"estimates": False}, {"taylor": True}, {"joint": True}, {"taylor": True, "joint": True}],
    ids=lambda extras: "+".join(extras),
)


@EXTRAS
@WINDOWS
@pytest.mark.parametrize("unit", ["block", "attn"])
def test_what_is_added_to_a_removal_is_counted(extras: dict[str, bool], unit: str, window: int | None, tmp_path: Path) -> None:
    folder = saved_family("llama-tied", tmp_path)
    with open_streamed(folder, window_bytes=window) as streamed:
        units = removal_units(streamed.layout, unit, 2)
        forecast = forecast_layer_removal(streamed, two_batches(), units, **extras)
    math = sdpa_kernel(SDPBackend.MATH)  # the fused kernel of a CPU is not in the registry
    with open_streamed(folder, window_bytes=window) as streamed, math, _Flops() as counter:
        measure_streamed_layer_removal(streamed, two_batches(), unit=unit, span=2, threshold=1e9, **extras)  # all are cheap
        assert streamed.stream.n_bytes_read == forecast.bytes_read
    flops = counter.total
    assert flops <= forecast.flops * 1.001
    if not extras.get("joint"):
        assert flops == pytest.approx(forecast.flops, rel=0.05)
    assert (forecast.exact_bytes, forecast.exact_flops) == (not extras.get("joint"), not extras.get("joint"))
    assert forecast.lines()[0].startswith("bytes read: at most ") == bool(extras.get("joint"))


def test_streams_of_the_taylor_estimate_are_counted_where_they_will_be(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    sizes = []
    for max_memory in (0, None):
        with open_streamed(folder) as streamed:
            units = removal_units(streamed.layout, "block", 1)
            sizes.append(forecast_layer_removal(streamed, two_batches(), units, taylor=True, max_memory=max_memory))
    streams = (N_BLOCKS + 1) * (2 * 12 + 10 * 3) * 16 * 8
    assert sizes[0].bytes_on_disk - sizes[1].bytes_on_disk == streams
    assert sizes[1].peak_memory - sizes[0].peak_memory <= streams


def test_arithmetic_is_that_of_the_matrix_products(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    ids = tiny_ids(1, 12)
    with open_streamed(folder) as streamed:
        gradients = forecast_gradient_norms(streamed, [predicting(ids)])
        units = removal_units(streamed.layout, "block", 1)
    with open_streamed(folder) as streamed:
        removal = forecast_layer_removal(streamed, [predicting(ids)], units)
    weights = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24
    block = 2 * 12 * weights + 2 * 2 * 12 * 12 * 16  # and queries with keys, weights with values
    head = 2 * 11 * 16 * 64
    through = [1, 2, 3]  # the intact stream, and variants that left out an earlier block
    assert removal.flops == sum(through) * block + (N_BLOCKS + 1) * head
    assert gradients.flops == pytest.approx(N_BLOCKS * 4 * block + 3 * head, rel=0.05)  # attention is recomputed in part
    assert removal.exact_flops
    assert gradients.exact_flops


def test_experts_are_an_upper_limit_and_said_to_be(tmp_path: Path) -> None:
    folder = saved_family("mixtral", tmp_path)
    with open_streamed(folder) as streamed:
        forecast = forecast_gradient_norms(streamed, two_batches())
    assert not forecast.exact_flops
    assert any(line.startswith("arithmetic: at most") for line in forecast.lines())


def test_nothing_is_left_in_place(tmp_path: Path) -> None:
    folder = saved_family("llama", tmp_path)
    with open_streamed(folder) as streamed:
        before = {name: (id(p), p.is_meta) for name, p in streamed.model.named_parameters()}
        forecast = forecast_gradient_norms(streamed, two_batches())
        assert {name: (id(p), p.is_meta) for name, p in streamed.model.named_parameters()} == before
    assert forecast.seconds > 0
    assert forecast.bytes_on_disk == (N_BLOCKS + 1) * (2 * 12 + 10 * 3) * 16 * 8


def test_blocks_that_share_their_weights_have_nothing_to_read(tmp_path: Path) -> None:
    save_model(Transformer(small_config("pre_ln", shared_blocks=True)), tmp_path)
    batches = [predicting(random_ids())]
    with open_streamed(tmp_path) as streamed:
        gradients = forecast_gradient_norms(streamed, batches)
        units = removal_units(streamed.layout, "block", 1)
    with open_streamed(tmp_path) as streamed:
        removal = forecast_layer_removal(streamed, batches, units, taylor=True, joint=True)
    with open_streamed(tmp_path) as streamed:
        measure_streamed_gradient_norms(streamed, batches)
        assert streamed.stream.n_bytes_read == gradients.bytes_read
    assert gradients.bytes_per_second == removal.bytes_per_second == 0
    assert gradients.seconds > 0 < removal.seconds
    assert "GB/s" not in gradients.lines()[-1]
