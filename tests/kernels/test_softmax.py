"""Softmax and its gradient, over rows of any width, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat import Gpu
from preheat.kernels import softmax as family
from preheat.kernels.ops import Ops
from tests.kernels.conftest import (
    DTYPES,
    Exact,
    Operand,
    agree,
    cases,
    exact,
    gradient,
    same_bits,
    shifted,
    tensors_agree,
)

Random = Callable[..., Operand]
# Rows that share a block and rows that do not; in registers, with one operand read again, or with both.
SMALL = [(1, 1), (37, 31), (5, 127), (5, 33), (2, 4099), (3, 1000), (2, 9001), (2, 20001)]
LARGE = [(4097, 1024), (1000, 4096), (301, 16384), (3, 262147)]


def softmax(x: Exact) -> Exact:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


@pytest.mark.parametrize(("dtype", "rows", "width"), cases(SMALL))
def test_both_ways_agree_with_float64(
    ops: Ops, random: Random, dtype: str, rows: int, width: int
) -> None:
    x, gy = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    result = ops.softmax(x.array)
    agree(result, softmax(x.exact))
    y = exact(result)
    dot, most = (np.sum(part, -1, keepdims=True) for part in (gy.exact * y, np.abs(gy.exact * y)))
    agree(ops.softmax_backward(gy.array, result), y * (gy.exact - dot), y * (np.abs(gy.exact) + most))


def test_the_gradient_is_that_of_the_values(ops: Ops, random: Random) -> None:
    x, gy = random(3, 13), random(3, 13)
    found = ops.softmax_backward(gy.array, ops.softmax(x.array)).numpy()
    assert np.allclose(found, gradient(softmax, x.exact, gy.exact), rtol=1e-5, atol=1e-6)


def test_two_lengths_in_one_process_are_both_right(ops: Ops, random: Random) -> None:
    for width in (36, 60, 36):  # one kernel
        assert family.softmax(7, width, "float32").entry == family.softmax(7, 36, "float32").entry
        x = random(7, width)
        agree(ops.softmax(x.array), softmax(x.exact))


@pytest.mark.parametrize("width", [64, 20000])
def test_far_below_the_largest_of_a_row_errors_grow_as_the_docs_say(
    device: Gpu, ops: Ops, width: int
) -> None:
    x = np.random.default_rng(5).uniform(-87, 0, (3, width)).astype("float32")
    below = x.max(-1, keepdims=True).astype(np.float64) - x
    wanted = softmax(x.astype(np.float64))
    found = exact(ops.softmax(device.array(x)))
    assert np.all(np.abs(found - wanted) <= (2e-6 + 1.2e-7 * below) * wanted + 1e-37)


@pytest.mark.parametrize("width", [64, 20000])
def test_masked_values_do_not_contribute_and_large_values_do_not_overflow(
    device: Gpu, ops: Ops, width: int
) -> None:
    x = np.random.default_rng(3).uniform(-3e4, 3e4, (2, width)).astype("float32")
    x[:, ::3] = -np.inf
    found = ops.softmax(device.array(x)).numpy()
    assert np.all(found[:, ::3] == 0)
    assert np.allclose(found, softmax(x.astype(np.float64)), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("width", [64, 20000])
def test_a_row_with_nothing_left_is_not_a_number_and_its_neighbour_is_right(
    device: Gpu, ops: Ops, width: int
) -> None:
    x = np.random.default_rng(4).standard_normal((2, width), dtype="float32")
    x[0] = -np.inf
    found = ops.softmax(device.array(x)).numpy()
    assert np.all(np.isnan(found[0]))
    assert np.allclose(found[1], softmax(x[1].astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_the_lowest_numbers_is_uniform(device: Gpu, ops: Ops, dtype: str) -> None:
    lowest = device.array(np.full((2, 40), -3.3895e38, "float32"), dtype)  # how models mask
    assert np.array_equal(
        ops.softmax(lowest).numpy(), device.array(np.full((2, 40), 0.025), dtype).numpy()
    )


@pytest.mark.parametrize("width", [24, 1000, 9000, 20000])
def test_alignment_changes_no_bit(device: Gpu, ops: Ops, random: Random, width: int) -> None:
    x, gy = random(3, width).array, random(3, width).array
    y = ops.softmax(x)
    assert same_bits(ops.softmax(shifted(device, x)), y)
    assert same_bits(ops.softmax(x, out=shifted(device, x)), y)
    gx = ops.softmax_backward(gy, y)
    assert same_bits(ops.softmax_backward(shifted(device, gy), shifted(device, y)), gx)
    assert same_bits(ops.softmax_backward(gy, shifted(device, y)), gx)


@pytest.mark.parametrize("width", [31, 1000, 9001, 20001])
def test_the_gradient_may_be_written_over_either_operand(ops: Ops, random: Random, width: int) -> None:
    y = ops.softmax(random(3, width).array)
    gy = random(3, width).array
    wanted = ops.softmax_backward(gy, y)
    copy = ops.gpu.array(y)
    assert ops.softmax_backward(gy, copy, out=copy) is copy
    assert ops.softmax_backward(gy, y, out=gy) is gy
    assert same_bits(copy, wanted)
    assert same_bits(gy, wanted)


def test_rows_are_the_last_axis(ops: Ops, random: Random) -> None:
    x = random(2, 3, 5)
    agree(ops.softmax(x.array), softmax(x.exact))


# For hardware alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), LARGE)
def test_real_sizes_agree_with_float64(
    torch: Any, on_gpu: Ops, dtype: str, rows: int, width: int
) -> None:
    x, gy = (torch.randn(rows, width, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    result, gx = torch.empty_like(x), torch.empty_like(x)
    on_gpu.softmax(x, out=result)
    tensors_agree(result, torch.softmax(x.double(), -1))
    on_gpu.softmax_backward(gy, result, out=gx)
    y = result.double()
    dy = gy.double()
    dot = (dy * y).sum(-1, keepdim=True)
    most = (dy * y).abs().sum(-1, keepdim=True)
    tensors_agree(gx, y * (dy - dot), y * (dy.abs() + most))


@pytest.mark.gpu
def test_more_elements_than_an_int_can_count(torch: Any, on_gpu: Ops) -> None:
    x = torch.zeros(2**16 + 1, 2**15, device="cuda", dtype=torch.float16)
    x[-1] = torch.randn(2**15, device="cuda")
    wanted = torch.softmax(x[-1].double(), -1)
    on_gpu.softmax(x, out=x)
    tensors_agree(x[-1], wanted)
