"""The checks of a sanitized emulator: kernels must not use values that CUDA leaves undefined.

Shared memory has a shadow of the same size at a fixed distance. A byte of the shadow is 0xFF once the
corresponding byte was written. The shadow is accessed like shared memory, moved by that distance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator import access, atomics, copies, matrices, mbarrier, warp
from preheat.emulator.layout import WARP
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.addresses import Addresses
    from preheat.emulator.group import Group

__all__ = ["NAMESPACE"]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

_WORD = np.dtype(np.uint32)
_SHARED = ("shared", "cluster")

_UNWRITTEN = (
    "shared memory starts with arbitrary bytes: write them first, and __syncthreads() where another "
    "thread does"
)
_UNDEFINED = "the value is undefined in CUDA: read from lanes that the mask names and that still run"


# Shared memory


def _load(group: Group, at: Addresses, offset: int, dtype: DType, site: int) -> Any:
    found = access.load(group, at, offset, dtype, site)
    _require_written(group, at, offset, dtype, site)
    return found


def _load_vector(
    group: Group, at: Addresses, offset: int, dtype: DType, site: int, count: int
) -> list[Any]:
    found = access.load_vector(group, at, offset, dtype, site, count)
    for i in range(count):
        _require_written(group, at, offset + i * dtype.itemsize, dtype, site)
    return found


def _store(group: Group, at: Addresses, offset: int, dtype: DType, site: int, value: Any) -> None:
    access.store(group, at, offset, dtype, site, value)
    _mark_written(group, at, offset, dtype)


def _store_vector(
    group: Group, at: Addresses, offset: int, dtype: DType, site: int, *values: Any
) -> None:
    access.store_vector(group, at, offset, dtype, site, *values)
    for i in range(len(values)):
        _mark_written(group, at, offset + i * dtype.itemsize, dtype)


def _load_matrices(
    group: Group, at: Addresses, offset: int, site: int, count: int, transposed: bool
) -> list[Any]:
    found = matrices.load_matrices(group, at, offset, site, count, transposed)
    with matrices.row_owners(group, at, offset, count, site, "reads") as (part, addresses):
        for start in range(offset, offset + 16, _WORD.itemsize):
            _require_written(part, addresses, start, _WORD, site)
    return found


def _store_matrices(
    group: Group, at: Addresses, offset: int, site: int, transposed: bool, *fragments: Any
) -> None:
    matrices.store_matrices(group, at, offset, site, transposed, *fragments)
    with matrices.row_owners(group, at, offset, len(fragments), site, "writes") as (part, addresses):
        for start in range(offset, offset + 16, _WORD.itemsize):
            _mark_written(part, addresses, start, _WORD)


def _atomic(
    group: Group,
    at: Addresses,
    offset: int,
    dtype: DType,
    site: int,
    update: atomics.Update,
    returns_old: bool,
    *values: Any,
) -> Any:
    found = atomics.atomic(group, at, offset, dtype, site, update, returns_old, *values)
    if returns_old or update is not atomics.EXCHANGE:  # An exchange whose result is unused is a store.
        _require_written(group, at, offset, dtype, site)
    _mark_written(group, at, offset, dtype)
    return found


def _copy_each(
    group: Group,
    target: copies.AddressOperand,
    source: copies.AddressOperand,
    size: int,
    given: Any,
    site: int,
) -> None:
    copies.copy_each(group, target, source, size, given, site)
    at, offset = target
    for start in range(offset, offset + size, _WORD.itemsize):
        _mark_written(group, at, start, _WORD)


def _copy_bulk(
    group: Group,
    target: copies.AddressOperand,
    source: copies.AddressOperand,
    sizes: Any,
    site: int,
    barrier: copies.AddressOperand | None = None,
) -> None:
    shadow = group.wave.shadow
    for position, to, of, size in copies.check_spans(group, target, source, sizes, site):
        if source[0].space in _SHARED and (missing := ctypes.string_at(of + shadow, size).count(0)):
            message = f"copies {size} bytes of shared memory, {missing} of which nothing has written"
            raise Violation(message, site, position, hint=_UNWRITTEN)
        if target[0].space in _SHARED:
            ctypes.memset(to + shadow, 0xFF, size)
    copies.copy_bulk(group, target, source, sizes, site, barrier)


def _initialise(group: Group, at: Addresses, offset: int, site: int, count: Any) -> None:
    mbarrier.initialise(group, at, offset, site, count)
    _mark_written(group, at, offset, np.dtype(np.uint64))


def _require_written(group: Group, at: Addresses, offset: int, dtype: DType, site: int) -> None:
    """Raise `Violation` if threads read shared memory that was never written."""
    bits = np.dtype(f"u{dtype.itemsize}")
    for positions, part, start in _shared_parts(at, offset, bits.itemsize):
        states = np.atleast_1d(access.load_unchecked(part, start + group.wave.shadow, bits))
        unwritten = states != ~bits.type(0)
        if unwritten.any():
            first = int(np.argmax(unwritten))
            missing = int(np.count_nonzero(states[first : first + 1].view(np.uint8) == 0))
            address = int(np.broadcast_to(part.values, states.shape)[first]) + start
            raise Violation(
                f"reads {bits.itemsize} bytes at {part.describe(first, start)}, {missing} of which "
                "nothing has written",
                site,
                first if positions is None else int(positions[first]),
                address,
                _UNWRITTEN,
            )


def _mark_written(group: Group, at: Addresses, offset: int, dtype: DType) -> None:
    bits = np.dtype(f"u{dtype.itemsize}")
    for _, part, start in _shared_parts(at, offset, bits.itemsize):
        access.store_unchecked(part, start + group.wave.shadow, bits, ~bits.type(0))


def _shared_parts(
    at: Addresses, offset: int, size: int
) -> Iterator[tuple[Array | None, Addresses, int]]:
    """Yield the addresses in shared memory, each with the positions of its threads, if not all."""
    if (at.bits | offset) & (size - 1):  # Only their sum is aligned.
        at = at.move_by(offset)
        offset = 0
    parts: list[tuple[Array | None, Addresses]] = [*at.parts] or [(None, at)]
    for positions, part in parts:
        if part.space in _SHARED:
            yield positions, part, offset


# Warps


def _check_member(group: Group, mask: Any, site: int) -> None:
    """Raise `Violation` if a thread executes an instruction whose mask does not contain it."""
    if _is_whole(mask):
        return
    lane = group.per_thread("lane")
    out = np.broadcast_to(mask >> lane & 1 == 0, (group.count,))
    if out.any():
        position = int(np.argmax(out))
        named = int(np.broadcast_to(mask, out.shape)[position])
        message = f"is lane {lane[position]} of its warp, which its own mask {named:#010x} leaves out"
        raise Violation(message, site, position, hint="a thread must name itself in the mask")


def _check_shuffle(group: Group, mode: str, b: Any, c: Any, mask: Any, site: int) -> None:
    """Raise `Violation` if a thread reads from a lane that is not in its mask or not there."""
    if _is_whole(mask) and group.warps.padded_index is None:
        return
    _check_member(group, mask, site)
    source, _ = warp.sources(mode, group.per_thread("lane").astype(np.int64), b, c)
    there = warp.active(group) & mask
    undefined = there >> source.astype(np.uint32) & 1 == 0
    if undefined.any():
        position = int(np.argmax(undefined))
        lane = int(source[position])
        named = int(np.broadcast_to(mask, source.shape)[position])
        thread = int(group.per_thread("thread_index")[position]) // WARP * WARP + lane
        why = "which has exited"
        if not named >> lane & 1:
            why = f"which its mask {named:#010x} leaves out"
        elif thread >= group.wave.layout.threads:
            why = f"and a block of {group.wave.layout.threads} threads has none there"
        message = f"shuffles from lane {lane} of its warp, {why}"
        raise Violation(message, site, position, hint=_UNDEFINED)


def _is_whole(mask: Any) -> bool:
    """Return whether the masks of all threads contain all lanes."""
    return mask.ndim == 0 and int(mask) == (1 << WARP) - 1


#: The functions that generated code calls instead of, or in addition to, those without checks.
NAMESPACE: dict[str, Any] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_load, _load_vector, _store, _store_vector, _load_matrices, _store_matrices),
        *(_atomic, _copy_bulk, _copy_each, _initialise, _check_member, _check_shuffle),
    )
}
