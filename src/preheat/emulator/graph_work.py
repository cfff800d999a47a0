"""The work of a graph: pieces with their dependencies, some of which need more than being called.

A `ChildGraph` stands for the work of another graph, and a `KernelWork` for a launch. An `EventRecord`
and an `EventWait` act on the stream in which the graph is executed. A `GraphAllocation` and a
`GraphFree` change what memory is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.devices import base

if TYPE_CHECKING:
    from preheat.emulator.allocator import Allocation
    from preheat.emulator.launch import Launch

__all__ = [
    "ChildGraph", "EventRecord", "EventWait", "EventWork", "GraphAllocation", "GraphFree", "GraphWork",
    "KernelWork", "Work", "WorkList", "do_nothing", "expand", "find_foreign_frees",
    "find_unfreed", "run_all",
]  # fmt: skip

Work = Callable[[], object]
WorkList = list[Work]


class GraphWork(NamedTuple):
    """The work of each replay, and the objects that it keeps alive.

    `after` has, for each piece of work, the positions of those that it depends on.
    """

    work: WorkList
    after: list[tuple[int, ...]]
    owners: tuple[object, ...] = ()


@dataclass(frozen=True)
class KernelWork:
    """A launch with the bytes of its parameters."""

    launch: Launch
    values: list[bytes]

    def __call__(self) -> None:
        self.launch.run(self.values)


@dataclass(frozen=True)
class ChildGraph:
    """Another graph as a piece of work. An executable replaces it by the pieces of that graph.

    Attributes:
        owner: What describes the other graph.
    """

    graph: GraphWork
    owner: object = None

    def __call__(self) -> None:
        raise AssertionError("an executable expands child graphs")


@dataclass(frozen=True)
class EventWork:
    """Work with an event, in the stream of a replay.

    Attributes:
        owner: What the event belongs to, and keeps valid.
    """

    event: base.Event
    owner: object = None

    def __call__(self) -> None:
        raise AssertionError("an executable submits events to its stream")

    def submit(self, stream: base.Stream) -> None:
        """Do the work in the stream of a replay."""
        raise NotImplementedError


class EventRecord(EventWork):
    """Work that records an event when the work that it depends on has ended."""

    def submit(self, stream: base.Stream) -> None:
        """Record the event in the stream of a replay."""
        stream.record(reuse=self.event)


class EventWait(EventWork):
    """Work that waits for an event, as it was last recorded when the graph is launched."""

    def submit(self, stream: base.Stream) -> None:
        """Let the stream of a replay wait for the event."""
        stream.wait(self.event)


class ClaimMemory(Protocol):
    """Counts memory of a device that a replay leaves allocated, or frees for another graph."""

    def __call__(
        self,
        made: Sequence[GraphAllocation],
        freed: Sequence[GraphAllocation],
        stream: base.Stream,
        *,
        free: bool,
    ) -> bool:
        """Return False if memory of an earlier replay is still allocated, unless `free` frees it.

        It is also False if memory that the replay frees is not allocated.
        """


@dataclass(frozen=True, eq=False)
class GraphAllocation:
    """Work that allocates memory in each replay, at an address that is always the same.

    Attributes:
        claim: Counts the memory on its device.
    """

    allocation: Allocation
    make_valid: Callable[[GraphAllocation], None]
    claim: ClaimMemory

    @property
    def address(self) -> int:
        """The address of the memory."""
        return self.allocation.buffer.start

    def __call__(self) -> None:
        self.make_valid(self)


@dataclass(frozen=True, eq=False)
class GraphFree:
    """Work that frees the memory of an allocation in each replay."""

    made: GraphAllocation
    make_freed: Callable[[], None]

    def __call__(self) -> None:
        self.make_freed()


def find_unfreed(work: Sequence[Work]) -> tuple[GraphAllocation, ...]:
    """Return the allocations in a list of work that no work in it frees."""
    freed = {each.made for each in work if isinstance(each, GraphFree)}
    return tuple(each for each in work if isinstance(each, GraphAllocation) and each not in freed)


def find_foreign_frees(work: Sequence[Work]) -> tuple[GraphAllocation, ...]:
    """Return the allocations of other graphs that a list of work frees."""
    own = {each for each in work if isinstance(each, GraphAllocation)}
    return tuple(each.made for each in work if isinstance(each, GraphFree) and each.made not in own)


def expand(graph: GraphWork) -> GraphWork:
    """Return a graph with the pieces of its child graphs instead of them.

    The pieces of a child graph come after those that the child graph depends on. One more piece, which
    does nothing, comes after them, and whatever depends on the child graph depends on it.
    """
    if not any(isinstance(piece, ChildGraph) for piece in graph.work):
        return graph
    work: WorkList = []
    after: list[tuple[int, ...]] = []

    def add(part: GraphWork, first: tuple[int, ...]) -> tuple[int, ...]:
        """Add the pieces of one graph, and return the position at which each of them has ended."""
        ends: list[int] = []
        for piece, needed in zip(part.work, part.after, strict=True):
            before = tuple(ends[each] for each in needed) or first
            if isinstance(piece, ChildGraph):
                before = add(piece.graph, before) or before
            work.append(do_nothing if isinstance(piece, ChildGraph) else piece)
            after.append(before)
            ends.append(len(work) - 1)
        return tuple(ends)

    add(graph, ())
    return GraphWork(work, after, graph.owners)


def do_nothing() -> None:
    """Do nothing: the piece only has dependencies."""


def run_all(work: WorkList, order: Sequence[int]) -> None:
    """Execute pieces of work in an order."""
    for at in order:
        work[at]()
