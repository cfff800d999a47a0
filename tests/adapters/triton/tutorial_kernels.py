"""Kernels that compute what the tutorials of Triton compute, as far as they need no matrix product.

Triton compiles the source of these functions. They are never called as Python functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def add(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def add_dependent(x, y, out, n, block: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start early."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.extra.cuda.gdc_wait()
    a = tl.load(x + at, mask=inside)
    b = tl.load(y + at, mask=inside)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, a + b, mask=inside)


@triton.jit
def softmax(x, out, rows, columns, block: tl.constexpr, stages: tl.constexpr):
    """Each program computes every `num_programs`-th row, with loads of later rows in flight."""
    column = tl.arange(0, block)
    inside = column < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=stages):
        values = tl.load(x + row * columns + column, mask=inside, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, axis=0))
        tl.store(out + row * columns + column, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def dropout(x, keep, out, n, p, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    kept = tl.load(keep + at, mask=inside)
    tl.store(out + at, tl.where(kept, value / (1 - p), 0.0), mask=inside)


@triton.jit
def seeded_dropout(x, out, n, p, seed, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    kept = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(kept, value / (1 - p), 0.0), mask=inside)


@triton.jit
def layer_norm(x, weight, bias, out, means, inverse_deviations, columns, eps, block: tl.constexpr):
    """Normalise one row in each program, a block of columns at a time."""
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    sums = tl.zeros([block], dtype=tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        sums += tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / columns
    squares = tl.zeros([block], dtype=tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        centred = tl.where(at < columns, value - mean, 0.0)
        squares += centred * centred
    inverse_deviation = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(inverse_deviations + row, inverse_deviation)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        inside = at < columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + at, mask=inside)
        shift = tl.load(bias + at, mask=inside)
        tl.store(out + at, (value - mean) * inverse_deviation * scale + shift, mask=inside)


@triton.jit
def layer_norm_backward(
    dx,
    dy,
    dweight,
    dbias,
    x,
    weight,
    means,
    inverse_deviations,
    locks,
    columns,
    groups: tl.constexpr,
    block: tl.constexpr,
):
    """Compute dx of one row, and add its part of dweight and dbias to that of its group under a lock.

    `locks` has a lock for each group, and then a flag whether the group has sums to add to.
    """
    row = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0).to(tl.float32)
    slope = tl.load(dy + row * columns + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    inverse_deviation = tl.load(inverse_deviations + row)
    normal = tl.where(inside, (value - tl.load(means + row)) * inverse_deviation, 0.0)
    scaled = scale * slope
    along = tl.sum(normal * scaled, axis=0) / columns
    level = tl.sum(scaled, axis=0) / columns
    tl.store(
        dx + row * columns + at, (scaled - (normal * along + level)) * inverse_deviation, mask=inside
    )
    group = row % groups
    part_of_weight = slope * normal
    part_of_bias = slope
    group_weight = dweight + group * columns + at
    group_bias = dbias + group * columns + at
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    if tl.load(locks + groups + group) == 0:
        tl.atomic_xchg(locks + groups + group, 1)
    else:
        part_of_weight += tl.load(group_weight, mask=inside)
        part_of_bias += tl.load(group_bias, mask=inside)
    tl.store(group_weight, part_of_weight, mask=inside)
    tl.store(group_bias, part_of_bias, mask=inside)
    tl.debug_barrier()  # All threads of the program have stored before the lock is free.
    tl.atomic_xchg(locks + group, 0)


@triton.jit
def sum_of_groups(parts, out, rows, columns, tall: tl.constexpr, wide: tl.constexpr):
    """Sum the columns of a matrix, a tile of `tall` x `wide` at a time."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    sums = tl.zeros((tall, wide), dtype=tl.float32)
    for start in range(0, rows, tall):
        row = start + tl.arange(0, tall)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        sums += tl.load(parts + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(sums, axis=0), mask=column < columns)


@triton.jit
def row_products(a, b, out, rows, width: tl.constexpr, block: tl.constexpr):
    """Compute sum(a * b) of each row, as attention does before its backward pass."""
    head = tl.program_id(1)
    row = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    inside = row < rows
    at = (head * rows + row[:, None]) * width + column[None, :]
    left = tl.load(a + at, mask=inside[:, None], other=0.0)
    right = tl.load(b + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(out + head * rows + row, tl.sum(left * right, axis=1), mask=inside)


@triton.jit
def arcsine(x, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(out + at, libdevice.asin(tl.load(x + at, mask=inside)), mask=inside)
