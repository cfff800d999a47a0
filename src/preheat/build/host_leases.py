"""Leases that let only one host compile a key: on a server, or in a shared cache directory."""

from __future__ import annotations

from preheat.build.directory_leases import directory_leases
from preheat.events import Events
from preheat.store import Chain, DiskStore
from preheat.store.remote import lease
from preheat.store.remote.lease import Leases
from preheat.store.remote.store import RemoteStore

__all__ = ["open_leases"]


def open_leases(cache: Chain, events: Events) -> Leases | None:
    """Return the leases of a cache; None if no other host shares it.

    They are on the first server that can hold leases and that this process may write. Other hosts would
    wait for nothing if this process could not store its result. Without such a server, they are in a
    cache directory on a network filesystem. Without one, they are on a server without atomic
    operations, where a host can only look an entry up once more before it compiles.
    """
    writable = [tier for tier in cache.shared if isinstance(tier, RemoteStore) and tier.writable]
    for tier in writable:
        if tier.server.can_hold_leases:
            return _server_leases(tier, events)
    for local in cache.tiers:
        if isinstance(local, DiskStore) and local.shared:
            return directory_leases(local, events)
    return _server_leases(writable[0], events) if writable else None


def _server_leases(tier: RemoteStore, events: Events) -> Leases:
    return Leases(
        tier.server,
        tier.when_written,
        events,
        was_dropped=tier.was_dropped,
        seconds=lease.LEASE_SECONDS,
    )
