"""Barriers of thread blocks: which threads have arrived, and which they release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator.divergence import check_barrier
from preheat.emulator.layout import WARP
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.cluster import ClusterBarrier
    from preheat.emulator.group import Group
    from preheat.emulator.wave import Wave

__all__ = ["Arrival", "Barriers"]

Array = np.ndarray[Any, Any]


class Arrival(NamedTuple):
    """The operands of a barrier instruction. `threads` is the number of threads to wait for, if given.

    The operands may differ between threads. `split` separates threads with other barriers or counts.
    """

    barrier_id: Any
    threads: Any = None
    kind: str = "sync"  # "sync", "arrive", or a reduction of the predicates: "popc", "and", "or".
    predicate: Any = None
    result: int = -1  # The register of a reduction's result.
    aligned: bool = True  # All threads must execute the same instruction.

    def split(self, group: Group) -> Iterator[tuple[Group, Arrival]]:
        """Yield the threads that use the same barrier, with their operands."""
        counts = self.threads is not None
        keys = self.barrier_id.astype(np.int64) << 32 | (self.threads if counts else 0)
        for key in np.unique(keys).tolist() if keys.ndim else [int(keys)]:
            barrier_id, threads = divmod(key, 1 << 32)
            one = self._replace(barrier_id=barrier_id, threads=threads if counts else None)
            chosen = keys == key
            if chosen.all():
                yield group, one
            else:
                part, _ = group.split(chosen)
                yield part, one.select(chosen)

    def select(self, chosen: Array) -> Arrival:
        """Return the same operands for some of the threads."""
        predicate = self.predicate
        if predicate is None or not predicate.ndim:
            return self
        return self._replace(predicate=predicate[chosen])


class _Waiting(NamedTuple):
    group: Group
    arrival: Arrival


class Barriers:
    """The barriers of all blocks of a wave, and of its clusters once they are used."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.waiting_groups: dict[int, list[_Waiting]] = {}
        self.cluster: ClusterBarrier | None = None
        self.releases = 0
        # The number of threads of each block and warp that have arrived and continued.
        self._arrived_only: dict[int, Array] = {}

    def arrive(self, group: Group, arrival: Arrival) -> list[Group]:
        """Add a group that has arrived at its barrier. Return the groups that may continue."""
        return [released for part, one in arrival.split(group) for released in self._arrive(part, one)]

    def _arrive(self, group: Group, arrival: Arrival) -> list[Group]:
        wave = self.wave
        barrier_id = arrival.barrier_id
        whole = group.count == wave.alive_total and arrival.threads is None
        if (
            whole
            and arrival.kind == "sync"
            and not self.waiting_groups.get(barrier_id)
            and barrier_id not in self._arrived_only
        ):
            if wave.program.sanitize:
                check_barrier(wave, [_Waiting(group, arrival)], wave.alive > 0)
            self.releases += 1
            return [group]
        if arrival.kind == "arrive":
            self._arrived_only[barrier_id] = self._count_by_warp(
                group, self._arrived_only.get(barrier_id)
            )
            return [group, *self.release(barrier_id)]
        self.waiting_groups.setdefault(barrier_id, []).append(_Waiting(group, arrival))
        return self.release(barrier_id)

    def release(self, barrier_id: int) -> list[Group]:
        """Return the groups that wait at this barrier and may continue."""
        waiting = self.waiting_groups.get(barrier_id)
        if not waiting:
            return []
        arrived_by_warp = self._arrived_only.get(barrier_id)
        for group, _ in waiting:
            arrived_by_warp = self._count_by_warp(group, arrived_by_warp)
        assert arrived_by_warp is not None
        arrived = arrived_by_warp.sum(1)
        expected = self.wave.alive.copy()
        counting = [one for one in waiting if one.arrival.threads is not None]
        whole = self._whole_warps(arrived_by_warp) if counting else arrived
        for group, arrival in counting:
            blocks = np.unique(group.per_thread("block_index"))
            arrived[blocks] = whole[blocks]
            expected[blocks] = arrival.threads
        complete = (arrived >= expected) & (arrived > 0)
        if not complete.any():
            return []
        if self.wave.program.sanitize:
            self._check_complete(barrier_id, waiting, complete)
        self.releases += 1
        if barrier_id in self._arrived_only:
            self._arrived_only[barrier_id][complete] = 0
            if not self._arrived_only[barrier_id].any():
                del self._arrived_only[barrier_id]
        return self._release(barrier_id, waiting, complete)

    def _check_complete(self, barrier_id: int, waiting: list[_Waiting], complete: Array) -> None:
        """Check the blocks that are complete, except those in which threads gave a thread count."""
        whole = complete.copy()
        if barrier_id in self._arrived_only:
            whole &= self._arrived_only[barrier_id].sum(1) == 0
        for group, arrival in waiting:
            if arrival.threads is not None:
                whole[group.per_thread("block_index")] = False
        check_barrier(self.wave, waiting, whole)

    def _count_by_warp(self, group: Group, others: Array | None) -> Array:
        """Return how many threads of each block and warp a group has, added to `others`."""
        layout = self.wave.layout
        counts = np.bincount(group.per_thread("warp"), minlength=layout.warps).reshape(
            layout.blocks, -1
        )
        return counts if others is None else counts + others

    def _whole_warps(self, arrived_by_warp: Array) -> Array:
        """Return the threads of each block that count as arrived: one counts for its whole warp."""
        layout = self.wave.layout
        alive = np.bincount(layout.warp[~self.wave.exited], minlength=layout.warps).reshape(
            arrived_by_warp.shape
        )
        whole = np.minimum(arrived_by_warp + WARP - alive, WARP)
        total: Array = np.where(arrived_by_warp > 0, whole, 0).sum(1)
        return total

    def release_all(self) -> list[Group]:
        """Return the groups that may continue because threads have exited."""
        released = [
            group for barrier_id in list(self.waiting_groups) for group in self.release(barrier_id)
        ]
        return released if self.cluster is None else [*released, *self.cluster.release()]

    def raise_if_waiting(self) -> None:
        """Raise `Violation` if threads still wait for others of their block."""
        for barrier_id, waiting in self.waiting_groups.items():
            for group, _ in waiting:
                self.wave.running = group
                message = f"waits at barrier {barrier_id} for threads of its block that never come"
                raise Violation(message, group.frame.code.blocks[group.pc - 1].site)

    def _release(self, barrier_id: int, waiting: list[_Waiting], complete: Array) -> list[Group]:
        self.waiting_groups[barrier_id] = []
        reduced = _reduce(waiting, len(complete))
        released = []
        for group, arrival in waiting:
            chosen = complete[group.per_thread("block_index")]
            if not chosen.any():
                self.waiting_groups[barrier_id].append(_Waiting(group, arrival))
                continue
            if not chosen.all():
                group, staying = group.split(chosen)
                self.waiting_groups[barrier_id].append(_Waiting(staying, arrival.select(~chosen)))
            if arrival.result >= 0:
                words = reduced[arrival.kind].take(group.per_thread("block_index"))
                group.set(arrival.result, words.view(group.frame.code.zeros[arrival.result].dtype))
            released.append(group)
        return released


def _reduce(waiting: list[_Waiting], blocks: int) -> dict[str, Array]:
    """Return the result of each kind of reduction of the predicates, for every block."""
    total = np.zeros(blocks, np.int64)
    true = np.zeros(blocks, np.int64)
    for group, arrival in waiting:
        if arrival.result >= 0:
            indices = group.per_thread("block_index")
            total += np.bincount(indices, minlength=blocks)
            chosen = indices[np.broadcast_to(arrival.predicate, indices.shape)]
            true += np.bincount(chosen, minlength=blocks)
    return {"popc": true.astype(np.uint32), "and": true == total, "or": true > 0}
