"""Kernels for gathers, single elements, tiles and loops.

Triton compiles the source of these functions. They are never called as Python functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Gathers


@triton.jit
def take_rows(table, index, out, n, width, tall: tl.constexpr, wide: tl.constexpr):
    """Copy the rows of `table` that `index` names."""
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    place = tl.load(index + row, mask=row < n, other=0)
    inside = (row[:, None] < n) & (column[None, :] < width)
    value = tl.load(table + place[:, None] * width + column[None, :], mask=inside)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=inside)


@triton.jit
def gather_in_tile(x, index, out, tall: tl.constexpr, wide: tl.constexpr, axis: tl.constexpr):
    at = tl.arange(0, tall)[:, None] * wide + tl.arange(0, wide)[None, :]
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(index + at), axis))


# Elements


@triton.jit
def choose(x, y, out, n, low, high, block: tl.constexpr):
    """Choose by nested conditions."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(y + at, mask=inside & (a > low), other=-7.0)
    clamped = tl.clamp(a, low, high)
    chosen = tl.where((a > low) & (a < high), a * b, tl.where(a >= high, clamped - b, b))
    tl.store(out + at, chosen, mask=inside & (at % 3 != 1))


@triton.jit
def with_cache_hints(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, cache_modifier=".ca")
    b = tl.load(y + at, mask=inside, cache_modifier=".cg")
    tl.store(out + at, a + b, mask=inside, cache_modifier=".cs")
    a = tl.load(x + at, mask=inside, eviction_policy="evict_last")
    b = tl.load(y + at, mask=inside, eviction_policy="evict_first")
    tl.store(out + n + at, a - b, mask=inside, eviction_policy="evict_last")
    a = tl.load(x + at, mask=inside, volatile=True)
    b = tl.load(y + at, mask=inside, cache_modifier=".cv")
    tl.store(out + 2 * n + at, b - a, mask=inside, cache_modifier=".wt")


