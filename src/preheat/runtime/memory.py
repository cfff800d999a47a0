"""Device memory with a life: owned, used in streams, closed once."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Protocol

from preheat.device import base
from preheat.runtime.context import Context
from preheat.runtime.stream import Event

__all__ = ["Buffer", "Dependent"]

_generations = itertools.count(1)


class Dependent(Protocol):
    """Something that becomes useless when memory it relies on is closed."""

    def expire(self, reason: str) -> None:
        """Take note, and refuse to be used from now on."""


class Buffer:
    """A piece of device memory. `generation` tells it from any other that had the same address.

    It belongs to `home`, the stream it was allocated in. Another stream that uses it waits, the
    first time, for what `home` has done with it; and it is not given back before every such
    stream has come past its last use.
    """

    __slots__ = (
        "__weakref__", "_dependents", "_users", "address", "context",
        "exported", "generation", "home", "open", "size",
    )  # fmt: skip

    def __init__(self, context: Context, size: int, home: base.Stream) -> None:
        self.open = False  # a failed allocation leaves nothing to free
        self.context, self.size, self.home = context, size, home
        self.exported = False  # another library holds it and may use it in streams we do not see
        self._users: dict[int, Event] = {}
        self._dependents: weakref.WeakSet[Dependent] | None = None
        self.address = context.allocate(max(size, 1), home)
        self.generation = next(_generations)
        self.open = True

    @property
    def lost(self) -> str | None:
        """Why this memory cannot be used, or None while it can."""
        if not self.open:
            return "its memory was freed"
        return None if self.context.lost is None else f"its memory is gone: {self.context.lost}"

    def before(self, stream: base.Stream) -> None:
        """Order `stream`, when it is new to this memory, behind what `home` has done so far."""
        if stream is not self.home and stream.handle not in self._users:
            event = self.home.record()
            stream.wait(event)
            event.close()

    def after(self, stream: base.Stream, event: Event) -> None:
        """Note that `stream` uses this memory until `event`."""
        if stream is not self.home:
            self._users[stream.handle] = event

    def settle(self) -> None:
        """Order `home` behind every other stream that used this memory."""
        for event in self._users.values():
            self.home.wait(event.raw)

    def tell(self, dependent: Dependent) -> None:
        """Let `dependent` know when this memory is closed."""
        if self._dependents is None:
            self._dependents = weakref.WeakSet()
        self._dependents.add(dependent)

    def close(self) -> None:
        """Give the memory back after the work now queued; what relies on it is told. Twice is fine."""
        if not self.open:
            return
        self.open = False
        for dependent in self._dependents or ():
            dependent.expire("its memory was freed")
        if self.context.lost is None:
            self._give_back()()

    def _give_back(self) -> partial[None]:
        return partial(
            _free, self.context.device, self.address, self.home, [*self._users.values()], self.exported
        )

    def __del__(self) -> None:
        if self.open:
            self.context.garbage.append(self._give_back())


def _free(
    device: base.Device, address: int, home: base.Stream, users: list[Event], exported: bool
) -> None:
    if exported:
        device.synchronize()
    for event in users:
        home.wait(event.raw)
    device.free(address, home)
