"""Leases that let only one host compile a key: on a server, or in a shared cache directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from preheat.model.events import Events
from preheat.store import Chain, DiskStore
from preheat.store.remote import lease
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.lease import Leases
from preheat.store.remote.server import Server
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import LEASES, Remote

__all__ = ["directory_leases", "open_leases"]

_TIMEOUT = 5.0  # seconds for one request to the filesystem


def open_leases(cache: Chain, events: Events) -> Leases | None:
    """Return the leases of a cache; None if no other host shares it.

    They are on the first server that can hold leases and that this process may write. Other hosts would
    wait for nothing if this process could not store its result. Without such a server, they are in a
    cache directory on a network filesystem. Without one, they are on a server without atomic
    operations, where a host can only look an entry up once more before it compiles.
    """
    writable = [tier for tier in cache.shared if tier.writable]
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


def directory_leases(disk: DiskStore, events: Events) -> Leases:
    """Return leases in the directory of `disk`, beside its entries. Nothing is written yet."""
    server = Server("lease", partial(_open_engine, disk), events, timeout=_TIMEOUT)
    return Leases(
        server,
        _at_once,
        events,
        was_dropped=lambda digest: not disk.exists([digest]),
        seconds=lease.LEASE_SECONDS,
    )


def _at_once(callback: Callable[[], object]) -> None:
    """Call a function now: every entry that was put before is in the directory."""
    callback()


def _open_engine(disk: DiskStore) -> FileEngine:
    try:
        disk.make_directory(f"{disk.root}/{LEASES}".rstrip("/"))
    except OSError as fault:
        raise RemoteError(f"{disk.root}: {fault.strerror or fault}") from None
    remote = Remote(service="file", name=f"file://{disk.root}", host="", path=str(disk.root))
    return FileEngine(remote, timeout=_TIMEOUT, mode=0o600)
