"""Single flight: threads that need the same result at the same time compute it once."""

from __future__ import annotations

import sys
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Generic, TypeVar, cast

from preheat.errors import copy_error
from preheat.model.events import Events
from preheat.process.locks import Holder

__all__ = ["SingleFlight"]

T = TypeVar("T")
_POLL = 0.2  # Seconds between two checks whether the thread that computes the result was interrupted.


class _Flight(Holder, Generic[T]):
    """A call that computes a result for all threads that wait for it, and the result.

    It does not use `threading.Event`, which an interrupt can leave locked.
    """

    __slots__ = ("done", "error", "result", "signal")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame  # These three are the attributes of a `Holder`.
        self.thread = get_ident()
        self._after = {}
        self.done = False
        self.result: T | None = None
        self.error: Exception | None = None
        self.signal = allocate_lock()  # released when the call ends
        self.signal.acquire()

    def wait(self) -> None:
        """Wait until the call ends, at most for `_POLL` seconds."""
        if self.signal.acquire(timeout=_POLL):
            self.signal.release()  # Wake the next thread that waits.


class SingleFlight(Generic[T]):
    """Runs one function for each key at a time, and gives its result to all threads that need it.

    When the running thread is interrupted, or does not exist in a forked child, one of the waiting
    threads runs its own function instead.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._flights: dict[Hashable, _Flight[T]] = {}

    def run(self, key: Hashable, make: Callable[[], T], *, title: str | None = None) -> T:
        """Return the result of `make`, or of the call for the same `key` that is in progress.

        `title` is the name of the key in events, which is `str(key)` by default.
        """
        mine: _Flight[T] = _Flight(sys._getframe())
        try:
            flight: _Flight[T] | None = self._flights.setdefault(key, mine)
            if flight is not mine:
                flight = self._join(key, mine, title)
            if flight is None:
                return make()
            if flight is not mine:
                return _outcome(flight)
            # Run `make`, and publish its result or its error to the threads that wait.
            try:
                result = mine.result = make()
            except Exception as error:
                mine.error = error
                raise
            except BaseException:
                # An interrupt concerns only this thread. The flight stays in `_flights`, where waiting
                # threads see that it ended without a result, and exactly one of them replaces it.
                mine.end()
                mine.signal.release()
                raise
            finally:
                if mine.frame is not None:
                    # Remove the flight first, so that later requests do not get an old result.
                    self._flights.pop(key, None)
                    mine.done = True
                    mine.frame = None
                    mine.signal.release()
            return result
        finally:
            mine.frame = None

    def in_progress(self, key: Hashable) -> bool:
        """Return whether another thread computes the result for `key`, so that `run` would wait."""
        flight = self._flights.get(key)
        if flight is None:
            return False
        last = cast("_Flight[T]", flight.last())
        return not last.done and last.thread != get_ident() and last.alive()

    def _join(self, key: Hashable, mine: _Flight[T], title: str | None) -> _Flight[T] | None:
        """Return the flight of another thread when it is done, or `mine` when it has to run.

        Return None if this thread itself runs the flight in progress. This happens when a signal
        handler requests the same key, and a wait would never end.
        """
        started = time.perf_counter()
        waited = False
        flight = self._flights.setdefault(key, mine)
        while flight is not mine and not flight.done:
            flight = cast("_Flight[T]", flight.last())
            if flight.alive():
                if flight.thread == mine.thread:
                    return None
                waited = True
                flight.wait()
            elif not flight.done and mine.take_over_from(flight):
                flight = self._flights[key] = mine
        if waited:
            seconds = time.perf_counter() - started
            name = title if title is not None else str(key)
            self._events.emit("wait", key=name, seconds=seconds, outcome="shared")
        return flight


def _outcome(flight: _Flight[T]) -> T:
    if flight.error is not None:
        raise copy_error(flight.error)
    return cast(T, flight.result)
