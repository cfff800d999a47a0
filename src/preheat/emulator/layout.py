"""How the threads of a wave are numbered: arrays that depend on the geometry alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from preheat.devices.base import Dim3
from preheat.process.lazy import lazy

__all__ = ["WARP", "Layout", "coordinates"]

Array = np.ndarray[Any, Any]
WARP = 32


def coordinates(number: int, extent: Dim3) -> Dim3:
    """Return the coordinates of a thread in its block, or of a block in its grid; x is fastest."""
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)


class Layout:
    """The threads of `blocks` consecutive thread blocks, block after block, x fastest.

    The `cluster_blocks` blocks of a cluster are consecutive, in the order of their ranks.
    """

    def __init__(self, block: Dim3, blocks: int, cluster_blocks: int = 1) -> None:
        self.block = block
        self.blocks = blocks
        self.cluster_blocks = cluster_blocks
        self.threads = block[0] * block[1] * block[2]  # In one block.
        self.count = blocks * self.threads
        self.warps_per_block = -(-self.threads // WARP)
        self.full_warps = self.threads % WARP == 0  # Every warp has all its threads.
        inner = WARP if block[0] % WARP == 0 else block[0]
        self.shape = (blocks, self.threads // inner, inner)
        self.special_registers: dict[str, Any] = {}  # A cache of `special_registers.value`.

    @lazy
    def thread_index(self) -> Array:
        """The index of each thread in its block."""
        return np.tile(np.arange(self.threads, dtype=np.uint32), self.blocks)

    @lazy
    def block_index(self) -> Array:
        """The block of each thread, counted from the first of the wave."""
        return np.repeat(np.arange(self.blocks), self.threads)

    @lazy
    def cluster_rank(self) -> Array:
        """The rank of each thread's block in its cluster."""
        return self.block_index % self.cluster_blocks

    @lazy
    def lane(self) -> Array:
        """The lane of each thread in its warp."""
        return self.thread_index % np.uint32(WARP)

    @lazy
    def warp(self) -> Array:
        """The warp of each thread, counted from the first of the wave."""
        return self.padded_index // WARP

    @lazy
    def padded_index(self) -> Array:
        """The index of each thread if every warp had 32 threads."""
        return self.block_index * (self.warps_per_block * WARP) + self.thread_index

    @property
    def warps(self) -> int:
        """The number of warps in the wave."""
        return self.blocks * self.warps_per_block

    def tid(self, axis: int) -> Any:
        """Return the coordinate of each thread in its block; a scalar along an axis of extent 1."""
        if self.block[axis] == 1:
            return np.uint32(0)
        below = int(np.prod(self.block[:axis]))
        return self.thread_index // np.uint32(below) % np.uint32(self.block[axis])
