"""Asynchronous copies. The emulator executes them immediately, so there is nothing to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.devices.emulator import access, mbarrier
from preheat.devices.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.devices.emulator.access import Place
    from preheat.devices.emulator.group import Group

__all__ = ["Where", "copy_bulk", "copy_each", "spans"]

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint32)
_BULK = 16  # Bytes. Addresses and sizes of bulk copies are multiples of it.

Where = tuple["Place", int]  # And the offset from it.


def copy_each(group: Group, target: Where, source: Where, size: int, given: Any, site: int) -> None:
    """Copy `size` bytes for each thread: `given` bytes from its source, and zeros for the rest."""
    given = np.broadcast_to(given, (group.count,))
    if (given > size).any():
        position = int(np.argmax(given > size))
        raise Violation(f"copies {given[position]} of {size} bytes", site, position)
    for count in np.unique(given).tolist():
        chosen = np.flatnonzero(given == count)
        with _of(chosen):
            one, (place, offset) = _part(group, source, chosen)
            kind: np.dtype[Any] = _WORD
            if count == size:
                found = access.load_vector(one, place, offset, _WORD, site, size // 4)
            elif count == 0:
                found = [np.uint32(0)] * (size // 4)
            else:
                kind = _BYTE
                found = access.load_bytes(one, place, offset, count, site, align=size)
                found += [np.uint8(0)] * (size - count)
            _, (place, offset) = _part(group, target, chosen)
            access.store_vector(one, place, offset, kind, site, *found)


def copy_bulk(
    group: Group, target: Where, source: Where, sizes: Any, site: int, barrier: Where | None = None
) -> None:
    """Copy blocks of memory, and report the bytes as complete to a `barrier`."""
    for _, to, of, size in spans(group, target, source, sizes, site):
        ctypes.memmove(to, of, size)
    if barrier is not None:
        mbarrier.arrive(group, *barrier, site, transfer=-np.asarray(sizes).astype(np.int64))


def spans(
    group: Group, target: Where, source: Where, sizes: Any, site: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each thread's position, its target and source in host memory, and the size."""
    for position, size in enumerate(np.broadcast_to(sizes, (group.count,)).tolist()):
        chosen = np.array([position])
        with _of(chosen):
            if size % _BULK:
                raise Violation(f"copies {size} bytes, which is not a multiple of {_BULK}", site)
            one, (place, offset) = _part(group, source, chosen)
            of = access.span(one, place, offset, size, site, write=False, align=_BULK)
            one, (place, offset) = _part(group, target, chosen)
            to = access.span(one, place, offset, size, site, write=True, align=_BULK)
        yield position, to, of, size


def _part(group: Group, where: Where, chosen: np.ndarray[Any, Any]) -> tuple[Group, Where]:
    """Return some of the threads, and their places."""
    if len(chosen) == group.count:
        return group, where
    at, offset = where
    one = group.part(chosen)
    values = np.broadcast_to(at.values, (group.count,))[chosen]
    find = access.place_shared if at.space in ("shared", "cluster") else access.place
    return one, (find(one, values, at.space), offset)


@contextmanager
def _of(chosen: np.ndarray[Any, Any]) -> Iterator[None]:
    """Translate the position in a `Violation` of some threads to the position among all of them."""
    try:
        yield
    except Violation as bad:
        bad.position = int(chosen[bad.position])
        raise
