"""Scans, reductions, sorting and atomic operations of Triton agree with NumPy on the emulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton import collective_kernels as kernels
from tests.adapters.triton.compiled import Launcher
from tests.adapters.triton.numbers import DTYPES, blocks, random_values, to_numbers, unwritten

Generator = np.random.Generator
SIZES = (1, 31, 33, 128, 1009)
COLUMNS = (1, 31, 33, 251, 256)
ROWS = 3


# Scans


@pytest.mark.parametrize(("kind", "reverse"), [("fp32", False), ("fp32", True), ("i64", False)])
@pytest.mark.parametrize("n", COLUMNS)
def test_cumsum(launch: Launcher, rng: Generator, n: int, kind: str, reverse: bool) -> None:
    x = random_values(rng, kind, (ROWS, n))
    out = unwritten(x.shape, x.dtype)
    types = f"*{kind} *{kind} i32"
    launch(kernels.running_sum, types, ROWS, x, out, n, block=256, reverse=reverse)
    order = slice(None, None, -1) if reverse else slice(None)
    expected = x.astype("f8")[:, order].cumsum(1)[:, order]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    assert out.dtype.kind == "f" or (out == expected).all()


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("n", COLUMNS)
def test_associative_scan_of_pairs(launch: Launcher, rng: Generator, n: int, warps: int) -> None:
    scale = rng.uniform(-1, 1, (ROWS, n)).astype("f4")
    shift = rng.standard_normal((ROWS, n)).astype("f4")
    out = unwritten(scale.shape)
    types = "*fp32 *fp32 *fp32 i32"
    launch(kernels.recurrence, types, ROWS, scale, shift, out, n, block=256, warps=warps)
    value = np.zeros(ROWS)
    for column in range(n):
        value = scale[:, column].astype("f8") * value + shift[:, column]
        np.testing.assert_allclose(out[:, column], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 3), (32, 16), (17, 13)])
def test_cumprod_along_the_first_axis(
    launch: Launcher, rng: Generator, rows: int, columns: int
) -> None:
    x = rng.uniform(0.8, 1.25, (rows, columns)).astype("f4")
    out = unwritten(x.shape)
    types = "*fp32 *fp32 i32 i32"
    launch(kernels.running_product_of_columns, types, 1, x, out, rows, columns, tall=32, wide=16)
    np.testing.assert_allclose(out, x.astype("f8").cumprod(0), rtol=1e-5)


# Reductions


@pytest.mark.parametrize(("kind", "warps"), [("fp32", 1), ("fp32", 8), ("i32", 4), ("fp64", 2)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 31), (7, 33), (9, 64)])
def test_reductions(
    launch: Launcher, rng: Generator, rows: int, columns: int, kind: str, warps: int
) -> None:
    """Few different values make ties, of which the first counts."""
    x = random_values(rng, kind, (rows, columns), top=8)
    sums, largest, smallest = (unwritten(rows, x.dtype) for _ in range(3))
    argmax, argmin = (unwritten(rows, "i4") for _ in range(2))
    types = f"*{kind} *{kind} *{kind} *{kind} *i32 *i32 i32 i32"
    outputs = (sums, largest, smallest, argmax, argmin)
    tile: dict[str, Any] = {"tall": 4, "wide": 64, "warps": warps}
    launch(kernels.reductions, types, blocks(rows, 4), x, *outputs, rows, columns, **tile)
    np.testing.assert_array_equal(sums, x.sum(1, "f8"))  # Sixteenths are added without an error.
    np.testing.assert_array_equal(largest, x.max(1))
    np.testing.assert_array_equal(smallest, x.min(1))
    np.testing.assert_array_equal(argmax, x.argmax(1))
    np.testing.assert_array_equal(argmin, x.argmin(1))


@pytest.mark.parametrize("kind", ["i8", "i32", "i64"])
@pytest.mark.parametrize("n", COLUMNS)
def test_xor_sum(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    limits = np.iinfo(DTYPES[kind])
    x = rng.integers(limits.min, limits.max, (ROWS, n), DTYPES[kind], endpoint=True)
    out = unwritten(ROWS, x.dtype)
    launch(kernels.xor_of_rows, f"*{kind} *{kind} i32", ROWS, x, out, n, block=256)
    np.testing.assert_array_equal(out, np.bitwise_xor.reduce(x, 1))


@pytest.mark.parametrize("n", COLUMNS)
def test_reduce_with_a_function_of_its_own(launch: Launcher, rng: Generator, n: int) -> None:
    x = rng.standard_normal((ROWS, n)).astype("f4")
    out = unwritten(ROWS)
    launch(kernels.largest_magnitude, "*fp32 *fp32 i32", ROWS, x, out, n, block=256)
    np.testing.assert_array_equal(out, x[np.arange(ROWS), np.abs(x).argmax(1)])


@pytest.mark.parametrize("n", COLUMNS)
def test_reduce_of_three_values(launch: Launcher, rng: Generator, n: int) -> None:
    x = (rng.standard_normal((ROWS, n)) + 3).astype("f4")
    mean, variance = unwritten(ROWS), unwritten(ROWS)
    types = "*fp32 *fp32 *fp32 i32"
    launch(kernels.moments, types, ROWS, x, mean, variance, n, block=256)
    np.testing.assert_allclose(mean, x.mean(1, "f8"), rtol=1e-5)
    np.testing.assert_allclose(variance, x.var(1, "f8"), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 33), (17, 191)])
def test_sums_of_a_grid_with_three_axes(
    launch: Launcher, rng: Generator, rows: int, columns: int
) -> None:
    x = random_values(rng, "i32", (rows, columns))
    out = np.zeros(rows, "i4")
    grid = blocks(rows, 16), 3, 2
    types = "*i32 *i32 i32 i32"
    launch(kernels.reduce_in_blocks, types, grid, x, out, rows, columns, tall=16, wide=32)
    np.testing.assert_array_equal(out, x.sum(1))


# Order


@pytest.mark.parametrize(("kind", "descending"), [("fp32", False), ("i32", True)])
@pytest.mark.parametrize("n", [1, 31, 33, 127, 128])
def test_sort(launch: Launcher, rng: Generator, n: int, kind: str, descending: bool) -> None:
    x = random_values(rng, kind, (ROWS, n))
    out = unwritten(x.shape, x.dtype)
    types = f"*{kind} *{kind} i32"
    launch(kernels.sort_rows, types, ROWS, x, out, n, block=128, descending=descending)
    expected = np.sort(x, 1)
    np.testing.assert_array_equal(out, expected[:, ::-1] if descending else expected)


@pytest.mark.parametrize("n", [8, 31, 127])
def test_topk(launch: Launcher, rng: Generator, n: int) -> None:
    x = rng.standard_normal((ROWS, n)).astype("f4")
    out = unwritten((ROWS, 8))
    launch(kernels.topk_rows, "*fp32 *fp32 i32", ROWS, x, out, n, k=8, block=128)
    np.testing.assert_array_equal(out, np.sort(x, 1)[:, :-9:-1])


@pytest.mark.parametrize("kind", ["i8", "fp16", "fp64"])
def test_flip(launch: Launcher, rng: Generator, kind: str) -> None:
    x = random_values(rng, kind, (ROWS, 64), top=100)
    out = unwritten(x.shape, x.dtype)
    launch(kernels.flip_rows, f"*{kind} *{kind}", ROWS, x, out, block=64)
    np.testing.assert_array_equal(out, x[:, ::-1])


@pytest.mark.parametrize("n", SIZES)
def test_histogram(launch: Launcher, rng: Generator, n: int) -> None:
    x = (rng.random(n) ** 2 * 64).astype("i4")
    out = np.zeros(64, "i4")
    launch(kernels.histogram, "*i32 *i32 i32", blocks(n, 256), x, out, n, bins=64, block=256)
    np.testing.assert_array_equal(out, np.bincount(x, minlength=64))


# Atomic operations


@pytest.mark.parametrize("kind", ["i32", "i64", "fp32", "fp64", "fp16"])
@pytest.mark.parametrize("n", SIZES)
def test_atomic_add(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    index, x = rng.integers(0, 37, n, "i4"), random_values(rng, kind, n)
    out = np.zeros(37, x.dtype)
    launch(
        kernels.scatter_add, f"*i32 *{kind} *{kind} i32", blocks(n, 128), index, x, out, n, block=128
    )
    expected = np.zeros(37)
    np.add.at(expected, index, x.astype("f8"))
    np.testing.assert_array_equal(out, expected)  # Sixteenths are added without an error.


@pytest.mark.parametrize("n", SIZES)
def test_atomic_add_of_bfloat16(launch: Launcher, rng: Generator, n: int) -> None:
    index, x = np.arange(n, dtype="i4") % 509, random_values(rng, "bf16", n)
    out = np.zeros(509, "u2")
    launch(kernels.scatter_add, "*i32 *bf16 *bf16 i32", blocks(n, 128), index, x, out, n, block=128)
    expected = np.zeros(509)
    np.add.at(expected, index, to_numbers(x, "bf16"))
    np.testing.assert_array_equal(to_numbers(out, "bf16"), expected)


@pytest.mark.parametrize("kind", ["i32", "u32", "i64", "u64", "fp32"])
@pytest.mark.parametrize("n", SIZES)
def test_atomic_max_and_min(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    index, x = rng.integers(0, 37, n, "i4"), random_values(rng, kind, n)
    largest = np.full(37, 3, x.dtype)
    smallest = largest.copy()
    expected = largest.copy(), smallest.copy()
    types = f"*i32 *{kind} *{kind} *{kind} i32"
    grid = blocks(n, 128)
    launch(kernels.scatter_extremes, types, grid, index, x, largest, smallest, n, block=128)
    np.maximum.at(expected[0], index, x)
    np.minimum.at(expected[1], index, x)
    np.testing.assert_array_equal(largest, expected[0])
    np.testing.assert_array_equal(smallest, expected[1])


@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("n", SIZES)
def test_atomic_and_or_xor(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    index, x = rng.integers(0, 37, n, "i4"), rng.integers(-(2**31), 2**31, n).astype(DTYPES[kind])
    ands, ors, xors = rng.integers(-(2**31), 2**31, (3, 37)).astype(x.dtype)
    expected = ands.copy(), ors.copy(), xors.copy()
    types = f"*i32 *{kind} *{kind} *{kind} *{kind} i32"
    outputs: dict[str, Any] = {"block": 128, "aligned": False}
    launch(kernels.scatter_bits, types, blocks(n, 128), index, x, ands, ors, xors, n, **outputs)
    for operation, want, got in zip(
        (np.bitwise_and, np.bitwise_or, np.bitwise_xor), expected, (ands, ors, xors), strict=True
    ):
        operation.at(want, index, x)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("programs", [1, 31, 67])
def test_atomic_cas(launch: Launcher, rng: Generator, programs: int, kind: str) -> None:
    """Programs multiply one number, and try again where another one was faster."""
    factors = (2 * rng.integers(-500, 500, programs) + 1).astype(DTYPES[kind])
    total = np.ones(1, factors.dtype)
    launch(kernels.multiply_by_cas, f"*{kind} *{kind}", programs, total, factors)
    bits = 8 * total.itemsize
    assert int(total[0]) % 2**bits == math.prod(factors.tolist()) % 2**bits


@pytest.mark.parametrize("programs", [1, 31, 67])
def test_atomic_tickets(launch: Launcher, programs: int) -> None:
    counter, out = np.zeros(1, "i4"), unwritten((programs, 32), "i4")
    launch(kernels.tickets, "*i32 *i32", programs, counter, out, block=32)
    assert counter[0] == programs
    assert (out == out[:, :1]).all()
    assert sorted(out[:, 0]) == list(range(programs))


def test_atomic_operations_of_every_order_and_scope(launch: Launcher, rng: Generator) -> None:
    x, cells = rng.integers(-9, 9, (2, 128), "i4")
    expected = cells.copy()
    seen = unwritten((4, 128), "i4")
    launch(kernels.ordered_updates, "*i32 *i32 *i32", 1, x, cells, seen, block=128)
    for at, value in enumerate(x.tolist()):
        first = int(expected[at])
        second = first + value
        third = max(second, value)
        fourth = second - value
        assert seen[:, at].tolist() == [first, second, third, fourth]
        expected[at] = value + 1 if fourth == value else fourth
    np.testing.assert_array_equal(cells, expected)
