"""Device memory with a life: owned, used in streams, closed once."""

from __future__ import annotations

import itertools
import threading
import weakref
from functools import partial
from typing import Protocol

from preheat.devices import base
from preheat.runtime.context import Context
from preheat.runtime.stream import Event, record
from preheat.runtime.window import FREE

__all__ = ["Buffer", "Dependent", "follow", "newest", "use_of"]

_generations = itertools.count(1)
_telling = threading.RLock()  # between those who make views and those who close; finalizers need it not


class Dependent(Protocol):
    """Something that becomes useless when memory it relies on is closed."""

    def expire(self, reason: str) -> None:
        """Take note, and refuse to be used from now on."""


class Buffer:
    """A piece of device memory. `generation` tells it from any other that had the same address.

    It belongs to `home`, the stream it was allocated in. Another stream that uses it waits, the
    first time, for what `home` has done with it; and it is not given back before every such
    stream has come past its last use. `users` are those streams, by number: one of ours as itself,
    one of another library, which may be destroyed any time, as an event after its last use.
    `behind` are those that are ordered behind all that `home` did, until it does something more. What
    another library holds is given back when it lets go, whatever was closed before.
    """

    __slots__ = (
        "__weakref__", "_dependents", "_exported", "address", "behind", "context",
        "generation", "home", "open", "size", "users",
    )  # fmt: skip

    def __init__(self, context: Context, size: int, home: base.Stream) -> None:
        self.open = False  # a failed allocation leaves nothing to free
        self.context, self.size, self.home = context, size, home
        self._exported: tuple[object, ...] = ()  # by whom the memory lives once it was exported
        self.users: dict[int, base.Stream | Event] = {}
        self.behind: set[int] = set()
        self._dependents: weakref.WeakSet[Dependent] | None = None
        self.address = self._allocate()
        self.generation = next(_generations)
        self.open = True

    def _allocate(self) -> int:
        address = self.context.allocate(max(self.size, 1), self.home)
        self.context.holders.add(self)
        return address

    def release(self) -> None:
        """Give the memory back, unless another library holds it: the device is closed."""
        if self.open and not self._exported:
            self.context.device.free(self.address, self.home)

    @property
    def lost(self) -> str | None:
        """Why this memory cannot be used, or None while it can."""
        if not self.open:
            return "its memory was freed"
        return None if self.context.lost is None else str(self.context.lost)

    def before(self, stream: base.Stream) -> None:
        """Order `stream`, when it is new to this memory, behind what `home` has done so far."""
        if stream is not self.home and stream.handle not in self.behind:
            follow(stream, self.home)

    def after(self, stream: base.Stream, use: base.Stream | Event) -> None:
        """Note that `stream` uses this memory: until an event or, one of ours, from here on."""
        if stream is not self.home:
            self.users[stream.handle] = use
            self.behind.add(stream.handle)

    def settle(self) -> None:
        """Order `home` behind every stream that used this memory since; they are new to it again."""
        while self.behind:
            follow(self.home, self.users[self.behind.pop()])

    def export(self) -> None:
        """Another library gets it, and may use it in streams we do not see."""
        if not self._exported:
            self._exported = (self.context.device.owner(self.address),)

    def tell(self, dependent: Dependent) -> None:
        """Let `dependent` know when this memory is closed."""
        with _telling:
            if self._dependents is None:
                self._dependents = weakref.WeakSet()
            self._dependents.add(dependent)

    def dependents(self) -> list[Dependent]:
        """Who is told."""
        with _telling:
            return list(self._dependents or ())

    def close(self) -> None:
        """Give the memory back after the work now queued; what relies on it is told. Twice is fine."""
        if self.open:
            self.context.forbid(FREE)
        with _telling:
            was, self.open = self.open, False
            told = list(self._dependents or ())
        for dependent in told:
            dependent.expire("its memory was freed")
        if was and not self._exported and self.context.lost is None:
            self._give_back()()

    def _give_back(self) -> partial[None]:
        users, exported = [*self.users.values()], bool(self._exported)
        return partial(_free, self.context.device, self.address, self.home, users, exported)

    def __del__(self) -> None:
        if self.open or self._exported:
            self.context.garbage.append(self._give_back())


def newest() -> int:
    """A generation that all memory so far is older than, and all memory from now on newer."""
    return next(_generations)


def follow(stream: base.Stream, other: base.Stream | Event) -> None:
    """Let later work of `stream` wait for an event, or for what another stream has to do by now."""
    if isinstance(other, Event):
        stream.wait(other.raw)
    elif other is not stream:
        event = other.record()
        stream.wait(event)
        event.close()


def use_of(context: Context, stream: base.Stream) -> base.Stream | Event:
    """What to remember of a use in `stream`: itself where it is ours, else an event after it."""
    return stream if context.owns(stream) else record(context, stream)


def _free(
    device: base.Device,
    address: int,
    home: base.Stream,
    users: list[base.Stream | Event],
    exported: bool,
) -> None:
    if exported:
        device.synchronize()
    for user in users:
        follow(home, user)
    device.free(address, home)
