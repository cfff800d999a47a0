"""Several tiers as one, the fastest first. A hit is copied into the tiers searched before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec

from preheat.events import Events
from preheat.store.base import (
    CLOSE_SECONDS,
    Filled,
    Filling,
    Found,
    Holder,
    Merger,
    SharedTier,
    Tier,
    WritableTier,
)

__all__ = ["Chain"]

P = ParamSpec("P")


class Chain:
    """Several tiers as one. A fault of a tier is an event, never an exception.

    The first `local` tiers are on this machine, and those after them on servers. A hit on a server is
    copied to all tiers before it. These include other servers, because the first server may be near and
    the last one far. `merger` combines two versions of an entry that changes, so that a copy loses
    nothing.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        events: Events,
        *,
        local: int | None = None,
        merger: Merger | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.local = len(self.tiers) if local is None else local
        self.shared = [tier for tier in self.tiers[self.local :] if isinstance(tier, SharedTier)]
        self._events = events
        self._merger = merger
        self._writable = [tier if isinstance(tier, WritableTier) else None for tier in tiers]

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

        The result is the blob, the name of its tier and the number of the next tier. This is one
        function without a generator, because every lookup calls it.
        """
        number = start
        for tier in self.tiers[start:end]:
            number += 1
            try:
                blob = tier.get(digest)
            except OSError as fault:
                self._events.fault(tier.name, "read", fault)
                continue
            if blob is None:
                continue
            if start and number > self.local and self._merger and self._merger.applies(blob):
                self._fill_merged(digest, blob, number - 1, self._merger)
                return blob, tier.name, number
            for earlier in self._writable[: number - 1]:
                if earlier is not None:
                    try:
                        earlier.put(digest, blob)
                    except OSError as fault:
                        self._events.fault(earlier.name, "write", fault)
            return blob, tier.name, number
        return None

    def _fill_merged(self, digest: str, theirs: bytes, end: int, merger: Merger) -> None:
        """Add what a server has to the versions of an entry in the first `end` tiers."""
        for number, tier in enumerate(self._writable[:end]):
            if tier is None:
                continue
            try:
                mine = tier.get(digest) if number < self.local else None  # Servers merge later.
                merged = theirs if mine is None else merger.merge(digest, mine, theirs)
                if merged != mine:
                    tier.put(digest, merged)
            except OSError as fault:
                self._events.fault(tier.name, "write", fault)

    def put(self, digest: str, blob: bytes) -> None:
        """Store the blob in every writable tier. Those on servers store it later."""
        for tier in filter(None, self._writable[: self.local]):
            if self._attempt("write", tier, tier.put, digest, blob):
                self._events.emit("put", tier=tier.name, key=digest, bytes=len(blob))
        for shared in self.shared:
            shared.put(digest, blob)

    def remove(self, digest: str) -> None:
        """Remove the digest from every writable tier."""
        for tier in filter(None, self._writable):
            self._attempt("remove", tier, tier.remove, digest)

    def look_ahead(self, digests: Iterable[str], *, once: bool = True) -> None:
        """Look up many digests on servers with few requests, before each of them is looked up.

        Digests that a tier of this machine has are skipped. The next lookup of a digest that no server
        has makes no request. Without `once`, this applies to all lookups of it for a while.
        """
        if not self.shared:
            return
        holders = [tier.holds for tier in self.tiers[: self.local] if isinstance(tier, Holder)]
        wanted = [digest for digest in digests if not any(holds(digest) for holds in holders)]
        for shared in self.shared:
            shared.look_ahead(wanted, once=once)

    def fill_shared(self, entries: Sequence[Filling]) -> list[Filled]:
        """Write the entries that servers do not have; return the result for each writable server."""
        return [filled for shared in self.shared if (filled := shared.fill(entries)) is not None]

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
        self, verb: str, tier: Tier, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Call a method of a tier, and return whether it succeeded."""
        try:
            act(*args, **kwargs)
        except OSError as fault:
            self._events.fault(tier.name, verb, fault)
            return False
        return True
