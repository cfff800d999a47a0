"""The memory that kernels may access: the live buffers of a device, found by address."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from preheat.emulator.device import EmulatorDevice
    from preheat.emulator.group import Frame

__all__ = ["FREED", "POISON", "Buffer", "HostMemory", "Memory", "Violation", "align_up", "positions_in"]

POISON = 0xCD  # The value of every byte that was never written.
FREED = 0xDD  # The value of every byte that a deferred stream freed.


class Violation(Exception):  # noqa: N818  (It becomes an EmulatorFault.)
    """A thread made an invalid access or step. `site` is the operation, `position` the thread.

    `other` is a frame and a site that the message ends with: where another thread is.
    """

    def __init__(
        self,
        message: str,
        site: int,
        position: int = 0,
        address: int | None = None,
        hint: str | None = None,
        other: tuple[Frame, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.site = site
        self.position = position
        self.address = address
        self.hint = hint
        self.other = other


@contextmanager
def positions_in(chosen: np.ndarray[Any, Any]) -> Iterator[None]:
    """Translate the position in a `Violation` of the chosen threads to that among all threads."""
    try:
        yield
    except Violation as violation:
        violation.position = int(chosen[violation.position])
        raise


def align_up(number: int, step: int) -> int:
    """Return the next multiple of `step`."""
    return -(-number // step) * step


class Buffer(NamedTuple):
    """Bytes that kernels may read and, if `writable`, write."""

    start: int
    end: int
    writable: bool


_OVERRUN = 64  # Bytes after a buffer where an access is described by it rather than by a freed one.
# An access outside a buffer is described relative to it if it is no further away than the buffer is
# long, within these bounds in bytes. An access further away is probably unrelated.
_MIN_REACH = 256
_MAX_REACH = 4096
_PAGE = 4096  # Addresses below this are a null pointer plus an index.
_EMPTY = Buffer(0, 0, False)


class Memory:
    """The live buffers of a device in order of address."""

    def __init__(self) -> None:
        self.last_used = _EMPTY  # The buffer of the last access, which most accesses use again.
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []
        self._overlap = False
        self._freed: deque[Buffer] = deque(maxlen=64)

    def add(self, start: int, size: int, *, writable: bool = True) -> Buffer:
        """Make `size` bytes at `start` valid. The same bytes may be added more than once."""
        buffer = Buffer(start, start + size, writable)
        for gone in [old for old in self._freed if start < old.end and old.start < buffer.end]:
            self._freed.remove(gone)
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._buffers.insert(at, buffer)
        self._overlap |= _overlapping(self._buffers[max(at - 1, 0) : at + 2])
        return buffer

    def remove(self, buffer: Buffer) -> None:
        """Make this buffer invalid."""
        at = bisect_left(self._starts, buffer.start)
        at = self._buffers.index(buffer, at)
        del self._starts[at], self._buffers[at]
        self.last_used = _EMPTY
        if self._overlap:
            self._overlap = _overlapping(self._buffers)

    def free(self, buffer: Buffer) -> None:
        """Make this buffer invalid, and report later accesses to it as use after free."""
        self.remove(buffer)
        self._freed.append(buffer)

    def covers(self, lo: int, hi: int, *, write: bool) -> bool:
        """Return whether one buffer contains every byte from `lo` up to `hi`."""
        at = bisect_right(self._starts, lo) - 1
        candidates = self._buffers if self._overlap else self._buffers[max(at, 0) : at + 1]
        for buffer in candidates:
            if buffer.start <= lo and hi <= buffer.end and (buffer.writable or not write):
                self.last_used = buffer
                return True
        return False

    def was_freed(self, address: int) -> bool:
        """Return whether this address lies in a recently freed buffer."""
        return any(buffer.start <= address < buffer.end for buffer in self._freed)

    def first_outside(self, addresses: np.ndarray[Any, Any], size: int, *, write: bool) -> int | None:
        """Return the position of the first address whose `size` bytes lie in no buffer, or None."""
        if self._overlap:
            inside = np.zeros(addresses.shape, np.bool_)
            for buffer in self._buffers:
                if buffer.writable or not write:
                    inside |= (addresses >= buffer.start) & (addresses <= buffer.end - size)
        else:
            table = np.array([_EMPTY, *self._buffers])
            at = np.searchsorted(table[1:, 0], addresses, "right")
            inside = (addresses >= table[at, 0]) & (addresses <= table[at, 1] - size)
            inside &= (table[at, 2] != 0) | (not write)
        return None if inside.all() else int(np.argmin(inside))

    def describe(
        self,
        address: int,
        size: int,
        *,
        write: bool,
        owner_of: Callable[[Buffer], str] = lambda _: "",
    ) -> str:
        """Return what is wrong with `size` bytes at `address`, relative to a nearby buffer.

        `owner_of` returns what a buffer is for, or an empty text.
        """

        def name_of(buffer: Buffer) -> str:
            owner = owner_of(buffer)
            name = f"{buffer.end - buffer.start}-byte buffer at 0x{buffer.start:x}"
            return f"{name} ({owner})" if owner else name

        verb = "writes" if write else "reads"
        what = f"{verb} {_bytes(size)} at 0x{address:x}"
        if write and self.covers(address, address + size, write=False):
            owner = owner_of(self.last_used)
            return f"{what}, in read-only memory" + (f" ({owner})" if owner else "")
        near = min(self._buffers, key=lambda b: _distance(b, address, size), default=None)
        overrun = near is not None and near.start <= address < near.end + _OVERRUN
        for buffer in reversed(self._freed):
            if buffer.start <= address < buffer.end and not overrun:
                return f"{what}, in a freed {name_of(buffer)}"
        reach = 0 if near is None else min(max(near.end - near.start, _MIN_REACH), _MAX_REACH)
        if near is None or _distance(near, address, size) > reach:
            null = ": the pointer is null" if address < _PAGE else ""
            return f"{what}, which no allocation contains{null}"
        if address >= near.end:
            return f"{what}, {_bytes(address - near.end)} past the end of the {name_of(near)}"
        if address < near.start:
            return f"{what}, {_bytes(near.start - address)} before the {name_of(near)}"
        return f"{what}, across the end of the {name_of(near)}"


def _overlapping(buffers: list[Buffer]) -> bool:
    return any(a.end > b.start for a, b in pairwise(buffers))


def _bytes(count: int) -> str:
    return f"{count} {'byte' if count == 1 else 'bytes'}"


def _distance(buffer: Buffer, address: int, size: int) -> int:
    return max(address - buffer.end, buffer.start - address - size, 0)


class HostMemory:
    """Decides which memory of the host kernels may use, and lets them use it during a launch.

    With `host_arrays`, they may use all of it. Otherwise they may use memory of the emulator alone,
    which a tensor has if its library has imported an array.
    """

    def __init__(self, device: EmulatorDevice, memory: Memory) -> None:
        self._device = device
        self._memory = memory

    def accepts(self, address: int, size: int) -> bool:
        """Return True if these bytes may be an argument of a kernel."""
        with self._device.lock:
            own = self._memory.covers(address, address + size, write=False)
        return own or self._device.host_arrays

    @contextmanager
    def register(self, address: int, size: int, writable: bool) -> Iterator[None]:
        """Let kernels use these bytes inside a `with` statement."""
        buffer = self.lend(address, size, writable=writable)
        try:
            yield
        finally:
            self.take_back(buffer)

    def lend(self, address: int, size: int, *, writable: bool = True) -> Buffer:
        """Let kernels use these bytes until `take_back`."""
        with self._device.lock:
            return self._memory.add(address, size, writable=writable)

    def take_back(self, buffer: Buffer) -> None:
        """End what `lend` began, after all queued work, which may use the memory."""
        device = self._device
        with device.lock:
            if device.scheduler is not None:
                device.scheduler.run_all()
            self._memory.remove(buffer)
