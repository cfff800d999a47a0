"""Floating-point arithmetic in every rounding mode, exact to the last bit.

NumPy rounds to nearest. Fused multiply-add and the other modes need the rounding error. In single
precision the result is first rounded to odd in double precision, where the last bit says whether the
result is inexact, which makes the second rounding correct (Boldo and Melquiond). In double precision
exact fractions decide where error-free sums cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from preheat.emulator.integer import Array, ArrayFunction, choose, unsigned

HALF = np.dtype(np.float16)
SINGLE = np.dtype(np.float32)
DOUBLE = np.dtype(np.float64)
TINY = {kind: np.finfo(kind).tiny for kind in (HALF, SINGLE, DOUBLE)}


def flush(a: Array) -> Array:
    """Replace subnormal numbers by zeros of the same sign."""
    return a * (np.abs(a) >= TINY[a.dtype])


def flushed(run: ArrayFunction) -> ArrayFunction:
    """Return `run` with subnormal operands and results flushed to zero."""
    return lambda *operands: flush(run(*map(flush, operands)))


def saturate(a: Array) -> Array:
    """Clamp to [+0, 1]. NaN becomes +0."""
    zero = a.dtype.type(0)
    return np.fmin(np.fmax(a, zero), a.dtype.type(1)) + zero


def map_result(run: ArrayFunction, last: ArrayFunction) -> ArrayFunction:
    """Return `run` with `last` applied to its result."""
    return lambda *operands: last(run(*operands))


def map_operands(run: ArrayFunction, first: ArrayFunction) -> ArrayFunction:
    """Return `run` with `first` applied to each operand."""
    return lambda *operands: run(*map(first, operands))


def relu(a: Array) -> Array:
    """Replace negative numbers by +0. NaN stays."""
    return np.maximum(a, a.dtype.type(0)) + a.dtype.type(0)


CHUNK = 4096


def in_chunks(run: ArrayFunction) -> ArrayFunction:
    """Return `run` on chunks so short that its intermediate arrays stay in the CPU cache."""

    def chunked(*operands: Array) -> Array:
        count = max(np.size(a) for a in operands)
        if count <= CHUNK:
            return run(*operands)
        chunks = (slice(start, start + CHUNK) for start in range(0, count, CHUNK))
        return np.concatenate([run(*(a[at] if a.ndim else a for a in operands)) for at in chunks])

    return chunked


def step(nearest: Array, lacking: Array, mode: str) -> Array:
    """Return the result in `mode`, from the nearest one and the sign of its error."""
    infinity = nearest.dtype.type(np.inf)
    down, up = lacking < 0, lacking > 0
    if mode == "rz":
        down = down & (nearest > 0)
        up = up & (nearest < 0)
    if mode != "rp":
        nearest = choose(down, np.nextafter(nearest, -infinity), nearest)
    if mode != "rm":
        nearest = choose(up, np.nextafter(nearest, infinity), nearest)
    return nearest


def narrow(a: Array, kind: np.dtype[Any], mode: str) -> Array:
    """Round a double once to `kind`."""
    nearest = a.astype(kind)
    if mode == "rn":
        return nearest
    size = np.abs(nearest)
    exact = np.abs(a)
    over, under = size > exact, size < exact
    found = unsigned(nearest) - over
    if mode != "rz":
        away = np.signbit(a) if mode == "rm" else ~np.signbit(a)
        found = found + ((over | under) & away)
    return found.view(kind)


def to_odd(nearest: Array, lacking: Array) -> Array:
    """Return `nearest`, or its odd neighbour towards the exact value if it is even and inexact."""
    number = nearest.view(np.int64)
    inexact = np.abs(lacking) > 0
    inward = (number ^ lacking.view(np.int64) < 0) & inexact
    return (number - inward | inexact).view(np.float64)


def sum_error(a: Array, b: Array, total: Array) -> Array:
    """Return exactly `a + b - total` (Knuth)."""
    part = total - a
    return (a - (total - part)) + (b - part)


def product_error(a: Array, b: Array, product: Array) -> Array:
    """Return exactly `a * b - product`, if nothing overflows or underflows (Dekker)."""
    a1, b1 = _upper_bits(a), _upper_bits(b)
    a2, b2 = a - a1, b - b1
    return a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def _upper_bits(a: Array) -> Array:
    scaled = a * 134217729.0  # 2**27 + 1 (Veltkamp).
    return scaled - (scaled - a)


def add_to_odd(a: Array, b: Array) -> Array:
    """Return a + b rounded to odd, so that rounding it again rounds only once."""
    total = a + b
    return to_odd(total, sum_error(a, b, total))


# Single precision, carried out in double precision: exact, or rounded to odd.


def _add_single(a: Array, b: Array) -> Array:
    return add_to_odd(a.astype(np.float64), b.astype(np.float64))


def _subtract_single(a: Array, b: Array) -> Array:
    return _add_single(a, -b)


def _multiply_single(a: Array, b: Array) -> Array:
    # This is faster than a ufunc that casts its operands.
    return a.astype(np.float64) * b.astype(np.float64)


def _fma_single(a: Array, b: Array, c: Array) -> Array:
    return add_to_odd(_multiply_single(a, b), c.astype(np.float64))


def _divide_single(a: Array, b: Array) -> Array:
    a, b = a.astype(np.float64), b.astype(np.float64)
    quotient = a / b
    product = quotient * b
    lacking = (a - product) - product_error(quotient, b, product)
    return to_odd(quotient, choose(b < 0, -lacking, lacking))


def _root_single(a: Array) -> Array:
    a = a.astype(np.float64)
    root = np.sqrt(a)
    square = root * root
    return to_odd(root, (a - square) - product_error(root, root, square))


def fma_single(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once to single precision."""
    product = _multiply_single(a, b)
    addend = c.astype(np.float64)
    total = product + addend
    # Double rounding is wrong only halfway between two results, or below the normal numbers.
    doubtful = total.view(np.int64) & 0x1FFFFFFF == 0x10000000
    doubtful |= np.abs(total) < TINY[SINGLE]
    if doubtful.any():
        total = _correct(total, np.flatnonzero(doubtful), product, addend)
    return total.astype(np.float32)


