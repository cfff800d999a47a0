"""The counters of this process, and of all processes that used the same cache."""

from __future__ import annotations

import time

from preheat.model.events import Events, Stats
from preheat.store.journal import Journal

__all__ = ["Counters"]


class Counters:
    """Counts events, and writes the counts to the journal of the cache, if there is one."""

    def __init__(self, events: Events, journal: Journal | None) -> None:
        self._events = events
        self._journal = journal
        self.due = 0.0  # the time of the next write, if writes are limited to one every few seconds

    def write(self, at_most_every: float = 0) -> None:
        """Write the counts.

        With `at_most_every`, do so only if the last write is that many seconds ago.
        """
        now = time.monotonic()
        if at_most_every and now < self.due:
            return
        self.due = now + at_most_every
        if self._journal is None:
            return
        try:
            self._journal.write(self._events.stats())
        except OSError as fault:
            self._events.fault("journal", "write", fault)

    def stats(self) -> dict[str, Stats]:
        """Return the counts of this process, and those of every process that used this cache."""
        mine = self._events.stats()
        if self._journal is None:
            return {"process": mine, "cache": mine}
        self.write()
        return {"process": mine, "cache": self._journal.total()}

    def after_fork(self) -> None:
        """Count from zero in a forked child, in its own journal file."""
        self._events.forget()
        if self._journal is not None:
            self._journal = self._journal.for_child()
