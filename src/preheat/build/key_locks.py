"""Locks that let only one process of a node compile a key, and requests that wait for such a lock."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.model.events import Events
from preheat.store.lock import FileLock
from preheat.store.trust import make_private

if TYPE_CHECKING:
    from preheat.build.build import Build
    from preheat.store.remote.lease_request import LeaseRequest  # Imported only if there is a server.

__all__ = ["Attempt", "KeyLocks", "PendingLease", "WouldWait", "parallel_compiles"]

_SLOT_WAIT = 1.0  # seconds after which a request is compiled without a slot


class WouldWait(BaseException):
    """Another thread or process is compiling the same key, and the caller can do other work first.

    It is not an `Exception`, because it only ends this try. Other threads that wait for the same key do
    not get it.
    """


class PendingLease(NamedTuple):
    """The lock and the lease request that one try keeps for the next one."""

    lock: FileLock | None
    request: LeaseRequest[Any]


@dataclass(slots=True)
class Attempt:
    """An attempt to obtain an entry, in several tries. A try raises `WouldWait` instead of waiting.

    It has what one try keeps for the next. `build` is what is being built, which is not looked up
    again. `since` is when the first try found that another process compiles the key, and `slot_since`
    when the first one found no slot. `pending` is set while another host compiles the key. The owner of
    the attempt calls `close` at the end.
    """

    build: Build | None = None
    since: float | None = None
    slot_since: float | None = None
    pending: tuple[str, PendingLease] | None = None

    def keep(self, digest: str, pending: PendingLease) -> None:
        """Pass `pending` to the next try. The lock stays held when this try ends."""
        if pending.lock is not None:
            pending.lock.detach()
        self.slot_since = None
        self.pending = (digest, pending)

    def resume(self, digest: str) -> PendingLease | None:
        """Return what the last try has kept. Raises `WouldWait` before the next poll is due."""
        if self.pending is None or self.pending[0] != digest:  # A replaced compiler changes the digest.
            self.close()
            return None
        pending = self.pending[1]
        if pending.request.pause() > 0:
            raise WouldWait
        self.pending = None
        return pending

    def due(self) -> bool:
        """Return True if it is time to ask the server again for the result of another host."""
        return self.pending is not None and self.pending[1].request.pause() <= 0

    def close(self) -> None:
        """Release what the last try has kept, because no other try follows."""
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

    def acquire(self, lock: FileLock, attempt: Attempt | None = None) -> None:
        """Take the lock, or continue without it after a bounded wait.

        With `attempt`, raise `WouldWait` instead of waiting, until that time has passed since the first
        try.
        """
        earlier = None if attempt is None else attempt.since
        started = time.perf_counter() if earlier is None else earlier
        try:
            make_private(lock.path.parent, trust=self._trust)
            taken = lock.acquire(0)
            if taken and earlier is None:
                return
            if not taken and attempt is None:
                taken = lock.acquire(self._wait)
            if not taken and attempt is not None and time.perf_counter() - started < self._wait:
                attempt.since = started
                raise WouldWait
        except OSError as fault:
            self._events.fault("lock", "lock", fault)
            return
        waited = time.perf_counter() - started
        outcome = "finished" if taken else "gave up"
        self._events.emit("wait", key=lock.path.name, seconds=waited, outcome=outcome)

    def slot(self, attempt: Attempt) -> FileLock | None:
        """Take one of the slots that the processes of a node share, and return its lock.

        The slots keep processes that start together from starting more compilers than the node has
        processors for. If all slots are taken, raise `WouldWait`, and after a second return None,
        because other processes may compile for hours.
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
        if attempt.slot_since is None:
            attempt.slot_since = now
        if now - attempt.slot_since < _SLOT_WAIT:
            raise WouldWait
        return None
