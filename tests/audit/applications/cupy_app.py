"""One kernel of CuPy from source, which NVRTC compiles in the process."""

import cupy

double = cupy.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
x = cupy.arange(32, dtype=cupy.float32)
double((1,), (32,), (x,))
assert (cupy.asnumpy(x) == 2 * cupy.arange(32).get()).all()
print("right")
