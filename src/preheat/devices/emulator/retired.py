"""Memory that deferred streams freed: kept for a while, and used again in the same stream."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from preheat.devices.emulator.memory import Buffer

__all__ = ["Block", "Retired"]

_BYTES, _COUNT = 64 << 20, 512  # how much is kept


class Block(NamedTuple):
    """Allocated memory, and the array that it is part of."""

    buffer: Buffer
    room: np.ndarray[Any, Any]
    of_graph: bool = False  # A graph allocated it, and does so at this address in every replay.

    @property
    def size(self) -> int:
        """How many bytes were asked for."""
        return self.buffer.end - self.buffer.start


class Retired:
    """Freed blocks, oldest first, each with the id of the stream in which its free was queued.

    A late access to freed memory must find memory, so blocks are kept beyond their free. Only the
    stream that freed a block may use it again, because its order alone is behind the free.
    """

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, Block]] = deque()
        self._bytes = 0

    def add(self, block: Block, stream: int) -> None:
        """Keep a block, and let go of the oldest where there are too many."""
        self._blocks.append((stream, block))
        self._bytes += block.size
        while self._bytes > _BYTES or len(self._blocks) > _COUNT:
            _, oldest = self._blocks.popleft()
            self._bytes -= oldest.size

    def take(self, size: int, stream: int) -> Block | None:
        """The block of this size that this stream freed last, or None."""
        for at in reversed(range(len(self._blocks))):
            freed_in, block = self._blocks[at]
            if freed_in == stream and block.size == size:
                del self._blocks[at]
                self._bytes -= size
                return block
        return None
