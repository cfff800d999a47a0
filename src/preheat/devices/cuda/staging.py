"""Pinned host memory for copies, so that the caller does not have to wait for the stream."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from preheat.devices.base import Event

__all__ = ["Chunk", "Staging"]


class Chunk(NamedTuple):
    """A chunk of pinned memory."""

    address: int
    size: int

    def put(self, data: memoryview) -> None:
        """Copy host bytes in."""
        self._view(len(data))[:] = data

    def take(self, data: memoryview) -> None:
        """Copy host bytes out."""
        data[:] = self._view(len(data))

    def _view(self, size: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")


class Staging:
    """Chunks of pinned memory. A chunk is reused once the copy that uses it has completed."""

    SIZE = 4 << 20
    MAX_CHUNKS = 16

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._made = 0
        self._free: list[Chunk] = []
        self._busy: deque[tuple[Event, Chunk]] = deque()
        self._lock = Lock()

    def take(self) -> Chunk:
        """Return a chunk that nothing uses; wait for the oldest copy when all are in use."""
        with self._lock:
            while self._busy and self._busy[0][0].done():
                event, chunk = self._busy.popleft()
                event.close()
                self._free.append(chunk)
            if self._free:
                return self._free.pop()
            if self._busy and self._made >= self.MAX_CHUNKS:
                event, chunk = self._busy.popleft()
                event.synchronize()
                event.close()
                return chunk
            self._made += 1
            return Chunk(self._allocate(self.SIZE), self.SIZE)

    def close(self) -> list[int]:
        """Return the addresses of all chunks, to be freed. No copy may be using one."""
        with self._lock:
            chunks = [*self._free, *(chunk for _, chunk in self._busy)]
            self._free = []
            self._busy = deque()
            self._made = 0
            return [chunk.address for chunk in chunks]

    def release(self, chunk: Chunk, event: Event | None = None) -> None:
        """Return a chunk for reuse, now or once `event` has completed."""
        with self._lock:
            if event is None:
                self._free.append(chunk)
            else:
                self._busy.append((event, chunk))
