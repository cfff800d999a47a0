"""Swapped axes and sums: exact except for the rounding of their storage type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import pytest

from preheat import Array, Gpu, InputError
from preheat.kernels import axes
from tests.kernels.conftest import DTYPES, Exact, Operand, agree, exact, shifted

Random = Callable[..., Operand]
SHAPES = [(1, 1, 1), (5, 7, 3), (3, 1, 33), (2, 31, 8), (7, 2, 127), (3, 4, 64)]


def swapped(x: Exact) -> Exact:
    return x.transpose(1, 0, 2)


def swap(gpu: Gpu, x: Array, y: Array, scale: float, *, add: bool) -> None:
    """Swap the first two axes of `x` into `y`."""
    rows, columns, width = x.shape
    op = axes.swap_axes(rows, columns, width, x.dtype)
    op.launch(gpu, x, y, scale, rows, columns, width, add)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_change_places(
    device: Gpu, random: Random, dtype: str, shape: tuple[int, int, int]
) -> None:
    x, old = random(*shape, dtype=dtype), random(shape[1], shape[0], shape[2], dtype=dtype)
    y = device.empty(old.array.shape, dtype).fill(np.nan)
    swap(device, x.array, y, 0.75, add=False)
    agree(y, 0.75 * swapped(x.exact))
    swap(device, x.array, old.array, 0.75, add=True)
    wanted = old.exact + 0.75 * swapped(x.exact)
    agree(old.array, wanted, np.abs(old.exact) + np.abs(swapped(x.exact)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_changes_nothing(device: Gpu, random: Random, dtype: str) -> None:
    x = random(5, 3, 16, dtype=dtype)
    y = shifted(device, device.zeros((3, 5, 16), dtype))
    for source in (x.array, shifted(device, x.array)):
        swap(device, source, y, 1.0, add=False)
        assert np.array_equal(exact(y), swapped(x.exact))


def test_with_one_column_it_is_a_sum(device: Gpu, random: Random) -> None:
    x, y = random(9, 33), random(9, 33)
    axes.add(9, 33, "float32").launch(device, x.array, y.array, 1.0, 9, 1, 33, True)
    assert np.array_equal(exact(y.array), (x.exact + y.exact).astype("float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(open_device: Callable[..., Gpu], dtype: str) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**14, (4099, 32, 128), dtype="uint16")
    hosts = {"float32": bits.astype("float32"), "float16": bits.view("float16"), "bfloat16": bits}
    x = gpu.array(hosts[dtype], dtype)
    y = gpu.empty((32, 4099, 128), dtype)
    swap(gpu, x, y, 1.0, add=False)
    assert np.array_equal(exact(y), swapped(exact(x)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(axes.swap_axes, 0, 1, 1), "rows 0 is outside"),
        (partial(axes.swap_axes, 1, -1, 1), "columns -1 is outside"),
        (partial(axes.swap_axes, 1, 1, 2**31), "width 2147483648 is outside"),
        (partial(axes.swap_axes, 2**16, 2**15, 1), "rows 65536 by columns 32768 by width 1 is more"),
        (partial(axes.swap_axes, cast(int, np.int32(2**16)), 2**15, 1), "rows 65536 by columns 32768"),
        (partial(axes.add, 0, 5), "rows 0 is outside"),
        (partial(axes.add, 2**30, 2**30), "rows 1073741824 by width 1073741824 is more"),
    ],
)
def test_dimensions_that_cannot_be_are_named(make: Callable[[str], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make("float32")
