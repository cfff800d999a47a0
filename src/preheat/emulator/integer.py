"""Integer and bit instructions for which NumPy has no single function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # An ndarray, or a NumPy scalar if a value is the same for all threads.

ArrayFunction = Callable[..., Array]

#: The integer type that is twice as wide.
WIDER = {
    np.dtype(f"{kind}{size}"): np.dtype(f"{kind}{2 * size}") for kind in "ui" for size in (1, 2, 4)
}


def choose(condition: Array, yes: Array, no: Array) -> Array:
    """Return `yes` where `condition` holds, `no` elsewhere. A scalar stays a scalar."""
    chosen: Array = np.where(condition, yes, no)
    return chosen[()]


def unsigned(a: Array) -> Array:
    """Return the same bits as an unsigned number."""
    return a.view(f"u{a.dtype.itemsize}")


def add_saturating(a: Array, b: Array) -> Array:
    """Return a + b, clamped."""
    return _saturate(np.add(a, b, dtype=np.int64))


def subtract_saturating(a: Array, b: Array) -> Array:
    """Return a - b, clamped."""
    return _saturate(np.subtract(a, b, dtype=np.int64))


def _saturate(wide: Array) -> Array:
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def multiply_wide(a: Array, b: Array) -> Array:
    """Return the whole product, twice as wide as its factors."""
    return np.multiply(a, b, dtype=WIDER[a.dtype])


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper half of the whole product."""
    if a.dtype.itemsize == 8:
        return _multiply_high_64(a, b)
    return (multiply_wide(a, b) >> a.dtype.itemsize * 8).astype(a.dtype)


def _multiply_high_64(a: Array, b: Array) -> Array:
    low = np.uint64(0xFFFFFFFF)
    ua = unsigned(a)
    ub = unsigned(b)
    half = np.uint64(32)
    a0, a1, b0, b1 = ua & low, ua >> half, ub & low, ub >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    high = a1 * b1 + (middle >> half) + (a0 * b1 + (middle & low) >> half)
    if a.dtype.kind == "i":  # As unsigned, a negative factor is 2**64 too large.
        high = high - ub * (a < 0) - ua * (b < 0)
    return high.view(a.dtype)


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return the lower half of a * b, plus c."""
    return a * b + c


def plus(product: ArrayFunction) -> ArrayFunction:
    """Return `product` of two operands, plus a third."""
    return lambda a, b, c: product(a, b) + c


def plus_saturating(product: ArrayFunction) -> ArrayFunction:
    """Return `product` of two operands, plus a third, clamped."""
    return lambda a, b, c: add_saturating(product(a, b), c)


def _product_24(a: Array, b: Array) -> Array:
    eight = a.dtype.type(8)
    return multiply_wide(a << eight >> eight, b << eight >> eight)


def multiply_24(a: Array, b: Array) -> Array:
    """Return the lower 32 bits of the product of the lower 24 bits."""
    return _product_24(a, b).astype(a.dtype)


def multiply_24_high(a: Array, b: Array) -> Array:
    """Return bits 16 to 47 of the product of the lower 24 bits."""
    return (_product_24(a, b) >> 16).astype(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Return the quotient towards zero, or all ones where the divisor is zero."""
    kind = np.result_type(a)
    zero = b == 0
    # Unsigned magnitudes also represent the smallest integer, and dividing it by -1 wraps.
    quotient = unsigned(np.abs(a)) // (unsigned(np.abs(b)) | zero)
    negative = (a < 0) != (b < 0)
    signed = choose(negative, -quotient, quotient) if kind.kind == "i" else quotient
    return choose(zero, ~kind.type(0), signed.view(kind))


def remainder(a: Array, b: Array) -> Array:
    """Return the remainder with the sign of the dividend, or all ones where the divisor is zero."""
    return choose(b == 0, ~a.dtype.type(0), a - divide(a, b) * b)


def sum_of_differences(a: Array, b: Array, c: Array) -> Array:
    """Return c plus the absolute difference of a and b."""
    return c + (np.maximum(a, b) - np.minimum(a, b))


def by_halves(run: ArrayFunction, kind: np.dtype[Any]) -> ArrayFunction:
    """Return `run` on the lower and on the upper half of the operands, read as `kind`."""
    both = each_half(run, kind)
    return lambda *operands: join(*both(*operands))


