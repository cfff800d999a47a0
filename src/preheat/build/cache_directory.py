"""The cache directory that the settings describe."""

from __future__ import annotations

from preheat.cache import DiskTier
from preheat.cache.trust import first_usable
from preheat.config import Config
from preheat.events import Events

__all__ = ["open_disk"]


def open_disk(config: Config, events: Events) -> DiskTier | None:
    """Open the cache directory that the settings describe; None when it is off or cannot be used."""
    trust = config.trust_cache_dir
    root = first_usable(config.cache_dirs, events, trust=trust) if config.cache else None
    if root is None:
        return None
    locks = first_usable([config.lock_dir, root / "locks"], events, trust=trust)
    if locks is None:
        return None
    return DiskTier(
        root,
        events,
        lock_dir=locks,
        limit=config.cache_limit,
        max_files=config.cache_files,
        trust=trust,
    )
