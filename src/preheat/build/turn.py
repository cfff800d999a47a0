"""The turn of one request to compile: a lock and a slot of the node, and a lease among hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from preheat.build.key_locks import Busy, Deferral, Kept, KeyLocks
from preheat.cache import Chain, DiskTier
from preheat.cache.lock import FileLock
from preheat.events import Events
from preheat.locks import Call, no_fork

if TYPE_CHECKING:  # Imported only where there is a server.
    from preheat.build.host_leases import HostLeases
    from preheat.cache.remote.lease import Lease

__all__ = ["Turn", "Turns"]

T = TypeVar("T")


class Turns:
    """Turns of requests to compile, among the processes of a node and the hosts that share a server."""

    def __init__(self, locks: KeyLocks, cache: Chain, events: Events, *, wait: float) -> None:
        self._locks = locks
        self._hosts = _host_leases(cache, events, wait) if _is_shared(cache) else None

    def begin(self, digest: str, owner: FrameType, deferral: Deferral | None = None) -> Turn:
        """Return a turn that holds nothing yet. `owner` is the frame that calls `release`.

        Raises `Busy` where the last attempt of `deferral` waits for another host.
        """
        return Turn(self._locks, self._hosts, digest, owner, deferral)

    def close(self) -> None:
        """Give all leases back, each once what was stored before is on the server."""
        if self._hosts is not None:
            self._hosts.close()


def _is_shared(cache: Chain) -> bool:
    """Return whether other hosts use a tier of the cache: a server, or a directory."""
    disks = (tier for tier in cache.tiers if isinstance(tier, DiskTier))
    return bool(cache.shared) or any(disk.shared for disk in disks)


def _host_leases(cache: Chain, events: Events, wait: float) -> HostLeases | None:
    with no_fork:
        from preheat.build.host_leases import open_leases

    return open_leases(cache, events, wait=wait)


class Turn:
    """What one request holds while it compiles, so that no other process or host compiles the same.

    The steps are `take_lock`, `take_slot`, `take_lease` and `release`. With a deferral, each of the
    first three raises `Busy` instead of waiting. The lease comes last: a host that has it compiles
    at once.
    """

    def __init__(
        self,
        locks: KeyLocks,
        hosts: HostLeases | None,
        digest: str,
        owner: FrameType,
        deferral: Deferral | None = None,
    ) -> None:
        self._locks = locks
        self._hosts = hosts
        self._digest = digest
        self._deferral = deferral
        self._kept = None if deferral is None else deferral.resume(digest)
        self._lock = locks.lock(digest, owner) if self._kept is None else self._kept.lock
        self._resumed = self._lock is not None and self._lock.held
        self._owner = None if hosts is None else Call(owner)
        self._slot: FileLock | None = None
        self.lease: Lease | None = None  # among hosts, once it was taken

    def take_lock(self) -> None:
        """Take the lock of the key on this node, or go on without it after a bounded wait."""
        if self._lock is not None and self._kept is None:
            self._locks.acquire(self._lock, self._deferral)

    def take_slot(self) -> None:
        """Take one of the slots for compiles of this node, if the caller has other work meanwhile."""
        # A claimed key is compiled already, and one that waited for another host rarely is.
        if self._deferral is not None and not self._resumed:
            self._slot = self._locks.slot(self._deferral)

    def take_lease(self, look: Callable[[], T | None]) -> T | None:
        """Take the lease among hosts, or return what `look` found when another host has stored it.

        The wait is bounded. It ends without the lease when the server has a fault, and at once where
        there is no server, or where a process of this node was waited for in vain.
        """
        if self._hosts is None or (self._lock is not None and not self._lock.held):
            return None
        request = self._hosts.request(self._digest, look) if self._kept is None else self._kept.request
        request.owner = self._owner
        try:
            while (pause := request.poll()) is not None:
                if self._deferral is not None:
                    self._defer(self._deferral, Kept(self._lock, request))
                time.sleep(pause)
        except Busy:
            raise
        except BaseException:
            request.close()
            raise
        self.lease = request.lease
        return request.found

    def _defer(self, deferral: Deferral, kept: Kept) -> None:
        """Keep the lock, so that one process of this node asks for the lease, and raise `Busy`."""
        deferral.keep(self._digest, kept)
        self._lock = None
        raise Busy

    def no_entry(self) -> None:
        """Tell the hosts that wait that no entry will come of this compile."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.end()

    def release(self) -> None:
        """Let other processes and, once the entry is on the server, other hosts continue."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        for lock in (self._slot, self._lock):
            if lock is not None:
                lock.release()
        if self._owner is not None:
            self._owner.end()
