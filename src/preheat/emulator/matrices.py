"""Instructions in which a warp holds matrices: each thread has a fragment of a few elements.

In an 8 x 8 matrix of 16-bit elements, the thread of lane t holds row t / 4, columns 2 (t % 4) and the
next, as one word; in a transposed one it holds those rows of that column. Larger matrices are blocks of
8 x 8. All 32 threads of a warp take part, and the threads of a group are in the order of their lanes,
so values reshape to 8 x 4 for each warp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator import access, small_floats
from preheat.emulator.addresses import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    resolve,
    resolve_generic,
    resolve_shared,
)
from preheat.emulator.layout import WARP
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.addresses import Addresses
    from preheat.emulator.group import Group

__all__ = [
    "SHAPES",
    "MmaShape",
    "check_warps",
    "load_matrices",
    "multiply",
    "row_owners",
    "store_matrices",
    "transpose_matrix",
]

Array = np.ndarray[Any, Any]
_U64 = np.dtype(np.uint64)
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_ROW = np.dtype(np.complex128)  # Four words that are copied as one: eight elements of a row.
_FULL_MASK = (1 << WARP) - 1
_KEPT_BITS = 25  # Bits of a term that an H200 keeps, below the highest exponent.
_ZERO_EXPONENT = -500  # The exponent of zero, below all others.


def check_warps(group: Group, site: int) -> None:
    """Raise `Violation` unless all threads of every warp take part."""
    warps = group.warps
    if warps.padded_index is None:
        return
    present = np.broadcast_to(warps.per_thread(warps.present), (group.count,))
    partial = present != _FULL_MASK
    if partial.any():
        position = int(np.argmax(partial))
        mask = int(present[position])
        missing = next(lane for lane in range(WARP) if not mask >> lane & 1)
        message = f"needs all 32 threads of its warp, and lane {missing} is not there"
        hint = "all threads of the warp must come here; the block must have a multiple of 32 threads"
        raise Violation(message, site, position, hint=hint)


# Matrices in shared memory


def load_matrices(
    group: Group, at: Addresses, offset: int, site: int, count: int, transposed: bool
) -> list[Array]:
    """Return the fragments of `count` 8 x 8 matrices, whose rows the first lanes point to."""
    check_warps(group, site)
    with row_owners(group, at, offset, count, site, "reads") as (part, addresses):
        found = access.load_vector(part, addresses, offset, _U64, site, 2)
        rows = np.empty((part.count, 2), _U64)
        rows[:, 0], rows[:, 1] = found
    elements = rows.view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        elements = np.ascontiguousarray(elements.swapaxes(2, 3))
    words = elements.view(np.uint32)
    return [words[:, i].reshape(-1) for i in range(count)]


def store_matrices(
    group: Group, at: Addresses, offset: int, site: int, transposed: bool, *fragments: Any
) -> None:
    """Write fragments as 8 x 8 matrices, whose rows the first lanes point to."""
    check_warps(group, site)
    count = len(fragments)
    words = np.empty((group.count // WARP, count, 8), _ROW)
    for i, fragment in enumerate(fragments):
        words[:, i] = _by_row(group, fragment)
    elements = words.view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        elements = np.ascontiguousarray(elements.swapaxes(2, 3))
    rows = elements.reshape(-1, 8).view(_U64)
    with row_owners(group, at, offset, count, site, "writes") as (part, addresses):
        access.store_vector(part, addresses, offset, _U64, site, rows[:, 0], rows[:, 1])


def transpose_matrix(group: Group, site: int, fragment: Any) -> Array:
    """Return the fragment of the transposed 8 x 8 matrix."""
    check_warps(group, site)
    elements = np.ascontiguousarray(_by_warp(group, fragment)).view(np.uint16)
    return np.ascontiguousarray(elements.swapaxes(1, 2)).view(np.uint32).reshape(-1)


@contextmanager
def row_owners(
    group: Group, at: Addresses, offset: int, count: int, site: int, verb: str
) -> Iterator[tuple[Group, Addresses]]:
    """Return the threads that point to the rows of `count` matrices, and their addresses.

    The addresses of other threads are ignored. A `Violation` inside refers to the position of its
    thread among all threads of the group.
    """
    part = group
    addresses = at
    chosen = None
    if 8 * count < WARP:
        chosen = np.arange(group.count).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        part = group.subgroup(chosen)
        values = np.broadcast_to(at.values, (group.count,))[chosen]
        if at.space in ("shared", "cluster"):
            addresses = resolve_shared(part, values, "shared")
        elif at.space == "mixed":
            addresses = resolve_generic(part, values)
        else:
            addresses = resolve(part, values, at.space)
    try:
        if addresses.space != "shared":
            _raise_outside_shared(addresses, offset, site, verb)
        yield part, addresses
    except Violation as bad:
        if chosen is not None:
            bad.position = int(chosen[bad.position])
        raise


def _raise_outside_shared(addresses: Addresses, offset: int, site: int, verb: str) -> None:
    values = np.atleast_1d(addresses.values)
    outside = (values < SHARED_WINDOW) | (values >= LOCAL_WINDOW)
    position = int(np.argmax(outside)) if addresses.space == "mixed" else 0
    address = int(values[position]) + offset
    message = f"{verb} a row of a matrix at {address:#x}, which is not in shared memory"
    raise Violation(message, site, position, address)


def _by_warp(group: Group, values: Any) -> Array:
    """Return values of the threads as 8 x 4 for each warp."""
    found: Array = values if values.ndim else np.broadcast_to(values, (group.count,))
    return found.reshape(-1, 8, 4)


def _by_row(group: Group, words: Any) -> Array:
    """Return the words of the threads, four at a time: a row of 8 for each warp."""
    return np.ascontiguousarray(_by_warp(group, words)).view(_ROW)[:, :, 0]


# Products


class MmaShape(NamedTuple):
    """A variant of `mma`: 16 x `depth` times `depth` x 8, of f16 or bf16, accumulated in f16 or f32."""

    depth: int
    kind: str
    sum: str

    @property
    def registers(self) -> tuple[int, int, int]:
        """The number of registers of a thread for the factors a and b and the sum."""
        return self.depth // 4, self.depth // 8, 4 if self.sum == "f32" else 2


SHAPES = {"m16n8k8": 8, "m16n8k16": 16}


def multiply(group: Group, shape: MmaShape, site: int, *fragments: Any) -> list[Array]:
    """Return the fragments of a * b + c, from the fragments of a, b and c.

    The products of 16-bit floats are exact. m16n8k16 with sums in f32 adds them as an H200 does, bit
    for bit (`_add_truncated`). Other variants add in float64 and round once. A GPU keeps fewer bits, so
    its result may differ by a few units in the last place of the largest term.
    """
    check_warps(group, site)
    warps = group.count // WARP
    steps = shape.depth // 8
    first, second, _ = shape.registers
    a = np.empty((warps, 2, 8, steps), _ROW)
    for i, values in enumerate(fragments[:first]):
        a[:, i % 2, :, i // 2] = _by_row(group, values)
    b = np.empty((warps, 8, steps), _ROW)
    for i, values in enumerate(fragments[first : first + second]):
        b[:, :, i] = _by_row(group, values)
    left = _numbers(a.view(np.uint16).reshape(warps, 16, shape.depth), shape.kind)
    right = _numbers(b.view(np.uint16).reshape(warps, 8, shape.depth), shape.kind)
    addend = fragments[first + second :]
    if shape.depth == 16 and shape.sum == "f32":
        c = np.empty((warps, 2, 8, 4, 2), np.float32)
        for i, values in enumerate(addend):
            c[:, i // 2, :, :, i % 2] = _by_warp(group, values)
        d = _add_truncated(left, right, c.reshape(warps, 16, 8)).reshape(c.shape)
        return [d[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]
    total = np.matmul(left, np.ascontiguousarray(right.swapaxes(1, 2))).reshape(warps, 2, 8, 4, 2)
    if shape.sum == "f16":
        words = np.empty((warps, 2, 8), _ROW)
        for i, values in enumerate(addend):
            words[:, i] = _by_row(group, values)
        total += _numbers(words.view(np.uint16), "f16").reshape(total.shape)
        pairs = small_floats.canonical(total.astype(np.float16)).view(np.uint32)
        return [pairs[:, i].reshape(-1) for i in range(2)]
    singles = np.empty(total.shape, np.float32)
    for i, values in enumerate(addend):
        singles[:, i // 2, :, :, i % 2] = _by_warp(group, values)
    total += singles
    rounded = total.astype(np.float32)
    rounded[np.isnan(rounded)] = _NAN
    return [rounded[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]


def _add_truncated(left: Array, right: Array, c: Array) -> Array:
    """Multiply rows of `left` by rows of `right` and add c: 17 terms at once, as an H200 does.

    Every term is truncated at 25 bits below the highest exponent among them; the exponent of a product
    is the sum of the exponents of its factors. Then the sum is truncated to float32.
    """
    first = np.ascontiguousarray(left.transpose(2, 0, 1))[:, :, :, None]  # By k, so that sums are fast.
    second = np.ascontiguousarray(right.transpose(2, 0, 1))[:, :, None, :]
    exponents = _exponents(first) + _exponents(second)
    highest = np.maximum(exponents.max(axis=0), _exponents(c) + np.int16(1)) - 2
    scale = np.ldexp(1.0, _KEPT_BITS - highest)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = first * second
        terms *= scale
        total = np.trunc(terms, out=terms).sum(axis=0) + np.trunc(c * scale)
        exact = total / scale
        rounded: Array = exact.astype(np.float32)
    above = (np.abs(rounded) > np.abs(exact)) & np.isfinite(rounded)
    rounded[above] = np.nextafter(rounded[above], np.float32(0))
    rounded[np.isnan(rounded)] = _NAN
    return rounded


def _exponents(numbers: Array) -> Array:
    """Return the exponents of `numpy.frexp`, and a low one for zero."""
    found: Array = np.frexp(numbers)[1].astype(np.int16)
    found[numbers == 0] = _ZERO_EXPONENT
    return found


def _numbers(bits: Array, kind: str) -> Array:
    """Return floats of 16 bits as float64."""
    numbers = bits.view(np.float16) if kind == "f16" else small_floats.from_bfloat16(bits)
    return numbers.astype(np.float64)
