"""An application that knows nothing of preheat. It prints the largest errors of its kernels.

It has a template and a program in PTX. They are compared with NumPy in float64.
"""

import ctypes
import json

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    launch,
)

TEMPLATE = """
template<class T> __global__ void scale(const T *x, T *y, T by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = by * x[i] + T(1);
}
"""
SQUARE = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry square(.param .u64 x, .param .u64 y, .param .f32 by, .param .u32 n) {
    .reg .u32 %r<6>;
    .reg .u64 %a<4>;
    .reg .f32 %f<3>;
    .reg .pred %p;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, %r1, %r2;
    ld.param.u32 %r4, [n];
    setp.ge.u32 %p, %r3, %r4;
    @%p ret;
    ld.param.u64 %a0, [x];
    ld.param.u64 %a1, [y];
    mul.wide.u32 %a2, %r3, 4;
    add.u64 %a0, %a0, %a2;
    add.u64 %a1, %a1, %a2;
    ld.global.f32 %f0, [%a0];
    mul.f32 %f1, %f0, %f0;
    st.global.f32 [%a1], %f1;
    ret;
}
"""
N, BY = 1003, 2.5


def on_host(buffer):
    """Return the memory of the host in a buffer as an array."""
    address = ctypes.cast(int(buffer.handle), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(address, (N,))


def main():
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(arch=f"sm_{device.arch}")

    def compiled(code, kind, target, *names):
        return Program(code, kind, options).compile(target, name_expressions=names)

    kernels = {
        "scale": compiled(TEMPLATE, "c++", "cubin", "scale<float>").get_kernel("scale<float>"),
        "square": compiled(SQUARE, "ptx", "cubin").get_kernel("square"),
    }
    host = [LegacyPinnedMemoryResource().allocate(4 * N) for _ in range(2)]
    given, result = map(on_host, host)
    given[:] = np.random.default_rng(7).standard_normal(N)
    exact = given.astype(np.float64)
    expected = {"scale": BY * exact + 1, "square": exact**2}
    x, y = (device.allocate(4 * N, stream=stream) for _ in range(2))
    x.copy_from(host[0], stream=stream)
    errors = {}
    for name, kernel in kernels.items():
        launch(stream, LaunchConfig(grid=8, block=128), kernel, x, y, np.float32(BY), np.int32(N))
        y.copy_to(host[1], stream=stream)
        stream.sync()
        errors[name] = float(np.abs(result - expected[name]).max() / np.abs(expected[name]).max())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
