"""Several stores as one, the fastest first. A hit is copied into the stores searched before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ParamSpec

from preheat.model.codec import DamagedEntryError
from preheat.model.events import Events
from preheat.store.base import (
    CLOSE_SECONDS,
    Found,
    Merger,
    Store,
    UntrustedError,
    Upload,
    UploadResult,
)
from preheat.store.trust import DistrustedError

if TYPE_CHECKING:  # Imported only if there is a server.
    from preheat.store.remote.store import RemoteStore

__all__ = ["Chain"]

P = ParamSpec("P")
_UNUSABLE = (OSError, UntrustedError, DamagedEntryError)


class Chain:
    """Several stores as one: the tiers of a cache. A fault of a tier is an event, never an exception.

    The tiers of this machine come first, and then the `shared` ones on servers. A hit on a server is
    copied to all tiers before it. These include other servers, because the first server may be near and
    the last one far. `merger` combines two versions of an entry that changes, so that a copy loses
    nothing.
    """

    def __init__(
        self,
        tiers: Sequence[Store],
        events: Events,
        *,
        shared: Sequence[RemoteStore] = (),
        merger: Merger | None = None,
    ) -> None:
        self.tiers = (*tiers, *shared)
        self.local = len(tiers)
        self.shared = tuple(shared)
        self._events = events
        self._merger = merger

    def get(self, digest: str) -> Found | None:
        """Return the blob of the first tier that has it, and copy it to the writable tiers before."""
        return next(self.each(digest), None)

    def each(self, digest: str, end: int | None = None) -> Iterator[Found]:
        """Yield the blob of every tier that has the digest, fastest first; the blobs may differ.

        `end` means the same as for `search`.
        """
        number = 0
        while (found := self.search(digest, number, end)) is not None:
            blob, tier, number = found
            yield Found(blob, tier)

    def search(
        self, digest: str, start: int = 0, end: int | None = None
    ) -> tuple[bytes, str, int] | None:
        """Search the tiers from number `start` up to number `end`, as `get` does.

        The result is the blob, the name of its tier and the number of the next tier.
        """
        for number, tier in enumerate(self.tiers[start:end], start=start):
            try:
                blob = tier.get(digest)
            except _UNUSABLE as error:
                self._report(tier, digest, error)
                continue
            if blob is None:
                continue
            if start and number >= self.local and self._merger and self._merger.applies(blob):
                self._fill_merged(digest, blob, number, self._merger)
                return blob, tier.name, number + 1
            for earlier in self.tiers[: min(number, self.local)]:
                if earlier.writable:
                    try:
                        earlier.put(digest, blob)
                    except OSError as fault:
                        self._events.fault(earlier.name, "write", fault)
            for shared in self.shared[: max(number - self.local, 0)]:
                shared.put_later(digest, blob)
            return blob, tier.name, number + 1
        return None

    def _report(self, tier: Store, digest: str, error: Exception) -> None:
        """Report an entry that cannot be used, or a fault of a tier. Remove a damaged entry."""
        match error:
            case UntrustedError():
                self._events.emit("untrusted", tier=tier.name, key=digest, reason=str(error))
            case DamagedEntryError():
                self._events.emit("damaged", tier=tier.name, key=digest, reason=str(error))
                # A server's entry stays: another machine may have a better connection to it.
                if tier.writable and tier not in self.shared:
                    self._attempt("remove a damaged entry", tier, tier.remove, digest)
            case DistrustedError():
                self._events.emit("refused", path=error.filename, reason=str(error))
            case OSError() if tier not in self.shared:  # Those report their faults themselves.
                self._events.fault(tier.name, "read", error)

    def _fill_merged(self, digest: str, theirs: bytes, end: int, merger: Merger) -> None:
        """Add what a server has to the versions of an entry in the first `end` tiers."""
        for tier in self.tiers[: self.local]:
            if tier.writable:
                mine = None
                try:
                    mine = tier.get(digest)
                except _UNUSABLE as error:
                    self._report(tier, digest, error)
                merged = theirs if mine is None else merger.merge(digest, mine, theirs)
                if merged != mine:
                    self._attempt("write", tier, tier.put, digest, merged)
        for shared in self.shared[: end - self.local]:
            shared.put_later(digest, theirs)  # It is merged when it is written.

    def put(self, digest: str, blob: bytes) -> None:
        """Store the blob in every writable tier. Those on servers store it later."""
        for tier in self.tiers[: self.local]:
            if tier.writable and self._attempt("write", tier, tier.put, digest, blob):
                self._events.emit("put", tier=tier.name, key=digest, bytes=len(blob))
        for shared in self.shared:
            shared.put_later(digest, blob)

    def remove(self, digest: str) -> None:
        """Remove the digest from every writable tier."""
        for tier in self.tiers:
            if tier.writable or tier in self.shared:
                self._attempt("remove", tier, tier.remove, digest)

    def look_ahead(self, digests: Iterable[str], *, once: bool = True) -> None:
        """Look up many digests on servers with few requests, before each of them is looked up.

        Digests that a tier of this machine has are skipped. The next lookup of a digest that no server
        has makes no request. Without `once`, this applies to all lookups of it for a while.
        """
        if not self.shared:
            return
        wanted = list(digests)
        for tier in self.tiers[: self.local]:
            there = tier.exists(wanted)
            wanted = [digest for digest in wanted if digest not in there]
        for shared in self.shared:
            shared.look_ahead(wanted, once=once)

    def upload(self, entries: Sequence[Upload]) -> list[UploadResult]:
        """Write the entries that servers do not have; return the result for each writable server."""
        return [result for shared in self.shared if (result := shared.upload(entries)) is not None]

    def settle(self, load: float = 0.5) -> None:
        """Wait, for a bounded time, until the queues of servers are at most `load` (0 to 1) full."""
        for shared in self.shared:
            shared.settle(load)

    @property
    def unanswered(self) -> int:
        """How many lookups the servers have not answered so far. A digest may count several times."""
        return sum(shared.unanswered for shared in self.shared)

    def close(self, seconds: float | None = None) -> None:
        """Write what is queued for servers, for a bounded time. The chain can still be used.

        All servers share this time, because they write at the same time.
        """
        deadline = time.monotonic() + (CLOSE_SECONDS if seconds is None else seconds)
        for shared in self.shared:
            shared.close(max(0.0, deadline - time.monotonic()))

    def _attempt(
        self, verb: str, tier: Store, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Call a method of a tier, and return whether it succeeded."""
        try:
            act(*args, **kwargs)
        except OSError as fault:
            self._events.fault(tier.name, verb, fault)
            return False
        return True
