"""Memory that deferred streams have freed: it is quarantined, and reused in the same stream."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from preheat.emulator.memory import Buffer

__all__ = ["Allocation", "Quarantine"]

_MAX_BYTES = 64 << 20
_MAX_COUNT = 512


class Allocation(NamedTuple):
    """Allocated memory, and the array that it is part of."""

    buffer: Buffer
    array: np.ndarray[Any, Any]
    of_graph: object = None  # The work that allocates it, at this address in every replay.

    @property
    def size(self) -> int:
        """The size that was requested, in bytes."""
        return self.buffer.end - self.buffer.start


class Quarantine:
    """Freed allocations, oldest first, each with the id of the stream in which its free was queued.

    A late access to freed memory must not crash, so allocations are kept after their free. Only the
    stream that freed an allocation may reuse it, because only its later work is ordered after the free.
    """

    def __init__(self) -> None:
        self._allocations: deque[tuple[int, Allocation]] = deque()
        self._bytes = 0

    def add(self, allocation: Allocation, stream: int) -> None:
        """Add an allocation, and drop the oldest ones if there are too many."""
        self._allocations.append((stream, allocation))
        self._bytes += allocation.size
        while self._bytes > _MAX_BYTES or len(self._allocations) > _MAX_COUNT:
            _, oldest = self._allocations.popleft()
            self._bytes -= oldest.size

    def take(self, size: int, stream: int) -> Allocation | None:
        """Return the allocation of this size that this stream freed last, or None."""
        for at in reversed(range(len(self._allocations))):
            freed_in, allocation = self._allocations[at]
            if freed_in == stream and allocation.size == size:
                del self._allocations[at]
                self._bytes -= size
                return allocation
        return None
