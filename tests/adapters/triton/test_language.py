"""What Triton makes of its operations computes on the emulator what NumPy computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton import language_kernels as kernels
from tests.adapters.triton.compiled import Launcher
from tests.adapters.triton.numbers import (
    DTYPES,
    PRECISION,
    Array,
    blocks,
    philox,
    to_bits,
    to_numbers,
    uniform,
    unwritten,
)

Generator = np.random.Generator
SIZES = (1, 31, 33, 128, 1009)
COLUMNS = (1, 31, 33, 251, 256)
ROWS = 3


def random_values(rng: Generator, kind: str, shape: int | tuple[int, ...], top: int = 1000) -> Array:
    """Return whole numbers up to `top` of either sign, or normal numbers, for a type of Triton."""
    if kind.startswith("u"):
        return rng.integers(0, top, shape).astype(DTYPES[kind])
    if kind.startswith("i"):
        return rng.integers(-top, top, shape).astype(DTYPES[kind])
    return to_bits(rng.integers(-64, 64, shape) / 16, kind)


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


# Gathers


@pytest.mark.parametrize("index_kind", ["i32", "i64"])
@pytest.mark.parametrize(("n", "width"), [(1, 1), (31, 33), (37, 64)])
def test_indirect_loads(launch: Launcher, rng: Generator, n: int, width: int, index_kind: str) -> None:
    table = rng.standard_normal((101, width)).astype("f4")
    index = rng.integers(0, 101, n).astype(DTYPES[index_kind])
    out = unwritten((n, width))
    grid = blocks(n, 16), blocks(width, 32)
    types = f"*fp32 *{index_kind} *fp32 i32 i32"
    launch(kernels.take_rows, types, grid, table, index, out, n, width, tall=16, wide=32)
    np.testing.assert_array_equal(out, table[index])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "i64"])
@pytest.mark.parametrize(("tall", "wide"), [(32, 16), (8, 64)])
def test_gather(launch: Launcher, rng: Generator, tall: int, wide: int, kind: str, axis: int) -> None:
    x = random_values(rng, kind, (tall, wide))
    index = rng.integers(0, (tall, wide)[axis], x.shape, "i4")
    out = unwritten(x.shape, x.dtype)
    types = f"*{kind} *i32 *{kind}"
    launch(kernels.gather_in_tile, types, 1, x, index, out, tall=tall, wide=wide, axis=axis)
    np.testing.assert_array_equal(out, np.take_along_axis(x, index, axis))


# Elements


@pytest.mark.parametrize("n", SIZES)
def test_where_and_masks(launch: Launcher, rng: Generator, n: int) -> None:
    """What is masked is neither read nor written."""
    x, y = (2 * rng.standard_normal((2, n))).astype("f4")
    low, high = np.float32(-0.75), np.float32(1.25)
    out = unwritten(n)
    types = "*fp32 *fp32 *fp32 i32 fp32 fp32"
    launch(kernels.choose, types, blocks(n, 128), x, y, out, n, low, high, block=128)
    b = np.where(x > low, y, np.float32(-7))
    expected = np.where(
        (x > low) & (x < high), x * b, np.where(x >= high, np.clip(x, low, high) - b, b)
    )
    written = np.arange(n) % 3 != 1
    np.testing.assert_allclose(out[written], expected[written], rtol=1e-6)
    assert np.isnan(out[~written]).all()


CONVERSIONS = [
    *(("fp32", to) for to in ("fp16", "bf16", "fp8e5", "i8", "i64")),
    *(("fp16", to) for to in ("fp32", "bf16", "i16")),
    *(("bf16", to) for to in ("fp32", "fp16", "i32")),
    *(("fp64", to) for to in ("fp32", "bf16")),
    *(("fp8e5", to) for to in ("fp32", "bf16")),
    *(("i8", to) for to in ("fp16", "bf16")),
    *(("fp8e4nv", to) for to in ("fp32", "fp16", "bf16")),
    *((of, "fp8e4nv") for of in ("fp32", "fp16", "bf16")),
    *(("u8", "bf16"), ("i32", "fp16"), ("i64", "fp32"), ("u32", "fp64"), ("i32", "i8")),
]


@pytest.mark.parametrize(("of", "to"), CONVERSIONS)
def test_conversions(launch: Launcher, rng: Generator, of: str, to: str) -> None:
    """A result is within half a unit in the last place."""
    n = 301
    signs = np.where(rng.random(n) < 0.5, -1, 1)
    if of[0] == "u":
        signs[:] = 1
    # Whole numbers that bytes have, or numbers that every format has without a subnormal.
    x = rng.integers(0, 128, n) * signs if of[0] in "iu" else rng.uniform(0.02, 127, n) * signs
    if of in PRECISION:
        digits = np.exp2(PRECISION[of] - 1 - np.floor(np.log2(np.abs(x))))
        x = np.trunc(x * digits) / digits
    stored = to_bits(x, of)
    np.testing.assert_array_equal(to_numbers(stored, of), x)
    out = unwritten(n, DTYPES[to])
    launch(kernels.convert, f"*{of} *{to} i32", blocks(n, 128), stored, out, n, block=128)
    if to in PRECISION:
        error = np.abs(to_numbers(out, to) - x)
        # A conversion in two steps rounds twice.
        assert (error <= 1.01 * np.abs(x) * 2.0 ** -PRECISION[to]).all()
    else:
        np.testing.assert_array_equal(out, np.trunc(x))


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("n", SIZES)
def test_arithmetic_in_the_type_of_the_operands(
    launch: Launcher, rng: Generator, n: int, kind: str
) -> None:
    x, y = (random_values(rng, kind, n) for _ in range(2))
    out = unwritten(n, x.dtype)
    types = f"fp32 *{kind} *{kind} *{kind} i32"
    launch(kernels.half_axpy, types, blocks(n, 128), 1.375, x, y, out, n, block=128)
    product, addend = 1.375 * to_numbers(x, kind), to_numbers(y, kind)
    error = np.abs(to_numbers(out, kind) - (product + addend))
    assert (error <= (np.abs(product) + np.abs(addend)) * 2.0 ** -PRECISION[kind] * 2).all()


@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("n", SIZES)
def test_integers(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    bits = 8 * DTYPES[kind].itemsize
    x = rng.integers(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), n).astype(DTYPES[kind])
    y = (rng.integers(1, 1000, n) * np.where(rng.random(n) < 0.5, -1, 1)).astype(DTYPES[kind])
    out = unwritten((5, n), x.dtype)
    launch(kernels.integers, f"*{kind} *{kind} *{kind} i32", blocks(n, 128), x, y, out, n, block=128)
    modulus = 2**bits
    for column, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        expected = [
            quotient,
            a - quotient * b,
            (a >> (b & 7)) ^ (a << 3) | ~b,
            (a % modulus) * (b % modulus) >> bits,
            min(a, b) - max(a, b) * abs(a),
        ]
        assert [int(v) % modulus for v in out[:, column]] == [v % modulus for v in expected]


@pytest.mark.parametrize("kind", ["fp32", "fp64"])
@pytest.mark.parametrize("n", SIZES)
def test_functions(launch: Launcher, rng: Generator, n: int, kind: str) -> None:
    x = rng.uniform(0.1, 6, n).astype(DTYPES[kind])
    out = unwritten((12, n), x.dtype)
    launch(kernels.functions, f"*{kind} *{kind} i32", blocks(n, 128), x, out, n, block=128)
    a = x.astype("f8")
    expected = [
        np.exp(-a),
        np.log(a),
        np.sin(a),
        np.cos(a),
        np.sqrt(a) + 1 / np.sqrt(a),
        np.vectorize(math.erf)(a),
        np.exp2(a) - np.log2(a),
        np.floor(a) - 2 * np.ceil(a),
        a * a - a,
        a / (1 + np.exp(-a)),
        np.tanh(a) + np.log1p(a),
        a**a + np.vectorize(math.lgamma)(a),
    ]
    tolerance = {"fp32": 4e-6, "fp64": 1e-13}[kind]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", SIZES)
def test_functions_that_are_rounded_to_nearest(launch: Launcher, rng: Generator, n: int) -> None:
    x, y = rng.uniform(1e-3, 1e3, (2, n)).astype("f4")
    out = unwritten((2, n))
    types = "*fp32 *fp32 *fp32 i32"
    launch(kernels.rounded_functions, types, blocks(n, 128), x, y, out, n, block=128)
    np.testing.assert_array_equal(out, [x / y, np.sqrt(x)])


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
@pytest.mark.parametrize("n", [1, 33, 1009])
def test_random_numbers(launch: Launcher, n: int, seed: int) -> None:
    words, normal = unwritten((4, n), "i4"), unwritten(n)
    launch(kernels.random_words, "*i32 i32 i32", blocks(n, 128), words, seed, n, block=128)
    a, b, c, d = philox(seed, np.arange(n))
    np.testing.assert_array_equal(words, [a, b, c, d])
    launch(kernels.normal_numbers, "*fp32 i32 i32", blocks(n, 128), normal, seed, n, block=128)
    radius = np.sqrt(-2 * np.log(np.maximum(uniform(a), 1e-7)))
    np.testing.assert_allclose(normal, radius * np.cos(2 * np.pi * uniform(b)), rtol=1e-5, atol=1e-5)


# Tiles


@pytest.mark.parametrize("kind", ["i8", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 33), (67, 101)])
def test_transpose(launch: Launcher, rng: Generator, rows: int, columns: int, kind: str) -> None:
    x = random_values(rng, kind, (rows, columns), top=100)
    out = unwritten((columns, rows), x.dtype)
    grid = blocks(rows, 32), blocks(columns, 32)
    types = f"*{kind} *{kind} i32 i32"
    launch(kernels.transpose, types, grid, x, out, rows, columns, tile=32)
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("shape", [(4, 8, 16), (32, 2, 8), (2, 2, 2)])
def test_permute(launch: Launcher, rng: Generator, shape: tuple[int, int, int]) -> None:
    x = rng.standard_normal(shape).astype("f4")
    out = unwritten((shape[2], shape[0], shape[1]))
    launch(kernels.permute, "*fp32 *fp32", 1, x, out, a=shape[0], b=shape[1], c=shape[2])
    np.testing.assert_array_equal(out, x.transpose(2, 0, 1))


@pytest.mark.parametrize("n", [2, 34, 1010])
def test_split_and_interleave(launch: Launcher, rng: Generator, n: int) -> None:
    x = random_values(rng, "fp16", n)
    out = unwritten(n, "f2")
    launch(kernels.swap_pairs, "*fp16 *fp16 i32", blocks(n, 128), x, out, n, block=128)
    np.testing.assert_array_equal(out, x.reshape(-1, 2)[:, ::-1].reshape(-1))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 33), (17, 101)])
def test_broadcast(launch: Launcher, rng: Generator, rows: int, columns: int) -> None:
    x, y = rng.standard_normal(rows).astype("f4"), rng.standard_normal(columns).astype("f4")
    out = unwritten((rows, columns))
    grid = blocks(rows, 16), blocks(columns, 32)
    types = "*fp32 *fp32 *fp32 i32 i32"
    launch(kernels.outer_sum, types, grid, x, y, out, rows, columns, tall=16, wide=32)
    np.testing.assert_array_equal(out, x[:, None] + y)


# Loops


@pytest.mark.parametrize("n", SIZES)
def test_a_loop_over_a_range(launch: Launcher, rng: Generator, n: int) -> None:
    x = rng.standard_normal((ROWS, n)).astype("f4")
    out = unwritten(ROWS, "f8")
    launch(kernels.sum_of_squares, "*fp32 *fp64 i32", ROWS, x, out, n, block=128)
    np.testing.assert_allclose(out, (x.astype("f8") ** 2).sum(1), rtol=1e-13)


def collatz_steps(value: int) -> int:
    steps = 0
    while value > 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        steps += 1
    return steps


@pytest.mark.parametrize("n", SIZES)
def test_a_loop_until_a_block_is_done(launch: Launcher, rng: Generator, n: int) -> None:
    x = rng.integers(1, 1000, n, "i4")
    out = unwritten(n, "i4")
    launch(kernels.collatz, "*i32 *i32 i32", blocks(n, 128), x, out, n, block=128)
    assert out.tolist() == [collatz_steps(value) for value in x.tolist()]


@pytest.mark.parametrize("kind", ["i32", "i64"])
def test_a_loop_of_scalars(launch: Launcher, rng: Generator, kind: str) -> None:
    x, y = rng.integers(1, 2**31 - 1, (2, 67)).astype(DTYPES[kind])
    y[3] = 0
    out = unwritten(67, x.dtype)
    launch(kernels.greatest_divisor, f"*{kind} *{kind} *{kind}", 67, x, y, out, aligned=False)
    np.testing.assert_array_equal(out, np.gcd(x, y))
