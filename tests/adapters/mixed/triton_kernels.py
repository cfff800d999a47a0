"""Triton functions of an application: a plain one, an autotuned one, and a matrix product."""

import triton
import triton.language as tl


@triton.jit
def scaled_sum(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    y = tl.load(y_ptr + at, mask=mask)
    tl.store(out_ptr + at, x + scale * y, mask=mask)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (4, 8)
    ],
    key=["n"],
)
@triton.jit
def gelu(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr + at, 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)), mask=mask)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, m, n, k, stride_am, stride_bk, stride_cm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        at = start + inner
        a_mask = (rows[:, None] < m) & (at[None, :] < k)
        a = tl.load(a_ptr + rows[:, None] * stride_am + at[None, :], mask=a_mask, other=0.0)
        b_mask = (at[:, None] < k) & (columns[None, :] < n)
        b = tl.load(b_ptr + at[:, None] * stride_bk + columns[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    c_mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_ptr + rows[:, None] * stride_cm + columns[None, :], total.to(tl.float16), mask=c_mask)
