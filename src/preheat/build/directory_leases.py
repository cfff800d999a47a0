"""Leases among the nodes that share a cache directory on a network filesystem."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from preheat.events import Events
from preheat.store import DiskStore
from preheat.store.remote import lease
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.lease import Leases
from preheat.store.remote.names import LEASES
from preheat.store.remote.server import Server
from preheat.store.remote.url import Remote

__all__ = ["directory_leases"]

_TIMEOUT = 5.0  # seconds for one request to the filesystem


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
