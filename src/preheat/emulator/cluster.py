"""Clusters of thread blocks: their barrier, and addresses in the shared memory of another block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator.addresses import BLOCK_WINDOW, INVALID_RANK, LOCAL_WINDOW, SHARED_WINDOW
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.group import Group
    from preheat.emulator.wave import Wave

__all__ = ["ClusterBarrier", "mapped", "mapped_generic", "rank_of", "rank_of_generic"]

Array = np.ndarray[Any, Any]

_ARRIVE_HINT = "a thread arrives once, and waits before it arrives again"


class ClusterBarrier:
    """The barriers of all clusters of a wave. Each cluster has one.

    A phase is complete when every thread of the cluster that has not exited has arrived. Then the next
    phase begins. A thread may wait for the phase in which it arrived last. If threads wait here for
    ever, other threads of their cluster wait elsewhere for ever, and the error names those.
    """

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        layout = wave.layout
        self._waiting: list[Group] = []
        # Whether each thread has arrived in the current phase.
        self._arrived = np.zeros(layout.count, np.bool_)
        # The phase that each thread has to wait for, or -1.
        self._awaited = np.full(layout.count, -1)
        self._phase = np.zeros(layout.blocks // layout.cluster_blocks, np.int64)

    def arrive(self, group: Group, site: int) -> list[Group]:
        """Count the threads of a group as arrived. Return the groups that waited for them."""
        lanes = group.all_lanes
        if (twice := self._arrived[lanes]).any():
            message = "arrives twice in one phase of the barrier of its cluster"
            raise Violation(message, site, int(np.argmax(twice)), hint=_ARRIVE_HINT)
        self._arrived[lanes] = True
        self._awaited[lanes] = self._phase_of(group)
        return self.release()

    def wait(self, group: Group, site: int) -> list[Group]:
        """Let the threads of a group wait. Return the groups that may continue."""
        early = self._awaited[group.all_lanes] < 0
        if early.any():
            message = "waits at the barrier of its cluster without having arrived"
            raise Violation(message, site, int(np.argmax(early)), hint=_ARRIVE_HINT)
        self._waiting.append(group)
        return self._release()

    def release(self) -> list[Group]:
        """Complete the phases in which all threads have arrived. Return the released groups."""
        arrived_or_exited = (self._arrived | self.wave.exited).reshape(len(self._phase), -1)
        complete = arrived_or_exited.all(1) & self._arrived.reshape(arrived_or_exited.shape).any(1)
        if not complete.any():
            return []
        self.wave.barriers.releases += 1
        self._phase += complete
        self._arrived.reshape(arrived_or_exited.shape)[complete] = False
        return self._release()

    def _release(self) -> list[Group]:
        """Remove and return the waiting groups whose phase is complete."""
        waiting = self._waiting
        self._waiting = []
        released = []
        for group in waiting:
            passes = self._phase_of(group) > self._awaited[group.all_lanes]
            if not passes.any():
                self._waiting.append(group)
                continue
            if not passes.all():
                group, staying = group.split(passes)
                self._waiting.append(staying)
            self._awaited[group.all_lanes] = -1
            released.append(group)
        return released

    def _phase_of(self, group: Group) -> Array:
        """Return the current phase of each thread's cluster."""
        phases: Array = self._phase[group.per_thread("block_index") // self.wave.layout.cluster_blocks]
        return phases


# Addresses


def mapped(address: Any, rank: Any) -> Any:
    """`mapa`: return the shared address that corresponds to `address` in the block with this rank."""
    block = np.minimum(rank, np.uint32(INVALID_RANK)).astype(address.dtype) + address.dtype.type(1)
    return address % address.dtype.type(BLOCK_WINDOW) + block * address.dtype.type(BLOCK_WINDOW)


def mapped_generic(group: Group, address: Any, rank: Any, site: int) -> Any:
    """`mapa` of a generic address."""
    return mapped(_in_window(group, address, site), rank) + np.uint64(SHARED_WINDOW)


def rank_of(group: Group, address: Any) -> Any:
    """`getctarank`: return the rank of the block that an address belongs to."""
    block = (address // address.dtype.type(BLOCK_WINDOW)).astype(np.uint32)
    return np.where(
        block == 0, group.per_thread("cluster_rank").astype(np.uint32), block - np.uint32(1)
    )


def rank_of_generic(group: Group, address: Any, site: int) -> Any:
    """`getctarank` of a generic address."""
    return rank_of(group, _in_window(group, address, site))


def _in_window(group: Group, address: Any, site: int) -> Any:
    """Return generic addresses relative to the shared window, or raise if one is outside."""
    outside = np.broadcast_to((address < SHARED_WINDOW) | (address >= LOCAL_WINDOW), (group.count,))
    if outside.any():
        position = int(np.argmax(outside))
        wrong = int(np.broadcast_to(address, outside.shape)[position])
        message = f"uses {wrong:#x} as an address of shared memory, where it is not"
        raise Violation(message, site, position, wrong)
    return address - np.uint64(SHARED_WINDOW)
