"""Kernels on the emulator, for both dialects of PTX: one launch, the arrays on the device already.

Every result is compared with NumPy in float64 before anything is timed. The prototype's figures are
those the emulator was planned with (an sm_90 dialect, on a machine like the one the project is built
on); its sources are gone, so kernels of the same name need not be the same to the letter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import preheat
from common import options, report, spread, us

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
GEMM = """
extern "C" __global__ void gemm(const float* a, const float* b, float* c, int n) {
    __shared__ float left[16][16], right[16][16];
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        left[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
"""
SUM = """
__device__ float block_sum(float value) {
    __shared__ float parts[8];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += parts[i];
    __syncthreads();
    return sum;
}
"""
SOFTMAX = f"""{SUM}
extern "C" __global__ void softmax_backward(const float* y, const float* dy, float* dx, int n) {{
    const float* p = y + blockIdx.x * n;
    const float* dp = dy + blockIdx.x * n;
    float dot = 0;
    for (int i = threadIdx.x; i < n; i += 256) dot += p[i] * dp[i];
    dot = block_sum(dot);
    for (int i = threadIdx.x; i < n; i += 256) dx[blockIdx.x * n + i] = p[i] * (dp[i] - dot);
}}
"""
RMSNORM = f"""{SUM}
extern "C" __global__ void rmsnorm_backward(
        const float* x, const float* w, const float* dy, float* dx, int n, float eps) {{
    const float* v = x + blockIdx.x * n;
    const float* dv = dy + blockIdx.x * n;
    float square = 0, dot = 0;
    for (int i = threadIdx.x; i < n; i += 256) {{
        square += v[i] * v[i];
        dot += v[i] * w[i] * dv[i];
    }}
    square = block_sum(square);
    dot = block_sum(dot);
    float r = rsqrtf(square / n + eps), c = dot / n * r * r * r;
    for (int i = threadIdx.x; i < n; i += 256) dx[blockIdx.x * n + i] = r * w[i] * dv[i] - c * v[i];
}}
"""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A launch, the argument it writes, the expected result, and the prototype's milliseconds."""

    title: str
    source: str
    entry: str
    grid: int | tuple[int, int]
    block: int | tuple[int, int]
    args: tuple[Any, ...]
    written: int
    expected: NDArray[np.float64]
    prototype: tuple[float, float]
    tolerance: float = 1e-5


def saxpy(rng: np.random.Generator, n: int, title: str, prototype: float) -> Case:
    x, y = floats(rng, n), floats(rng, n)
    grid, expected = -(-n // 256), 2.0 * wide(x) + wide(y)
    args = (2.0, x, y, n)
    return Case(title, SAXPY, "saxpy", grid, 256, args, 2, expected, (prototype, prototype))


def gemm(rng: np.random.Generator, n: int) -> Case:
    a, b = floats(rng, n, n), floats(rng, n, n)
    args, grid = (a, b, unwritten(n, n), n), (n // 16, n // 16)
    title = f"GEMM {n}³, 16 x 16 tiles"
    expected = wide(a) @ wide(b)
    return Case(title, GEMM, "gemm", grid, (16, 16), args, 2, expected, (135.0, 272.0), 1e-4)


def softmax_backward(rng: np.random.Generator, rows: int, n: int) -> Case:
    powers = np.exp(floats(rng, rows, n))
    dy = floats(rng, rows, n)
    y = powers / powers.sum(axis=1, keepdims=True)
    p, dp = wide(y), wide(dy)
    expected = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    title = f"softmax backward {rows} x {n}"
    args = (y, dy, unwritten(rows, n), n)
    return Case(title, SOFTMAX, "softmax_backward", rows, 256, args, 2, expected, (64.0, 64.0))


def rmsnorm_backward(rng: np.random.Generator, rows: int, n: int) -> Case:
    x = floats(rng, rows, n)
    w = floats(rng, n)
    dy = floats(rng, rows, n)
    eps = 1e-5
    v = wide(x)
    g = wide(w) * wide(dy)
    r = 1 / np.sqrt((v * v).mean(axis=1, keepdims=True) + eps)
    expected = r * g - v * r**3 * (v * g).mean(axis=1, keepdims=True)
    title = f"RMSNorm backward {rows} x {n}"
    args = (x, w, dy, unwritten(rows, n), n, eps)
    return Case(title, RMSNORM, "rmsnorm_backward", rows, 256, args, 3, expected, (106.0, 106.0))


def cases(rng: np.random.Generator) -> list[Case]:
    return [
        saxpy(rng, 1000, "saxpy, 1000 elements", 0.2),
        saxpy(rng, 1 << 20, "saxpy, 1 M elements", 39.0),
        gemm(rng, 256),
        softmax_backward(rng, 1024, 1024),
        rmsnorm_backward(rng, 1024, 1024),
    ]


def floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def wide(values: NDArray[Any]) -> NDArray[np.float64]:
    return values.astype(np.float64)


def unwritten(*shape: int) -> Floats:
    return np.full(shape, np.nan, np.float32)


def prepared(gpu: preheat.Gpu, case: Case) -> tuple[Callable[[], None], float]:
    """Return a launch that was checked once, and the milliseconds from source to its first end."""
    args = [gpu.array(arg) if isinstance(arg, np.ndarray) else arg for arg in case.args]
    gpu.builder.build(preheat.Program.of(case.source), gpu.arch)  # Compiling is not measured.
    started = time.perf_counter()
    kernel = gpu.kernel(case.source, case.entry)
    kernel[case.grid, case.block](*args)
    gpu.synchronize()
    first = (time.perf_counter() - started) * 1e3
    got = args[case.written].numpy().astype(np.float64)
    error = np.linalg.norm(got - case.expected) / np.linalg.norm(case.expected)
    if not error < case.tolerance:
        raise SystemExit(f"{case.title} on {gpu.arch}: wrong, relative error {error}")

    def launch() -> None:
        kernel[case.grid, case.block](*args)
        gpu.synchronize()

    return launch, first


def timed(launch: Callable[[], None], seconds: float) -> list[float]:
    """Return the milliseconds of as many launches as fit into about `seconds`, at least five."""
    runs: list[float] = []
    while len(runs) < 5 or (sum(runs) < seconds * 1e3 and len(runs) < 2000):
        started = time.perf_counter()
        launch()
        runs.append((time.perf_counter() - started) * 1e3)
    return runs


def ratios(ours: float, prototype: Sequence[float]) -> tuple[str, str]:
    """Return the prototype's figure and how many times faster preheat is."""
    low, high = prototype
    if low == high:
        return f"{low:g} ms", f"{low / ours:.2f} x"
    return f"{low:g} to {high:g} ms", f"{low / ours:.2f} to {high / ours:.2f} x"


def bench(arches: Sequence[str], seconds: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for case in cases(np.random.default_rng(1)):
        for arch in arches:
            launch, first = prepared(preheat.device("emulator", arch=arch), case)
            runs = timed(launch, seconds)
            middle = statistics.median(runs)
            shown = (us(first * 1e3), us(middle * 1e3), spread(runs))
            rows.append((case.title, arch, *shown, *ratios(middle, case.prototype)))
    return rows


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_90", "sm_100"], help="what to emulate")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to spend on each row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        os.environ |= {"PREHEAT_CACHE_DIR": f"{place}/cache", "PREHEAT_LOCK_DIR": f"{place}/locks"}
        rows = bench(args.arch, args.seconds)
    head = ("", "arch", "first launch", "median", "spread", "prototype", "times faster")
    report("bench_emulator", "One launch on the emulator", head, rows, into=args.json)


if __name__ == "__main__":
    main()
