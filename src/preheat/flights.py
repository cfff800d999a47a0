"""Single flight among the threads of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
        self._flying: dict[str, Future[T]] = {}

    def share(self, digest: str, make: Callable[[], T]) -> T:
        """The result of one `make` per digest among all threads that ask meanwhile."""
        from concurrent.futures import Future

        while True:
            with self._lock:
                future = self._flying.get(digest)
                if future is None:
                    mine = self._flying[digest] = Future()
                    break
            started = time.perf_counter()
            error = future.exception()
            waited = time.perf_counter() - started
            self._events.emit("wait", key=digest, seconds=waited, outcome="shared")
            if error is None:
                return future.result()
            if isinstance(error, Exception):
                raise fresh(error)
            # The thread that compiled was interrupted; that is its business. Try again here.
        try:
            made = make()
        except BaseException as error:
            self._land(digest)
            mine.set_exception(error)
            raise
        self._land(digest)
        mine.set_result(made)
        return made

    def _land(self, digest: str) -> None:
        with self._lock:
            del self._flying[digest]
