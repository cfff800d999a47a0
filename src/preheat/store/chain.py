"""Tiers in a row: the fastest first, a hit fills those before it, a fault stops nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from preheat.events import Events
from preheat.store.base import Found, Store

__all__ = ["Chain"]

T = TypeVar("T")


class Chain:
    """Several tiers as one. Never raises for what a tier could not do: that is an event."""

    def __init__(self, tiers: Sequence[Store], events: Events) -> None:
        self.tiers, self._events = tuple(tiers), events

    def get(self, digest: str) -> Found | None:
        """The blob from the first tier that has it, back-filled into the writable ones before."""
        for depth, tier in enumerate(self.tiers):
            blob = self._attempt("read", tier, lambda tier=tier: tier.get(digest))
            if blob is not None:
                self._fill(self.tiers[:depth], digest, blob)
                return Found(blob, tier.name)
        return None

    def put(self, digest: str, blob: bytes) -> None:
        """Offer the blob to every writable tier."""
        for name in self._fill(self.tiers, digest, blob):
            self._events.emit("put", tier=name, key=digest, bytes=len(blob))

    def remove(self, digest: str) -> None:
        """Take the digest out of every writable tier."""
        for tier in self.tiers:
            if tier.writable:
                self._attempt("remove", tier, lambda tier=tier: tier.remove(digest))

    def _fill(self, tiers: Sequence[Store], digest: str, blob: bytes) -> list[str]:
        """Put into the writable ones of `tiers`; the names of those that took it."""

        def put(tier: Store) -> bool:
            tier.put(digest, blob)
            return True

        return [
            tier.name
            for tier in tiers
            if tier.writable and self._attempt("write", tier, lambda tier=tier: put(tier))
        ]

    def _attempt(self, verb: str, tier: Store, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except OSError as fault:
            self._events.fault(tier.name, verb, fault)
            return None
