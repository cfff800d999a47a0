"""Device memory with a life: owned, used in streams, closed once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol

from preheat.devices import base
from preheat.runtime.active_capture import FREE
from preheat.runtime.context import Context
from preheat.runtime.uses import Uses

__all__ = ["Buffer", "Dependent", "newest"]

_generations = itertools.count(1)


class Dependent(Protocol):
    """Something that becomes useless when memory it relies on is closed."""

    def expire(self, reason: str) -> None:
        """Refuse to be used from now on."""


class Buffer:
    """A piece of device memory. `generation` tells it from any other that had the same address.

    It was allocated in the stream `home` and is freed there, after every use that `uses` has. Memory
    that another library holds is freed when that library releases it, even if it was closed before.
    """

    __slots__ = (
        "__weakref__", "_backing", "_dependents", "address", "context", "generation", "home", "open",
        "size", "uses",
    )  # fmt: skip

    def __init__(self, context: Context, size: int, home: base.Stream) -> None:
        self.open = False  # A failed allocation leaves nothing to free.
        self.context, self.size, self.home = context, size, home
        self._backing: tuple[object, ...] = ()  # what the memory of an exported buffer is part of
        self._dependents: weakref.WeakSet[Dependent] | None = None
        self.uses = self._new_uses()
        self.address = self._allocate()
        self.generation = next(_generations)
        self.open = True

    def _new_uses(self) -> Uses:
        return self.context.order.uses(self.home)

    def _allocate(self) -> int:
        address = self.context.allocate(max(self.size, 1), self.home)
        self.context.holders.add(self)
        return address

    def uses_of(self, array: Dependent) -> Uses:
        """Return the uses that launches of `array` test. A buffer whose arrays can end earlier than
        its memory tells them.
        """
        del array
        return self.uses

    def release(self) -> None:
        """Free the memory at once, unless another library holds it: the device is closed."""
        if self.open and not self._backing:
            self.context.device.free(self.address, self.home)

    @property
    def lost(self) -> str | None:
        """Why this memory cannot be used, or None while it can."""
        if not self.open:
            return "its memory was freed"
        return None if self.context.lost is None else str(self.context.lost)

    def export(self) -> None:
        """Keep what the memory is part of: another library gets it."""
        if not self._backing:
            self._backing = (self.context.device.owner(self.address),)

    def tell(self, dependent: Dependent) -> None:
        """Let `dependent` know when this memory is closed."""

        def add() -> None:
            if self._dependents is None:
                self._dependents = weakref.WeakSet()
            self._dependents.add(dependent)

        self.context.order.run_locked(add)

    def dependents(self) -> list[Dependent]:
        """Return everything that is told when this memory is closed."""
        found: list[Dependent] = []
        self.context.order.run_locked(lambda: found.extend(self._dependents or ()))
        return found

    def close(self) -> None:
        """Free the memory after the work now queued and tell what relies on it. Twice is fine."""
        if self.open:
            self.context.forbid(FREE)
        closed: list[bool] = []

        def close() -> None:
            closed.append(self.open)
            self.open = False

        self.context.order.run_locked(close)
        for dependent in self.dependents():
            dependent.expire("its memory was freed")
        if closed[0] and self.context.lost is None:
            self._close_uses()
            if not self.uses.shared:
                self._backing = ()
                self._give_back()()

    def _close_uses(self) -> None:
        self.context.order.close(self.uses)

    def _give_back(self) -> Callable[[], None]:
        context, address, home, uses = self.context, self.address, self.home, self.uses
        return lambda: context.free(address, home, uses)

    def __del__(self) -> None:
        if self.open or self._backing:
            self.context.garbage.append(self._give_back())


def newest() -> int:
    """Return a generation that all memory so far is older than, and all memory from now on newer."""
    return next(_generations)
