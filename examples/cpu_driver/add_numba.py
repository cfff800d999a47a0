"""Numba-CUDA: a kernel in Python. NUMBA_CUDA_DEBUGINFO=1 lets a fault name its line."""

import numpy as np
from numba import cuda


@cuda.jit
def add(a, b, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i] + b[i]


N = 100_000
a, b = np.random.default_rng(0).random((2, N), dtype="float32")
c = cuda.device_array(N, "float32")
add[(N + 255) // 256, 256](cuda.to_device(a), cuda.to_device(b), c)
print("right" if (c.copy_to_host() == a + b).all() else "wrong")
