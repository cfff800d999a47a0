"""A request for a lease: it ends with the lease, with the entry, or without either."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from typing import Generic, TypeVar

from preheat.process.locks import Holder
from preheat.store.remote.engine import LEASE_BYTES, Engine, RemoteError
from preheat.store.remote.lease import Lease, LeaseContent, Leases, explain_refused_lease, lease_name
from preheat.store.remote.server import PausedError, size_of

__all__ = ["LeaseRequest"]

T = TypeVar("T")

_POLL = (0.05, 2.0)  # first and longest pause between two polls, in seconds
_GROWTH = 1.5  # of the pause, from one poll to the next
_MAX_ABSENCES = 3  # polls in succession that find no lease and cannot create it
_LOOKS = 3  # looks for the entry within the time of a lease, even while its holder is alive


class LeaseRequest(Generic[T]):
    """Asks for the lease of `digest` until it ends; `poll` never waits.

    `look` returns the entry, or None when it is not stored. When the request has ended, `found` is the
    entry, or None if the caller has to make it. The caller releases `lease` afterwards. `lease` is None
    after a fault, after `limit` seconds, when the last holder ended without an entry, and on a server
    without atomic operations, where every host would get a lease. The caller then makes the entry
    without one.
    """

    def __init__(
        self, leases: Leases, digest: str, look: Callable[[], T | None], *, limit: float
    ) -> None:
        self.lease: Lease | None = None
        self.found: T | None = None
        self.owner: Holder | None = None  # the call that polls and then releases the lease
        self._leases = leases
        self._digest = digest
        self._name = lease_name(digest)
        self._mine = LeaseContent.of(secrets.token_hex(16).encode(), 0)
        self._look = look
        self._outcome: str | None = None
        self._requests = 0
        self._began = self._due = self._looked = leases.clock()
        self._limit = limit
        self._pause = _POLL[0]
        self._seen: LeaseContent | None = None  # what another holder last wrote
        self._seen_since = 0.0  # when it was seen for the first time
        self._absences = 0  # polls in succession that found no lease
        self._waited = False

    def pause(self) -> float:
        """Return the seconds until the next poll is due."""
        return max(0.0, self._due - self._leases.clock())

    def poll(self) -> float | None:
        """Ask the server, if that is due. Return the seconds until the next poll; None at the end."""
        if self._outcome is not None:
            return None
        if (pause := self.pause()) > 0:
            return pause
        now = self._leases.clock()
        try:
            outcome = self._ask(now)
        except PausedError:
            self._leases.try_again()
            outcome = self._find() or "paused"
        except RemoteError:  # It was reported.
            outcome = "fault"
        left = self._began + self._limit - now
        if outcome is None and left > 0:
            self._waited = True
            return self._next(now, left)
        self._end(outcome or "gave up")
        return None

    def close(self) -> None:
        """End the request, and give back a lease that it has."""
        self._outcome = self._outcome or "closed"
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.free()

    # Between two polls

    def _next(self, now: float, left: float) -> float:
        """Return the pause until the next poll. Hosts that began together poll at different times."""
        pause = min(self._pause * random.uniform(0.5, 1.0), left)
        self._pause = min(self._pause * _GROWTH, _POLL[1])
        self._due = now + pause
        return pause

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        if not self._requests:  # The server has no leases, or is not asked at the moment.
            return
        events = self._leases.events
        events.emit("lease", key=self._digest, outcome=outcome, requests=self._requests)
        if self._waited:
            seconds = self._leases.clock() - self._began
            said = {"found": "finished"}.get(outcome, outcome)
            events.emit("wait", key=self._digest, seconds=seconds, outcome=said)

    # One poll. Each step returns the outcome, or None to go on waiting.

    def _ask(self, now: float) -> str | None:
        if not self._waited:
            return self._create("held")
        self._requests += 1
        data = self._leases.server.call("read_lease", self._read, kind="lease", size=size_of)
        if data is None:  # It was released, or the server removed it.
            self._absences += 1
            return self._find() or self._create("taken over")
        self._absences = 0
        content = LeaseContent(data)
        if content.token == self._mine.token:  # The answer to an earlier request was lost.
            return self._hold(content, "held")
        if content.ended:
            if self._seen is None:
                return self._replace(content)
            return self._find() or "ended"
        return self._watch(content, now)

    def _read(self, engine: Engine) -> bytes | None:
        return engine.get(self._name, limit=LEASE_BYTES)

    def _watch(self, content: LeaseContent, now: float) -> str | None:
        """Notice whether the holder is alive: the content changes within the time of a lease."""
        seconds = self._leases.seconds
        if self._seen is None or content.data != self._seen.data:
            self._seen, self._seen_since = content, now
        elif now - self._seen_since >= seconds:
            return self._find() or self._replace(content)
        if now - self._looked >= seconds / _LOOKS:
            self._looked = now
            return self._find()  # The holder may have died after it stored the entry.
        return None

    def _create(self, outcome: str) -> str | None:
        if not self._leases.supported():
            return self._find() or "unsupported"

        def create(engine: Engine) -> bool:
            created = engine.create(self._name, self._mine.data, seconds=self._leases.seconds)
            # Another host may have created it since the read, but hardly each time.
            if not created and self._absences >= _MAX_ABSENCES:
                raise explain_refused_lease(engine)
            return created

        return self._hold(self._mine, outcome) if self._change("create", create) else None

    def _replace(self, old: LeaseContent) -> str | None:
        """Take the lease of a holder that is dead or has ended, unless another host does so first."""

        def swap(engine: Engine) -> bool:
            seconds = self._leases.seconds
            return engine.swap(self._name, old.data, self._mine.data, seconds=seconds)

        return self._hold(self._mine, "taken over") if self._change("swap", swap) else None

    def _change(self, verb: str, act: Callable[[Engine], bool]) -> bool:
        server = self._leases.server
        # Do not make the caller wait for a trial request, or for a server whose reads fail. If writes
        # fail, the entry would be dropped, and other hosts would wait for an entry that never comes.
        if not server.available("read", "write", "lease"):
            raise PausedError(
                f"{server.name} is not asked for a lease, because earlier requests failed"
            )
        self._requests += 1
        return server.call(f"{verb}_lease", act, kind="lease")

    def _hold(self, content: LeaseContent, outcome: str) -> str:
        """Keep the lease, unless the last holder stored the entry before it released the lease."""
        self.lease = self._leases.hold(self._digest, content, self.owner)
        if found := self._find():
            self.close()
            return found
        return outcome

    def _find(self) -> str | None:
        self.found = self._look()
        return None if self.found is None else "found"
