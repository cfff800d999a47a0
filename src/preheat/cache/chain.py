"""Tiers in a row: the fastest first, a hit fills those before it, a fault stops nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from preheat.cache.base import Found, Store, WritableStore
from preheat.events import Events

__all__ = ["Chain"]

P = ParamSpec("P")
T = TypeVar("T")


class Chain:
    """Several tiers as one. Never raises for what a tier could not do: that is an event."""

    def __init__(self, tiers: Sequence[Store], events: Events) -> None:
        self.tiers, self._events = tuple(tiers), events
        self._writable = [tier if isinstance(tier, WritableStore) else None for tier in tiers]

    def get(self, digest: str) -> Found | None:
        """The blob from the first tier that has it, back-filled into the writable ones before."""
        return next(self.each(digest), None)

    def each(self, digest: str) -> Iterator[Found]:
        """Every tier's blob for the digest, nearest first, for one whose tiers may disagree."""
        for depth, tier in enumerate(self.tiers):
            _, blob = self._attempt("read", tier, tier.get, digest)
            if blob is not None:
                for earlier in filter(None, self._writable[:depth]):
                    self._attempt("write", earlier, earlier.put, digest, blob)
                yield Found(blob, tier.name)

    def put(self, digest: str, blob: bytes) -> None:
        """Offer the blob to every writable tier."""
        for tier in filter(None, self._writable):
            if self._attempt("write", tier, tier.put, digest, blob)[0]:
                self._events.emit("put", tier=tier.name, key=digest, bytes=len(blob))

    def remove(self, digest: str) -> None:
        """Take the digest out of every writable tier."""
        for tier in filter(None, self._writable):
            self._attempt("remove", tier, tier.remove, digest)

    def _attempt(
        self, verb: str, tier: Store, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[bool, T | None]:
        """Whether the tier did what it was asked, and what it answered."""
        try:
            return True, act(*args, **kwargs)
        except OSError as fault:
            self._events.fault(tier.name, verb, fault)
            return False, None
