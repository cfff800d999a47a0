"""Leases on a server: of many hosts that miss the same entry, one makes it.

A lease is a small object under `v1/leases/<digest>`. It has a random token of its holder and a beat,
which the holder increments while it works. Other hosts wait while the content changes. They compare the
content with what they saw before and measure the time by their own clocks, so no clocks of two hosts
are ever compared. Results never depend on a lease: a host without one makes the entry as well.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable

from preheat import fork
from preheat.cache.remote.engine import Engine, RemoteError
from preheat.cache.remote.server import Server
from preheat.events import Events
from preheat.locks import Call, Lock

__all__ = ["LEASE_SECONDS", "Content", "Lease", "Leases", "lease_name"]

#: A lease that its holder has not renewed for this long is taken over.
LEASE_SECONDS = 10.0
_BEATS = 3  # renewals within the time of a lease


def lease_name(digest: str) -> str:
    """Return the name of the object on the server."""
    return f"v1/leases/{digest}"


class Content:
    """What the object of a lease has in it: the token of its holder, and a beat or `ended`."""

    __slots__ = ("data", "ended", "token")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.token, _, beat = data.partition(b" ")
        self.ended = beat == b"ended"

    @classmethod
    def of(cls, token: bytes, beat: int | None) -> Content:
        """Return the content for a beat; without one, that of a holder that ended without an entry."""
        return cls(token + b" " + (b"ended" if beat is None else b"%d" % beat))


class Lease:
    """A lease that this process holds. `Leases` renews it until it is released or lost.

    `owner` is the call that releases it. When the call ends without that, as by an interrupt, the lease
    is given back instead of being renewed.
    """

    def __init__(
        self, leases: Leases, digest: str, content: Content, owner: Call | None = None
    ) -> None:
        self.digest = digest
        self.name = lease_name(digest)
        self._owner = owner
        self.lost = False
        self.requests = 0
        self._leases = leases
        self._content = content
        self._beat = 0
        self._lock = Lock()  # One change at a time: the thread that renews is not that of a release.

    def renew(self) -> None:
        """Show other hosts that the holder is alive, and find out whether one has taken over."""
        if self._owner is not None and not self._owner.alive():
            self.free()
            return
        with self._lock:
            if not self._leases.has(self):
                return
            self._beat += 1
            if not self._swap(Content.of(self._content.token, self._beat)):
                self.lost = True
                self._leases.drop(self)
                self._report("lost")

    def release(self) -> None:
        """Give the lease back once everything that this process stored is on the server.

        Hosts that wait find the entry then. If there is none, the next one takes the lease.
        """
        if self._leases.has(self):
            self._owner = None
            self._leases.when_written(self.free)

    def free(self) -> None:
        """Give the lease back at once."""
        self._give_back("released", self._discard)

    def end(self) -> None:
        """Give the lease back at once, and tell the other hosts that no entry will come of it.

        They need not wait for one another then, as after a program that cannot be compiled.
        """
        self._give_back("ended", lambda: self._swap(Content.of(self._content.token, None)))

    def _give_back(self, outcome: str, act: Callable[[], bool]) -> None:
        with self._lock:
            if not self._leases.drop(self):  # It is lost, or that of a parent process.
                return
            try:
                self.lost = not act()
            except RemoteError:  # It was reported. The other hosts wait until the lease is out of date.
                outcome = "fault"
            self._report("lost" if self.lost else outcome)

    def _discard(self) -> bool:
        def discard(engine: Engine) -> bool:
            return engine.discard(self.name, self._content.data)

        return self._change("discard", discard, absent=True)

    def _swap(self, new: Content) -> bool:
        def swap(engine: Engine) -> bool:
            return engine.swap(self.name, self._content.data, new.data, seconds=self._leases.seconds)

        if swapped := self._change("swap", swap):
            self._content = new
        return swapped

    def _change(self, verb: str, act: Callable[[Engine], bool], *, absent: bool = False) -> bool:
        """Change the object, and return whether it was that of this holder; `absent` if there is none.

        The server may have done what an earlier request asked for although its answer was lost. So if
        the object has other content with the own token, `act` is called once more, with that content.
        """
        if self._call(verb, act):
            return True
        self.requests += 1
        data = self._leases.server.call("read_lease", lambda engine: engine.read(self.name))
        if data is None:
            return absent
        if Content(data).token != self._content.token:
            return False
        self._content = Content(data)
        return self._call(verb, act)

    def _call(self, verb: str, act: Callable[[Engine], bool]) -> bool:
        self.requests += 1
        return self._leases.server.call(f"{verb}_lease", act, writes=True)

    def _report(self, outcome: str) -> None:
        self._leases.events.emit("lease", key=self.digest, outcome=outcome, requests=self.requests)


class Leases:
    """The leases that this process holds on one server, and the thread that renews them.

    `when_written` calls a function once everything that was stored before is on the server. The thread
    runs while there are leases. Safe from any thread. A forked child starts without leases.
    """

    def __init__(
        self,
        server: Server,
        when_written: Callable[[Callable[[], object]], object],
        events: Events,
        *,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], object] = lambda run: _thread.start_new_thread(run, ()),
    ) -> None:
        """`clock` and `start`, which runs a function in a thread, are replaced by tests."""
        self.server = server
        self.when_written = when_written
        self.events = events
        self.seconds = seconds
        self.clock = clock
        self._start = start
        self._lock = Lock()
        self._held: dict[Lease, None] = {}
        self._renewing = False
        fork.register(self)

    def supported(self) -> bool:
        """Return whether the server can hold leases. Without that, a lease would exclude nobody."""
        try:
            return self.server.engine().conditional
        except RemoteError:
            return True  # The request that follows fails too, and is reported.

    def hold(self, digest: str, content: Content, owner: Call | None = None) -> Lease:
        """Renew a lease that was just obtained from now on, while `owner` runs."""
        lease = Lease(self, digest, content, owner)
        with self._lock:
            self._held[lease] = None
            start = not self._renewing
            self._renewing = True
        if start:
            self._start_renewing()
        return lease

    def _start_renewing(self) -> None:
        try:
            self._start(self._renew_until_empty)
        except RuntimeError as error:  # The process is exiting, or it has too many threads.
            self._renewing = False
            self.events.fault("lease", "renew", error)

    def has(self, lease: Lease) -> bool:
        """Return whether this process renews `lease`."""
        return lease in self._held

    def drop(self, lease: Lease) -> bool:
        """Renew `lease` no more, and return whether it was renewed before."""
        with self._lock:
            if lease not in self._held:
                return False
            del self._held[lease]
            return True

    def _renew_until_empty(self) -> None:
        while True:
            time.sleep(self.seconds / _BEATS)
            with self._lock:
                if not self._held:
                    self._renewing = False
                    return
            self.renew()

    def renew(self) -> None:
        """Renew all leases once. After a fault, the others wait for the next time."""
        try:
            for lease in list(self._held):
                lease.renew()
        except RemoteError:  # It was reported.
            return

    def after_fork(self) -> None:
        """Forget the leases and the thread of the parent, in a forked child."""
        self._held = {}
        self._renewing = False

    def close(self) -> None:
        """Give all leases back, each once what was stored before is on the server."""
        for lease in list(self._held):
            lease.release()
