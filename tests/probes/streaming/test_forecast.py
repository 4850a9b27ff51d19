"""What a dry run says: bytes to the byte, arithmetic by hand, and no weights in memory afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.removal_units import removal_units
from probes.streaming.forecast import forecast_gradient_norms, forecast_layer_removal
from probes.streaming.gradients import measure_streamed_gradient_norms
from probes.streaming.model import open_streamed
from probes.streaming.removal import measure_streamed_layer_removal
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
