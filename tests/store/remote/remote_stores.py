"""A store of entries on an engine in memory, with a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from preheat.model.events import Events
from preheat.store import Chain
from preheat.store.base import Merger
from preheat.store.remote.engine import Engine
from preheat.store.remote.server import Server
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.worker import Worker
from preheat.store.signing.keys import Keys
from tests.store.remote.memory_engine import MemoryEngine

__all__ = ["TIMEOUT", "Clock", "entry", "store_on"]

TIMEOUT = 2.0


@dataclass
class Clock:
    """The time, and the sleeps between retries, which take no time."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def store_on(
    engine: MemoryEngine | Callable[[], Engine],
    events: Events,
    clock: Clock | None = None,
    *,
    keys: Callable[[], Keys] = Keys,
    writable: bool = True,
    merger: Merger | None = None,
    worker: Worker | None = None,
    name: str = "remote",
) -> RemoteStore:
    """Return the store of entries on an engine."""
    clock = clock or Clock()
    opener = (lambda: engine) if isinstance(engine, MemoryEngine) else engine
    server = Server(name, opener, events, timeout=TIMEOUT, clock=clock, sleep=clock.sleep)
    return RemoteStore(server, events, read_keys=keys, writable=writable, merger=merger, worker=worker)


def entry(tier: RemoteStore, digest: str) -> bytes | None:
    """Look an entry up as a program does. What is wrong with it, or with the server, is an event."""
    found = Chain([], tier._events, shared=[tier]).get(digest)
    return None if found is None else found.blob
