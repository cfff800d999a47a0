"""Single flight among the threads of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, cast

from preheat.errors import fresh
from preheat.events import Events

__all__ = ["Flights"]

T = TypeVar("T")


class _Flight(Generic[T]):
    """One making that others may wait for: what came of it, once it has landed.

    A `concurrent.futures.Future` would do, but costs every process milliseconds to import.
    """

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.made: T | None = None
        self.error: BaseException | None = None


class Flights(Generic[T]):
    """Threads that miss the same key together: one makes it, the others wait for that."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._flying: dict[Hashable, _Flight[T]] = {}

    def share(self, key: Hashable, make: Callable[[], T], *, title: str | None = None) -> T:
        """The result of one `make` per key among all threads that ask meanwhile.

        `title` is what events call the key, where it is not its own name.
        """
        while True:
            with self._lock:
                other = self._flying.get(key)
                if other is None:
                    mine = self._flying[key] = _Flight()
                    break
            started = time.perf_counter()
            other.landed.wait()
            waited = time.perf_counter() - started
            name = title if title is not None else str(key)
            self._events.emit("wait", key=name, seconds=waited, outcome="shared")
            if other.error is None:
                return cast(T, other.made)
            if isinstance(other.error, Exception):
                raise fresh(other.error)
            # The thread that compiled was interrupted; that is its business. Try again here.
        try:
            mine.made = make()
        except BaseException as error:
            mine.error = error
            raise
        finally:
            with self._lock:
                del self._flying[key]
            mine.landed.set()
        return mine.made
