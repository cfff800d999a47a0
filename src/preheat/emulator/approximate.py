"""The approximate functions, each within the error bound that NVIDIA documents.

They are computed in double precision and rounded once. This module is as inaccurate as the hardware
where that is known to be visible (angles, 16-bit results, seeds of doubles).
"""

from __future__ import annotations

import numpy as np

from preheat.emulator.floating import HALF, SINGLE, narrow
from preheat.emulator.integer import Array, ArrayFunction, choose


def _double(a: Array) -> Array:
    return a.astype(np.float64)


def _reduced_angle(a: Array) -> Array:
    """Return an angle reduced as in hardware: turns are counted and cut in single precision."""
    product = np.multiply(a, np.float32(1 / (2 * np.pi)), dtype=np.float64)
    return np.fmod(_double(narrow(product, SINGLE, "rz")), 1.0) * (2 * np.pi)


def _rounded(function: ArrayFunction, first: ArrayFunction = _double) -> ArrayFunction:
    """Return `function` of `first`, computed in double precision and rounded once."""
    return lambda a: function(first(a)).astype(a.dtype)


def power(a: Array) -> Array:
    """Return 2 to the power of `a`. In float16 the result is truncated."""
    exact = np.exp2(_double(a))
    nearest = exact.astype(a.dtype)
    if a.dtype != HALF:
        return nearest
    return choose(np.isinf(nearest), nearest, narrow(exact, HALF, "rz"))


def cut_to_bfloat16(run: ArrayFunction) -> ArrayFunction:
    """Return `run` with its single-precision result truncated to bfloat16."""
    return lambda a: (run(a).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _upper_word(function: ArrayFunction) -> ArrayFunction:
    """Return `function` of the upper 32 bits of a double, with a result of 32 bits."""

    def run(a: Array) -> Array:
        result = function(_upper_bits(a))
        return choose(np.isnan(result), result, _upper_bits(result))

    return run


def _upper_bits(a: Array) -> Array:
    return (a.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _inverse(a: Array) -> Array:
    return 1.0 / a


def _inverse_root(a: Array) -> Array:
    return 1.0 / np.sqrt(a)


def divide(a: Array, b: Array) -> Array:
    """Return a / b."""
    return (_double(a) / _double(b)).astype(np.float32)


def divide_by_inverse(a: Array, b: Array) -> Array:
    """Return the quotient, or zero times `a` where the inverse of `b` is too small to be normal."""
    small = (np.abs(b) > np.float32(2.0**126)) & (np.abs(b) < np.float32(np.inf))
    return choose(small, a * np.copysign(np.float32(0), b), divide(a, b))


reciprocal = _rounded(_inverse)
reciprocal_seed = _upper_word(_inverse)
root = _rounded(np.sqrt)
inverse_root = _rounded(_inverse_root)
inverse_root_seed = _upper_word(_inverse_root)
logarithm = _rounded(np.log2)
tangent = _rounded(np.tanh)
sine = _rounded(np.sin, _reduced_angle)
cosine = _rounded(np.cos, _reduced_angle)