def each_half(run: ArrayFunction, kind: np.dtype[Any]) -> Callable[..., tuple[Array, Array]]:
    """Return both results of `run` on the lower and on the upper half of the operands."""

    def both(*operands: Array) -> tuple[Array, Array]:
        low, high = zip(*(halves(a) for a in operands), strict=True)
        return run(*(a.view(kind) for a in low)), run(*(a.view(kind) for a in high))

    return both


def halves(a: Array) -> tuple[Array, Array]:
    """Return the lower and the upper half of the bits of an unsigned operand."""
    part = f"u{a.dtype.itemsize // 2}"
    return a.astype(part), (a >> a.dtype.type(a.dtype.itemsize * 4)).astype(part)


def join(low: Array, high: Array) -> Array:
    """Return two results as one that is twice as wide."""
    whole = WIDER[unsigned(low).dtype]
    return unsigned(low).astype(whole) | unsigned(high).astype(whole) << whole.type(whole.itemsize * 4)


def shift_left(a: Array, n: Array) -> Array:
    """Shift left. The result is zero if the amount is at least the width."""
    return np.left_shift(a, np.minimum(n, np.uint32(a.dtype.itemsize * 8)).astype(a.dtype))


def shift_right(a: Array, n: Array) -> Array:
    """Shift right. The result is the sign or zero if the amount is at least the width."""
    return np.right_shift(a, np.minimum(n, np.uint32(a.dtype.itemsize * 8)).astype(a.dtype))


def funnel_left(mode: str) -> ArrayFunction:
    """Shift two words left together and return the upper word."""

    return lambda low, high, n: (_pair(low, high) << _amount(n, mode) >> np.uint64(32)).astype(
        np.uint32
    )


def funnel_right(mode: str) -> ArrayFunction:
    """Shift two words right together and return the lower word."""

    return lambda low, high, n: (_pair(low, high) >> _amount(n, mode)).astype(np.uint32)


def _pair(low: Array, high: Array) -> Array:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def _amount(n: Array, mode: str) -> Array:
    return (n & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))).astype(np.uint64)


def is_zero(a: Array) -> Array:
    """Return 1 where a is 0, else 0."""
    return (a == 0).astype(a.dtype)


def ones(count: Array, kind: np.dtype[Any]) -> Array:
    """Return a mask of the lowest `count` bits."""
    return ~shift_left(~np.zeros_like(count, dtype=kind), count)[()]


def extract(a: Array, position: Array, length: Array) -> Array:
    """Return the field of `length` bits at `position`, sign-extended if signed."""
    position, length = _field(a, position, length)
    if a.dtype.kind == "u":
        return shift_right(a, position) & ones(length, a.dtype)
    width = np.uint32(a.dtype.itemsize * 8)
    spare = width - np.minimum(length, width)
    return shift_right(shift_left(shift_right(a, position), spare), spare)


def _field(a: Array, position: Array, length: Array) -> tuple[Array, Array]:
    """Return position and length: 8 bits of either for 32-bit fields, more for 64-bit ones."""
    if a.dtype.itemsize == 8:
        return position, length
    return position & np.uint32(0xFF), length & np.uint32(0xFF)


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """Return `b` with the lowest `length` bits of `a` inserted at `position`."""
    position, length = _field(a, position, length)
    mask = shift_left(ones(length, a.dtype), position)
    return b ^ (b ^ shift_left(a, position)) & mask


def _bit_length(a: Array) -> Array:
    if a.dtype.itemsize == 8:
        high = a >> np.uint64(32)
        return choose(high != 0, _bit_length_32(high) + 32, _bit_length_32(a & np.uint64(0xFFFFFFFF)))
    return _bit_length_32(a)


def _bit_length_32(a: Array) -> Array:
    return np.frexp(a.astype(np.float64))[1].astype(np.uint32)


def leading_zeros(a: Array) -> Array:
    """Return the number of zero bits above the highest set bit."""
    return np.uint32(a.dtype.itemsize * 8) - _bit_length(a)


def population(a: Array) -> Array:
    """Return the number of set bits."""
    return np.bitwise_count(a).astype(np.uint32)


def highest_bit(a: Array) -> Array:
    """Return the position of the highest bit that differs from the sign, or all ones."""
    return _bit_length(
        unsigned(a ^ (a >> a.dtype.type(a.dtype.itemsize * 8 - 1)) if a.dtype.kind == "i" else a)
    ) - np.uint32(1)


