"""Barriers of thread blocks: who has arrived, and whom that lets go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.devices.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.devices.emulator.group import Group
    from preheat.devices.emulator.wave import Wave

__all__ = ["Arrival", "Barriers"]

Array = np.ndarray[Any, Any]


class Arrival(NamedTuple):
    """What a barrier instruction asked for; `threads` is how many it waits for, if it says so."""

    ident: int
    threads: int | None = None
    kind: str = "sync"  # "arrive", or what a reduction makes of the predicates: "popc", "and", "or"
    predicate: Any = None
    result: int = -1  # slot of a reduction's result

    @classmethod
    def of(cls, site: int, ident: Any, count: Any, kind: str, predicate: Any, result: int) -> Arrival:
        """What a group asks for; all its threads must mean the same barrier."""
        for value in (ident, count):
            if value is not None and value.ndim and (value != value[0]).any():
                raise Violation("threads that run together name different barriers", site)
        number = int(np.atleast_1d(ident)[0])
        threads = None if count is None else int(np.atleast_1d(count)[0])
        return cls(number, threads, kind, predicate, result)


class _Waiting(NamedTuple):
    group: Group
    arrival: Arrival


class Barriers:
    """The barriers of all blocks of a wave."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.parked: dict[int, list[_Waiting]] = {}
        self.releases = 0
        self._passed: dict[int, Array] = {}  # threads of each block that arrived and went on

    def arrive(self, group: Group, arrival: Arrival) -> list[Group]:
        """Take in a group that now stands behind its barrier; the groups that may go on."""
        wave = self.wave
        ident = arrival.ident
        whole = group.count == wave.alive_total and arrival.threads is None
        if (
            whole
            and arrival.kind == "sync"
            and not self.parked.get(ident)
            and ident not in self._passed
        ):
            return [group]
        if arrival.kind == "arrive":
            counts = self._passed.setdefault(ident, np.zeros(wave.layout.blocks, np.int64))
            counts += np.bincount(group.of("row"), minlength=len(counts))
            return [group, *self.release(ident)]
        self.parked.setdefault(ident, []).append(_Waiting(group, arrival))
        return self.release(ident)

    def release(self, ident: int) -> list[Group]:
        """The groups that nothing holds at this barrier any more."""
        waiting = self.parked.get(ident)
        if not waiting:
            return []
        blocks = self.wave.layout.blocks
        arrived = self._passed.get(ident, np.zeros(blocks, np.int64)).copy()
        expected = self.wave.alive.copy()
        for group, arrival in waiting:
            rows = group.of("row")
            arrived += np.bincount(rows, minlength=blocks)
            if arrival.threads is not None:
                expected[np.unique(rows)] = arrival.threads
        full = (arrived >= expected) & (arrived > 0)
        if not full.any():
            return []
        self.releases += 1
        if ident in self._passed:
            self._passed[ident][full] = 0
            if not self._passed[ident].any():
                del self._passed[ident]
        return self._let_go(ident, waiting, full)

    def release_all(self) -> list[Group]:
        """The groups that go on because threads have exited."""
        return [group for ident in list(self.parked) for group in self.release(ident)]

    def complain(self) -> None:
        """`Violation` when threads still wait, for those of their block that went elsewhere."""
        for ident, parked in self.parked.items():
            for group, _ in parked:
                self.wave.running = group
                message = f"waits at barrier {ident} for threads of its block that never come"
                raise Violation(message, group.frame.code.steps[group.pc - 1].site)

    def _let_go(self, ident: int, waiting: list[_Waiting], full: Array) -> list[Group]:
        self.parked[ident] = []
        reduced = _reduced(waiting, len(full))
        gone = []
        for group, arrival in waiting:
            chosen = full[group.of("row")]
            held = None
            if not chosen.all():
                group, held = group.split(chosen)
            if held is not None:
                kept = arrival.predicate
                kept = kept[~chosen] if kept is not None and kept.ndim else kept
                self.parked[ident].append(_Waiting(held, arrival._replace(predicate=kept)))
            if group is not None:
                if arrival.result >= 0:
                    group.set(arrival.result, reduced[arrival.kind].take(group.of("row")))
                gone.append(group)
        return gone


def _reduced(waiting: list[_Waiting], blocks: int) -> dict[str, Array]:
    """What each kind of reduction makes of the predicates, for every block."""
    total, true = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
    for group, arrival in waiting:
        if arrival.result >= 0:
            rows = group.of("row")
            total += np.bincount(rows, minlength=blocks)
            chosen = rows[np.broadcast_to(arrival.predicate, rows.shape)]
            true += np.bincount(chosen, minlength=blocks)
    return {"popc": true.astype(np.uint32), "and": true == total, "or": true > 0}
