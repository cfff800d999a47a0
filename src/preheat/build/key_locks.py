"""Locks by which the processes of a node compile a key only once."""

from __future__ import annotations

import time
from pathlib import Path
from types import FrameType

from preheat.cache.lock import FileLock
from preheat.cache.trust import make_private
from preheat.events import Events

__all__ = ["KeyLocks"]


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

    def acquire(self, lock: FileLock) -> None:
        """Take the lock, or continue without it after a bounded wait."""
        started = time.perf_counter()
        try:
            make_private(lock.path.parent, trust=self._trust)
            if lock.acquire(0):
                return
            taken = lock.acquire(self._wait)
        except OSError as fault:
            self._events.fault("lock", "lock", fault)
            return
        waited = time.perf_counter() - started
        outcome = "finished" if taken else "gave up"
        self._events.emit("wait", key=lock.path.name, seconds=waited, outcome=outcome)
