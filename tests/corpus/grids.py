"""Stencils with halos, convolution from constant memory, images, cellular automata."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.random import Generator

from tests.corpus.case import Launch, below, blocks, kernel, normal, wide, words, writes


@kernel(
    """
    #define RADIUS 3

    extern "C" __global__ void stencil_1d(const int* in, int* out, int n) {
        __shared__ int line[64 + 2 * RADIUS];
        int i = blockIdx.x * 64 + threadIdx.x, at = threadIdx.x + RADIUS;
        line[at] = i < n ? in[i] : 0;
        if (threadIdx.x < RADIUS) {
            line[at - RADIUS] = i >= RADIUS ? in[i - RADIUS] : 0;
            line[at + 64] = i + 64 < n ? in[i + 64] : 0;
        }
        __syncthreads();
        if (i >= n) return;
        int sum = 0;
        for (int d = -RADIUS; d <= RADIUS; d++) sum += line[at + d];
        out[i] = sum;
    }
    """,
    sizes=(1, 67, 500),
)
def stencil_1d(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    out = sliding_window_view(np.pad(x, 3), 7).sum(-1, dtype=np.int32)
    return Launch(blocks(n, 64), 64, (x, writes(out), n))


@kernel(
    """
    extern "C" __global__ void jacobi_2d(const double* in, double* out, int width, int height) {
        __shared__ double tile[10][18];
        int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
        for (int ty = threadIdx.y; ty < 10; ty += 8)
            for (int tx = threadIdx.x; tx < 18; tx += 16) {
                int gx = min(max((int)blockIdx.x * 16 + tx - 1, 0), width - 1);
                int gy = min(max((int)blockIdx.y * 8 + ty - 1, 0), height - 1);
                tile[ty][tx] = in[gy * width + gx];
            }
        __syncthreads();
        if (x >= width || y >= height) return;
        int tx = threadIdx.x + 1, ty = threadIdx.y + 1;
        double around = tile[ty - 1][tx] + tile[ty + 1][tx] + tile[ty][tx - 1] + tile[ty][tx + 1];
        out[y * width + x] = 0.25 * around - tile[ty][tx];
    }
    """,
    sizes=(1, 17, 35),
    rtol=1e-14,
    atol=1e-14,
)
def jacobi_2d(rng: Generator, n: int) -> Launch:
    width, height = n, n // 2 + 1
    x = rng.standard_normal((height, width))
    p = np.pad(x, 1, mode="edge")
    out = 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]) - x
    grid = blocks(width, 16), blocks(height, 8)
    return Launch(grid, (16, 8), (x, writes(out), width, height))


@kernel(
    """
    extern "C" __global__ void heat_3d(const float* __restrict__ u, float* __restrict__ next, int nx,
                                       int ny, int nz, float k) {
        int x = blockIdx.x * blockDim.x + threadIdx.x;
        int y = blockIdx.y * blockDim.y + threadIdx.y;
        int z = blockIdx.z * blockDim.z + threadIdx.z;
        if (x >= nx || y >= ny || z >= nz) return;
        int i = (z * ny + y) * nx + x, plane = nx * ny;
        bool inner = x > 0 && y > 0 && z > 0 && x < nx - 1 && y < ny - 1 && z < nz - 1;
        if (!inner) {
            next[i] = u[i];
            return;
        }
        float around = u[i - 1] + u[i + 1] + u[i - nx] + u[i + nx] + u[i - plane] + u[i + plane];
        next[i] = u[i] + k * (around - 6.0f * u[i]);
    }
    """,
    sizes=(1, 7, 11),
    rtol=1e-6,
    atol=1e-6,
)
def heat_3d(rng: Generator, n: int) -> Launch:
    nx, ny, nz = n, n + 1, n // 2 + 2
    x = normal(rng, nz, ny, nx)
    u = wide(x)
    out = u.copy()
    inner = (slice(1, -1),) * 3
    neighbours = sum(np.roll(u, by, axis)[inner] for axis in range(3) for by in (-1, 1))
    out[inner] += 0.125 * (neighbours - 6 * u[inner])
    grid = blocks(nx, 8), blocks(ny, 4), blocks(nz, 2)
    return Launch(grid, (8, 4, 2), (x, writes(out, "float32"), nx, ny, nz, 0.125))


@kernel(
    """
    __constant__ float taps[5][5];

    extern "C" __global__ void convolve_constant(const float* image, float* out, int width,
                                                 int height) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
        if (x >= width || y >= height) return;
        float sum = 0.0f;
        for (int dy = -2; dy <= 2; dy++)
            for (int dx = -2; dx <= 2; dx++) {
                int sx = x + dx, sy = y + dy;
                if (sx >= 0 && sx < width && sy >= 0 && sy < height)
                    sum += taps[dy + 2][dx + 2] * image[sy * width + sx];
            }
        out[y * width + x] = sum;
    }
    """,
    sizes=(1, 13, 31),
    rtol=1e-6,
    atol=2e-6,
)
def convolve_constant(rng: Generator, n: int) -> Launch:
    width, height = n, n + 2
    image, taps = normal(rng, height, width), normal(rng, 5, 5)
    windows = sliding_window_view(np.pad(wide(image), 2), (5, 5))
    out = writes((windows * wide(taps)).sum((-1, -2)), "float32")
    grid = blocks(width, 16), blocks(height, 4)
    return Launch(grid, (16, 4), (image, out, width, height), symbols={"taps": taps.ravel()})


@kernel(
    """
    extern "C" __global__ void game_of_life(const unsigned char* cells, unsigned char* next, int width,
                                            int height) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
        if (x >= width || y >= height) return;
        int alive = 0;
        for (int dy = -1; dy <= 1; dy++)
            for (int dx = -1; dx <= 1; dx++)
                if (dx || dy)
                    alive += cells[(y + dy + height) % height * width + (x + dx + width) % width];
        next[y * width + x] = alive == 3 || (alive == 2 && cells[y * width + x]);
    }
    """,
    sizes=(1, 17, 33),
)
def game_of_life(rng: Generator, n: int) -> Launch:
    width, height = n, n + 5
    cells = below(rng, 0, 2, height, width).astype(np.uint8)
    turns = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]
    alive = sum(np.roll(cells, turn, (0, 1)).astype(int) for turn in turns)
    after = (alive == 3) | ((alive == 2) & (cells == 1))
    grid = blocks(width, 8), blocks(height, 8)
    return Launch(grid, (8, 8), (cells, writes(after, "uint8"), width, height))


@kernel(
    """
    extern "C" __global__ void large_shared_reverse(const double* in, double* out, int n) {
        extern __shared__ double staged[];  // more than the 48 KiB a block has without asking
        for (int i = threadIdx.x; i < n; i += blockDim.x) staged[n - 1 - i] = in[i];
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            out[i] = staged[i] + 2.0 * staged[(i + 1) % n];
    }
    """,
    sizes=(1, 6200, 8009),
    rtol=1e-15,
    atol=1e-15,
)
def large_shared_reverse(rng: Generator, n: int) -> Launch:
    x = rng.standard_normal(n)
    out = x[::-1] + 2 * np.roll(x[::-1], -1)
    return Launch(1, 256, (x, writes(out), n), shared=8 * n)


@kernel(
    """
    extern "C" __global__ void bilinear_resize(const float* in, int iw, int ih, float* out, int ow,
                                               int oh) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
        if (x >= ow || y >= oh) return;
        float sx = fmaxf((x + 0.5f) * iw / ow - 0.5f, 0.0f);
        float sy = fmaxf((y + 0.5f) * ih / oh - 0.5f, 0.0f);
        int x0 = (int)floorf(sx), y0 = (int)floorf(sy);
        int x1 = min(x0 + 1, iw - 1), y1 = min(y0 + 1, ih - 1);
        float fx = sx - x0, fy = sy - y0;
        float top = in[y0 * iw + x0] * (1 - fx) + in[y0 * iw + x1] * fx;
        float bottom = in[y1 * iw + x0] * (1 - fx) + in[y1 * iw + x1] * fx;
        out[y * ow + x] = top * (1 - fy) + bottom * fy;
    }
    """,
    sizes=(1, 13, 29),
    atol=1e-5,
)
def bilinear_resize(rng: Generator, n: int) -> Launch:
    image = normal(rng, n, n + 3)
    ow = 2 * n + 1
    oh = n + 7
    ih, iw = image.shape

    def axis(size: int, into: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.maximum((np.arange(into) + 0.5) * size / into - 0.5, 0)
        first = np.floor(at).astype(int)
        return first, np.minimum(first + 1, size - 1), at - first

    (x0, x1, fx), (y0, y1, fy) = axis(iw, ow), axis(ih, oh)
    across = wide(image)[:, x0] * (1 - fx) + wide(image)[:, x1] * fx
    out = across[y0] * (1 - fy)[:, None] + across[y1] * fy[:, None]
    grid = blocks(ow, 16), blocks(oh, 8)
    return Launch(grid, (16, 8), (image, iw, ih, writes(out, "float32"), ow, oh))


@kernel(
    """
    extern "C" __global__ void max_pool(const float* x, float* out, int* where, int channels,
                                        int size) {
        int c = blockIdx.z, oy = blockIdx.y, ox = threadIdx.x, half = size / 2;
        if (ox >= half || c >= channels) return;
        const float* plane = x + c * size * size;
        int best = 2 * oy * size + 2 * ox;
        for (int k = 1; k < 4; k++) {
            int at = (2 * oy + (k >> 1)) * size + 2 * ox + (k & 1);
            if (plane[at] > plane[best]) best = at;
        }
        out[(c * half + oy) * half + ox] = plane[best];
        where[(c * half + oy) * half + ox] = best;
    }
    """,
    sizes=(2, 7, 20),
)
def max_pool(rng: Generator, n: int) -> Launch:
    x = normal(rng, 3, n, n)
    half = n // 2
    squares = x[:, : 2 * half, : 2 * half].reshape(3, half, 2, half, 2).swapaxes(2, 3)
    even = squares.reshape(3, half, half, 4)
    best = even.argmax(-1)
    y, col = np.indices((half, half))
    where = (2 * y + best // 2) * n + 2 * col + best % 2
    results = writes(even.max(-1)), writes(where, "int32")
    return Launch((1, half, 3), 32, (x, *results, 3, n))
