"""A function of an application that Numba-CUDA compiles."""

from numba import cuda


@cuda.jit
def double(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = 2.0 * x[i]
