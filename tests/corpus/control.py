"""Control flow: jump tables, nested divergence, early exits, loops that end by their data, calls."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.random import Generator

from tests.corpus.case import (
    Launch,
    below,
    blocks,
    kernel,
    normal,
    uniform,
    updates,
    wide,
    words,
    writes,
)


@kernel(
    """
    extern "C" __global__ void opcode_switch(const int* op, const int* a, const int* b, int* out,
                                             int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int x = a[i], y = b[i], r;
        switch (op[i]) {
            case 0: r = x + y; break;
            case 1: r = x - y; break;
            case 2: r = x * y; break;
            case 3: r = x & y; break;
            case 4: r = x ^ y; break;
            case 5: r = min(x, y); break;
            case 6: r = x << (y & 15); break;
            case 7: for (r = 0; x > 0; x >>= 1) r += y; break;
            case 8:
            case 9: out[i] = abs(y); return;
            default: r = -1;
        }
        out[i] = r;
    }
    """,
    sizes=(1, 33, 1000),
)
def opcode_switch(rng: Generator, n: int) -> Launch:
    op, x, y = below(rng, -1, 12, n), below(rng, -9999, 9999, n), below(rng, -9999, 9999, n)
    rounds = np.array([max(int(v), 0).bit_length() for v in x])
    by_op = [
        *(x + y, x - y, x * y, x & y, x ^ y, np.minimum(x, y)),
        *(x << (y & 15), rounds * y, np.abs(y), np.abs(y)),
    ]
    known = (op >= 0) & (op < 10)
    out = np.where(known, np.choose(np.clip(op, 0, 9), by_op), -1)
    return Launch(blocks(n, 128), 128, (op, x, y, writes(out, "int32"), n))


@kernel(
    """
    .version 8.0
    .target sm_80
    .address_size 64

    .visible .entry jump_table(.param .u64 op, .param .u64 x, .param .u32 n)
    {
        .reg .pred %p<3>;
        .reg .b32 %r<9>;
        .reg .b64 %rd<7>;

        ld.param.u64 %rd1, [op];
        ld.param.u64 %rd2, [x];
        ld.param.u32 %r1, [n];
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %ntid.x;
        mov.u32 %r4, %tid.x;
        mad.lo.s32 %r5, %r2, %r3, %r4;
        setp.ge.s32 %p1, %r5, %r1;
        @%p1 bra DONE;
        cvta.to.global.u64 %rd3, %rd1;
        cvta.to.global.u64 %rd4, %rd2;
        mul.wide.s32 %rd5, %r5, 4;
        add.s64 %rd3, %rd3, %rd5;
        add.s64 %rd4, %rd4, %rd5;
        ld.global.u32 %r6, [%rd3];
        ld.global.u32 %r7, [%rd4];
        setp.gt.u32 %p2, %r6, 3;
        @%p2 bra STORE;
    TABLE: .branchtargets DOUBLE, NEGATE, STORE, SQUARE;
        brx.idx %r6, TABLE;
    SQUARE:
        mul.lo.s32 %r7, %r7, %r7;  // falls through
    NEGATE:
        neg.s32 %r7, %r7;
        bra.uni STORE;
    DOUBLE:
        shl.b32 %r7, %r7, 1;
    STORE:
        st.global.u32 [%rd4], %r7;
    DONE:
        ret;
    }
    """,
    sizes=(1, 33, 500),
)
def jump_table(rng: Generator, n: int) -> Launch:
    op = below(rng, -1, 6, n)
    x = words(rng, n)
    after = np.choose(np.clip(op, -1, 4) + 1, [x, x << 1, -x, x, -(x * x), x])
    return Launch(blocks(n, 64), 64, (op, updates(x, after), n))


@kernel(
    """
    extern "C" __global__ void nested_divergence(const int* x, int* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int v = x[i], r = 0;
        if (v % 2) {
            if (v % 3) {
                for (int k = 0; k < v % 7; k++) {
                    if (k == 3) continue;
                    if (r > 40) break;
                    r += k * 5 + 1;
                }
            } else if (v > 50) {
                r = -v;
            } else {
                do { r += 3; } while (r < v);
            }
        } else {
            r = v % 4 ? 100 + v : 200 - v;
            if (threadIdx.x % 5 == 0) r *= 2;
        }
        out[i] = r + blockIdx.x;
    }
    """,
    sizes=(1, 33, 1000),
)
def nested_divergence(rng: Generator, n: int) -> Launch:
    x = below(rng, 1, 100, n)

    def one(i: int, v: int) -> int:
        r = 0
        if v % 2 and v % 3:
            for k in range(v % 7):
                if k == 3:
                    continue
                if r > 40:
                    break
                r += k * 5 + 1
        elif v % 2:
            r = -v if v > 50 else max(-(-v // 3) * 3, 3)
        else:
            r = (100 + v if v % 4 else 200 - v) * (2 if i % 64 % 5 == 0 else 1)
        return r + i // 64

    out = np.array([one(i, int(v)) for i, v in enumerate(x)], np.int32)
    return Launch(blocks(n, 64), 64, (x, writes(out), n))


@kernel(
    """
    extern "C" __global__ void first_above(const float* rows, int width, float limit, int* where,
                                           int n) {
        int row = blockIdx.x * blockDim.x + threadIdx.x;
        if (row >= n) return;
        const float* r = rows + (size_t)row * width;
        for (int c = 0; c < width; c++)
            if (r[c] > limit) {
                where[row] = c;
                return;
            }
        where[row] = -1;
    }
    """,
    sizes=(1, 33, 200),
)
def first_above(rng: Generator, n: int) -> Launch:
    rows = normal(rng, n, 23)
    over = rows > 1.75
    where = np.where(over.any(1), over.argmax(1), -1)
    return Launch(blocks(n, 64), 64, (rows, 23, 1.75, writes(where, "int32"), n))


@kernel(
    """
    extern "C" __global__ void early_exit_before_barriers(const int* x, int* out, int n) {
        __shared__ int seen[64];
        int first = blockIdx.x * 64;
        if (first >= n) return;  // whole blocks leave
        int i = first + threadIdx.x;
        seen[threadIdx.x] = i < n ? x[i] : 0;
        __syncthreads();
        if (i >= n) return;
        out[i] = seen[63 - threadIdx.x] - seen[threadIdx.x];
    }
    """,
    sizes=(1, 33, 127),
)
def early_exit_before_barriers(rng: Generator, n: int) -> Launch:
    x = below(rng, 1, 1000, n)
    padded = np.pad(x, (0, -n % 64)).reshape(-1, 64)
    out = (padded[:, ::-1] - padded).ravel()[:n]
    return Launch(blocks(n, 64) + 2, 64, (x, writes(out), n))


@kernel(
    """
    extern "C" __global__ void mandelbrot(int* counts, int width, int height, float x0, float y0,
                                          float step, int limit) {
        int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
        if (px >= width || py >= height) return;
        float cx = __fadd_rn(x0, __fmul_rn(px, step)), cy = __fadd_rn(y0, __fmul_rn(py, step));
        float x = 0, y = 0;
        int k = 0;
        while (k < limit) {
            float xx = __fmul_rn(x, x), yy = __fmul_rn(y, y);
            if (__fadd_rn(xx, yy) > 4.0f) break;
            y = __fadd_rn(__fmul_rn(__fmul_rn(2.0f, x), y), cy);
            x = __fadd_rn(__fsub_rn(xx, yy), cx);
            k++;
        }
        counts[py * width + px] = k;
    }
    """,
    sizes=(1, 17, 37),
)
def mandelbrot(rng: Generator, n: int) -> Launch:
    width, height, limit = n, n // 2 + 1, 40
    x0, y0 = np.float32(-2 + rng.uniform(0, 0.1)), np.float32(-1 + rng.uniform(0, 0.1))
    step = np.float32(3 / n)
    cx = (x0 + np.arange(width, dtype=np.float32) * step)[None, :]
    cy = (y0 + np.arange(height, dtype=np.float32) * step)[:, None]
    x, y = np.zeros((2, height, width), np.float32)
    counts = np.zeros((height, width), np.int32)
    inside = np.ones((height, width), bool)
    for _ in range(limit):
        inside &= x * x + y * y <= 4
        counts += inside
        x, y = np.where(inside, x * x - y * y + cx, x), np.where(inside, 2 * x * y + cy, y)
    args = writes(counts), width, height, float(x0), float(y0), float(step), limit
    return Launch((blocks(width, 8), blocks(height, 8)), (8, 8), args)


@kernel(
    """
    extern "C" __global__ void lower_bound(const double* sorted, int m, const double* needles,
                                           int* where, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int low = 0, high = m;
        while (low < high) {
            int middle = low + (high - low) / 2;
            if (sorted[middle] < needles[i]) low = middle + 1;
            else high = middle;
        }
        where[i] = low;
    }
    """,
    sizes=(1, 33, 500),
)
def lower_bound(rng: Generator, n: int) -> Launch:
    values = np.sort(rng.standard_normal(101))
    needles = rng.choice(np.concatenate([values, rng.standard_normal(101)]), n)
    where = np.searchsorted(values, needles).astype(np.int32)
    return Launch(blocks(n, 128), 128, (values, 101, needles, writes(where), n))


@kernel(
    """
    __device__ __noinline__ float horner(const float* c, int degree, float x) {
        float y = c[degree];
        while (--degree >= 0) y = fmaf(y, x, c[degree]);
        return y;
    }

    __device__ __noinline__ void order(float& a, float& b) {
        if (a > b) { float t = a; a = b; b = t; }
    }

    extern "C" __global__ void noinline_calls(const float* c, const float* x, float* low, float* high,
                                              int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float a = horner(c, 4, x[i]), b = horner(c + 1, i % 4, x[i]);
        order(a, b);
        low[i] = a;
        high[i] = b;
    }
    """,
    sizes=(1, 33, 300),
    rtol=1e-6,
    atol=1e-6,
)
def noinline_calls(rng: Generator, n: int) -> Launch:
    c, x = normal(rng, 5), normal(rng, n)
    a = np.polyval(wide(c)[::-1], wide(x))
    b = np.array([np.polyval(wide(c)[i % 4 + 1 : 0 : -1], float(v)) for i, v in enumerate(x)])
    results = writes(np.minimum(a, b), "float32"), writes(np.maximum(a, b), "float32")
    return Launch(blocks(n, 64), 64, (c, x, *results, n))


@kernel(
    """
    __device__ int count_paths(int right, int down) {
        if (right == 0 || down == 0) return 1;
        return count_paths(right - 1, down) + count_paths(right, down - 1);
    }

    extern "C" __global__ void recursion(const int* right, const int* down, int* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = count_paths(right[i], down[i]);
    }
    """,
    sizes=(1, 33),
)
def recursion(rng: Generator, n: int) -> Launch:
    right, down = below(rng, 0, 4, n), below(rng, 0, 4, n)
    out = np.array([comb(int(r + d), int(r)) for r, d in zip(right, down, strict=True)], np.int32)
    return Launch(blocks(n, 64), 64, (right, down, writes(out), n))


@kernel(
    """
    extern "C" __global__ void median_of_window(const float* x, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float window[9];
        int count = 0;
        for (int k = max(i - 4, 0); k <= min(i + 4, n - 1); k++) {  // insertion sort, indexed by data
            int at = count++;
            for (; at > 0 && window[at - 1] > x[k]; at--) window[at] = window[at - 1];
            window[at] = x[k];
        }
        out[i] = window[count / 2];
    }
    """,
    sizes=(1, 33, 200),
)
def median_of_window(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    windows = [np.sort(x[max(i - 4, 0) : i + 5]) for i in range(n)]
    out = np.array([window[len(window) // 2] for window in windows])
    return Launch(blocks(n, 64), 64, (x, writes(out), n))


@kernel(
    """
    extern "C" __global__ void index_3d(int* out, int nx, int ny, int nz) {
        int x = blockIdx.x * blockDim.x + threadIdx.x;
        int y = blockIdx.y * blockDim.y + threadIdx.y;
        int z = blockIdx.z * blockDim.z + threadIdx.z;
        if (x >= nx || y >= ny || z >= nz) return;
        int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        out[(z * ny + y) * nx + x] = block * 1000 + thread;
    }
    """,
    sizes=(1, 7, 13),
)
def index_3d(rng: Generator, n: int) -> Launch:
    nx = n
    ny = n + int(rng.integers(1, 4))
    nz = n // 2 + 1
    grid = blocks(nx, 5), blocks(ny, 3), blocks(nz, 2)
    z, y, x = np.indices((nz, ny, nx))
    thread = (z % 2 * 3 + y % 3) * 5 + x % 5
    block = (z // 2 * grid[1] + y // 3) * grid[0] + x // 5
    return Launch(grid, (5, 3, 2), (writes(block * 1000 + thread, "int32"), nx, ny, nz))


@kernel(
    """
    extern "C" __global__ void newton_root(const double* a, double* root, int* rounds, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        double x = a[i] > 1.0 ? a[i] : 1.0, before;
        int k = 0;
        do {
            before = x;
            x = 0.5 * (x + a[i] / x);
            k++;
        } while (fabs(x - before) > 1e-12 * x && k < 60);
        root[i] = x;
        rounds[i] = k < 60 ? 1 : 0;
    }
    """,
    sizes=(1, 33, 200),
    rtol=2e-15,
)
def newton_root(rng: Generator, n: int) -> Launch:
    a = wide(uniform(rng, 0.01, 1000, n))
    return Launch(blocks(n, 64), 64, (a, writes(np.sqrt(a)), writes(np.ones(n, np.int32)), n))


@kernel(
    """
    __device__ __constant__ int steps[4] = {7, -3, 11, 2};
    __device__ int visits[4];

    extern "C" __global__ void device_globals(int* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int kind = x[i] & 3;
        atomicAdd(&visits[kind], 1);
        x[i] += steps[kind];
    }
    """,
    sizes=(1, 33, 200),
)
def device_globals(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    visits = below(rng, 1, 100, 4)
    after = x + np.array([7, -3, 11, 2], np.int32)[x & 3]
    counted = updates(visits, visits + np.bincount(x & 3, minlength=4))
    return Launch(blocks(n, 64), 64, (updates(x, after), n), symbols={"visits": counted})
