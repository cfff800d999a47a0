"""Conversions between numbers: each rounds once, and out-of-range integers saturate."""

from __future__ import annotations

from typing import Any

import numpy as np

from preheat.devices.emulator.floating import DOUBLE, add_to_odd, narrow, step, sum_error
from preheat.devices.emulator.halves import double_to_brain
from preheat.devices.emulator.integer import Array, Run, choose, join

TO_INTEGRAL: dict[str, Run] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def integer_to_integer(to: np.dtype[Any], *, saturate: bool) -> Run:
    """Cut off, or extended by the sign of the source; or clamped to what `to` can hold."""

    def clamp(a: Array) -> Array:
        ours, theirs = np.iinfo(to), np.iinfo(a.dtype)
        return np.clip(a, max(ours.min, theirs.min), min(ours.max, theirs.max)).astype(to)

    return clamp if saturate else lambda a: a.astype(to, copy=False)


def float_to_integer(of: np.dtype[Any], to: np.dtype[Any], mode: str) -> Run:
    """Rounded by `mode` and clamped to what `to` can hold; NaN is zero, or the highest bit."""
    integral, limits = TO_INTEGRAL[mode], np.iinfo(to)
    # NaN is the highest bit alone where there are 64 bits on either side.
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
    """An integer as a double, rounded to odd where it is too long."""
    return a.astype(np.float64) if a.dtype.itemsize < 8 else add_to_odd(*_words(a))


def _words(a: Array) -> tuple[Array, Array]:
    """The upper and the lower 32 of 64 bits as doubles that add up to the integer."""
    upper, lower = a >> a.dtype.type(32), a & a.dtype.type(0xFFFFFFFF)
    return upper.astype(np.float64) * 2.0**32, lower.astype(np.float64)


def integer_to_float(to: np.dtype[Any], mode: str) -> Run:
    """The number of `to` next to an integer in `mode`."""
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


def integer_to_brain(mode: str) -> Run:
    """The bfloat16 next to an integer in `mode`."""
    return lambda a: double_to_brain(_to_odd(a), mode)


def float_to_float(to: np.dtype[Any], mode: str) -> Run:
    """Rounded once to `to`."""
    if mode == "rn":
        return lambda a: a.astype(to, copy=False)
    return lambda a: narrow(a.astype(np.float64), to, mode)


def pair(convert: Run) -> Run:
    """`convert` of two operands, the first in the upper half of the result."""
    return lambda upper, lower: join(convert(lower), convert(upper))


def push(kind: np.dtype[Any]) -> Run:
    """Two integers clamped to bytes, below the lower half of a third operand."""
    bytes_of = pair(integer_to_integer(kind, saturate=True))
    return lambda upper, lower, c: c << np.uint32(16) | bytes_of(upper, lower)