@triton.jit
def extremes_with_nan(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(y + at, mask=inside, other=0.0)
    keep: tl.constexpr = tl.PropagateNan.ALL
    drop: tl.constexpr = tl.PropagateNan.NONE
    tl.store(out + at, tl.maximum(a, b, propagate_nan=keep), mask=inside)
    tl.store(out + n + at, tl.maximum(a, b, propagate_nan=drop), mask=inside)
    tl.store(out + 2 * n + at, tl.minimum(a, b, propagate_nan=keep), mask=inside)
    tl.store(out + 3 * n + at, tl.minimum(a, b, propagate_nan=drop), mask=inside)


@triton.jit
def rotate_bits(x, out, n, block: tl.constexpr):
    """Rotate by an instruction that the kernel names itself, and change the sign as a float."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n, other=0)
    rotated = tl.inline_asm_elementwise(
        "shf.l.wrap.b32 $0, $1, $1, 7;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out + at, rotated, mask=at < n)
    negated = -value.to(tl.float32, bitcast=True)
    tl.store(out + n + at, negated.to(tl.int32, bitcast=True), mask=at < n)


@triton.jit
def assert_positive(x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.device_assert(tl.load(x + at, mask=at < n, other=1) > 0, "a number is not positive")


@triton.jit
def print_values(x, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.device_print("value", tl.load(x + at))


@triton.jit
def convert(x, out, n, block: tl.constexpr):
    """Convert to the type of `out`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def half_axpy(a, x, y, out, n, block: tl.constexpr):
    """Compute in the type of the operands."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0.0)
    tl.store(out + at, value * a.to(value.dtype) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def integers(x, y, out, n, block: tl.constexpr):
    """Store quotients, remainders, shifts, bits and high halves of products, each in a row of `out`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(y + at, mask=inside, other=1)
    tl.store(out + at, a // b, mask=inside)
    tl.store(out + n + at, a % b, mask=inside)
    tl.store(out + 2 * n + at, (a >> (b & 7)) ^ (a << 3) | ~b, mask=inside)
    tl.store(out + 3 * n + at, tl.umulhi(a, b), mask=inside)
    tl.store(out + 4 * n + at, tl.minimum(a, b) - tl.maximum(a, b) * tl.abs(a), mask=inside)


@triton.jit
def functions(x, out, n, block: tl.constexpr):
    """Store one function of positive numbers in each row of `out`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=1.0)
    tl.store(out + at, tl.exp(-a), mask=inside)
    tl.store(out + n + at, tl.log(a), mask=inside)
    tl.store(out + 2 * n + at, tl.sin(a), mask=inside)
    tl.store(out + 3 * n + at, tl.cos(a), mask=inside)
    tl.store(out + 4 * n + at, tl.sqrt(a) + tl.rsqrt(a), mask=inside)
    tl.store(out + 5 * n + at, tl.erf(a), mask=inside)
    tl.store(out + 6 * n + at, tl.exp2(a) - tl.log2(a), mask=inside)
    tl.store(out + 7 * n + at, tl.floor(a) - 2 * tl.ceil(a), mask=inside)
    tl.store(out + 8 * n + at, tl.fma(a, a, -a), mask=inside)
    tl.store(out + 9 * n + at, tl.sigmoid(a) * a, mask=inside)
    tl.store(out + 10 * n + at, libdevice.tanh(a) + libdevice.log1p(a), mask=inside)
    tl.store(out + 11 * n + at, libdevice.pow(a, a) + libdevice.lgamma(a), mask=inside)


@triton.jit
def rounded_functions(x, y, out, n, block: tl.constexpr):
    """Store a quotient and a square root that are rounded to nearest, each in a row of `out`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=1.0)
    b = tl.load(y + at, mask=inside, other=1.0)
    tl.store(out + at, tl.div_rn(a, b), mask=inside)
    tl.store(out + n + at, tl.sqrt_rn(a), mask=inside)


@triton.jit
def normal_numbers(out, seed, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.randn(seed, at), mask=at < n)


@triton.jit
def random_words(out, seed, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    a, b, c, d = tl.randint4x(seed, at)
    tl.store(out + at, a, mask=at < n)
    tl.store(out + n + at, b, mask=at < n)
    tl.store(out + 2 * n + at, c, mask=at < n)
    tl.store(out + 3 * n + at, d, mask=at < n)


# Tiles


@triton.jit
def transpose(x, out, rows, columns, tile: tl.constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    value = tl.load(
        x + row[:, None] * columns + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < columns),
    )
    tl.store(
        out + column[:, None] * rows + row[None, :],
        tl.trans(value),
        mask=(column[:, None] < columns) & (row[None, :] < rows),
    )


@triton.jit
def permute(x, out, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr):
    """Store the axes (0, 1, 2) of a tile as (2, 0, 1)."""
    tile = tl.reshape(tl.load(x + tl.arange(0, a * b * c)), (a, b, c))
    tl.store(out + tl.arange(0, a * b * c), tl.reshape(tl.permute(tile, (2, 0, 1)), (a * b * c,)))


@triton.jit
def swap_pairs(x, out, n, block: tl.constexpr):
    """Split neighbours, and interleave them the other way round."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n)
    left, right = tl.split(tl.reshape(value, (block // 2, 2)))
    tl.store(out + at, tl.interleave(right, left), mask=at < n)


@triton.jit
def outer_sum(x, y, out, rows, columns, tall: tl.constexpr, wide: tl.constexpr):
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    left = tl.load(x + row, mask=row < rows)
    right = tl.load(y + column, mask=column < columns)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(
        out + row[:, None] * columns + column[None, :], left[:, None] + right[None, :], mask=inside
    )


# Loops


@triton.jit
def sum_of_squares(x, out, n, block: tl.constexpr):
    """Sum the squares of a row in one program, a block at a time."""
    row = tl.program_id(0)
    sums = tl.zeros([block], dtype=tl.float64)
    for start in range(0, n, block):
        at = start + tl.arange(0, block)
        value = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float64)
        sums += value * value
    tl.store(out + row, tl.sum(sums, axis=0))


@triton.jit
def log_sum_exp(x, out, n, block: tl.constexpr, stages: tl.constexpr):
    """Compute log2(sum(2**x)) of a row, with the loads of later blocks in flight."""
    row = tl.program_id(0)
    top = tl.full([block], -1e30, dtype=tl.float32)
    sums = tl.zeros([block], dtype=tl.float32)
    for start in tl.range(0, n, block, num_stages=stages):
        at = start + tl.arange(0, block)
        value = tl.load(x + row * n + at, mask=at < n, other=-1e30)
        higher = tl.maximum(top, value)
        sums = sums * tl.exp2(top - higher) + tl.where(at < n, tl.exp2(value - higher), 0.0)
        top = higher
    highest = tl.max(top, axis=0)
    tl.store(out + row, highest + tl.log2(tl.sum(sums * tl.exp2(top - highest), axis=0)))


@triton.jit
def collatz(x, out, n, block: tl.constexpr):
    """Count the steps to 1; a block goes on until all its numbers are there."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n, other=1)
    steps = tl.zeros([block], dtype=tl.int32)
    while tl.max(value, axis=0) > 1:
        following = tl.where(value % 2 == 0, value // 2, 3 * value + 1)
        steps += tl.where(value > 1, 1, 0)
        value = tl.where(value > 1, following, 1)
    tl.store(out + at, steps, mask=at < n)


@triton.jit
def greatest_divisor(x, y, out):
    """Compute one greatest common divisor in each program, with scalars."""
    at = tl.program_id(0)
    a = tl.load(x + at)
    b = tl.load(y + at)
    while b != 0:
        a, b = b, a % b
    tl.store(out + at, a)
