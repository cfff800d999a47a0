"""Conversions between numbers. Each rounds once, and out-of-range integers saturate."""

from __future__ import annotations

from typing import Any

import numpy as np

from preheat.emulator.floating import DOUBLE, add_to_odd, narrow, step, sum_error
from preheat.emulator.integer import Array, ArrayFunction, choose, join
from preheat.emulator.small_floats import double_to_bfloat16

TO_INTEGRAL: dict[str, ArrayFunction] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def integer_to_integer(to: np.dtype[Any], *, saturate: bool) -> ArrayFunction:
    """Truncate, extend by the sign of the source, or clamp to the range of `to`."""

    def clamp(a: Array) -> Array:
        ours, theirs = np.iinfo(to), np.iinfo(a.dtype)
        return np.clip(a, max(ours.min, theirs.min), min(ours.max, theirs.max)).astype(to)

    return clamp if saturate else lambda a: a.astype(to, copy=False)


def float_to_integer(of: np.dtype[Any], to: np.dtype[Any], mode: str) -> ArrayFunction:
    """Round in `mode` and clamp to the range of `to`. NaN becomes zero, or the highest bit."""
    integral = TO_INTEGRAL[mode]
    limits = np.iinfo(to)
    # NaN becomes the highest bit alone if source or result has 64 bits.
    wide = of.itemsize == 8 or to.itemsize == 8
    nan = np.array(1 << limits.bits - 1, f"u{to.itemsize}").view(to)[()] if wide else to.type(0)
    beyond = float(limits.max) + 1 if limits.bits < 64 else 2.0 ** (limits.bits - (limits.min < 0))

    def run(a: Array) -> Array:
        whole = integral(a.astype(np.float64))
        inside = (whole >= limits.min) & (whole < beyond)
        edge = choose(whole < 0, to.type(limits.min), to.type(limits.max))
        result = choose(inside, whole, 0.0).astype(to)
        return choose(inside, result, choose(np.isnan(whole), nan, edge))

    return run


def _to_odd(a: Array) -> Array:
    """Return an integer as a double, rounded to odd if it is too long."""
    return a.astype(np.float64) if a.dtype.itemsize < 8 else add_to_odd(*_words(a))


def _words(a: Array) -> tuple[Array, Array]:
    """Return the upper and the lower 32 of 64 bits as doubles that add up to the integer."""
    upper, lower = a >> a.dtype.type(32), a & a.dtype.type(0xFFFFFFFF)
    return upper.astype(np.float64) * 2.0**32, lower.astype(np.float64)


def integer_to_float(to: np.dtype[Any], mode: str) -> ArrayFunction:
    """Return an integer as `to`, rounded in `mode`."""
    if mode == "rn":
        return lambda a: a.astype(to)
    if to != DOUBLE:
        return lambda a: narrow(_to_odd(a), to, mode)

    def run(a: Array) -> Array:
        if a.dtype.itemsize < 8:
            return a.astype(np.float64)
        upper, lower = _words(a)
        total = upper + lower
        return step(total, sum_error(upper, lower, total), mode)

    return run


def integer_to_bfloat16(mode: str) -> ArrayFunction:
    """Return an integer as bfloat16, rounded in `mode`."""
    return lambda a: double_to_bfloat16(_to_odd(a), mode)


def float_to_float(to: np.dtype[Any], mode: str) -> ArrayFunction:
    """Round once to `to`."""
    if mode == "rn":
        return lambda a: a.astype(to, copy=False)
    return lambda a: narrow(a.astype(np.float64), to, mode)


def pair(convert: ArrayFunction) -> ArrayFunction:
    """Return `convert` of two operands, the first in the upper half of the result."""
    return lambda upper, lower: join(convert(lower), convert(upper))


def push(kind: np.dtype[Any]) -> ArrayFunction:
    """Clamp two integers to bytes and put them below the lower half of a third operand."""
    bytes_of = pair(integer_to_integer(kind, saturate=True))
    return lambda upper, lower, c: c << np.uint32(16) | bytes_of(upper, lower)
