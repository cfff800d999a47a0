"""Leases on a server: of many hosts that miss the same entry, one makes it.

A lease is a small object under `v1/leases/<digest>`. It has a random token of its holder and a beat,
which the holder increments while it works. Other hosts wait while the content changes. They compare the
content with what they saw before and measure the time by their own clocks, so no clocks of two hosts
are ever compared. Results never depend on a lease: a host without one makes the entry as well.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from preheat.model.events import Events
from preheat.process import fork
from preheat.process.locks import Holder, Lock
from preheat.store.remote.engine import LEASE_BYTES, Engine, RemoteError
from preheat.store.remote.server import PausedError, Server, size_of
from preheat.store.remote.url import LEASES

__all__ = ["LEASE_SECONDS", "Lease", "LeaseContent", "Leases", "explain_refused_lease", "lease_name"]

#: A lease that its holder has not renewed for this long is taken over.
LEASE_SECONDS = 10.0
_BEATS = 3  # renewals within the time of a lease
_THREADS = 8  # threads that renew leases at the same time, at most
_LEASES_PER_THREAD = 2  # One thread renews this number of leases before another thread is started.


def lease_name(digest: str) -> str:
    """Return the name of the object on the server."""
    return f"{LEASES}{digest}"


def explain_refused_lease(engine: Engine) -> RemoteError:
    """Return the error for a server that has no lease and does not create it either."""
    return RemoteError(f"{engine.name}: it answers that a lease does not exist, and does not create it")


class LeaseContent:
    """The content of a lease object: the token of its holder, and a beat number or `ended`."""

    __slots__ = ("data", "ended", "token")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.token, _, beat = data.partition(b" ")
        self.ended = beat == b"ended"

    @classmethod
    def of(cls, token: bytes, beat: int | None) -> LeaseContent:
        """Return the content for a beat. Without one, the holder ended without an entry."""
        return cls(token + b" " + (b"ended" if beat is None else b"%d" % beat))


class Lease:
    """A lease that this process holds. `Leases` renews it until it is released or lost.

    `owner` is the call that releases it. If the call ends without a release, it was interrupted, or the
    compile of another library failed. The lease is then ended instead of being renewed.
    """

    def __init__(
        self, leases: Leases, digest: str, content: LeaseContent, owner: Holder | None = None
    ) -> None:
        self.digest = digest
        self.name = lease_name(digest)
        self.requests = 0
        self._owner = owner
        self._leases = leases
        self._content = content
        self._beat = 0
        # Serializes changes: one thread renews the lease and another one releases it.
        self._lock = Lock()

    def renew(self) -> None:
        """Show other hosts that the holder is alive, and find out whether one has taken over."""
        if self._is_abandoned():
            self.end()
            return
        with self._lock:
            if not self._leases.has(self):
                return
            self._beat += 1
            beat = LeaseContent.of(self._content.token, self._beat)
            if not self._swap(beat, background=True):
                self._leases.drop(self)
                self._report("lost")

    def _is_abandoned(self) -> bool:
        """Return whether the owner ended without a release."""
        owner = self._owner
        if owner is None or owner.alive():
            return False
        # `release` clears the owner before the call of the owner ends. A release between the two
        # checks above is therefore seen here.
        return self._owner is owner

    def release(self, *entries: str) -> None:
        """Give the lease back once everything that this process stored is on the server.

        Hosts that wait find the entry then. If nothing was stored, the next one takes the lease. If the
        entry, or one of the `entries` that were stored with it, could not be written, the lease is
        ended.
        """
        if self._leases.has(self):
            self._owner = None
            self._leases.when_written(partial(self._give_back_after_upload, entries))

    def _give_back_after_upload(self, entries: tuple[str, ...]) -> None:
        if any(self._leases.was_dropped(digest) for digest in (self.digest, *entries)):
            self.end()
        else:
            self.free()

    def free(self) -> None:
        """Give the lease back at once."""
        self._give_back("released", self._discard)

    def end(self) -> None:
        """Give the lease back at once, and tell the other hosts that no entry will come of it.

        They need not wait for one another then, as after a program that cannot be compiled.
        """
        self._give_back("ended", lambda: self._swap(LeaseContent.of(self._content.token, None)))

    def _give_back(self, outcome: str, act: Callable[[], bool]) -> None:
        with self._lock:
            if not self._leases.drop(self):  # It is lost, or a parent process has it.
                return
            try:
                if not act():
                    outcome = "lost"
            except RemoteError:  # It was reported. The other hosts wait until the lease is out of date.
                outcome = "fault"
            self._report(outcome)

    def _discard(self) -> bool:
        def discard(engine: Engine) -> bool:
            return engine.discard(self.name, self._content.data)

        return self._change("discard", discard, absent=True)

    def _swap(self, new: LeaseContent, *, background: bool = False) -> bool:
        def swap(engine: Engine) -> bool:
            return engine.swap(self.name, self._content.data, new.data, seconds=self._leases.seconds)

        if swapped := self._change("swap", swap, background=background):
            self._content = new
        return swapped

    def _change(
        self,
        verb: str,
        act: Callable[[Engine], bool],
        *,
        absent: bool = False,
        background: bool = False,
    ) -> bool:
        """Change the object, and return whether it was this holder's; `absent` if there is none.

        The server may have done what an earlier request asked for although its answer was lost. So if
        the object has other content with our token, `act` is called once more, with that content.
        """
        if self._call(verb, act, background=background):
            return True
        data = self._read(background=background)
        if data is None:
            return absent
        if LeaseContent(data).token != self._content.token:
            return False
        self._content = LeaseContent(data)
        return self._call(verb, act, background=background)

    def _read(self, *, background: bool) -> bytes | None:
        def read(engine: Engine) -> bytes | None:
            return engine.get(self.name, limit=LEASE_BYTES)

        self.requests += 1
        server = self._leases.server
        return server.call("read_lease", read, kind="lease", background=background, size=size_of)

    def _call(self, verb: str, act: Callable[[Engine], bool], *, background: bool) -> bool:
        self.requests += 1
        return self._leases.server.call(f"{verb}_lease", act, kind="lease", background=background)

    def _report(self, outcome: str) -> None:
        self._leases.events.emit("lease", key=self.digest, outcome=outcome, requests=self.requests)


class Leases:
    """The leases that this process holds on one server, and the thread that renews them.

    `when_written` calls a function once everything that was stored before is on the server.
    `was_dropped` returns whether the entry of a digest could not be written. The thread runs while
    there are leases, and starts others if there are many. Safe from any thread. A forked child starts
    without leases.
    """

    def __init__(
        self,
        server: Server,
        when_written: Callable[[Callable[[], object]], object],
        events: Events,
        *,
        was_dropped: Callable[[str], bool] = lambda _: False,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], object] = lambda run: _thread.start_new_thread(run, ()),
    ) -> None:
        """`clock` and `start`, which runs a function in a thread, are replaced by tests."""
        self.server = server
        self.when_written = when_written
        self.was_dropped = was_dropped
        self.events = events
        self.seconds = seconds
        self.clock = clock
        self._start = start
        self._lock = Lock()
        self._held: dict[Lease, None] = {}
        self._renewing = False
        self._due: deque[Lease] = deque()  # those that the current round has not renewed yet
        self._helpers = 0  # threads that renew leases in addition to the first one
        fork.register(self)

    def supported(self) -> bool:
        """Return whether the server can hold leases. If it cannot, a lease excludes no other host."""
        try:
            return self.server.engine().conditional
        except RemoteError:
            return True  # The request that follows fails too, and is reported.

    def hold(self, digest: str, content: LeaseContent, owner: Holder | None = None) -> Lease:
        """Keep a lease that was just obtained, and renew it while `owner` runs."""
        lease = Lease(self, digest, content, owner)
        with self._lock:
            self._held[lease] = None
            start = not self._renewing
            self._renewing = True
        if start and not self._start_thread(self._renew_until_empty):
            self._renewing = False
        return lease

    def has(self, lease: Lease) -> bool:
        """Return whether this process renews `lease`."""
        return lease in self._held

    def drop(self, lease: Lease) -> bool:
        """Stop renewing `lease`, and return whether this process held it."""
        with self._lock:
            if lease not in self._held:
                return False
            del self._held[lease]
            return True

    def try_again(self) -> None:
        """After a pause, find out in the background whether the server answers again."""

        def read(engine: Engine) -> bytes | None:
            return engine.get(lease_name("trial"), limit=LEASE_BYTES)

        if self.server.breaker.claim_trial():
            trial = partial(self.server.trial, "read_lease", read, size=size_of)
            self._start_thread(trial)

    # Renewals

    def _renew_until_empty(self) -> None:
        pause = self.seconds / _BEATS
        due = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                due = max(due + pause, now)  # The time that a round takes is a part of the pause.
                time.sleep(due - now)
                with self._lock:
                    if not self._held:
                        self._renewing = False
                        return
                self.renew()
        except BaseException:
            self._renewing = False  # The next lease starts another thread.
            raise

    def renew(self) -> None:
        """Renew all leases once, in a few threads if there are many.

        A lease that cannot be renewed does not prevent the renewal of the others. The round ends only
        if the server is not asked any more.
        """
        with self._lock:
            self._due = deque(self._held)
            wanted = min(_THREADS, len(self._due) // _LEASES_PER_THREAD) - 1 - self._helpers
            self._helpers += max(0, wanted)
        for _ in range(wanted):
            if not self._start_thread(self._help):
                self._end_help()
        self._renew_due()

    def _help(self) -> None:
        try:
            self._renew_due()
        finally:
            self._end_help()

    def _end_help(self) -> None:
        with self._lock:
            self._helpers -= 1

    def _renew_due(self) -> None:
        while True:
            try:
                lease = self._due.popleft()
            except IndexError:
                return
            try:
                lease.renew()
            except PausedError:
                self._due.clear()
                return
            except RemoteError:  # It was reported.
                continue
            except Exception as error:
                self.events.fault(self.server.name, "renew a lease", error)

    def _start_thread(self, run: Callable[[], None]) -> bool:
        """Run a function in a thread, and return whether the thread was started."""
        try:
            self._start(run)
        except RuntimeError as error:  # The process is exiting, or it has too many threads.
            self.events.fault("lease", "start a thread", error)
            return False
        return True

    # Processes

    def after_fork(self) -> None:
        """Forget the leases and the threads of the parent, in a forked child."""
        self._held = {}
        self._renewing = False
        self._due = deque()
        self._helpers = 0

    def close(self) -> None:
        """Give all leases back, each once what was stored before is on the server."""
        for lease in list(self._held):
            lease.release()
