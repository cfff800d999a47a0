"""Barriers of thread blocks: which threads have arrived, and which they release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.devices.emulator.layout import WARP
from preheat.devices.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.devices.emulator.cluster import ClusterBarrier
    from preheat.devices.emulator.group import Group
    from preheat.devices.emulator.wave import Wave

__all__ = ["Arrival", "Barriers"]

Array = np.ndarray[Any, Any]


class Arrival(NamedTuple):
    """The operands of a barrier instruction. `threads` is the number of threads to wait for, if given.

    Values may differ between threads; barrier and count may until `parts` has split them.
    """

    ident: Any
    threads: Any = None
    kind: str = "sync"  # "sync", "arrive", or a reduction of the predicates: "popc", "and", "or".
    predicate: Any = None
    result: int = -1  # The register of a reduction's result.

    def parts(self, group: Group) -> Iterator[tuple[Group, Arrival]]:
        """Yield the threads that use the same barrier, with their operands."""
        counts = self.threads is not None
        wanted = self.ident.astype(np.int64) << 32 | (self.threads if counts else 0)
        for value in np.unique(wanted).tolist() if wanted.ndim else [int(wanted)]:
            ident, threads = divmod(value, 1 << 32)
            one = Arrival(ident, threads if counts else None, self.kind, self.predicate, self.result)
            chosen = wanted == value
            if chosen.all():
                yield group, one
            else:
                part, _ = group.split(chosen)
                yield part, one.of(chosen)

    def of(self, chosen: Array) -> Arrival:
        """Return the same operands for some of the threads."""
        kept = self.predicate
        return self if kept is None or not kept.ndim else self._replace(predicate=kept[chosen])


class _Waiting(NamedTuple):
    group: Group
    arrival: Arrival


class Barriers:
    """The barriers of all blocks of a wave, and those of its clusters once they are used."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.parked: dict[int, list[_Waiting]] = {}
        self.cluster: ClusterBarrier | None = None
        self.releases = 0
        self._passed: dict[
            int, Array
        ] = {}  # Threads of each block and warp that have arrived and continued.

    def arrive(self, group: Group, asked: Arrival) -> list[Group]:
        """Add a group that has arrived at its barrier. Return the groups that may continue."""
        return [gone for part, one in asked.parts(group) for gone in self._arrive(part, one)]

    def _arrive(self, group: Group, arrival: Arrival) -> list[Group]:
        wave = self.wave
        ident = arrival.ident
        whole = group.count == wave.alive_total and arrival.threads is None
        if (
            whole
            and arrival.kind == "sync"
            and not self.parked.get(ident)
            and ident not in self._passed
        ):
            self.releases += 1
            return [group]
        if arrival.kind == "arrive":
            self._passed[ident] = self._by_warp(group, self._passed.get(ident))
            return [group, *self.release(ident)]
        self.parked.setdefault(ident, []).append(_Waiting(group, arrival))
        return self.release(ident)

    def release(self, ident: int) -> list[Group]:
        """Return the groups that this barrier no longer holds."""
        waiting = self.parked.get(ident)
        if not waiting:
            return []
        came = self._passed.get(ident)
        for group, _ in waiting:
            came = self._by_warp(group, came)
        assert came is not None
        arrived = came.sum(1)
        expected = self.wave.alive.copy()
        counting = [one for one in waiting if one.arrival.threads is not None]
        whole = self._whole_warps(came) if counting else arrived
        for group, arrival in counting:
            rows = np.unique(group.of("row"))
            arrived[rows] = whole[rows]
            expected[rows] = arrival.threads
        full = (arrived >= expected) & (arrived > 0)
        if not full.any():
            return []
        self.releases += 1
        if ident in self._passed:
            self._passed[ident][full] = 0
            if not self._passed[ident].any():
                del self._passed[ident]
        return self._let_go(ident, waiting, full)

    def _by_warp(self, group: Group, others: Array | None) -> Array:
        """Return how many threads of each block and warp a group has, added to `others`."""
        layout = self.wave.layout
        counts = np.bincount(group.of("warp"), minlength=layout.warps).reshape(layout.blocks, -1)
        return counts if others is None else counts + others

    def _whole_warps(self, came: Array) -> Array:
        """Return the threads of each block that count as arrived: one counts for its whole warp."""
        layout, there = self.wave.layout, ~self.wave.exited
        alive = np.bincount(layout.warp[there], minlength=layout.warps).reshape(came.shape)
        whole: Array = np.where(came > 0, np.minimum(came + WARP - alive, WARP), 0).sum(1)
        return whole

    def release_all(self) -> list[Group]:
        """Return the groups that may continue because threads have exited."""
        gone = [group for ident in list(self.parked) for group in self.release(ident)]
        return gone if self.cluster is None else [*gone, *self.cluster.release()]

    def raise_if_waiting(self) -> None:
        """Raise `Violation` if threads still wait for others of their block."""
        for ident, parked in self.parked.items():
            for group, _ in parked:
                self.wave.running = group
                message = f"waits at barrier {ident} for threads of its block that never come"
                raise Violation(message, group.frame.code.blocks[group.pc - 1].site)

    def _let_go(self, ident: int, waiting: list[_Waiting], full: Array) -> list[Group]:
        self.parked[ident] = []
        reduced = _reduced(waiting, len(full))
        gone = []
        for group, arrival in waiting:
            chosen = full[group.of("row")]
            if not chosen.any():
                self.parked[ident].append(_Waiting(group, arrival))
                continue
            if not chosen.all():
                group, held = group.split(chosen)
                self.parked[ident].append(_Waiting(held, arrival.of(~chosen)))
            if arrival.result >= 0:
                words = reduced[arrival.kind].take(group.of("row"))
                group.set(arrival.result, words.view(group.frame.code.zeros[arrival.result].dtype))
            gone.append(group)
        return gone


def _reduced(waiting: list[_Waiting], blocks: int) -> dict[str, Array]:
    """Return the result of each kind of reduction of the predicates, for every block."""
    total, true = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
    for group, arrival in waiting:
        if arrival.result >= 0:
            rows = group.of("row")
            total += np.bincount(rows, minlength=blocks)
            chosen = rows[np.broadcast_to(arrival.predicate, rows.shape)]
            true += np.bincount(chosen, minlength=blocks)
    return {"popc": true.astype(np.uint32), "and": true == total, "or": true > 0}
