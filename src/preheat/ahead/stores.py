"""The stores that the command line names, and which entries are copied from one to the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from preheat.ahead.bundles import graphs, meta, require_place
from preheat.build.bundles import baked_archs, entry_meta
from preheat.build.opening import required_signers
from preheat.build.remotes import for_command, open_remotes
from preheat.errors import InputError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.events import Events, logged_events
from preheat.model.foreign import ForeignEntry, foreign_kind, is_foreign
from preheat.model.setting_values import split_pin
from preheat.process.progress import progress
from preheat.store import DiskStore, LayerStore, Store
from preheat.store.bundle import Bundle, write
from preheat.store.copy import Copier, CopyResult
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import parse_remote, require_writable_kind
from preheat.store.trust import unusable_reason
from preheat.toolchain.headers.states import HeaderLists, decode_states

__all__ = [
    "BundleStore",
    "Choice",
    "bundle_output",
    "copy_entries",
    "is_bundle",
    "is_url",
    "open_bundle",
    "open_directory",
    "open_store",
    "require_different",
    "shown",
]

CUDA = "cuda"  # the kind of entries that preheat compiled itself
_NEEDS_BAKE = "a bundle holds programs by their requests: 'preheat bake' makes it from a manifest"
_NOT_IN_CACHES = "a bundle does not hold the list by which a cache finds a program with header files"


class Choice(NamedTuple):
    """Which entries to copy: of these architectures and this kind, or all of them."""

    archs: frozenset[Arch] = frozenset()
    kind: str | None = None

    def includes(self, entry: Artifact | ForeignEntry) -> bool:
        """Return whether an entry is to be copied. Files for no architecture suit all of them."""
        kind = entry.kind if isinstance(entry, ForeignEntry) else CUDA
        right_arch = not self.archs or entry.arch is None or entry.arch in self.archs
        return right_arch and self.kind in (None, kind)


_ALL = Choice()


def copy_entries(
    source: Store, target: Store, choice: Choice = _ALL, *, dry_run: bool = False
) -> CopyResult:
    """Copy the chosen entries of `source` that `target` lacks, and write a bundle that got some."""

    def objection(digest: str, blob: bytes) -> str | None:
        entry = decode(digest, blob)
        if not choice.includes(entry):
            return ""
        bundle = isinstance(target, BundleStore) and not isinstance(entry, ForeignEntry)
        return _NEEDS_BAKE if bundle else None

    copier = Copier(
        source=source,
        target=target,
        lists=HeaderLists(),
        objection=objection,
        with_lists=choice.kind in (None, CUDA),
        dry_run=dry_run,
    )
    result = copier.copy(lambda total: progress("copying", total))
    if isinstance(source, BundleStore) and source.left_out:
        result.skipped[_NOT_IN_CACHES] = source.left_out
    return result


def decode(digest: str, blob: bytes) -> Artifact | ForeignEntry:
    """Return what an entry holds; `DamagedEntryError` when it is neither code nor foreign files."""
    stored, sections = codec.unpack_checked(blob)
    if is_foreign(stored):
        return ForeignEntry.decode(digest, stored, sections)
    return Artifact.decode(digest, stored, sections)


class BundleStore:
    """The entries of a bundle that a cache can use: code without header files, and foreign files.

    Programs with header files, and programs that no cache may keep, stay in the bundle. Their number is
    `left_out`. What is put is written by `close`, into a new file at `path`.
    """

    writable = True

    def __init__(self, path: Path, bundle: Bundle | None) -> None:
        self.name = str(path)
        self.left_out = 0
        self._path = path
        self._bundle = bundle
        self._added: dict[str, bytes] = {}

    def get(self, digest: str) -> bytes | None:
        """Return a verified entry."""
        return None if self._bundle is None else self._bundle.get(digest)

    def exists(self, digests: Iterable[str]) -> set[str]:
        """Return the `digests` that the bundle has."""
        return set() if self._bundle is None else set(digests) & set(self._bundle.digests())

    def names(self) -> Iterator[str]:
        """Yield the digests of these entries, and of those that cannot be read."""
        self.left_out = 0
        if self._bundle is None:
            return
        for digest in self._bundle.digests():
            try:
                code = self._code(self._bundle, digest)
            except codec.DamagedEntryError:
                code = digest
            if code is not None:
                yield code

    def _code(self, bundle: Bundle, digest: str) -> str | None:
        """Return the digest of foreign files, or of the code of a request; None for other entries."""
        found = entry_meta(bundle, digest)
        if found is None:
            return digest if foreign_kind(bundle.get(digest) or b"") else None
        ((state, code),) = decode_states(found)
        if state.headers or found.get("note"):
            self.left_out += 1
            return None
        return code

    def put(self, digest: str, blob: bytes) -> None:
        """Keep foreign files for `close`, without what differs from one bake to the next."""
        entry = decode(digest, blob)
        assert isinstance(entry, ForeignEntry)
        self._added[digest] = entry.encode(provenance=False)

    def remove(self, digest: str) -> None:
        """Forget an entry that was put."""
        self._added.pop(digest, None)

    def close(self) -> None:
        """Write the bundle if anything was put, and close the file."""
        before = self._bundle
        if self._added:
            about = dict(meta((), (), ())) if before is None else dict(before.meta)
            targets = [] if before is None else [*baked_archs(before)]
            added = [decode(digest, blob) for digest, blob in self._added.items()]
            targets += [entry.arch for entry in added if entry.arch is not None]
            about |= meta(about["toolchains"], targets, () if before is None else graphs(before))
            write(self._path, self._blobs() | self._added, about)
        if before is not None:
            before.close()

    def _blobs(self) -> dict[str, bytes]:
        if self._bundle is None:
            return {}
        found = ((digest, self._bundle.get(digest)) for digest in self._bundle.digests())
        return {digest: blob for digest, blob in found if blob is not None}


# Opening stores by name


def is_url(text: str) -> bool:
    """Return whether a store is named by a URL."""
    return "://" in text


def is_bundle(text: str) -> bool:
    """Return whether a store is a bundle, with or without a pin: a file, or a name in `.heat`."""
    if is_url(text):
        return False
    path, pin = split_pin(text)
    return pin is not None or path.is_file() or (path.suffix == ".heat" and not path.is_dir())


def open_bundle(text: str, config: Config) -> Bundle:
    """Open a bundle to read, as a process with these settings would mount it."""
    signers = required_signers(config)
    return Bundle.open(
        text, trust=config.trust_cache_dir, signers=None if signers is None else signers()
    )


def open_store(text: str, config: Config, *, write: bool) -> LayerStore | RemoteStore | BundleStore:
    """Open a store to copy from, or with `write` to copy to.

    Raises `InputError` or `BundleError` when it cannot be used. A directory to write is made where
    there is none.
    """
    if is_url(text):
        return _open_remote(text, config, write=write)
    if not is_bundle(text):
        return open_directory(_absolute(text), config, write=write)
    if not write:
        bundle = open_bundle(text, config)
        return BundleStore(bundle.path, bundle)
    path = bundle_output(text)
    require_place(path)
    return BundleStore(path, Bundle.open(path) if path.exists() else None)


def open_directory(path: Path, config: Config, *, write: bool) -> LayerStore:
    """Open a cache directory; `InputError` when it cannot be used."""
    trust = config.trust_cache_dir
    if why := unusable_reason(path, trust=trust, write=write):
        raise InputError(f"the directory {path} cannot be used: {why}")
    if not write:
        return LayerStore(path, str(path), trust=trust)
    disk = DiskStore(
        path,
        logged_events(),
        lock_dir=config.lock_dir,
        limit=config.cache_limit,
        max_files=config.cache_files,
        trust=trust,
    )
    disk.name = str(path)
    return disk


def _open_remote(url: str, config: Config, *, write: bool) -> RemoteStore:
    """Open a shared store; `InputError` when it cannot be used. No request is made yet."""
    remote = parse_remote(url)
    reasons: list[str] = []
    events = Events()
    events.subscribe(
        lambda _, fields: reasons.append(f"{fields['path']}: {fields['reason']}"), "refused"
    )
    stores = open_remotes(for_command(replace(config, remote=(url,))), events)
    if not stores:
        raise InputError("; ".join(reasons))
    (store,) = stores
    if write:
        require_writable_kind(remote)
    if write and not store.writable:
        raise InputError(
            f"{remote.name} cannot be written without a key, because its readers need a signature",
            hint="set PREHEAT_SIGNING_KEY to a key of 'preheat keys new'",
        )
    store.name = remote.name
    return store


def bundle_output(text: str) -> Path:
    """Return the path of a bundle to write; `InputError` for one with a pin, which never changes."""
    path, pin = split_pin(text)
    if pin is not None:
        raise InputError(f"{text} has a pin, and cannot be written")
    return path


def shown(text: str) -> str:
    """Return the name of a store for messages: a URL without its credentials."""
    return parse_remote(text).name if is_url(text) else text


def require_different(one: str, other: str) -> None:
    """Raise `InputError` when both names lead to one store."""
    same = one == other if is_url(one) or is_url(other) else _absolute(one) == _absolute(other)
    if same:
        raise InputError(f"{shown(one)} and {shown(other)} are the same store")


def _absolute(text: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(text)))
