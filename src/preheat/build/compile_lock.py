"""Only one thread, one process of a node and one host make an entry; the others wait for it."""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

from preheat.errors import copy_error
from preheat.model.events import Events
from preheat.process.lazy import LazyModule
from preheat.process.locks import Holder
from preheat.store import Chain, DiskStore
from preheat.store.lock import FileLock
from preheat.store.trust import make_private

if TYPE_CHECKING:
    from preheat.build import remotes
    from preheat.build.obtain import Build
    from preheat.store.remote import lease_request
    from preheat.store.remote.lease import Lease, Leases
    from preheat.store.remote.lease_request import LeaseRequest
else:  # Only a process that shares a store with other hosts needs them.
    remotes = LazyModule("preheat.build.remotes")
    lease_request = LazyModule("preheat.store.remote.lease_request")

__all__ = [
    "Attempt",
    "CompileLock",
    "CompileLocks",
    "KeyLocks",
    "Look",
    "PendingLease",
    "SingleFlight",
    "WouldWait",
    "parallel_compiles",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_SLOT_WAIT = 1.0  # seconds after which a request is compiled without a slot
_POLL = 0.2  # seconds between two checks whether the thread that computes the result was interrupted.


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
        self._leases = remotes.open_leases(cache, events) if _is_shared(cache) else None
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
            request = lease_request.LeaseRequest(leases, self.digest, look, limit=self._wait)
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


# The processes of a node


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


# The threads of a process


class _Flight(Holder, Generic[T]):
    """A call that computes a result for all threads that wait for it, and the result.

    It does not use `threading.Event`, which an interrupt can leave locked.
    """

    __slots__ = ("done", "error", "result", "signal")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame  # These three are the attributes of a `Holder`.
        self.thread = get_ident()
        self._after = {}
        self.done = False
        self.result: T | None = None
        self.error: Exception | None = None
        self.signal = allocate_lock()  # released when the call ends
        self.signal.acquire()

    def wait(self) -> None:
        """Wait until the call ends, at most for `_POLL` seconds."""
        if self.signal.acquire(timeout=_POLL):
            self.signal.release()  # Wake the next thread that waits.


class SingleFlight(Generic[T]):
    """Runs one function for each key at a time, and gives its result to all threads that need it.

    When the running thread is interrupted, or does not exist in a forked child, one of the waiting
    threads runs its own function instead.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._flights: dict[Hashable, _Flight[T]] = {}

    def run(self, key: Hashable, make: Callable[[], T], *, title: str | None = None) -> T:
        """Return the result of `make`, or of the call for the same `key` that is in progress.

        `title` is the name of the key in events, which is `str(key)` by default.
        """
        mine: _Flight[T] = _Flight(sys._getframe())
        try:
            flight: _Flight[T] | None = self._flights.setdefault(key, mine)
            if flight is not mine:
                flight = self._join(key, mine, title)
            if flight is None:
                return make()
            if flight is not mine:
                return _outcome(flight)
            # Run `make`, and publish its result or its error to the threads that wait.
            try:
                result = mine.result = make()
            except Exception as error:
                mine.error = error
                raise
            except BaseException:
                # An interrupt concerns only this thread. The flight stays in `_flights`, where waiting
                # threads see that it ended without a result, and exactly one of them replaces it.
                mine.end()
                mine.signal.release()
                raise
            finally:
                if mine.frame is not None:
                    # Remove the flight first, so that later requests do not get an old result.
                    self._flights.pop(key, None)
                    mine.done = True
                    mine.frame = None
                    mine.signal.release()
            return result
        finally:
            mine.frame = None

    def in_progress(self, key: Hashable) -> bool:
        """Return whether another thread computes the result for `key`, so that `run` would wait."""
        flight = self._flights.get(key)
        if flight is None:
            return False
        last = cast("_Flight[T]", flight.last())
        return not last.done and last.thread != get_ident() and last.alive()

    def _join(self, key: Hashable, mine: _Flight[T], title: str | None) -> _Flight[T] | None:
        """Return the flight of another thread when it is done, or `mine` when it has to run.

        Return None if this thread itself runs the flight in progress. This happens when a signal
        handler requests the same key, and a wait would never end.
        """
        started = time.perf_counter()
        waited = False
        flight = self._flights.setdefault(key, mine)
        while flight is not mine and not flight.done:
            flight = cast("_Flight[T]", flight.last())
            if flight.alive():
                if flight.thread == mine.thread:
                    return None
                waited = True
                flight.wait()
            elif not flight.done and mine.take_over_from(flight):
                flight = self._flights[key] = mine
        if waited:
            seconds = time.perf_counter() - started
            name = title if title is not None else str(key)
            self._events.emit("wait", key=name, seconds=seconds, outcome="shared")
        return flight


def _outcome(flight: _Flight[T]) -> T:
    if flight.error is not None:
        raise copy_error(flight.error)
    return cast(T, flight.result)
