"""Kernels as an application writes them."""

import math

import numpy as np
from numba import cuda, float32

SCALE = 3.0
TABLE = np.array([1.0, 2.0, 4.0], dtype=np.float32)


@cuda.jit(device=True)
def helper(x):
    return math.sin(x) * SCALE


@cuda.jit
def add(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = helper(x[i]) + y[i] + TABLE[i % 3]


@cuda.jit(cache=True, fastmath=True)
def halve(x):
    shared = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    shared[i] = x[i]
    cuda.syncthreads()
    x[i] = shared[31 - i] / 2
