"""The entries of the cache directory, as the command line lists and names them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from preheat.build.opening import open_disk
from preheat.errors import InputError, PreheatError
from preheat.model import codec
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.events import logged_events
from preheat.model.foreign import ForeignEntry, foreign_kind, is_foreign
from preheat.process.progress import progress
from preheat.store import DiskStore
from preheat.store.layer import Item
from preheat.store.trust import DistrustedError
from preheat.toolchain.headers.states import decode_states, is_header_list

__all__ = [
    "CUDA",
    "Stored",
    "artifact_at",
    "artifacts",
    "damage",
    "digest_at",
    "entries",
    "entry_at",
    "header_lists",
    "items_by_kind",
    "kind_of",
    "open_cache",
    "require_kind",
]

Stored = Artifact | ForeignEntry

CUDA = "cuda"  # the kind of entries that preheat compiled itself


def open_cache() -> DiskStore:
    """Open the cache of the settings. Raises when it is off or no directory can be used."""
    config = Config.from_env()
    if not config.cache:
        raise InputError("the cache is off", hint="unset PREHEAT_CACHE")
    disk = open_disk(config, logged_events())
    if disk is None:
        raise PreheatError("no cache directory can be used; see 'preheat doctor'")
    return disk


def kind_of(disk: DiskStore, digest: str) -> str | None:
    """Return the kind of an entry, or None for a header list and for a note without its entry."""
    front = disk.first_bytes(digest)
    if front is None or is_header_list(front):
        return None
    return foreign_kind(front) or CUDA


def items_by_kind(disk: DiskStore) -> dict[str | None, list[Item]]:
    """Return the files of the cache by the kind of the entry; see `kind_of`."""
    found: dict[str | None, list[Item]] = {}
    for item in disk.items():
        found.setdefault(kind_of(disk, item.digest), []).append(item)
    return found


def require_kind(kind: str | None, kinds: Collection[str | None]) -> None:
    """Raise unless the cache has entries of `kind`."""
    if kind is not None and kind not in kinds:
        known = ", ".join(sorted(filter(None, kinds)))
        raise InputError(
            f"the cache has no entry of kind {kind!r}",
            hint=f"it has {known}" if known else "the cache is empty",
        )


def entries(doing: str, kind: str | None = None) -> Iterator[tuple[Item, Stored]]:
    """Yield every intact entry, most recently used first. The cache is only read."""
    disk = open_cache()
    by_kind = items_by_kind(disk)
    require_kind(kind, by_kind)
    chosen = (item for each, items in by_kind.items() if kind in (None, each) for item in items)
    items = sorted(chosen, key=lambda item: -item.last_read)
    reader = disk.reader()
    with progress(doing, len(items), show=None if len(items) > 1000 else False) as bar:
        for item in items:
            bar.step(item.digest[:12])
            with suppress(codec.DamagedEntryError, OSError):
                blob = reader.get(item.digest)
                found = None if blob is None else _decode(item.digest, blob)
                if found is not None:
                    yield item, found


def artifacts(doing: str) -> Iterator[tuple[Item, Artifact]]:
    """Yield every intact artifact, most recently used first."""
    for item, entry in entries(doing):
        if isinstance(entry, Artifact):
            yield item, entry


def _decode(digest: str, blob: bytes) -> Stored | None:
    """Return an entry; None for a header list. Raises `DamagedEntryError`."""
    meta, sections = codec.unpack_checked(blob)
    if is_foreign(meta):
        return ForeignEntry.decode(digest, meta, sections)
    if meta.get("kind") == "headers":
        decode_states(meta)
        return None
    return Artifact.decode(digest, meta, sections) if meta.get("kind") == "artifact" else None


def damage(disk: DiskStore, digest: str) -> str | None:
    """Return why an entry is damaged, or None when it is intact or missing."""
    try:
        blob = disk.reader().get(digest)
        if blob is not None:
            _decode(digest, blob)
    except (codec.DamagedEntryError, DistrustedError) as bad:
        return str(bad)
    except OSError as fault:
        return f"{type(fault).__name__}: {fault}"
    return None


def digest_at(disk: DiskStore, key: str) -> str:
    """Return the digest of the only entry whose key starts with `key`."""
    prefix = key.strip().lower()
    if len(prefix) < 4 or any(char not in "0123456789abcdef" for char in prefix):
        hint = "use at least 4 digits of a key from 'preheat cache ls'"
        raise InputError(f"{key!r} is not a key", hint=hint)
    alike = [item for item in disk.items() if item.digest.startswith(prefix)]
    found = [item.digest for item in alike if kind_of(disk, item.digest)]
    if not found:
        raise InputError(f"no entry has the key {key}", hint="'preheat cache ls' lists the entries")
    if len(found) > 1:
        raise InputError(f"{key} is the start of {len(found)} keys", hint="give more digits")
    return found[0]


def entry_at(key: str) -> Stored:
    """Return the entry whose key starts with `key`."""
    disk = open_cache()
    digest = digest_at(disk, key)
    found = None
    with suppress(codec.DamagedEntryError, OSError):
        blob = disk.reader().get(digest)
        found = None if blob is None else _decode(digest, blob)
    if found is None:
        raise PreheatError(
            f"entry {digest[:12]} is damaged; 'preheat cache verify --repair' removes it"
        )
    return found


def artifact_at(key: str) -> Artifact:
    """Return the artifact whose key starts with `key`; `InputError` for an entry of another library."""
    found = entry_at(key)
    if isinstance(found, Artifact):
        return found
    raise InputError(
        f"entry {found.digest[:12]} holds files of {found.kind}, and was not compiled by preheat",
        hint=f"'preheat cache show {key}' lists its files",
    )


def header_lists(disk: DiskStore, wanted: Collection[str]) -> dict[str, set[str]]:
    """Return the header lists that refer to any of `wanted`, each with all entries it refers to."""
    reader = disk.reader()
    found = {}
    for item in items_by_kind(disk).get(None, ()):
        with suppress(codec.DamagedEntryError, OSError):
            if blob := reader.get(item.digest):
                meta, _ = codec.unpack_checked(blob)
                found[item.digest] = {digest for _, digest in decode_states(meta)}
    return {listing: referred for listing, referred in found.items() if referred & set(wanted)}
