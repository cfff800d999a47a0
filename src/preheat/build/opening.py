"""What the settings of a builder describe: its cache directory, signers, and recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.errors import InputError
from preheat.model.config import Config, node_local_lock_dirs
from preheat.model.events import Events
from preheat.process.lazy import LazyModule
from preheat.store import Chain, DiskStore, LayerStore, MemoryStore, Store
from preheat.store.filesystem import Mount, filesystem_of, read_mounts
from preheat.store.trust import first_usable, usable

if TYPE_CHECKING:
    from preheat.ahead import recorder
    from preheat.build import remotes
    from preheat.store.signing import keys
    from preheat.store.signing.keys import Keyring
else:  # Few processes record, share a store, or require signed bundles.
    recorder = LazyModule("preheat.ahead.recorder")
    remotes = LazyModule("preheat.build.remotes")
    keys = LazyModule("preheat.store.signing.keys")

__all__ = [
    "choose_lock_dir",
    "explain_shared",
    "open_chain",
    "open_disk",
    "record_requests",
    "required_signers",
    "unreachable_stores",
]


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
    return remotes.open_shared_chain(local, config, events), disk


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


def choose_lock_dir(config: Config, root: Path, events: Events, mounts: Sequence[Mount]) -> Path | None:
    """Return the directory for locks of the cache at `root`; None when there is none.

    Each candidate on a network filesystem is a `refused` event. On some of these filesystems, `flock`
    is missing or locks out only processes of the same node, and only the kernel of the same node
    releases the locks of a process that has died.
    """
    candidates = [config.lock_dir, root / "locks", *node_local_lock_dirs()]
    local = _skip_shared(dict.fromkeys(candidates), events, mounts)
    return first_usable(local, events, trust=config.trust_cache_dir)


def explain_shared(path: Path, mounts: Sequence[Mount] | None = None) -> str | None:
    """Return why locks cannot be at `path`, if it is on a network filesystem, or None."""
    filesystem = filesystem_of(path, mounts)
    if not filesystem.shared:
        return None
    return f"it is on {filesystem.kind}, which other nodes share; locks must be local to this node"


def _skip_shared(
    candidates: dict[Path, None], events: Events, mounts: Sequence[Mount]
) -> Iterator[Path]:
    for path in candidates:
        why = explain_shared(path, mounts)
        if why is None:
            yield path
        else:
            events.emit("refused", path=str(path), reason=why)


def required_signers(config: Config) -> Callable[[], Keyring] | None:
    """Return a function that reads the trusted keys; None when bundles need no signature.

    It raises `InputError` when a file of keys cannot be used, or none is named.
    """
    return partial(_read_trusted_keys, config) if config.require_signed else None


def _read_trusted_keys(config: Config) -> Keyring:
    trusted = keys.Keys.load(config.signing_key, config.trusted_keys).trusted
    if trusted is None:
        raise InputError(
            "PREHEAT_REQUIRE_SIGNED is on, and no key is trusted",
            hint="name files of public keys in PREHEAT_TRUSTED_KEYS",
        )
    return trusted


def record_requests(config: Config, events: Events) -> None:
    """Write the requests to a builder with these events to the recording that the settings name."""
    if config.record is not None:
        recorder.Recorder.attach(events, config.record)