def _correct(total: Array, at: Array, product: Array, addend: Array) -> Array:
    """Return `total` with the sums at these indices rounded to odd instead."""
    if not total.ndim:
        return add_to_odd(product, addend)
    total[at] = add_to_odd(*(x.take(at) if x.ndim else x for x in (product, addend)))
    return total


def fma_half(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once to float16."""
    # In double precision, the product and any sum that double rounding could change are exact.
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float16)


# Double precision.


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once to double precision."""
    product = a * b
    size = np.abs(product)
    safe = (size > 2.0**-960) & (np.maximum(size, np.abs(c)) < 2.0**1000)
    safe &= np.maximum(np.abs(a), np.abs(b)) < 2.0**990
    result = _fma_by_sums(a, b, c, product)
    return result if np.all(safe) else _fma_by_fractions(a, b, c, result, safe)


def _fma_by_sums(a: Array, b: Array, c: Array, product: Array) -> Array:
    """Return the sum, which is correct if no intermediate value overflows or underflows."""
    lower = product_error(a, b, product)
    middle = c + lower
    upper = product + middle
    return upper + add_to_odd(sum_error(c, lower, middle), sum_error(product, middle, upper))


def _fma_by_fractions(a: Array, b: Array, c: Array, result: Array, safe: Array) -> Array:
    """Return `result` where `safe`; elsewhere compute it by NumPy or by exact fractions."""
    a, b, c = np.broadcast_arrays(a, b, c)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    # If c is infinite or NaN, it is the sum, even if the finite product overflows.
    plain = choose(np.isfinite(a) & np.isfinite(b) & ~np.isfinite(c), c, a * b + c)
    result = np.array(choose(safe, result, plain))
    for lane in np.argwhere(~safe & finite):
        at = tuple(lane)
        result[at] = nearest(Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at])))
    return result[()]


def nearest(exact: Fraction) -> float:
    """Return the double nearest to a fraction."""
    sign = -1 if exact < 0 else 1
    try:
        return math.copysign(float(exact), sign)
    except OverflowError:
        return sign * math.inf


# The error of a double-precision result, up to a positive factor.
LACKING: dict[str, Callable[..., Fraction]] = {
    "add": lambda result, a, b: a + b - result,
    "sub": lambda result, a, b: a - b - result,
    "mul": lambda result, a, b: a * b - result,
    "fma": lambda result, a, b, c: a * b + c - result,
    "div": lambda result, a, b: (a - result * b) * b,
    "rcp": lambda result, a: (1 - result * a) * a,
    "sqrt": lambda result, a: a - result * result,
}


