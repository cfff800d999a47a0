"""Helpers for the tests of the runtime: kernels and inputs."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.gpu import Gpu
from tests.conftest import SAXPY

SIZES = (1, 31, 33, 257, 1009)

KERNELS = (
    SAXPY
    + """
struct Pair { int a; float b; double c; };
struct __align__(64) Wide { unsigned char bytes[128]; };

__device__ int counter = 41;
__device__ float table[3] = {1.5f, 2.5f, 3.5f};
__constant__ int weights[4] = {1, 2, 3, 4};

extern "C" __global__ void add(const int* x, int by, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + by;
}
extern "C" __global__ void count() { counter += 1; }
extern "C" __global__ void weigh(int* out) { out[threadIdx.x] = weights[threadIdx.x] * 10; }
extern "C" __global__ void unpack(Pair p, double* out) { out[0] = p.a; out[1] = p.b; out[2] = p.c; }
extern "C" __global__ void pick(int before, Wide w, int i, int* out) {
    out[0] = before;
    out[1] = w.bytes[i];
}
extern "C" __global__ void any_memory(const void* x, long long* out) { *out = (long long)x; }
extern "C" __global__ void follow(int** chain, int* out) { *out = chain == 0 ? -1 : 1; }
extern "C" __global__ void __launch_bounds__(64) narrow(int* out) { out[threadIdx.x] = threadIdx.x; }
extern "C" __global__ void reverse(int* data, int n) {
    extern __shared__ int room[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) room[i] = data[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) data[i] = room[n - 1 - i];
}
extern "C" __global__ void places(int* out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
"""
)

PTX = """\
.version 8.0
.target sm_80
.address_size 64

.visible .entry keep(.param .u64 to, .param .b32 word, .param .b64 wide, .param .f32 real)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    .reg .f32 %f<2>;
    ld.param.u64 %rd1, [to];
    ld.param.b32 %r1, [word];
    ld.param.b64 %rd2, [wide];
    ld.param.f32 %f1, [real];
    cvta.to.global.u64 %rd3, %rd1;
    st.global.b64 [%rd3], %rd2;
    st.global.b32 [%rd3+8], %r1;
    st.global.f32 [%rd3+12], %f1;
    ret;
}
"""


class SaxpyCase(NamedTuple):
    """A device with saxpy and its operands."""

    gpu: Gpu
    saxpy: Kernel
    x: Array
    y: Array
    n: int
    xs: np.ndarray[Any, Any]
    ys: np.ndarray[Any, Any]

    def launch(self, times: int = 1) -> None:
        """Launch saxpy; from the third time on the launch is a fast one."""
        for _ in range(times):
            self.saxpy[5, 64](2.0, self.x, self.y, self.n)

    def check(self, times: int) -> None:
        """Check that `y` is the result of this number of launches."""
        exact = self.ys.astype(np.float64) + 2.0 * times * self.xs
        np.testing.assert_allclose(self.y.numpy(), exact, rtol=1e-5, atol=1e-5)


def saxpy_case(gpu: Gpu, n: int = 257) -> SaxpyCase:
    """Return saxpy on `gpu` with operands of `n` elements."""
    random = np.random.default_rng(n)
    xs, ys = (random.standard_normal(n).astype(np.float32) for _ in range(2))
    return SaxpyCase(gpu, gpu.kernel(KERNELS, "saxpy"), gpu.array(xs), gpu.array(ys), n, xs, ys)


def import_or_skip(name: str) -> Any:
    """Import another library without its warnings, or skip the test if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as missing:
            pytest.skip(f"{name} cannot be imported: {missing}")
