"""Kernels of an application: one with an atomic operation, and one that calls another function."""

from numba import cuda


@cuda.jit(device=True)
def weighted(x, a):
    return a * x + 1


@cuda.jit
def scale(x, y, a):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = weighted(x[i], a)


@cuda.jit
def total(x, out):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(out, 0, x[i])
