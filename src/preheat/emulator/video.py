"""SIMD video instructions on two halves or four bytes of words: `vadd2`, `vabsdiff4`, …"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from preheat.emulator.integer import Array, ArrayFunction

__all__ = ["OPERATIONS", "mask", "packed", "select"]

Operation = Callable[[Array, Array], Array]


def _difference(a: Array, b: Array) -> Array:
    return np.abs(a - b)


def _average(a: Array, b: Array) -> Array:
    """Return the mean, rounded away from zero."""
    total = a + b
    return (total + (total >= 0)) >> np.int32(1)


OPERATIONS: dict[str, Operation] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vavrg": _average,
    "vabsdiff": _difference,
    "vmin": np.minimum,
    "vmax": np.maximum,
}


def packed(
    operation: Operation, a_type: str, b_type: str, clamp: str = "", *, add: bool = False
) -> ArrayFunction:
    """Return `operation` on each part of `a` and `b`, of types such as `i1` and `u2`.

    Results are clamped to the type `clamp`. They are added to `c`, or inserted into the parts that a
    mask selects; the other parts come from `c`.
    """
    size = np.dtype(a_type).itemsize * 8
    field = np.uint32((1 << size) - 1)

    def run(a: Array, b: Array, c: Array, mask: int = -1) -> Array:
        result = c
        for part in range(32 // size):
            if not mask >> part & 1:
                continue
            shift = np.uint32(size * part)
            x, y = ((v >> shift).astype(t).astype(np.int32) for v, t in ((a, a_type), (b, b_type)))
            found = operation(x, y)
            if clamp:
                found = np.clip(found, np.iinfo(clamp).min, np.iinfo(clamp).max)
            word = found.astype(np.uint32)
            result = result + word if add else result & ~(field << shift) | (word & field) << shift
        return result

    return run


def select(order: str) -> ArrayFunction:
    """Return a word from the parts of two. `order` names the highest first: `h32` or `b0123`."""
    size = 16 if order[0] == "h" else 8

    def run(a: Array, b: Array) -> Array:
        result = np.uint32(0)
        for place, digit in enumerate(reversed(order[1:])):
            source, part = divmod(int(digit), 32 // size)
            field = ((b if source else a) >> np.uint32(size * part)) & np.uint32((1 << size) - 1)
            result = result | field << np.uint32(size * place)
        return result

    return run


def mask(parts: str) -> int:
    """Return the parts that a mask such as `h1` or `b310` names, as bits."""
    return sum(1 << int(digit) for digit in parts[1:])