def _lacking(operation: str) -> ArrayFunction:
    """Return the sign of the error of a result; 0 where an operand is not finite."""

    def sign(result: float, *operands: float) -> float:
        if not all(map(math.isfinite, operands)) or math.isnan(result):
            return 0.0
        # An infinite result has overflowed, unless it comes from a division by zero, which is exact.
        finite = math.copysign(min(abs(result), np.finfo(np.float64).max), result)
        missing = LACKING[operation](*map(Fraction, (finite, *operands)))
        if finite != result and missing:
            return math.copysign(1.0, -result)
        return float((missing > 0) - (missing < 0))

    return np.vectorize(sign, otypes=[np.float64])


def reciprocal(a: Array) -> Array:
    """Return 1 / a."""
    return a.dtype.type(1) / a


NEAREST: dict[str, dict[np.dtype[Any], ArrayFunction]] = {
    "add": {HALF: np.add, SINGLE: np.add, DOUBLE: np.add},
    "sub": {HALF: np.subtract, SINGLE: np.subtract, DOUBLE: np.subtract},
    "mul": {HALF: np.multiply, SINGLE: np.multiply, DOUBLE: np.multiply},
    "div": {SINGLE: np.divide, DOUBLE: np.divide},
    "rcp": {SINGLE: reciprocal, DOUBLE: reciprocal},
    "sqrt": {SINGLE: np.sqrt, DOUBLE: np.sqrt},
    "fma": {HALF: fma_half, SINGLE: fma_single, DOUBLE: in_chunks(fma_double)},
}
TO_ODD: dict[str, ArrayFunction] = {
    "add": _add_single,
    "sub": _subtract_single,
    "mul": _multiply_single,
    "div": _divide_single,
    "rcp": lambda a: _divide_single(np.float32(1), a),
    "sqrt": _root_single,
    "fma": _fma_single,
}
# Which operands to negate to negate the result: rounding down is rounding up of the negated value,
# which makes an exact sum of zero negative, as required.
MIRROR = {"add": (-1, -1), "sub": (-1, -1), "fma": (-1, 1, -1)}


def flushed_arithmetic(operation: str, kind: np.dtype[Any], mode: str) -> ArrayFunction:
    """Return `arithmetic` with subnormal operands and results flushed to zero."""
    run = arithmetic(operation, kind, mode)
    exact = TO_ODD[operation]
    limit = TINY[kind]

    def ftz(*operands: Array) -> Array:
        operands = tuple(map(flush, operands))
        result = flush(run(*operands))
        at_limit = np.abs(result) == limit
        if np.any(at_limit):
            # A result that became normal only by the coarse rounding of subnormals is flushed as well.
            finer = narrow(exact(*operands) * 2.0**8, kind, mode)
            small = at_limit & (np.abs(finer) < limit * kind.type(2.0**8))
            result = choose(small, np.copysign(kind.type(0), result), result)
        return result

    return ftz


def arithmetic(operation: str, kind: np.dtype[Any], mode: str) -> ArrayFunction:
    """Return `operation` on numbers of `kind`, rounded once in `mode`."""
    at_nearest = NEAREST[operation][kind]
    if mode == "rn":
        return at_nearest
    if mode == "rm" and operation in MIRROR:
        upward = arithmetic(operation, kind, "rp")
        signs = MIRROR[operation]
        return lambda *operands: (
            -upward(*(-a if s < 0 else a for a, s in zip(operands, signs, strict=True)))
        )
    if kind == SINGLE:
        exact = TO_ODD[operation]
        return in_chunks(lambda *operands: narrow(exact(*operands), SINGLE, mode))
    lacking = _lacking(operation)

    def directed(*operands: Array) -> Array:
        result = at_nearest(*operands)
        return step(result, lacking(result, *operands), mode)

    return directed


def extreme(operation: str, *, nan: bool) -> ArrayFunction:
    """Return "min" or "max" of two numbers, with -0 < +0. NaN if both are or, with `nan`, either is."""
    pick = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[operation][nan]
    merge = np.bitwise_or if operation == "min" else np.bitwise_and

    def run(a: Array, b: Array) -> Array:
        # Equal numbers differ only in the sign of zero.
        equal = merge(unsigned(a), unsigned(b)).view(a.dtype)
        return choose(a == b, equal, pick(a, b))

    return run


def xor_sign(run: ArrayFunction) -> ArrayFunction:
    """Return `run` on magnitudes, with the product of the signs (`.xorsign.abs`)."""

    def signed(a: Array, b: Array) -> Array:
        sign = np.signbit(a) ^ np.signbit(b)
        return np.copysign(run(np.abs(a), np.abs(b)), choose(sign, a.dtype.type(-1), a.dtype.type(1)))

    return signed


def copy_sign(a: Array, b: Array) -> Array:
    """Return `b` with the sign of `a`."""
    return np.copysign(b, a)
