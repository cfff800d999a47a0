"""Memory that deferred streams have freed: it is quarantined, and reused in the same stream."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from preheat.devices.emulator.memory import Buffer

__all__ = ["Block", "Quarantine"]

_BYTES, _COUNT = 64 << 20, 512  # The most bytes and blocks in quarantine.


class Block(NamedTuple):
    """Allocated memory, and the array that it is part of."""

    buffer: Buffer
    array: np.ndarray[Any, Any]
    of_graph: bool = False  # A graph allocated it, and allocates it at this address in every replay.

    @property
    def size(self) -> int:
        """The size that was requested, in bytes."""
        return self.buffer.end - self.buffer.start


class Quarantine:
    """Freed blocks, oldest first, each with the id of the stream in which its free was queued.

    A late access to freed memory must not crash, so blocks are kept after their free. Only the stream
    that freed a block may reuse it, because only its later work is ordered after the free.
    """

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, Block]] = deque()
        self._bytes = 0

    def add(self, block: Block, stream: int) -> None:
        """Add a block, and drop the oldest ones if there are too many."""
        self._blocks.append((stream, block))
        self._bytes += block.size
        while self._bytes > _BYTES or len(self._blocks) > _COUNT:
            _, oldest = self._blocks.popleft()
            self._bytes -= oldest.size

    def take(self, size: int, stream: int) -> Block | None:
        """Return the block of this size that this stream freed last, or None."""
        for at in reversed(range(len(self._blocks))):
            freed_in, block = self._blocks[at]
            if freed_in == stream and block.size == size:
                del self._blocks[at]
                self._bytes -= size
                return block
        return None
