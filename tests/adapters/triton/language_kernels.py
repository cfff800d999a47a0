"""Kernels for the operations of Triton's language: scans, reductions, sorting, atomics and more.

Triton compiles the source of these functions. They are never called as Python functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Scans


@triton.jit
def running_sum(x, out, n, block: tl.constexpr, reverse: tl.constexpr):
    """Scan the rows of a matrix with `n` columns, one row in each program."""
    at = tl.arange(0, block)
    row = tl.program_id(0) * n
    value = tl.load(x + row + at, mask=at < n, other=0)
    tl.store(out + row + at, tl.cumsum(value, axis=0, reverse=reverse), mask=at < n)


@triton.jit
def compose(scale, shift, next_scale, next_shift):
    """Compose two functions `a * x + b`."""
    return scale * next_scale, next_scale * shift + next_shift


@triton.jit
def recurrence(scale, shift, out, n, block: tl.constexpr):
    """Compute h[i] = scale[i] * h[i - 1] + shift[i]."""
    at = tl.arange(0, block)
    row = tl.program_id(0) * n
    a = tl.load(scale + row + at, mask=at < n, other=1.0)
    b = tl.load(shift + row + at, mask=at < n, other=0.0)
    _, h = tl.associative_scan((a, b), 0, compose)
    tl.store(out + row + at, h, mask=at < n)


@triton.jit
def running_product_of_columns(x, out, rows, columns, tall: tl.constexpr, wide: tl.constexpr):
    row = tl.arange(0, tall)[:, None]
    column = tl.arange(0, wide)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * columns + column, mask=inside, other=1.0)
    tl.store(out + row * columns + column, tl.cumprod(value, axis=0), mask=inside)


# Reductions


@triton.jit
def reductions(
    x, sums, largest, smallest, argmax, argmin, rows, columns, tall: tl.constexpr, wide: tl.constexpr
):
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    column = tl.arange(0, wide)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    tl.store(sums + row, tl.sum(tl.load(x + at, mask=inside, other=0), axis=1), mask=row < rows)
    high = tl.load(x + at, mask=inside, other=-100000)
    low = tl.load(x + at, mask=inside, other=100000)
    tl.store(largest + row, tl.max(high, axis=1), mask=row < rows)
    tl.store(smallest + row, tl.min(low, axis=1), mask=row < rows)
    tl.store(argmax + row, tl.argmax(high, axis=1), mask=row < rows)
    tl.store(argmin + row, tl.argmin(low, axis=1), mask=row < rows)


@triton.jit
def xor_of_rows(x, out, n, block: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.program_id(0)
    value = tl.load(x + row * n + at, mask=at < n, other=0)
    tl.store(out + row, tl.xor_sum(value, axis=0))


@triton.jit
def larger_magnitude(a, b):
    return tl.where(tl.abs(a) >= tl.abs(b), a, b)


@triton.jit
def largest_magnitude(x, out, n, block: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.program_id(0)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(out + row, tl.reduce(value, 0, larger_magnitude))


# Order


@triton.jit
def sort_rows(x, out, n, block: tl.constexpr, descending: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.program_id(0) * n
    absent: tl.constexpr = -100000 if descending else 100000
    value = tl.load(x + row + at, mask=at < n, other=absent)
    tl.store(out + row + at, tl.sort(value, descending=descending), mask=at < n)


@triton.jit
def topk_rows(x, out, n, k: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    value = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=-float("inf"))
    tl.store(out + tl.program_id(0) * k + tl.arange(0, k), tl.topk(value, k))


@triton.jit
def flip_rows(x, out, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.flip(tl.load(x + at), 0))


@triton.jit
def histogram(x, out, n, bins: tl.constexpr, block: tl.constexpr):
    """Add the histogram of each block to `out`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    counts = tl.histogram(tl.load(x + at, mask=inside, other=0), bins, mask=inside)
    tl.atomic_add(out + tl.arange(0, bins), counts)


# Atomic operations


@triton.jit
def scatter_add(index, x, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    place = tl.load(index + at, mask=inside, other=0)
    tl.atomic_add(out + place, tl.load(x + at, mask=inside, other=0), mask=inside)


@triton.jit
def scatter_extremes(index, x, largest, smallest, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    place = tl.load(index + at, mask=inside, other=0)
    value = tl.load(x + at, mask=inside, other=0)
    tl.atomic_max(largest + place, value, mask=inside)
    tl.atomic_min(smallest + place, value, mask=inside)


@triton.jit
def scatter_bits(index, x, ands, ors, xors, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    place = tl.load(index + at, mask=inside, other=0)
    value = tl.load(x + at, mask=inside, other=0)
    tl.atomic_and(ands + place, value, mask=inside)
    tl.atomic_or(ors + place, value, mask=inside)
    tl.atomic_xor(xors + place, value, mask=inside)


@triton.jit
def multiply_by_cas(total, factors):
    """Multiply `total` by the factor of this program, whatever other programs do meanwhile."""
    factor = tl.load(factors + tl.program_id(0))
    seen = tl.load(total, volatile=True)
    written = tl.atomic_cas(total, seen, seen * factor)
    while written != seen:
        seen = written
        written = tl.atomic_cas(total, seen, seen * factor)


@triton.jit
def tickets(counter, out, block: tl.constexpr):
    """Draw a number for each program and store its number of the program there."""
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.store(out + ticket * block + tl.arange(0, block), tl.program_id(0))


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


@triton.jit
def reduce_in_blocks(x, out, rows, inner, tall: tl.constexpr, wide: tl.constexpr):
    """Sum a matrix over its columns in a grid of three axes, adding what other programs sum."""
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    part = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    column = part * wide + tl.arange(0, wide)
    inside = (row[:, None] < rows) & (column[None, :] < inner)
    value = tl.load(x + row[:, None] * inner + column[None, :], mask=inside, other=0)
    tl.atomic_add(out + row, tl.sum(value, axis=1), mask=row < rows)
