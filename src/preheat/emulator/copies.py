"""Asynchronous copies. The emulator executes them immediately, so there is nothing to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator import access, mbarrier
from preheat.emulator.addresses import Addresses, resolve, resolve_shared
from preheat.emulator.memory import Violation, positions_in

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = ["AddressOperand", "check_spans", "copy_bulk", "copy_each"]

_BYTE = np.dtype(np.uint8)
_WORD = np.dtype(np.uint32)
_BULK = 16  # Bytes. Addresses and sizes of bulk copies are multiples of it.

AddressOperand = tuple[Addresses, int]  # And an offset.


def copy_each(
    group: Group, target: AddressOperand, source: AddressOperand, size: int, given: Any, site: int
) -> None:
    """Copy `size` bytes for each thread: `given` bytes from its source, and zeros for the rest."""
    given = np.broadcast_to(given, (group.count,))
    if (given > size).any():
        position = int(np.argmax(given > size))
        raise Violation(f"copies {given[position]} of {size} bytes", site, position)
    for count in np.unique(given).tolist():
        chosen = np.flatnonzero(given == count)
        with positions_in(chosen):
            one, (addresses, offset) = _subgroup(group, source, chosen)
            kind: np.dtype[Any] = _WORD
            if count == size:
                found = access.load_vector(one, addresses, offset, _WORD, site, size // 4)
            elif count == 0:
                found = [np.uint32(0)] * (size // 4)
            else:
                kind = _BYTE
                found = access.load_bytes(one, addresses, offset, count, site, align=size)
                found += [np.uint8(0)] * (size - count)
            _, (addresses, offset) = _subgroup(group, target, chosen)
            access.store_vector(one, addresses, offset, kind, site, *found)


def copy_bulk(
    group: Group,
    target: AddressOperand,
    source: AddressOperand,
    sizes: Any,
    site: int,
    barrier: AddressOperand | None = None,
) -> None:
    """Copy blocks of memory, and report the bytes as complete to a `barrier`."""
    for _, to, of, size in check_spans(group, target, source, sizes, site):
        ctypes.memmove(to, of, size)
    if barrier is not None:
        mbarrier.arrive(group, *barrier, site, transfer=-np.asarray(sizes).astype(np.int64))


def check_spans(
    group: Group, target: AddressOperand, source: AddressOperand, sizes: Any, site: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each thread's position, its target and source in host memory, and the size."""
    for position, size in enumerate(np.broadcast_to(sizes, (group.count,)).tolist()):
        chosen = np.array([position])
        with positions_in(chosen):
            if size % _BULK:
                raise Violation(f"copies {size} bytes, which is not a multiple of {_BULK}", site)
            one, (addresses, offset) = _subgroup(group, source, chosen)
            of = access.check_address(one, addresses, offset, size, site, write=False, align=_BULK)
            one, (addresses, offset) = _subgroup(group, target, chosen)
            to = access.check_address(one, addresses, offset, size, site, write=True, align=_BULK)
        yield position, to, of, size


def _subgroup(
    group: Group, operand: AddressOperand, chosen: np.ndarray[Any, Any]
) -> tuple[Group, AddressOperand]:
    """Return some of the threads, and their addresses."""
    if len(chosen) == group.count:
        return group, operand
    at, offset = operand
    one = group.subgroup(chosen)
    values = np.broadcast_to(at.values, (group.count,))[chosen]
    function = resolve_shared if at.space in ("shared", "cluster") else resolve
    return one, (function(one, values, at.space), offset)
