"""Single flight among the threads of a process."""

from __future__ import annotations

import sys
import time
from _thread import allocate_lock
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Generic, TypeVar, cast

from preheat.errors import fresh
from preheat.events import Events
from preheat.locks import Call

__all__ = ["Flights"]

T = TypeVar("T")
_POLL = 0.2  # seconds between two looks whether the thread that makes it was interrupted


class _Flight(Call, Generic[T]):
    """A call that makes something for all who ask meanwhile, and what came of it.

    It does not use `threading.Event`, which an interrupt can leave locked.
    """

    __slots__ = ("error", "landed", "made", "signal")

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame)
        self.landed = False
        self.made: T | None = None
        self.error: Exception | None = None
        self.signal = allocate_lock()  # released when the call ends
        self.signal.acquire()

    def wait(self) -> None:
        """Wait until the call ends, or for a while."""
        if self.signal.acquire(timeout=_POLL):
            self.signal.release()  # for the next one that waits

    def land(self) -> None:
        """Show what came of the call to those who wait."""
        self.landed = True
        self.end()
        self.signal.release()


class Flights(Generic[T]):
    """Threads that miss the same key together: one makes it, the others wait for that.

    A thread that is interrupted, or that a forked child does not have, is replaced by one that waits.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._flying: dict[Hashable, _Flight[T]] = {}

    def share(self, key: Hashable, make: Callable[[], T], *, title: str | None = None) -> T:
        """The result of one `make` per key among all threads that ask meanwhile.

        `title` is what events call the key, where it is not its own name.
        """
        mine: _Flight[T] = _Flight(sys._getframe())
        try:
            flight = self._board(key, mine, title)
            if flight is None:
                return make()
            return self._fly(key, mine, make) if flight is mine else _outcome(flight)
        finally:
            mine.end()

    def _board(self, key: Hashable, mine: _Flight[T], title: str | None) -> _Flight[T] | None:
        """Return the flight of another thread once it landed, or `mine` where that has to fly.

        None says that this thread flies already: it is in a signal handler, and waiting for itself
        would never end.
        """
        started, waited = time.perf_counter(), False
        flight = self._flying.setdefault(key, mine)
        while flight is not mine and not flight.landed:
            flight = cast("_Flight[T]", flight.last())
            if flight.alive():
                if flight.thread == mine.thread:
                    return None
                waited = True
                flight.wait()
            elif not flight.landed and mine.follow(flight):
                flight = self._flying[key] = mine
        if waited:
            seconds, name = time.perf_counter() - started, title if title is not None else str(key)
            self._events.emit("wait", key=name, seconds=seconds, outcome="shared")
        return flight

    def _fly(self, key: Hashable, mine: _Flight[T], make: Callable[[], T]) -> T:
        try:
            made = mine.made = make()
        except Exception as error:
            mine.error = error
            raise
        except BaseException:
            # The interrupt is the business of this thread. The flight stays where those who wait find
            # that it has ended without landing, and exactly one of them takes its place.
            mine.end()
            mine.signal.release()
            raise
        finally:
            if mine.frame is not None:
                # First, so that one who asks from now on does not get an old result.
                self._flying.pop(key, None)
                mine.land()
        return made


def _outcome(flight: _Flight[T]) -> T:
    if flight.error is not None:
        raise fresh(flight.error)
    return cast(T, flight.made)
