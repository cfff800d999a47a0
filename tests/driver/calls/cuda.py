"""The CUDA driver as a program calls it, with cuda.bindings, and the kernels of the tests."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

__all__ = ["SOURCE", "Program", "compiled", "cu", "ok", "status"]

SOURCE = b"""
__device__ int variable = 7;
extern "C" __global__ void add(int* x, int n, int more) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += more;
}
extern "C" __global__ void twice(int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
extern "C" __global__ void count(int* x) { x[0] = variable++; }
"""
_TYPES = {int: ctypes.c_int, cu.CUdeviceptr: ctypes.c_void_p}


def ok(result: Sequence[Any]) -> Any:
    """Return what a call returned, without its status, which is 0."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else tuple(result[1:])


def status(result: Sequence[Any]) -> int:
    """Return the status of a call."""
    return int(result[0])


@functools.cache
def compiled(arch: str = "sm_90", kind: str = "CUBIN", source: bytes = SOURCE, *options: str) -> bytes:
    """Return the code of the kernels."""
    made = ok(nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], []))
    words = [word.encode() for word in (f"-arch={arch}", *options)]
    ok(nvrtc.nvrtcCompileProgram(made, len(words), words))
    code: bytes = b" " * ok(getattr(nvrtc, f"nvrtcGet{kind}Size")(made))
    ok(getattr(nvrtc, f"nvrtcGet{kind}")(made, code))
    return code


class Program:
    """A program with the primary context of the first device."""

    def __init__(self) -> None:
        ok(cu.cuInit(0))
        self.device = ok(cu.cuDeviceGet(0))
        self.context = ok(cu.cuDevicePrimaryCtxRetain(self.device))
        ok(cu.cuCtxPushCurrent(self.context))
        self.module = ok(cu.cuModuleLoadData(compiled()))

    def function(self, name: str) -> Any:
        """Return a kernel."""
        return ok(cu.cuModuleGetFunction(self.module, name.encode()))

    def memory(self, values: Sequence[int]) -> Any:
        """Return device memory with integers."""
        array = np.array(values, np.int32)
        address = ok(cu.cuMemAlloc(array.nbytes))
        ok(cu.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def values(self, address: Any, count: int) -> list[int]:
        """Return the integers in device memory."""
        array = np.zeros(count, np.int32)
        ok(cu.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return [int(value) for value in array]

    def launch(self, name: str, *arguments: Any, stream: Any = 0, shared: int = 0) -> Any:
        """Launch a kernel in one block of 32 threads, and return what the call returned."""
        kinds = tuple(_TYPES[type(each)] for each in arguments)
        given = tuple(int(each) for each in arguments), kinds
        return cu.cuLaunchKernel(self.function(name), 1, 1, 1, 32, 1, 1, shared, stream, given, 0)

    def close(self) -> None:
        """Leave the context."""
        ok(cu.cuCtxSynchronize())
        ok(cu.cuModuleUnload(self.module))
        ok(cu.cuCtxPopCurrent())
        ok(cu.cuDevicePrimaryCtxRelease(self.device))
