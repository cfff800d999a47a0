"""The approximate functions, each within the error bound that NVIDIA documents.

They are computed in double precision and rounded once. Where the hardware is known to be less accurate
in a visible way (angles, 16-bit results, seeds of doubles), so is this module.
"""

from __future__ import annotations

import numpy as np

from preheat.devices.emulator.floating import HALF, SINGLE, narrow
from preheat.devices.emulator.integer import Array, ArrayFunction, choose


def _double(a: Array) -> Array:
    return a.astype(np.float64)


def _turns(a: Array) -> Array:
    """Return an angle reduced as in hardware: turns are counted and cut in single precision."""
    product = np.multiply(a, np.float32(1 / (2 * np.pi)), dtype=np.float64)
    return np.fmod(_double(narrow(product, SINGLE, "rz")), 1.0) * (2 * np.pi)


def _rounded(function: ArrayFunction, of: ArrayFunction = _double) -> ArrayFunction:
    """Return `function`, computed in double precision."""
    return lambda a: function(of(a)).astype(a.dtype)


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
        result = function(_cut(a))
        return choose(np.isnan(result), result, _cut(result))

    return run


def _cut(a: Array) -> Array:
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


reciprocal, root, inverse_root = _rounded(_inverse), _rounded(np.sqrt), _rounded(_inverse_root)
reciprocal_seed, inverse_root_seed = _upper_word(_inverse), _upper_word(_inverse_root)
logarithm, tangent = _rounded(np.log2), _rounded(np.tanh)
sine, cosine = _rounded(np.sin, of=_turns), _rounded(np.cos, of=_turns)
