"""The right to make one entry: a lock and a slot of the node, and a lease among hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from preheat.build.key_locks import Attempt, KeyLocks, PendingLease, WouldWait
from preheat.build.singleflight import SingleFlight
from preheat.model.events import Events
from preheat.process.locks import Holder, no_fork
from preheat.store import Chain, DiskStore
from preheat.store.lock import FileLock

if TYPE_CHECKING:  # Imported only if there is a server.
    from preheat.store.remote.lease import Lease, Leases
    from preheat.store.remote.lease_request import LeaseRequest

__all__ = ["CompileLock", "CompileLocks", "Look"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Look(Protocol[T_co]):
    """A function that returns a stored entry; with `local`, only one on this machine."""

    def __call__(self, *, local: bool = False) -> T_co | None: ...


class CompileLocks:
    """Lets one thread, one process of a node, and one of the hosts that share a server make an entry.

    Attributes:
        flights: The entries that threads of this process make now.
    """

    def __init__(self, locks: KeyLocks, cache: Chain, events: Events, *, wait: float) -> None:
        self.flights: SingleFlight[Any] = SingleFlight(events)
        self._locks = locks
        self._leases = _open_leases(cache, events) if _is_shared(cache) else None
        self._wait = wait

    def begin(self, digest: str, owner: FrameType, attempt: Attempt | None = None) -> CompileLock:
        """Return a lock that is not held yet. `owner` is the frame that calls `release`.

        Raises `WouldWait` if `attempt` waits for another host, and the next poll is not due yet.
        """
        return CompileLock(self._locks, self._leases, digest, owner, attempt, wait=self._wait)

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


class CompileLock:
    """What one request holds while its entry is made, so that no other process or host makes it.

    `acquire` takes the lock of the node, then a slot if the caller has other work meanwhile, and at
    last the lease: a host that has it compiles at once. With an attempt, each of these steps raises
    `WouldWait` instead of waiting.

    Attributes:
        digest: The key.
        lease: The lease among hosts, once it was taken.
    """

    def __init__(
        self,
        locks: KeyLocks,
        leases: Leases | None,
        digest: str,
        owner: FrameType,
        attempt: Attempt | None = None,
        *,
        wait: float,
    ) -> None:
        self.digest = digest
        self.lease: Lease | None = None
        self._locks = locks
        self._leases = leases
        self._wait = wait  # seconds, for another host
        self._attempt = attempt
        self._pending = None if attempt is None else attempt.resume(digest)
        self._lock = locks.lock(digest, owner) if self._pending is None else self._pending.lock
        self._owner = None if leases is None else Holder(owner)
        self._slot: FileLock | None = None
        self._ends_lease = False
        self._entries: tuple[str, ...] = ()

    def acquire(self, look: Look[T]) -> T | None:
        """Take what there is to hold, or return the entry that another process or host has stored.

        Each wait is bounded, and ends without the lock or the lease. `look` is called once this node
        has the lock, because the process that held it before may have stored the entry on this machine.
        """
        if self._lock is not None and self._pending is None:
            self._locks.acquire(self._lock, self._attempt)
        entry = look(local=True)
        if entry is not None:
            return entry
        # A key that waited for another host is rarely compiled here, so it needs no slot.
        if self._attempt is not None and self._pending is None:
            self._slot = self._locks.slot(self._attempt)
        # There is no wait without a server, or if the lock of this node could not be taken.
        if self._leases is None or (self._lock is not None and not self._lock.held):
            return None
        return self._take_lease(self._leases, look)

    def _take_lease(self, leases: Leases, look: Look[T]) -> T | None:
        """Take the lease, or return what `look` found when another host has stored it.

        The wait ends without a lease if the server has a fault.
        """
        if self._pending is None:
            request = _request_lease(leases, self.digest, look, self._wait)
        else:
            request = self._pending.request
        request.owner = self._owner
        try:
            while (pause := request.poll()) is not None:
                if self._attempt is not None:
                    self._continue_later(self._attempt, PendingLease(self._lock, request))
                time.sleep(pause)
        except WouldWait:
            raise
        except BaseException:
            request.close()
            raise
        self.lease = request.lease
        return request.found

    def _continue_later(self, attempt: Attempt, pending: PendingLease) -> None:
        """Keep the lock and raise `WouldWait`.

        With the lock, only this process of the node requests the lease.
        """
        attempt.keep(self.digest, pending)
        self._lock = None
        raise WouldWait

    def expect_no_entry(self) -> None:
        """Let `release` notify waiting hosts that there will be no entry.

        Each of them then makes the entry for itself.
        """
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

    def give_up(self) -> None:
        """Release everything, because there will be no entry."""
        self.expect_no_entry()
        self.release()

    def _give_back(self, lease: Lease) -> None:
        if self._ends_lease:
            lease.end()
        else:
            lease.release(*self._entries)
