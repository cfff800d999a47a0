"""The cache directory and the other tiers that the settings describe."""

from __future__ import annotations

from preheat.build.lock_directory import choose_lock_dir
from preheat.cache import Chain, DiskTier, LayerTier, MemoryTier, Tier
from preheat.cache.filesystem import filesystem_of, read_mounts
from preheat.cache.trust import first_usable, usable
from preheat.config import Config
from preheat.events import Events
from preheat.locks import no_fork

__all__ = ["open_chain", "open_disk", "unreachable_stores"]


def open_chain(config: Config, events: Events) -> tuple[Chain, DiskTier | None]:
    """Open the tiers that the settings describe: memory, layers, the disk, and shared stores."""
    trust = config.trust_cache_dir
    layers = usable(config.layers, events, trust=trust, write=False)
    local: list[Tier] = [
        MemoryTier(config.memory_limit),
        *(LayerTier(path, events, trust=trust) for path in layers),
    ]
    if disk := open_disk(config, events):
        local.append(disk)
    if not config.remote:
        return Chain(local, events), disk
    with no_fork:
        from preheat.build.remotes import shared_chain

    return shared_chain(local, config, events), disk


def open_disk(config: Config, events: Events) -> DiskTier | None:
    """Open the cache directory that the settings describe; None when it is off or cannot be used."""
    trust = config.trust_cache_dir
    root = first_usable(config.cache_dirs, events, trust=trust) if config.cache else None
    if root is None:
        return None
    mounts = read_mounts()
    locks = choose_lock_dir(config, root, events, mounts)
    if locks is None:
        return None
    return DiskTier(
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
    if not cache.shared:
        return []
    with no_fork:
        from preheat.cache.remote.tier import RemoteTier

    return [
        f"the shared store {tier.name} could not be used"
        for tier in cache.shared
        if isinstance(tier, RemoteTier) and not tier.server.reads.closed
    ]
