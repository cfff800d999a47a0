"""cuda.core: a template is compiled for the device, and launched in a stream."""

import ctypes

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    launch,
)

SOURCE = """
template <typename T> __global__ void add(const T* a, const T* b, T* c, size_t n) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""
N = 1000

device = Device()
device.set_current()
stream = device.create_stream()
# lineinfo lets a fault name the line of the source.
options = ProgramOptions(arch=f"sm_{device.arch}", lineinfo=True)
compiled = Program(SOURCE, "c++", options).compile("cubin", name_expressions=("add<float>",))
add = compiled.get_kernel("add<float>")


def on_host(buffer):
    """Return the memory of the host in a buffer as an array."""
    address = ctypes.cast(int(buffer.handle), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(address, (N,))


pinned = [LegacyPinnedMemoryResource().allocate(4 * N) for _ in range(3)]
a, b, c = map(on_host, pinned)
a[:], b[:] = np.random.default_rng(0).random((2, N), dtype="float32")
buffers = [device.allocate(4 * N, stream=stream) for _ in range(3)]
for buffer, host in zip(buffers[:2], pinned, strict=False):
    buffer.copy_from(host, stream=stream)
launch(stream, LaunchConfig(grid=4, block=256), add, *buffers, np.uint64(N))
buffers[2].copy_to(pinned[2], stream=stream)
stream.sync()
print("right" if (c == a + b).all() else "wrong")
