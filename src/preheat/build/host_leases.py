"""One compile among hosts: leases on a server that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from preheat.build.directory_leases import directory_leases
from preheat.cache import Chain, DiskTier
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

    A process that may not write could not store what the others would wait for. Where there is no
    server, a cache directory on a network filesystem keeps the leases.
    """
    for tier in cache.shared:
        if isinstance(tier, RemoteTier) and tier.writable:
            seconds = lease.LEASE_SECONDS
            leases = Leases(tier.server, tier.when_written, events, seconds=seconds)
            return HostLeases(leases, wait=wait)
    for local in cache.tiers:
        if isinstance(local, DiskTier) and local.shared:
            return HostLeases(directory_leases(local, events), wait=wait)
    return None
