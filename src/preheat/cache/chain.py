"""Several tiers as one: the fastest first. A hit is copied into the tiers that were asked before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

from preheat.cache.base import Found, Tier, WritableTier
from preheat.events import Events

__all__ = ["Chain"]

P = ParamSpec("P")


class Chain:
    """Several tiers as one. A fault of a tier is an event, never an exception."""

    def __init__(self, tiers: Sequence[Tier], events: Events) -> None:
        self.tiers = tuple(tiers)
        self._events = events
        self._writable = [tier if isinstance(tier, WritableTier) else None for tier in tiers]

    def get(self, digest: str) -> Found | None:
        """Return the blob of the first tier that has it, and copy it to the writable tiers before."""
        return next(self.each(digest), None)

    def each(self, digest: str) -> Iterator[Found]:
        """Yield the blob of every tier that has the digest, fastest first; the blobs may differ."""
        number = 0
        while (found := self.search(digest, number)) is not None:
            blob, tier, number = found
            yield Found(blob, tier)

    def search(self, digest: str, start: int = 0) -> tuple[bytes, str, int] | None:
        """Do what `get` does in the tiers from number `start` on.

        The result is the blob, the name of its tier and the number of the next tier. It is one function
        without a generator, because every lookup runs it.
        """
        number = start
        for tier in self.tiers[start:]:
            number += 1
            try:
                blob = tier.get(digest)
            except OSError as fault:
                self._events.fault(tier.name, "read", fault)
                continue
            if blob is None:
                continue
            for earlier in self._writable[: number - 1]:
                if earlier is not None:
                    try:
                        earlier.put(digest, blob)
                    except OSError as fault:
                        self._events.fault(earlier.name, "write", fault)
            return blob, tier.name, number
        return None

    def put(self, digest: str, blob: bytes) -> None:
        """Store the blob in every writable tier."""
        for tier in filter(None, self._writable):
            if self._attempt("write", tier, tier.put, digest, blob):
                self._events.emit("put", tier=tier.name, key=digest, bytes=len(blob))

    def remove(self, digest: str) -> None:
        """Remove the digest from every writable tier."""
        for tier in filter(None, self._writable):
            self._attempt("remove", tier, tier.remove, digest)

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
