"""A bundle as a store. Its programs have other keys than those of a cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from preheat.ahead.bundles import graphs, meta, require_place
from preheat.build.bundle_archs import baked_archs
from preheat.build.bundle_entries import entry_meta
from preheat.foreign import ForeignEntry, foreign_kind
from preheat.store.bundle import Bundle, write
from preheat.store.codec import DamagedEntryError
from preheat.sync.store import Content, decode
from preheat.toolchain.headers import decode_states

__all__ = ["BundleSource", "BundleTarget"]

_NEEDS_BAKE = "a bundle holds programs by their requests: 'preheat bake' makes it from a manifest"
_NOT_IN_CACHES = "a bundle does not hold the list by which a cache finds a program with header files"


class BundleSource:
    """The entries of a bundle that a cache can use: code without header files, and foreign files.

    Programs with header files, and programs that no cache may keep, stay in the bundle.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.name = str(bundle.path)
        self.skipped: dict[str, int] = {}
        self._bundle = bundle

    def digests(self) -> Iterator[str]:
        """Yield the digests of these entries, and of those that cannot be read."""
        self.skipped.clear()
        for digest in self._bundle.digests():
            try:
                code = self._code(digest)
            except DamagedEntryError:
                yield digest
            else:
                yield from () if code is None else (code,)

    def _code(self, digest: str) -> str | None:
        """Return the digest of foreign files, or of the code of a request; None for other entries."""
        found = entry_meta(self._bundle, digest)
        if found is None:
            return digest if foreign_kind(self._bundle.get(digest) or b"") else None
        ((state, code),) = decode_states(found)
        if state.headers or found.get("note"):
            self.skipped[_NOT_IN_CACHES] = self.skipped.get(_NOT_IN_CACHES, 0) + 1
            return None
        return code

    def is_header_list(self, digest: str) -> bool:
        """Return False: a bundle has no header lists."""
        del digest
        return False

    def read(self, digest: str) -> bytes | None:
        """Return a verified entry."""
        return self._bundle.get(digest)

    def close(self) -> None:
        """Close the file."""
        self._bundle.close()


class BundleTarget:
    """A bundle that foreign files are added to. It is written as a whole, in `close`."""

    def __init__(self, path: Path) -> None:
        require_place(path)
        self.name = str(path)
        self._path = path
        self._before = Bundle.open(path) if path.exists() else None
        self._added: dict[str, bytes] = {}

    def existing(self, digests: Collection[str]) -> set[str]:
        """Return those of `digests` that the bundle has."""
        return set() if self._before is None else set(digests) & set(self._before.digests())

    def is_header_list(self, digest: str) -> bool:
        """Return False: a bundle has no header lists."""
        del digest
        return False

    def objection(self, content: Content) -> str | None:
        """Return why only `preheat bake` can put an entry into a bundle; None for foreign files."""
        return None if isinstance(content, ForeignEntry) else _NEEDS_BAKE

    def write(self, digest: str, blob: bytes) -> None:
        """Keep an entry for `close`, without what differs from one bake to the next."""
        content = decode(digest, blob)
        assert isinstance(content, ForeignEntry)
        self._added[digest] = content.encode(provenance=False)

    def merge(self, digest: str, header_list: bytes, *, dry_run: bool) -> bool:
        """Return False: a bundle has no header lists."""
        del digest, header_list, dry_run
        return False

    def close(self) -> None:
        """Write the bundle, if anything was added."""
        if not self._added:
            return
        about = dict(meta((), (), ())) if self._before is None else dict(self._before.meta)
        targets = [*(() if self._before is None else baked_archs(self._before))]
        for digest, blob in self._added.items():
            content = decode(digest, blob)
            targets += [content.arch] if content.arch is not None else []
        keys = () if self._before is None else graphs(self._before)
        about |= meta(about["toolchains"], targets, keys)
        write(self._path, self._blobs() | self._added, about)

    def _blobs(self) -> dict[str, bytes]:
        if self._before is None:
            return {}
        found = ((digest, self._before.get(digest)) for digest in self._before.digests())
        return {digest: blob for digest, blob in found if blob is not None}
