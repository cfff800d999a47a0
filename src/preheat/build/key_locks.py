"""Locks by which the processes of a node compile a key only once, and requests that wait for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from preheat.build.lookup import Miss
from preheat.cache.lock import FileLock
from preheat.cache.trust import make_private
from preheat.events import Events

__all__ = ["Busy", "Deferral", "KeyLocks"]


class Busy(BaseException):
    """Another thread or process compiles the same key, and the caller has other work meanwhile.

    It is no `Exception`: it ends this attempt alone, and no thread that waits for the same key gets it.
    """


@dataclass(slots=True)
class Deferral:
    """What a request keeps from one attempt to the next. An attempt raises `Busy` instead of waiting.

    `missed` is the result of the lookup, which is not repeated. `since` is when the first attempt found
    that another process compiles the key.
    """

    missed: Miss | None = None
    since: float | None = None


class KeyLocks:
    """One lock file for every key, in a directory that the processes of a node share."""

    def __init__(self, directory: Path | None, events: Events, *, wait: float, trust: bool) -> None:
        self.directory = directory
        self._events = events
        self._wait = wait
        self._trust = trust

    def lock(self, digest: str, owner: FrameType) -> FileLock | None:
        """Return the lock of a key, not taken yet; None where no directory is shared.

        `owner` is the frame that releases it: a lock whose frame is gone counts as released.
        """
        return None if self.directory is None else FileLock(self.directory / digest, owner=owner)

    def acquire(self, lock: FileLock, deferral: Deferral | None = None) -> None:
        """Take the lock, or continue without it after a bounded wait.

        With `deferral`, raise `Busy` instead of waiting, until the first attempt is that long ago.
        """
        earlier = None if deferral is None else deferral.since
        started = time.perf_counter() if earlier is None else earlier
        try:
            make_private(lock.path.parent, trust=self._trust)
            taken = lock.acquire(0)
            if taken and earlier is None:
                return
            if not taken and deferral is None:
                taken = lock.acquire(self._wait)
            if not taken and deferral is not None and time.perf_counter() - started < self._wait:
                deferral.since = started
                raise Busy
        except OSError as fault:
            self._events.fault("lock", "lock", fault)
            return
        waited = time.perf_counter() - started
        outcome = "finished" if taken else "gave up"
        self._events.emit("wait", key=lock.path.name, seconds=waited, outcome=outcome)
