"""Device memory: allocated in a stream, used in any, and freed once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.devices import base
from preheat.devices.active_capture import FREE
from preheat.devices.context import Context
from preheat.devices.uses import Uses

if TYPE_CHECKING:
    from preheat.devices.array import Array

__all__ = ["Buffer", "new_generation_limit"]

_generations = itertools.count(1)


class Buffer:
    """An allocation of device memory. `generation` distinguishes it from others at the same address.

    It is allocated in the stream `home` and freed there, after every use in `uses`. Memory that another
    library holds is freed when that library releases it, even if it was closed before.
    """

    __slots__ = (
        "__weakref__", "_exported_memory", "_graphs", "address", "context", "generation", "home",
        "open", "size", "uses",
    )  # fmt: skip

    def __init__(self, context: Context, size: int, home: base.Stream) -> None:
        self.open = False  # A failed allocation leaves nothing to free.
        self.context = context
        self.size = size
        self.home = home
        self._exported_memory: tuple[object, ...] = ()  # owner of the memory of an exported buffer
        self._graphs: weakref.WeakSet[object] | None = None
        self.uses = self._new_uses()
        self.address = self._allocate()
        self.generation = next(_generations)
        self.open = True

    def _new_uses(self) -> Uses:
        return self.context.order.new_uses(self.home)

    def _allocate(self) -> int:
        address = self.context.allocate(max(self.size, 1), self.home)
        self.context.resources.add(self)
        return address

    def uses_for(self, array: Array) -> Uses:
        """Return the uses that launches of `array` test.

        A buffer whose arrays can end before its memory overrides this, to make such arrays unusable.
        """
        del array
        return self.uses

    def release(self) -> None:
        """Free the memory now, because the device is closed, unless another library holds it."""
        if self.open and not self._exported_memory:
            self.context.device.free(self.address, self.home)

    @property
    def lost(self) -> str | None:
        """The reason why this memory cannot be used, or None while it can."""
        if not self.open:
            return "its memory was freed"
        return None if self.context.lost is None else str(self.context.lost)

    def export(self) -> None:
        """Keep the owner of the memory alive, because another library gets the memory."""
        if not self._exported_memory:
            self._exported_memory = (self.context.device.owner(self.address),)

    def add_graph(self, graph: object) -> None:
        """Let `graphs` return a graph that uses this memory, as long as the graph exists."""

        def add() -> None:
            if self._graphs is None:
                self._graphs = weakref.WeakSet()
            self._graphs.add(graph)

        self.context.order.run_locked(add)

    def graphs(self) -> list[object]:
        """Return the graphs that use this memory."""
        graphs: list[object] = []
        self.context.order.run_locked(lambda: graphs.extend(self._graphs or ()))
        return graphs

    def close(self) -> None:
        """Free the memory after the queued work. A second call does nothing."""
        if self.open:
            self.context.refuse_in_capture(FREE)
        closed: list[bool] = []

        def close() -> None:
            closed.append(self.open)
            self.open = False
            self._close_uses()

        self.context.order.run_locked(close)
        if not closed[0] or self.uses.exported:
            return
        if self.context.lost is None:
            self._exported_memory = ()
            self._deallocator()()
        elif not self._exported_memory:  # The context may recover.
            self.context.deferred_cleanups.append(self._deallocator())

    def _close_uses(self) -> None:
        self.uses.close()

    def _deallocator(self) -> Callable[[], None]:
        """Return what frees the memory, without a reference to this object."""
        context = self.context
        address = self.address
        home = self.home
        uses = self.uses
        return lambda: context.free(address, home, uses)

    def __del__(self) -> None:
        if self.open or self._exported_memory:
            self.context.deferred_cleanups.append(self._deallocator())


def new_generation_limit() -> int:
    """Return a number above the generation of every existing allocation and below every later one."""
    return next(_generations)
