from __future__ import annotations

import math

import pytest
import torch

from probes.norms import Status, combine_norms, l2_norm, reading_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1024,), (1025,), (3, 1000), (0,)])
def test_norm_equals_the_float64_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    expected = float(tensor.double().norm())
    assert float(l2_norm(tensor)) == pytest.approx(expected, rel=1e-6 if dtype != torch.float64 else 1e-14)


def test_ten_million_float32_entries_lose_nothing() -> None:
    tensor = torch.full((10_000_000,), 0.1)
    exact = float(torch.tensor(0.1)) * math.sqrt(10_000_000)
    assert float(l2_norm(tensor)) == pytest.approx(exact, rel=1e-6)
    assert abs(float(torch.linalg.vector_norm(tensor)) / exact - 1) > 1e-5  # what a plain float32 sum does


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-25, 1e-13, 1e13, 1e20, 1e38])
def test_float32_squares_out_of_range_are_no_zero_and_no_infinity(size: float) -> None:
    tensor = torch.full((3000,), size)
    assert float(l2_norm(tensor)) == pytest.approx(float(tensor[0].double()) * math.sqrt(3000), rel=1e-6)


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_float64_squares_out_of_range_are_no_zero_and_no_infinity(size: float) -> None:
    assert float(l2_norm(torch.full((9,), size, dtype=torch.float64))) == pytest.approx(3 * size, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("entries", "status"),
    [
        ([1.0, math.inf], Status.INF),
        ([-math.inf, 0.0], Status.INF),
        ([math.nan, 1.0], Status.NAN),
        ([math.nan, math.inf], Status.NAN),
        ([0.0, -0.0], Status.ZERO),
        ([1.0, 0.0], Status.OK),
    ],
)
def test_status_of_entries(dtype: torch.dtype, entries: list[float], status: Status) -> None:
    tensor = torch.tensor(entries, dtype=dtype)
    assert reading_of(float(l2_norm(tensor)), tensor.numel(), dtype).status is status


@pytest.mark.parametrize(("norm", "status"), [(1e-39, Status.UNDERFLOW), (1e-30, Status.OK), (0.0, Status.ZERO)])
def test_underflow_is_below_the_smallest_normal_number(norm: float, status: Status) -> None:
    assert reading_of(norm, 1, torch.float32).status is status


def test_underflow_is_about_the_entries_not_their_number() -> None:
    entries = torch.full((10_000,), 1e-39)  # subnormal, but their norm is 1e-37
    assert reading_of(float(l2_norm(entries)), entries.numel(), torch.float32).status is Status.UNDERFLOW


def test_combined_norms() -> None:
    assert combine_norms([3.0, 4.0, 12.0]) == 13.0
    assert combine_norms([]) == 0.0
    assert combine_norms([1.0, math.inf]) == math.inf
    assert math.isnan(combine_norms([math.inf, math.nan]))
    assert combine_norms([1e-200, 1e-200]) == pytest.approx(math.sqrt(2) * 1e-200)
