"""The counters of this process, in the journal of the cache and for monitoring systems."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from preheat.model.config import Address, Config
from preheat.model.events import Events, Stats
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock
from preheat.store.journal import Journal

if TYPE_CHECKING:
    from preheat.tools.metrics import otel, server
else:
    otel = LazyModule("preheat.tools.metrics.otel")
    server = LazyModule("preheat.tools.metrics.server")

__all__ = ["Counters", "disable_server", "expose_counters", "serve"]


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
        """Return the counts of this process, and the sums over every process that used this cache."""
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


_lock = Lock()
# Whether this process, or one that it was forked from, has a server or must not have one.
_served_or_disabled = False


def expose_counters(config: Config, events: Events) -> None:
    """Offer the counters of this process to the monitoring systems that the settings name."""
    if config.metrics is not None:
        serve(config.metrics, events)
    if config.otel:
        otel.report(events)


def disable_server() -> None:
    """Disable the server in this process.

    The command line of preheat calls this. A program that it starts may listen.
    """
    global _served_or_disabled
    _served_or_disabled = True


def serve(address: Address, events: Events) -> None:
    """Serve the counters of this process on `address`, once, for as long as the process.

    An address that cannot be used is a `fault` event. Children that are forked later do not listen.
    """
    global _served_or_disabled
    with _lock:
        if _served_or_disabled:
            return
        _served_or_disabled = True
    try:
        server.MetricsServer(address)  # `atexit` keeps it.
    except (OSError, ValueError, RuntimeError) as fault:  # ValueError: the host name is invalid.
        events.fault("metrics", f"listen on {address}", fault)
