"""A matrix product, a softmax and a layer norm, as the tutorials of Triton write them."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a, b, c, rows, columns, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, inner, BK):
        k = start + tl.arange(0, BK)
        left_inside = (row[:, None] < rows) & (k[None, :] < inner)
        right_inside = (k[:, None] < inner) & (column[None, :] < columns)
        left = tl.load(a + row[:, None] * inner + k[None, :], mask=left_inside, other=0.0)
        right = tl.load(b + k[:, None] * columns + column[None, :], mask=right_inside, other=0.0)
        total = tl.dot(left, right, total)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(c + row[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    values = tl.load(x + at, mask=inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + at, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def layer_norm(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    inside = column < columns
    values = tl.load(x + at, mask=inside, other=0.0)
    mean = tl.sum(values, axis=0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    normal = centred * scale * tl.load(weight + column, mask=inside)
    tl.store(out + at, normal + tl.load(bias + column, mask=inside), mask=inside)
