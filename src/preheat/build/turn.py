"""The turn of one request to compile: a lock and a slot of the node, and a lease among hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from preheat.build.key_locks import Busy, Deferral, KeyLocks, PendingLease
from preheat.events import Events
from preheat.locks import Call, no_fork
from preheat.store import Chain, DiskStore
from preheat.store.lock import FileLock

if TYPE_CHECKING:  # Imported only if there is a server.
    from preheat.store.remote.lease import Lease, Leases
    from preheat.store.remote.lease_request import LeaseRequest

__all__ = ["Turn", "Turns"]

T = TypeVar("T")


class Turns:
    """Turns of requests to compile, among the processes of a node and the hosts that share a server."""

    def __init__(self, locks: KeyLocks, cache: Chain, events: Events, *, wait: float) -> None:
        self._locks = locks
        self._leases = _open_leases(cache, events) if _is_shared(cache) else None
        self._wait = wait

    def begin(self, digest: str, owner: FrameType, deferral: Deferral | None = None) -> Turn:
        """Return a turn that holds nothing yet. `owner` is the frame that calls `release`.

        Raises `Busy` if `deferral` waits for another host, and the next poll is not due yet.
        """
        return Turn(self._locks, self._leases, digest, owner, deferral, wait=self._wait)

    def close(self) -> None:
        """Release all leases. Each is released after its entries have been written to the server."""
        if self._leases is not None:
            self._leases.close()


def _is_shared(cache: Chain) -> bool:
    """Return whether other hosts use a tier of the cache: a server, or a directory."""
    disks = (tier for tier in cache.tiers if isinstance(tier, DiskStore))
    return bool(cache.shared) or any(disk.shared for disk in disks)


def _open_leases(cache: Chain, events: Events) -> Leases | None:
    with no_fork:
        from preheat.build.host_leases import open_leases

    return open_leases(cache, events)


def _request_lease(
    leases: Leases, digest: str, look: Callable[[], T | None], limit: float
) -> LeaseRequest[T]:
    with no_fork:
        from preheat.store.remote.lease_request import LeaseRequest

    return LeaseRequest(leases, digest, look, limit=limit)


class Turn:
    """What one request holds while it compiles, so that no other process or host compiles its key.

    The steps are `take_lock`, `take_slot`, `take_lease` and `release`. With a deferral, each of the
    first three raises `Busy` instead of waiting. The lease comes last: a host that has it compiles
    at once.
    """

    def __init__(
        self,
        locks: KeyLocks,
        leases: Leases | None,
        digest: str,
        owner: FrameType,
        deferral: Deferral | None = None,
        *,
        wait: float,
    ) -> None:
        self._locks = locks
        self._leases = leases
        self._wait = wait  # seconds, for another host
        self._digest = digest
        self._deferral = deferral
        self._pending = None if deferral is None else deferral.resume(digest)
        self._lock = locks.lock(digest, owner) if self._pending is None else self._pending.lock
        self._resumed = self._lock is not None and self._lock.held
        self._owner = None if leases is None else Call(owner)
        self._slot: FileLock | None = None
        self.lease: Lease | None = None  # among hosts, once it was taken
        self._ends_lease = False
        self._entries: tuple[str, ...] = ()

    def take_lock(self) -> None:
        """Take the lock of the key on this node, or continue without it after a bounded wait."""
        if self._lock is not None and self._pending is None:
            self._locks.acquire(self._lock, self._deferral)

    def take_slot(self) -> None:
        """Take one of the slots for compiles of this node, if the caller has other work meanwhile."""
        # No slot is needed for a claimed key, whose compile has already started. A key that waited for
        # another host is rarely compiled here.
        if self._deferral is not None and not self._resumed:
            self._slot = self._locks.slot(self._deferral)

    def take_lease(self, look: Callable[[], T | None]) -> T | None:
        """Take the lease among hosts, or return what `look` found when another host has stored it.

        The wait is bounded. It ends without a lease if the server has a fault. There is no wait if
        there is no server, or if the lock of this node could not be taken.
        """
        if self._leases is None or (self._lock is not None and not self._lock.held):
            return None
        if self._pending is None:
            request = _request_lease(self._leases, self._digest, look, self._wait)
        else:
            request = self._pending.request
        request.owner = self._owner
        try:
            while (pause := request.poll()) is not None:
                if self._deferral is not None:
                    self._defer(self._deferral, PendingLease(self._lock, request))
                time.sleep(pause)
        except Busy:
            raise
        except BaseException:
            request.close()
            raise
        self.lease = request.lease
        return request.found

    def _defer(self, deferral: Deferral, pending: PendingLease) -> None:
        """Keep the lock and raise `Busy`.

        With the lock, only this process of the node requests the lease.
        """
        deferral.keep(self._digest, pending)
        self._lock = None
        raise Busy

    def expect_no_entry(self) -> None:
        """Let `release` notify waiting hosts that this compile will not store an entry."""
        self._ends_lease = True

    def expect_entry(self, digest: str) -> None:
        """Name the entry with the code, if its digest is not the digest of the request.

        If the entry cannot be written, `release` ends the lease.
        """
        self._entries = (digest,)

    def release(self) -> None:
        """Let other processes and, once the entry is on the server, other hosts continue.

        The processes of this node do not wait for the request to the server.
        """
        lease, self.lease = self.lease, None
        try:
            for lock in (self._slot, self._lock):
                if lock is not None:
                    lock.release()
        finally:
            try:
                if lease is not None:
                    self._give_back(lease)
            finally:
                if self._owner is not None:
                    self._owner.end()

    def _give_back(self, lease: Lease) -> None:
        if self._ends_lease:
            lease.end()
        else:
            lease.release(*self._entries)
