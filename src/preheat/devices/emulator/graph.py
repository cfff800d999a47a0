"""Graphs of the emulator: work with its dependencies, which each replay executes.

Where work is deferred, each replay executes the nodes in another order that their dependencies allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from preheat.devices import base
from preheat.devices.emulator.driver_errors import driver_error
from preheat.devices.emulator.quarantine import Allocation
from preheat.devices.emulator.schedule import Scheduler

__all__ = [
    "ClaimMemory", "EmulatorExecutable", "EmulatorGraph", "GraphAllocation", "GraphFree", "GraphWork",
    "WorkList", "unfreed",
]  # fmt: skip

WorkList = list[Callable[[], object]]


@dataclass(frozen=True)
class GraphAllocation:
    """Work that allocates memory in each replay, at an address that is always the same."""

    allocation: Allocation
    make_valid: Callable[[], None]

    @property
    def address(self) -> int:
        """The address of the memory."""
        return self.allocation.buffer.start

    def __call__(self) -> None:
        self.make_valid()


@dataclass(frozen=True)
class GraphFree:
    """Work that frees the memory of an allocation in each replay."""

    made: GraphAllocation
    make_freed: Callable[[], None]

    def __call__(self) -> None:
        self.make_freed()


def unfreed(work: WorkList) -> tuple[Allocation, ...]:
    """Return the memory that work allocates and does not free."""
    freed = {each.made.address for each in work if isinstance(each, GraphFree)}
    made = [each for each in work if isinstance(each, GraphAllocation)]
    return tuple(each.allocation for each in made if each.address not in freed)


class ClaimMemory(Protocol):
    """Counts the memory that a replay leaves allocated as memory of the device."""

    def __call__(self, allocations: Sequence[Allocation], stream: base.Stream, *, free: bool) -> bool:
        """Return False if memory of an earlier replay is still allocated, unless `free` frees it."""


class GraphWork(NamedTuple):
    """The work of each replay, and the objects that it keeps alive.

    `after` has, for each piece of work, the positions of those that it depends on.
    """

    work: WorkList
    after: list[tuple[int, ...]]
    owners: tuple[object, ...] = ()


class EmulatorExecutable:
    """Captured work, executed in an order that its nodes allow. It keeps owners alive."""

    def __init__(
        self,
        captured: GraphWork,
        scheduler: Scheduler | None,
        claim: ClaimMemory,
        *,
        free_on_launch: bool,
    ) -> None:
        self._captured: GraphWork | None = captured
        self._scheduler = scheduler
        self._claim = claim
        self._free_on_launch = free_on_launch
        self._unfreed = unfreed(captured.work)

    def upload(self, stream: base.Stream) -> None:
        """Do nothing: there is nothing to upload."""

    def prepare(
        self, stream: base.Stream, *, unless_captured: bool = False, mark: base.Event | None = None
    ) -> base.Replay:
        """Return a function that executes the work or queues it as one item."""
        replay = partial(self._replay, stream, mark)
        if unless_captured:
            return lambda: replay() if stream.capture_status() == "none" else base.NOT_SUBMITTED
        return replay

    def _replay(self, stream: base.Stream, mark: base.Event | None) -> tuple[int, ...]:
        captured = self._captured
        scheduler = self._scheduler
        if captured is None:
            return (400,)
        if self._unfreed and not self._claim(self._unfreed, stream, free=self._free_on_launch):
            return (1,)
        if scheduler is None:
            _run_all(captured, range(len(captured.work)))
        else:
            order = scheduler.shuffled(captured.after)
            scheduler.submit(
                stream.id, partial(_run_all, captured, order)
            )  # It keeps the owners alive.
        if mark is not None:
            stream.record(reuse=mark)
        return (0,)

    def renew(self, captured: GraphWork) -> None:
        """Let later replays do other work. Queued replays do what they were queued with."""
        self._captured = captured
        self._unfreed = unfreed(captured.work)

    def as_work(self) -> Callable[[], None]:
        """Return one replay as a piece of work of another graph."""
        captured = self._captured
        if captured is None:
            raise driver_error("graph launch", 400)
        return partial(_run_all, captured, range(len(captured.work)))

    def close(self) -> None:
        """Release the work and the owners. A queued replay keeps them alive."""
        self._captured = None


def _run_all(captured: GraphWork, order: Sequence[int]) -> None:
    for at in order:
        captured.work[at]()


class EmulatorGraph:
    """The work captured from a stream."""

    def __init__(
        self,
        nodes: list[base.GraphNode],
        captured: GraphWork,
        scheduler: Scheduler | None,
        claim: ClaimMemory,
    ) -> None:
        self._nodes = nodes
        self._captured = captured
        self._scheduler = scheduler
        self._claim = claim

    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def nodes(self) -> list[base.GraphNode]:
        """Return its nodes, oldest first."""
        return list(self._nodes)

    def dependencies(self) -> list[tuple[int, ...]]:
        """Return, for each node, the positions of the nodes that it depends on."""
        return list(self._captured.after)

    @property
    def captured(self) -> GraphWork:
        """The work of its nodes, and what they depend on."""
        return self._captured

    def instantiate(self, *, free_on_launch: bool = False) -> base.Executable:
        """Return an executable."""
        return EmulatorExecutable(
            self._captured, self._scheduler, self._claim, free_on_launch=free_on_launch
        )

    def close(self) -> None:
        """Release the work and the owners."""
        self._nodes = []
        self._captured = GraphWork([], [])
