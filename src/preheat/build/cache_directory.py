"""The cache directory and the other stores that the settings describe."""

from __future__ import annotations

from preheat.build.lock_directory import choose_lock_dir
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.process.locks import no_fork
from preheat.store import Chain, DiskStore, LayerStore, MemoryStore, Store
from preheat.store.filesystem import filesystem_of, read_mounts
from preheat.store.trust import first_usable, usable

__all__ = ["open_chain", "open_disk", "unreachable_stores"]


def open_chain(config: Config, events: Events) -> tuple[Chain, DiskStore | None]:
    """Open the tiers that the settings describe: memory, layers, the disk, and shared stores."""
    trust = config.trust_cache_dir
    layers = usable(config.layers, events, trust=trust, write=False)
    local: list[Store] = [
        MemoryStore(config.memory_limit),
        *(LayerStore(path, trust=trust) for path in layers),
    ]
    if disk := open_disk(config, events):
        local.append(disk)
    if not config.remote:
        return Chain(local, events), disk
    with no_fork:
        from preheat.build.remotes import shared_chain

    return shared_chain(local, config, events), disk


def open_disk(config: Config, events: Events) -> DiskStore | None:
    """Open the cache directory that the settings describe; None when it is off or cannot be used."""
    trust = config.trust_cache_dir
    root = first_usable(config.cache_dirs, events, trust=trust) if config.cache else None
    if root is None:
        return None
    mounts = read_mounts()
    locks = choose_lock_dir(config, root, events, mounts)
    if locks is None:
        return None
    return DiskStore(
        root,
        events,
        lock_dir=locks,
        limit=config.cache_limit,
        max_files=config.cache_files,
        trust=trust,
        shared=filesystem_of(root, mounts).shared,
    )


def unreachable_stores(cache: Chain) -> list[str]:
    """Return a message for each shared store that is not used now, because requests to it failed."""
    return [
        f"the shared store {store.name} could not be used"
        for store in cache.shared
        if not store.server.available("read")
    ]
