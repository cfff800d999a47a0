"""The counters of all builders of this process, including those that were closed."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import count

from preheat import fork
from preheat.events import Events, Sink, Stats, Tally, merge
from preheat.locks import Lock

__all__ = ["ProcessCounters", "process_counters"]


class ProcessCounters:
    """The sum of the counters of all `Events`. It never decreases, even if some of them are gone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = count()
        self._events: weakref.WeakSet[Events] = weakref.WeakSet()
        self._tallies: dict[int, Tally] = {}
        self._ended: deque[int] = deque()  # numbers of tallies whose events are gone
        self._past: Stats = {}  # the sum of these tallies
        self._sinks: list[tuple[Sink, tuple[str, ...]]] = []
        fork.register(self)

    def add(self, events: Events) -> None:
        """Add the counters of `events`. A second call with the same events does nothing."""
        with self._lock:
            self._collect()
            if events in self._events:
                return
            number = next(self._numbers)
            self._events.add(events)
            self._tallies[number] = events.tally
            # The finalizer may run in any thread at any time, so it only appends.
            weakref.finalize(events, self._ended.append, number).atexit = False
            for sink, names in self._sinks:
                events.subscribe(sink, *names)

    def subscribe(self, sink: Sink, *names: str) -> None:
        """Pass the events called `names` of all builders, present and future, to `sink`."""
        with self._lock:
            self._sinks.append((sink, names))
            for events in list(self._events):
                events.subscribe(sink, *names)

    def stats(self) -> Stats:
        """Return the sum of all counters since the process started or was forked."""
        with self._lock:
            self._collect()
            return merge(self._past, *(tally.stats() for tally in list(self._tallies.values())))

    def _collect(self) -> None:
        """Fold the tallies of events that are gone into one sum, so that their number is bounded."""
        while self._ended:
            tally = self._tallies.pop(self._ended.popleft())
            self._past = merge(self._past, tally.stats())

    def after_fork(self) -> None:
        """Count from zero in a forked child."""
        self._past = {}
        for tally in self._tallies.values():
            tally.forget()


#: The counters of this process.
process_counters = ProcessCounters()
