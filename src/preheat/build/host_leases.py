"""One compile among hosts: leases on a server that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from preheat.cache import Chain
from preheat.cache.remote import lease
from preheat.cache.remote.lease import Leases
from preheat.cache.remote.lease_request import LeaseRequest
from preheat.cache.remote.tier import RemoteTier
from preheat.events import Events

__all__ = ["HostLeases", "open_leases"]

T = TypeVar("T")


class HostLeases:
    """Requests for leases, each with the same limit of time."""

    def __init__(self, leases: Leases, *, wait: float) -> None:
        self._leases = leases
        self._wait = wait

    def request(self, digest: str, look: Callable[[], T | None]) -> LeaseRequest[T]:
        """Ask for the lease of a key; `look` returns its entry once that is stored."""
        return LeaseRequest(self._leases, digest, look, limit=self._wait)

    def close(self) -> None:
        """Give all leases back, each once what was stored before is on the server."""
        self._leases.close()


def open_leases(cache: Chain, events: Events, *, wait: float) -> HostLeases | None:
    """Return leases on the first server of a cache that this process may write; None without one.

    A process that may not write could not store what the others would wait for.
    """
    for tier in cache.shared:
        if isinstance(tier, RemoteTier) and tier.writable:
            seconds = lease.LEASE_SECONDS
            leases = Leases(tier.server, tier.when_written, events, seconds=seconds)
            return HostLeases(leases, wait=wait)
    return None
