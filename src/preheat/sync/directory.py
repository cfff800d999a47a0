"""A cache directory as a store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from preheat.build.key_locks import KeyLocks
from preheat.config import Config
from preheat.errors import InputError
from preheat.events import Events, logged_events
from preheat.store import DiskTier, LayerTier
from preheat.store.codec import DamagedEntryError
from preheat.store.signing.interface import UntrustedError
from preheat.store.trust import unusable_reason
from preheat.sync.store import Content, merged_list
from preheat.toolchain.headers import is_header_list

__all__ = ["Directory", "open_directory"]

_LOCK_WAIT = 10.0  # seconds to wait for a process that adds to the same header list


class Directory:
    """A cache directory, which is only read unless it has a `disk` to write."""

    def __init__(self, layer: LayerTier, disk: DiskTier | None = None, *, trust: bool = False) -> None:
        self.skipped: dict[str, int] = {}
        self.name = str(layer.root)
        self._layer = layer
        self._disk = disk
        self._locks = None if disk is None else KeyLocks(
            disk.lock_dir, Events(), wait=_LOCK_WAIT, trust=trust
        )  # fmt: skip

    def digests(self) -> Iterator[str]:
        """Yield the digest of every entry. Notes, which belong to this machine, are left out."""
        return (item.digest for item in self._layer.items() if self._has(item.digest))

    def existing(self, digests: Collection[str]) -> set[str]:
        """Return those of `digests` that have a file."""
        return set(filter(self._has, digests))

    def _has(self, digest: str) -> bool:
        return self._layer.holds(digest)

    def is_header_list(self, digest: str) -> bool:
        """Return whether an entry is a header list, by its first bytes."""
        return is_header_list(self._layer.first_bytes(digest) or b"")

    def read(self, digest: str) -> bytes | None:
        """Return a verified entry. The directory is not changed, not even to remove a damaged one."""
        seen: list[tuple[str, str]] = []
        events = Events(
            lambda name, fields: seen.append((name, str(fields.get("reason") or fields.get("error"))))
        )
        blob = self._layer.reader(events).get(digest)
        for name, reason in seen:
            raise UntrustedError(reason) if name == "refused" else DamagedEntryError(reason)
        return blob

    def objection(self, content: Content) -> None:
        """Return None: a directory keeps every entry."""
        del content

    def write(self, digest: str, blob: bytes) -> None:
        """Publish an entry, within the limits of the cache."""
        self._writable().put(digest, blob)

    def merge(self, digest: str, header_list: bytes, *, dry_run: bool) -> bool:
        """Add states to a header list while no process of this node does."""
        assert self._locks is not None
        lock = self._locks.lock(digest, sys._getframe())
        assert lock is not None
        try:
            self._locks.acquire(lock)
            merged = merged_list(digest, header_list, self.read)
            if merged is not None and not dry_run:
                self.write(digest, merged)
            return merged is not None
        finally:
            lock.release()

    def _writable(self) -> DiskTier:
        assert self._disk is not None
        return self._disk

    def close(self) -> None:
        """Do nothing: every entry is on the disk."""


def open_directory(path: Path, config: Config, *, write: bool) -> Directory:
    """Open a cache directory; `InputError` when it cannot be used."""
    trust = config.trust_cache_dir
    if why := unusable_reason(path, trust=trust, write=write):
        raise InputError(f"the directory {path} cannot be used: {why}")
    events = logged_events()
    if not write:
        return Directory(LayerTier(path, events, trust=trust))
    disk = DiskTier(
        path,
        events,
        lock_dir=config.lock_dir,
        limit=config.cache_limit,
        max_files=config.cache_files,
        trust=trust,
    )
    return Directory(disk, disk, trust=trust)
