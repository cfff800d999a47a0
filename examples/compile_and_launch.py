"""Compile a kernel, launch it, and see what a mistake looks like.

    python compile_and_launch.py

Run it twice. The second process compiles nothing: it finds the kernel in the cache.
"""

import numpy as np

import preheat

SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""

# "auto" is the GPU, or the emulator on a machine without one. PREHEAT_DEVICE and
# preheat.device() without an argument let the environment decide.
gpu = preheat.device("auto")

# This is the only place where anything is compiled, and only if no cache has it. The key of a
# cache entry has the source, the options, the architecture and the version of the compiler.
saxpy = gpu.kernel(SOURCE, "saxpy")
print(f"{saxpy.entry} for {gpu.arch}")

# Arrays of the device. Tensors of torch and arrays of CuPy can be passed to a kernel as well.
x = gpu.array(np.arange(1000, dtype="float32"))
y = gpu.zeros(1000)

# Grid and block, as <<<4, 256>>> in CUDA C++. Python numbers are converted to the type of the
# parameter, so 2.0 becomes a float and 1000 an int.
saxpy[4, 256](2.0, x, y, 1000)

# The launch returns at once. `numpy()` waits for the kernel and copies the result.
print(y.numpy()[:5])

# A wrong argument is an error before the launch. The kernel and the device stay usable.
try:
    saxpy[4, 256](2.0, x, y, 1000.5)
except preheat.LaunchError as error:
    print(error)

# The counters of this process. A second run prints "0 compiled, 1 found on disk".
stats = gpu.builder.stats()["process"]
print(f"{stats.get('compiles', 0):.0f} compiled, {stats.get('hits.disk', 0):.0f} found on disk")
