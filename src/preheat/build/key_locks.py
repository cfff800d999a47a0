"""Locks that let only one process of a node compile a key, and requests that wait for such a lock."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.build.lookup import Miss
from preheat.cache.lock import FileLock
from preheat.cache.trust import make_private
from preheat.events import Events

if TYPE_CHECKING:  # Imported only if there is a server.
    from preheat.cache.remote.lease_request import LeaseRequest

__all__ = ["Busy", "Deferral", "KeyLocks", "PendingLease", "parallel_compiles"]

_SLOT_WAIT = 1.0  # seconds after which a request is compiled without a slot


class Busy(BaseException):
    """Another thread or process is compiling the same key, and the caller can do other work first.

    It is not an `Exception`, because it only ends this attempt. Other threads that wait for the same
    key do not get it.
    """


class PendingLease(NamedTuple):
    """The lock and the lease request that an attempt keeps for the next one."""

    lock: FileLock | None
    request: LeaseRequest[Any]


@dataclass(slots=True)
class Deferral:
    """What a request keeps from one attempt to the next. An attempt raises `Busy` instead of waiting.

    `missed` is the result of the lookup, which is not repeated. `since` is when the first attempt found
    that another process compiles the key, and `slot_since` when the first one found no slot. `pending`
    is set while another host compiles the key. The owner of the deferral calls `close` at the end.
    """

    missed: Miss | None = None
    since: float | None = None
    slot_since: float | None = None
    pending: tuple[str, PendingLease] | None = None

    def keep(self, digest: str, pending: PendingLease) -> None:
        """Pass `pending` to the next attempt. The lock stays held when this attempt ends."""
        if pending.lock is not None:
            pending.lock.detach()
        self.slot_since = None
        self.pending = (digest, pending)

    def resume(self, digest: str) -> PendingLease | None:
        """Return what the last attempt has kept. Raises `Busy` before the next poll is due."""
        if self.pending is None or self.pending[0] != digest:  # A replaced compiler changes the digest.
            self.close()
            return None
        pending = self.pending[1]
        if pending.request.pause() > 0:
            raise Busy
        self.pending = None
        return pending

    def due(self) -> bool:
        """Return True if it is time to ask the server again for the result of another host."""
        return self.pending is not None and self.pending[1].request.pause() <= 0

    def close(self) -> None:
        """Release what the last attempt has kept, because no other attempt follows."""
        ended, self.pending = self.pending, None
        if ended is not None:
            ended[1].request.close()
            if ended[1].lock is not None:
                ended[1].lock.release()


def parallel_compiles() -> int:
    """Return the largest number of requests that this node compiles and stores at the same time.

    The number is larger than the number of processors. The pool of each process runs one compile for
    each processor, and the other requests keep the compilers busy while results are stored.
    """
    processors = os.cpu_count() or 1
    return processors + (processors + 1) // 2


class KeyLocks:
    """One lock file for every key, in a directory that the processes of a node share."""

    def __init__(self, directory: Path | None, events: Events, *, wait: float, trust: bool) -> None:
        self.directory = directory
        self._events = events
        self._wait = wait
        self._trust = trust
        self._first_slots = count(os.getpid())  # Threads and processes try different slots first.

    def lock(self, digest: str, owner: FrameType) -> FileLock | None:
        """Return the lock of a key, which is not held yet; None if no directory is shared.

        `owner` is the frame that releases it: a lock whose frame is gone counts as released.
        """
        if self.directory is None:
            return None
        return FileLock(self.directory / digest, owner=owner)

    def acquire(self, lock: FileLock, deferral: Deferral | None = None) -> None:
        """Take the lock, or continue without it after a bounded wait.

        With `deferral`, raise `Busy` instead of waiting, until that time has passed since the first
        attempt.
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

    def slot(self, deferral: Deferral) -> FileLock | None:
        """Take one of the slots that the processes of a node share, and return its lock.

        The slots keep processes that start together from starting more compilers than the node has
        processors for. If all slots are taken, raise `Busy`, and after a second return None, because
        other processes may compile for hours.
        """
        if self.directory is None:
            return None
        slots = parallel_compiles()
        first = next(self._first_slots)
        try:
            for number in range(slots):
                path = self.directory / f"slot-{(first + number) % slots}"
                # The lock has no owner, so that later locks need not check its frame. Only threads of
                # preheat take a slot, and no interrupt ends them.
                lock = FileLock(path, keep=True, trust=self._trust)
                if lock.attempt():
                    return lock
        except OSError as fault:
            self._events.fault("lock", "lock", fault)
            return None
        now = time.perf_counter()
        if deferral.slot_since is None:
            deferral.slot_since = now
        if now - deferral.slot_since < _SLOT_WAIT:
            raise Busy
        return None
