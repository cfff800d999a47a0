"""The leases by which hosts compile a key only once: on a server, or in a shared cache directory."""

from __future__ import annotations

from preheat.build.directory_leases import directory_leases
from preheat.cache import Chain, DiskTier
from preheat.cache.remote import lease
from preheat.cache.remote.lease import Leases
from preheat.cache.remote.tier import RemoteTier
from preheat.events import Events

__all__ = ["open_leases"]


def open_leases(cache: Chain, events: Events) -> Leases | None:
    """Return leases on the first server of a cache that can hold them and that this process may write.

    A process that may not write could not store what the others would wait for. Without such a server,
    a cache directory on a network filesystem keeps the leases. Without one, a server that has no atomic
    operations is asked once more for an entry before it is made. None if nothing is shared.
    """
    writable = [tier for tier in cache.shared if isinstance(tier, RemoteTier) and tier.writable]
    for tier in writable:
        if tier.server.can_hold_leases:
            return _server_leases(tier, events)
    for local in cache.tiers:
        if isinstance(local, DiskTier) and local.shared:
            return directory_leases(local, events)
    return _server_leases(writable[0], events) if writable else None


def _server_leases(tier: RemoteTier, events: Events) -> Leases:
    return Leases(
        tier.server,
        tier.when_written,
        events,
        was_dropped=tier.was_dropped,
        seconds=lease.LEASE_SECONDS,
    )
