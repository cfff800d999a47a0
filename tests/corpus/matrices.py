"""Matrices: transposes, products, sparse rows, shortest paths."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from tests.corpus.case import Launch, below, blocks, kernel, normal, updates, wide, words, writes


@kernel(
    """
    extern "C" __global__ void transpose_naive(const double* in, double* out, int rows, int cols) {
        int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
        if (r < rows && c < cols) out[c * rows + r] = in[r * cols + c];
    }
    """,
    sizes=(1, 31, 61),
)
def transpose_naive(rng: Generator, n: int) -> Launch:
    rows, cols = n, n // 2 + 1
    x = rng.standard_normal((rows, cols))
    return Launch((blocks(cols, 16), blocks(rows, 4)), (16, 4), (x, writes(x.T), rows, cols))


@kernel(
    """
    extern "C" __global__ void transpose_tiled(const float* __restrict__ in, float* __restrict__ out,
                                               int rows, int cols) {
        __shared__ float tile[32][33];  // one wider, off the banks
        int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
        for (int k = 0; k < 32; k += 8)
            if (r + k < rows && c < cols) tile[threadIdx.y + k][threadIdx.x] = in[(r + k) * cols + c];
        __syncthreads();
        c = blockIdx.y * 32 + threadIdx.x;
        r = blockIdx.x * 32 + threadIdx.y;
        for (int k = 0; k < 32; k += 8)
            if (r + k < cols && c < rows) out[(r + k) * rows + c] = tile[threadIdx.x][threadIdx.y + k];
    }
    """,
    sizes=(1, 33, 67),
)
def transpose_tiled(rng: Generator, n: int) -> Launch:
    rows, cols = n, n + 10
    x = normal(rng, rows, cols)
    return Launch((blocks(cols, 32), blocks(rows, 32)), (32, 8), (x, writes(x.T), rows, cols))


@kernel(
    """
    #define TILE 16

    extern "C" __global__ void gemm_shared(const float* A, const float* B, float* C, int M, int N,
                                           int K) {
        __shared__ float a[TILE][TILE], b[TILE][TILE];
        int tx = threadIdx.x, ty = threadIdx.y;
        int row = blockIdx.y * TILE + ty, col = blockIdx.x * TILE + tx;
        float sum = 0.0f;
        for (int k0 = 0; k0 < K; k0 += TILE) {
            a[ty][tx] = row < M && k0 + tx < K ? A[row * K + k0 + tx] : 0.0f;
            b[ty][tx] = k0 + ty < K && col < N ? B[(k0 + ty) * N + col] : 0.0f;
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < TILE; k++) sum += a[ty][k] * b[k][tx];
            __syncthreads();
        }
        if (row < M && col < N) C[row * N + col] = sum;
    }
    """,
    sizes=(1, 31, 47),
    rtol=1e-5,
    atol=1e-5,
)
def gemm_shared(rng: Generator, n: int) -> Launch:
    m, k = n // 2 + 1, n + 6
    a, b = normal(rng, m, k), normal(rng, k, n)
    c = writes(wide(a) @ wide(b), "float32")
    return Launch((blocks(n, 16), blocks(m, 16)), (16, 16), (a, b, c, m, n, k))


@kernel(
    """
    template <typename T, int Tile, int Each>
    __global__ void gemm_registers(const T* A, const T* B, T* C, int M, int N, int K, T alpha, T beta) {
        constexpr int Side = Tile / Each;  // threads along an edge
        __shared__ T a[8][Tile], b[8][Tile];
        int ty = threadIdx.x / Side, tx = threadIdx.x % Side;
        int row0 = blockIdx.y * Tile, col0 = blockIdx.x * Tile;
        T sum[Each][Each] = {};
        for (int k0 = 0; k0 < K; k0 += 8) {
            for (int i = threadIdx.x; i < 8 * Tile; i += Side * Side) {
                int k = i % 8, r = i / 8;
                a[k][r] = row0 + r < M && k0 + k < K ? A[(row0 + r) * K + k0 + k] : T(0);
                int c = i % Tile, kk = i / Tile;
                b[kk][c] = k0 + kk < K && col0 + c < N ? B[(k0 + kk) * N + col0 + c] : T(0);
            }
            __syncthreads();
            for (int k = 0; k < 8; k++) {
                T ra[Each], rb[Each];
                #pragma unroll
                for (int e = 0; e < Each; e++) {
                    ra[e] = a[k][ty * Each + e];
                    rb[e] = b[k][tx * Each + e];
                }
                #pragma unroll
                for (int i = 0; i < Each; i++)
                    #pragma unroll
                    for (int j = 0; j < Each; j++) sum[i][j] += ra[i] * rb[j];
            }
            __syncthreads();
        }
        for (int i = 0; i < Each; i++)
            for (int j = 0; j < Each; j++) {
                int r = row0 + ty * Each + i, c = col0 + tx * Each + j;
                if (r < M && c < N) C[r * N + c] = alpha * sum[i][j] + beta * C[r * N + c];
            }
    }
    """,
    entry="gemm_registers<float, 32, 4>",
    sizes=(1, 33, 45),
    rtol=1e-5,
    atol=2e-5,
)
def gemm_registers(rng: Generator, n: int) -> Launch:
    m, k = n + 3, n // 2 + 5
    a, b, c = normal(rng, m, k), normal(rng, k, n), normal(rng, m, n)
    after = updates(c, 1.5 * wide(a) @ wide(b) - 0.5 * wide(c))
    return Launch((blocks(n, 32), blocks(m, 32)), 64, (a, b, after, m, n, k, 1.5, -0.5))


@kernel(
    """
    extern "C" __global__ void __launch_bounds__(64)
    gemm_float4(const float4* A, const float4* B, float4* C, int N4, int K4) {
        __shared__ float4 rows[8][8];
        int row = blockIdx.y * 8 + threadIdx.y, col4 = blockIdx.x * 8 + threadIdx.x;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int k4 = 0; k4 < K4; k4 += 8) {
            rows[threadIdx.y][threadIdx.x] = A[row * K4 + k4 + threadIdx.x];
            __syncthreads();
            for (int k = 0; k < 8; k++) {
                float4 a = rows[threadIdx.y][k];
                const float* scalars = &a.x;
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    float4 b = B[((k4 + k) * 4 + e) * N4 + col4];
                    sum.x += scalars[e] * b.x; sum.y += scalars[e] * b.y;
                    sum.z += scalars[e] * b.z; sum.w += scalars[e] * b.w;
                }
            }
            __syncthreads();
        }
        C[row * N4 + col4] = sum;
    }
    """,
    sizes=(1, 2),
    rtol=1e-5,
    atol=2e-5,
)
def gemm_float4(rng: Generator, n: int) -> Launch:
    m, cols, k = 8 * n, 32 * n, 64
    a, b = normal(rng, m, k), normal(rng, k, cols)
    c = writes(wide(a) @ wide(b), "float32")
    return Launch((n, n), (8, 8), (a, b, c, cols // 4, k // 4))


@kernel(
    """
    extern "C" __global__ void matrix_vector_by_warp(const float* A, const float* x, float* y, int rows,
                                                     int cols) {
        int warp = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize, lane = threadIdx.x % warpSize;
        if (warp >= rows) return;
        float sum = 0.0f;
        for (int c = lane; c < cols; c += warpSize) sum = fmaf(A[(size_t)warp * cols + c], x[c], sum);
        for (int d = warpSize / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
        if (lane == 0) y[warp] = sum;
    }
    """,
    sizes=(1, 31, 101),
    rtol=2e-6,
    atol=4e-6,
)
def matrix_vector_by_warp(rng: Generator, n: int) -> Launch:
    a, x = normal(rng, n // 2 + 1, n), normal(rng, n)
    rows = len(a)
    return Launch(blocks(rows * 32, 96), 96, (a, x, writes(wide(a) @ wide(x), "float32"), rows, n))


@kernel(
    """
    extern "C" __global__ void gemm_int8(const char4* A, const char4* B, int* C, int N, int K4) {
        int row = blockIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
        if (col >= N) return;
        int sum = 0;
        for (int k = 0; k < K4; k++) {
            char4 a = A[row * K4 + k], b = B[col * K4 + k];
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
        C[row * N + col] = sum;
    }
    """,
    sizes=(1, 31, 65),
)
def gemm_int8(rng: Generator, n: int) -> Launch:
    a, b = words(rng, (5, 20), "int8"), words(rng, (n, 20), "int8")
    c = a.astype(np.int32) @ b.T.astype(np.int32)
    return Launch((blocks(n, 32), 5), 32, (a, b, writes(c), n, 5))


@kernel(
    """
    extern "C" __global__ void batched_outer(const double* a, const double* b, double* c, int n) {
        int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
        int batch = blockIdx.z;
        if (i < n && j < n) c[((size_t)batch * n + i) * n + j] += a[batch * n + i] * b[batch * n + j];
    }
    """,
    sizes=(1, 11, 19),
    rtol=1e-14,
    atol=1e-14,
)
def batched_outer(rng: Generator, n: int) -> Launch:
    a, b, c = rng.standard_normal((4, n)), rng.standard_normal((4, n)), rng.standard_normal((4, n, n))
    after = updates(c, c + a[:, :, None] * b[:, None, :])
    return Launch((blocks(n, 8), blocks(n, 8), 4), (8, 8), (a, b, after, n))


@kernel(
    """
    extern "C" __global__ void spmv_csr(const int* starts, const int* columns, const float* values,
                                        const float* x, float* y, int rows) {
        int row = blockIdx.x * blockDim.x + threadIdx.x;
        if (row >= rows) return;
        float sum = 0.0f;
        for (int k = starts[row]; k < starts[row + 1]; k++) sum += values[k] * __ldg(&x[columns[k]]);
        y[row] = sum;
    }
    """,
    sizes=(1, 33, 300),
    rtol=1e-6,
    atol=1e-6,
)
def spmv_csr(rng: Generator, n: int) -> Launch:
    dense = np.where(rng.random((n, n)) < 4 / n, normal(rng, n, n), 0).astype(np.float32)
    row, column = np.nonzero(dense)
    starts = np.searchsorted(row, np.arange(n + 1)).astype(np.int32)
    values = np.append(dense[row, column], np.float32(1))  # never empty
    x = normal(rng, n)
    y = writes(wide(dense) @ wide(x), "float32")
    return Launch(blocks(n, 64), 64, (starts, np.append(column, 0).astype(np.int32), values, x, y, n))


@kernel(
    """
    extern "C" __global__ void floyd_warshall_step(int* distance, int n, int through) {
        int to = blockIdx.x * blockDim.x + threadIdx.x, from = blockIdx.y * blockDim.y + threadIdx.y;
        if (to >= n || from >= n) return;
        int detour = distance[from * n + through] + distance[through * n + to];
        if (detour < distance[from * n + to]) distance[from * n + to] = detour;
    }
    """,
    sizes=(1, 17, 37),
)
def floyd_warshall_step(rng: Generator, n: int) -> Launch:
    distance = below(rng, 1, 1000, n, n)
    through = int(rng.integers(n))
    np.fill_diagonal(distance, 0)
    after = np.minimum(distance, distance[:, through, None] + distance[through])
    grid = blocks(n, 16), blocks(n, 8)
    return Launch(grid, (16, 8), (updates(distance, after), n, through))


@kernel(
    """
    extern "C" __global__ void triangular_solve(const double* L, const double* b, double* x, int n) {
        extern __shared__ double solved[];
        int t = threadIdx.x;
        double mine = t < n ? b[t] : 0.0;
        for (int k = 0; k < n; k++) {
            if (t == k) solved[k] = mine / L[k * n + k];
            __syncthreads();
            if (t > k && t < n) mine -= L[t * n + k] * solved[k];
        }
        if (t < n) x[t] = solved[t];
    }
    """,
    sizes=(1, 17, 50),
    rtol=1e-12,
    atol=1e-12,
)
def triangular_solve(rng: Generator, n: int) -> Launch:
    lower = np.tril(0.1 * rng.standard_normal((n, n)))
    np.fill_diagonal(lower, rng.uniform(1, 2, n))
    b = rng.standard_normal(n)
    return Launch(1, 64, (lower, b, writes(np.linalg.solve(lower, b)), n), shared=64 * 8)