def highest_bit_shift(a: Array) -> Array:
    """Return how far left that bit must be shifted to become the top bit."""
    found = highest_bit(a)
    return choose(found == np.uint32(0xFFFFFFFF), found, np.uint32(a.dtype.itemsize * 8 - 1) - found)


def reverse(a: Array) -> Array:
    """Return the bits in reverse order."""
    width = a.dtype.itemsize * 8
    kind = a.dtype.type
    every = (1 << width) - 1
    step = 1
    while step < width:
        mask = kind(every // ((1 << step) + 1))  # `step` ones, `step` zeros, and so on.
        a = (a >> kind(step)) & mask | (a & mask) << kind(step)
        step *= 2
    return a


SELECTIONS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Return four of the eight bytes of `a` and `b`, each selected by three bits, or its sign."""
    pair = _pair(a, b)
    result = np.uint32(0)
    for place in range(4):
        pick = selector >> np.uint32(4 * place)
        byte = pair >> ((pick & np.uint32(7)) * np.uint32(8)).astype(np.uint64) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        byte = choose(pick & np.uint32(8) != 0, sign, byte)
        result = result | byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def permute_by(mode: str) -> ArrayFunction:
    """Return `permute` with one of four fixed selections."""
    selections = np.array(SELECTIONS[mode], np.uint32)

    def run(a: Array, b: Array, selector: Array) -> Array:
        return permute(a, b, selections[selector & np.uint32(3)])

    return run


def logic_3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Return the function of three bits with the constant truth table `table`."""
    lut = int(table) & 0xFF
    if lut.bit_count() > 4:
        return ~_minterms(a, b, c, lut ^ 0xFF)
    return _minterms(a, b, c, lut)


def _minterms(a: Array, b: Array, c: Array, lut: int) -> Array:
    result = a & np.uint32(0) & b & c
    for row in (row for row in range(8) if lut >> row & 1):
        result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def dot_bytes(a_kind: str, b_kind: str) -> ArrayFunction:
    """Return `c` plus the sum of four products of bytes."""

    def run(a: Array, b: Array, c: Array) -> Array:
        return c + sum(
            _lane(a, 8 * i, a_kind + "1", c) * _lane(b, 8 * i, b_kind + "1", c) for i in range(4)
        )

    return run


def dot_halves(a_kind: str, b_kind: str, upper: bool) -> ArrayFunction:
    """Return `c` plus two products of 16 by 8 bits, from the lower or the upper bytes of `b`."""

    def run(a: Array, b: Array, c: Array) -> Array:
        lanes = ((16 * i, 8 * i + 16 * upper) for i in range(2))
        return c + sum(_lane(a, i, a_kind + "2", c) * _lane(b, j, b_kind + "1", c) for i, j in lanes)

    return run


def _lane(a: Array, bit: int, kind: str, like: Array) -> Array:
    return (unsigned(a) >> np.uint32(bit)).astype(kind).astype(like.dtype)


def nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """Return the position of the `offset`-th set bit from `base` up or down, or all ones."""
    none = np.uint32(0xFFFFFFFF)
    position = base.astype(np.int64)
    left = np.maximum(np.abs(offset.astype(np.int64)), 1)
    step = choose(offset == 0, 32, np.sign(offset))  # An offset of zero tests only one position.
    found = none
    for _ in range(32):
        inside = (position >= 0) & (position < 32)
        left = left - (inside & (mask >> (position & 31).astype(np.uint32) & np.uint32(1) != 0))
        found = choose(inside & (left == 0) & (found == none), position.astype(np.uint32), found)
        position = choose(inside, position + step, -1)
    return found


def mask_bits(mode: str) -> ArrayFunction:
    """Return `width` ones from `position` up."""

    def run(position: Array, width: Array) -> Array:
        if mode == "wrap":
            position = position & np.uint32(31)
            width = width & np.uint32(31)
        return shift_left(ones(width, position.dtype), position)

    return run


def extend(mode: str) -> ArrayFunction:
    """Return the lowest `width` bits, sign-extended if signed."""

    def run(a: Array, width: Array) -> Array:
        if mode == "wrap":
            width = width & np.uint32(31)
        return extract(a, np.uint32(0), np.minimum(width, np.uint32(32)))

    return run
