"""Kernels of an application: one with an atomic operation, and two that call other functions."""

from numba import cuda


@cuda.jit(device=True)
def weighted(x, a):
    return a * x + 1


@cuda.jit("float32(float32)", device=True)
def squared(x):
    return x * x


@cuda.jit(device=True)
def cubed(x):
    return x * squared(x)


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


@cuda.jit
def polynomial(x, y, a):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = cubed(x[i]) - squared(x[i]) + weighted(x[i], a)
