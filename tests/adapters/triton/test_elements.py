"""Gathers, functions, tiles and loops of Triton agree with NumPy on the emulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat import EmulatorFault
from tests.adapters.triton import element_kernels as kernels
from tests.adapters.triton.compiled import Launcher
from tests.adapters.triton.numbers import (
    DTYPES,
    PRECISION,
    blocks,
    philox,
    random_values,
    to_bits,
    to_numbers,
    uniform,
    unwritten,
)

Generator = np.random.Generator
SIZES = (1, 31, 33, 128, 1009)
ROWS = 3


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


@pytest.mark.parametrize("n", SIZES)
def test_cache_hints(launch: Launcher, rng: Generator, n: int) -> None:
    x, y = rng.standard_normal((2, n)).astype("f4")
    out = unwritten((3, n))
    types = "*fp32 *fp32 *fp32 i32"
    launch(kernels.with_cache_hints, types, blocks(n, 256), x, y, out, n, block=256)
    np.testing.assert_array_equal(out, [x + y, x - y, y - x])


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32", "fp64"])
def test_max_and_min_with_nan(launch: Launcher, rng: Generator, kind: str) -> None:
    n = 301
    a, b = (np.where(rng.random(n) < 0.3, np.nan, rng.integers(-64, 64, n) / 16) for _ in range(2))
    x, y = to_bits(a, kind), to_bits(b, kind)
    out = unwritten((4, n), x.dtype)
    types = f"*{kind} *{kind} *{kind} i32"
    launch(kernels.extremes_with_nan, types, blocks(n, 128), x, y, out, n, block=128)
    expected = [np.maximum(a, b), np.fmax(a, b), np.minimum(a, b), np.fmin(a, b)]
    np.testing.assert_array_equal(to_numbers(out, kind), expected)


@pytest.mark.parametrize("n", SIZES)
def test_inline_instructions_and_bits_of_floats(launch: Launcher, rng: Generator, n: int) -> None:
    x = rng.integers(-(2**31), 2**31, n).astype("i4")
    x[np.isnan(x.view("f4"))] = 1
    out = unwritten((2, n), "i4")
    launch(kernels.rotate_bits, "*i32 *i32 i32", blocks(n, 128), x, out, n, block=128)
    words = x.view("u4")
    np.testing.assert_array_equal(out.view("u4"), [words << 7 | words >> 25, words ^ 0x80000000])


def test_a_device_assertion_that_fails_is_a_fault(launch: Launcher) -> None:
    x = np.ones(300, "i4")
    arguments: dict[str, Any] = {"block": 128, "debug": True}
    launch(kernels.assert_positive, "*i32 i32", 3, x, 300, **arguments)
    x[200] = -1
    with pytest.raises(EmulatorFault, match="a number is not positive") as caught:
        launch(kernels.assert_positive, "*i32 i32", 3, x, 300, **arguments)
    assert caught.value.block == (1, 0, 0)


def test_device_print(launch: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    x = np.arange(64, dtype="i4") * 3
    launch(kernels.print_values, "*i32", 2, x, block=32, warps=1)
    printed = sorted(int(line.rpartition(" ")[2]) for line in capfd.readouterr().out.splitlines())
    assert printed == x.tolist()


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


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("n", SIZES)
def test_a_loop_in_stages(launch: Launcher, rng: Generator, n: int, stages: int) -> None:
    x = (8 * rng.standard_normal((ROWS, n))).astype("f4")
    out = unwritten(ROWS)
    launch(kernels.log_sum_exp, "*fp32 *fp32 i32", ROWS, x, out, n, block=128, stages=stages)
    expected = np.log2(np.exp2(x.astype("f8")).sum(1))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


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
