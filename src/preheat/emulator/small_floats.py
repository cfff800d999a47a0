"""Floating-point formats of 16 and 8 bits: float16 as in NumPy, the others as raw bits."""

from __future__ import annotations

import numpy as np

from preheat.emulator.floating import SINGLE, in_chunks, narrow
from preheat.emulator.integer import Array, ArrayFunction, choose

NAN = np.uint16(0x7FFF).view(np.float16)


def canonical(a: Array) -> Array:
    """Return a float16 whose NaN has the bits of the hardware."""
    return choose(np.isnan(a), NAN, a)


def from_bfloat16(a: Array) -> Array:
    """Return a bfloat16 as a single."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def single_to_bfloat16(a: Array, mode: str = "rn") -> Array:
    """Return a single as bfloat16, rounded in `mode`. NaN is canonical."""
    bits = a.view(np.uint32)
    if mode == "rn":
        rounding = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    else:
        away = {"rz": np.False_, "rm": np.signbit(a), "rp": ~np.signbit(a)}[mode]
        rounding = away * np.uint32(0xFFFF)
    return choose(np.isnan(a), np.uint16(0x7FFF), (bits + rounding >> np.uint32(16)).astype(np.uint16))


def to_bfloat16(a: Array, mode: str = "rn") -> Array:
    """Return the bfloat16 bits of singles."""
    return single_to_bfloat16(a, mode) if a.dtype == SINGLE else double_to_bfloat16(a, mode)


def double_to_bfloat16(a: Array, mode: str = "rn") -> Array:
    """Return a double as bfloat16, rounded once."""
    towards_zero = narrow(a, SINGLE, "rz")
    # The last bit of the single tells the second rounding that the first one was inexact.
    odd = towards_zero.view(np.uint32) | (towards_zero != a)
    return single_to_bfloat16(odd.view(np.float32), mode)


def bfloat16(run: ArrayFunction) -> ArrayFunction:
    """Return a function on bfloat16 from `run` on singles, whose result is exact or rounded to odd."""
    return in_chunks(lambda *operands: to_bfloat16(run(*map(from_bfloat16, operands))))


def single_to_tf32(mode: str) -> ArrayFunction:
    """Return a single with a fraction of 10 bits, as tf32 has."""

    def run(a: Array) -> Array:
        bits = a.view(np.uint32)
        even = np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
        rounding = {"rn": even, "rna": np.uint32(0x1000), "rz": np.uint32(0)}[mode]
        return choose(np.isnan(a), np.uint32(0x7FFFE000), bits + rounding & np.uint32(0xFFFFE000))

    return run


# The formats of 8 bits are float16 with a shorter fraction: e5m2 is its upper byte, and e4m3,
# whose exponents are 8 lower, is one bit further down.


def to_fp8(format: str) -> ArrayFunction:
    """Return a number as e4m3 or e5m2, rounded to nearest and clamped to the largest."""
    digits, lowest, largest = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}[format]

    def run(a: Array) -> Array:
        a = a.astype(np.float64)
        exponent = np.maximum(np.frexp(a)[1] - 1, lowest)
        rounded = np.clip(
            np.ldexp(np.rint(np.ldexp(a, digits - exponent)), exponent - digits), -largest, largest
        )
        if format == "e5m2":
            code = rounded.astype(np.float16).view(np.uint16) >> np.uint16(8)
        else:
            bits = (rounded / 256).astype(np.float16).view(np.uint16)
            code = bits >> np.uint16(7) & np.uint16(0x7F) | bits >> np.uint16(8) & np.uint16(0x80)
        return choose(np.isnan(a), np.uint8(0x7F), code.astype(np.uint8))

    return run


def from_fp8(format: str) -> ArrayFunction:
    """Return a number of e4m3 or e5m2 as float16."""

    def wide(a: Array) -> Array:
        return canonical((a.astype(np.uint16) << np.uint16(8)).view(np.float16))

    def scaled(a: Array) -> Array:
        size = a & np.uint8(0x7F)
        sign = (a & np.uint8(0x80)).astype(np.uint16)
        bits = size.astype(np.uint16) << np.uint16(7) | sign << np.uint16(8)
        return choose(size == 0x7F, NAN, bits.view(np.float16) * np.float16(256))

    return scaled if format == "e4m3" else wide
