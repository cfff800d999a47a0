"""Single flight among the threads of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from preheat.errors import fresh
from preheat.events import Events

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Flights"]

T = TypeVar("T")


class Flights(Generic[T]):
    """Threads that miss the same key together: one makes it, the others wait for that."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._flying: dict[Hashable, Future[T]] = {}

    def share(self, key: Hashable, make: Callable[[], T], *, title: str | None = None) -> T:
        """The result of one `make` per key among all threads that ask meanwhile.

        `title` is what events call the key, where it is not its own name.
        """
        from concurrent.futures import Future

        while True:
            with self._lock:
                future = self._flying.get(key)
                if future is None:
                    mine = self._flying[key] = Future()
                    break
            started = time.perf_counter()
            error = future.exception()
            waited = time.perf_counter() - started
            name = title if title is not None else str(key)
            self._events.emit("wait", key=name, seconds=waited, outcome="shared")
            if error is None:
                return future.result()
            if isinstance(error, Exception):
                raise fresh(error)
            # The thread that compiled was interrupted; that is its business. Try again here.
        try:
            made = make()
        except BaseException as error:
            self._land(key)
            mine.set_exception(error)
            raise
        self._land(key)
        mine.set_result(made)
        return made

    def _land(self, key: Hashable) -> None:
        with self._lock:
            del self._flying[key]
