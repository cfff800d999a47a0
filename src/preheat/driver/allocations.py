"""The memory that a program has from the driver, by address."""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.driver.contexts import Context
    from preheat.driver.pools import Pool

__all__ = ["Allocation", "Allocations", "Kind"]

_numbers = itertools.count(1)


class Kind(enum.Enum):
    """How memory was allocated."""

    DEVICE = enum.auto()
    MANAGED = enum.auto()
    PINNED = enum.auto()  # by the driver, on the host
    REGISTERED = enum.auto()  # by the program, on the host
    VARIABLE = enum.auto()  # of a module
    IMPORTED = enum.auto()  # of another process
    GRAPH = enum.auto()  # by the replays of a graph, at this address
    GRAPH_PINNED = enum.auto()
    GRAPH_MANAGED = enum.auto()
    ARRAY = enum.auto()  # of texels, by an address that the program does not have


@dataclass(eq=False)
class Allocation:
    """Memory of one device or of the host.

    Attributes:
        release: What else has to be done when it is freed.
        owner: What keeps its memory, if it is on the host or of another process, or its file.
    """

    start: int
    size: int
    kind: Kind
    context: Context
    pool: Pool | None = None
    flags: int = 0
    release: Callable[[], object] = lambda: None
    owner: object = None
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.start + self.size

    @property
    def on_host(self) -> bool:
        """True for host memory, whose copies do not have to wait."""
        return self.kind in (Kind.PINNED, Kind.REGISTERED, Kind.GRAPH_PINNED)

    @property
    def can_be_shared(self) -> bool:
        """True for memory that other processes may open."""
        return self.kind is Kind.DEVICE and self.pool is None

    @property
    def is_managed(self) -> bool:
        """True for memory whose place the driver chooses."""
        return self.kind in (Kind.MANAGED, Kind.GRAPH_MANAGED)

    @property
    def of_graph(self) -> bool:
        """True for memory whose address belongs to a graph, also while it is not allocated."""
        return self.kind in (Kind.GRAPH, Kind.GRAPH_PINNED, Kind.GRAPH_MANAGED)


class Allocations:
    """What is allocated, in order of address. The interpreter lock is held during each call."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._by_start: dict[int, Allocation] = {}

    def add(self, made: Allocation) -> None:
        """Add memory. What was at its address before is forgotten."""
        if made.start not in self._by_start:
            insort(self._starts, made.start)
        self._by_start[made.start] = made

    def remove(self, start: int) -> None:
        """Forget the memory that begins at an address."""
        if self._by_start.pop(start, None) is not None:
            del self._starts[bisect_right(self._starts, start) - 1]

    def at(self, start: int) -> Allocation | None:
        """Return the memory that begins at an address, or None."""
        return self._by_start.get(start)

    def find(self, address: int) -> Allocation | None:
        """Return the memory that an address lies in, or None."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        found = self._by_start[self._starts[place]]
        return found if address < found.end else None

    def contains(self, address: int, size: int) -> bool:
        """Return whether all bytes lie in one allocation."""
        found = self.find(address)
        return found is not None and address + size <= found.end

    def of_context(self, context: Context) -> list[Allocation]:
        """Return the memory that was allocated in a context."""
        return [each for each in self._by_start.values() if each.context is context]
