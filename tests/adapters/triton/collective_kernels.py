"""Kernels in whose operations elements meet: scans, reductions, sorting and atomic operations.

Triton compiles the source of these functions. They are never called as Python functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit
def join_moments(mean, squares, count, other_mean, other_squares, other_count):
    """Join the means and the sums of squared deviations of two samples (Welford, Chan)."""
    total = count + other_count
    share = tl.where(total == 0, 0.0, other_count / total)
    delta = other_mean - mean
    return mean + delta * share, squares + other_squares + delta * delta * count * share, total


@triton.jit
def moments(x, means, variances, n, block: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.program_id(0)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0)
    count = (at < n).to(tl.float32)
    mean, squares, total = tl.reduce((value, tl.zeros_like(value), count), 0, join_moments)
    tl.store(means + row, mean)
    tl.store(variances + row, squares / total)


@triton.jit
def reduce_in_blocks(x, out, rows, inner, tall: tl.constexpr, wide: tl.constexpr):
    """Sum a matrix over its columns in a grid of three axes, adding what other programs sum."""
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    part = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    column = part * wide + tl.arange(0, wide)
    inside = (row[:, None] < rows) & (column[None, :] < inner)
    value = tl.load(x + row[:, None] * inner + column[None, :], mask=inside, other=0)
    tl.atomic_add(out + row, tl.sum(value, axis=1), mask=row < rows)


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


@triton.jit
def ordered_updates(x, cells, seen, block: tl.constexpr):
    """Update each cell in four ways, and store what each of them returns in a row of `seen`."""
    at = tl.arange(0, block)
    value = tl.load(x + at)
    old = tl.atomic_add(cells + at, value, sem="relaxed", scope="cta")
    tl.store(seen + at, old)
    old = tl.atomic_max(cells + at, value, sem="release", scope="gpu")
    tl.store(seen + block + at, old)
    old = tl.atomic_xchg(cells + at, old - value, sem="acquire", scope="sys")
    tl.store(seen + 2 * block + at, old)
    old = tl.atomic_cas(cells + at, value, value + 1, sem="acq_rel", scope="gpu")
    tl.store(seen + 3 * block + at, old)
