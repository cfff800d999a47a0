"""cuda.bindings: compile, load and launch a kernel by the functions of the driver."""

import ctypes

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = b"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""


def checked(result):
    """Return what a call returned; raise its error, if it has one."""
    if int(result[0]):
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


checked(driver.cuInit(0))
context = checked(driver.cuDevicePrimaryCtxRetain(0))
checked(driver.cuCtxSetCurrent(context))

program = checked(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
# -lineinfo lets a fault name the line of the source.
checked(nvrtc.nvrtcCompileProgram(program, 2, [b"-arch=sm_90", b"-lineinfo"]))
cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
checked(nvrtc.nvrtcGetCUBIN(program, cubin))
module = checked(driver.cuModuleLoadData(cubin))
add = checked(driver.cuModuleGetFunction(module, b"add"))

a, b = np.random.default_rng(0).random((2, 1000), dtype="float32")
c = np.empty_like(a)
on_device = [int(checked(driver.cuMemAlloc(a.nbytes))) for _ in range(3)]
for address, array in zip(on_device, (a, b), strict=False):
    checked(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
arguments = ((*on_device, a.size), (ctypes.c_void_p,) * 3 + (ctypes.c_int,))
checked(driver.cuLaunchKernel(add, 4, 1, 1, 256, 1, 1, 0, 0, arguments, 0))
checked(driver.cuMemcpyDtoH(c.ctypes.data, on_device[2], c.nbytes))
print("right" if (c == a + b).all() else "wrong")
