"""Kernels that are compiled when they are defined, and other ways to make one."""

import math

from numba import cuda, vectorize


@cuda.jit("float32(float32)", device=True)
def eager_helper(x):
    return math.tanh(x)


@cuda.jit("void(float32[::1])")
def eager(x):
    x[cuda.grid(1)] += eager_helper(x[0])


@cuda.jit(debug=True, opt=False)
def checked(x, n):
    if n == 0:
        raise ValueError("n is zero")
    x[0] = 1 // n


@vectorize(["float32(float32, float32)"], target="cuda")
def product(a, b):
    return a * b


@cuda.reduce
def total(a, b):
    return a + b


def made(factor):
    @cuda.jit
    def scaled(x):
        x[cuda.grid(1)] *= factor

    return scaled
