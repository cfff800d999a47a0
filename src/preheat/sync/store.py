"""The interface of a store that entries are copied from and to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from preheat.artifact import Artifact
from preheat.foreign import ForeignEntry, is_foreign
from preheat.store import codec
from preheat.store.codec import DamagedEntryError
from preheat.store.signing.interface import UntrustedError
from preheat.toolchain.header_lists import HeaderLists

__all__ = ["CUDA", "Content", "Source", "Target", "decode", "kind_of", "merged_list"]

CUDA = "cuda"  # the kind of entries that preheat compiled itself
Content = Artifact | ForeignEntry


class Source(Protocol):
    """Entries to copy. Safe from any thread.

    A fault of the whole store is an `OSError` or a `PreheatError`, which ends the copying.
    """

    name: str  # for messages

    @property
    def skipped(self) -> Mapping[str, int]:
        """The number of entries that no other store can use, by reason, after `digests`."""

    def digests(self) -> Iterable[str]:
        """Return the digest of every entry that another store can use."""

    def is_header_list(self, digest: str) -> bool | None:
        """Return whether an entry is a header list; None when it has to be read to know that."""

    def read(self, digest: str) -> bytes | None:
        """Return an entry whose checksum is right; None when there is none.

        Raises `DamagedEntryError` for damage, and `UntrustedError` when someone who is not trusted
        may have written the entry.
        """

    def close(self) -> None:
        """Close files and connections. The store is not used afterwards."""


class Target(Protocol):
    """Where entries are copied to. Safe from any thread, and faults are those of a `Source`."""

    name: str

    def existing(self, digests: Collection[str]) -> set[str]:
        """Return those of `digests` that the store has, with few requests."""

    def is_header_list(self, digest: str) -> bool | None:
        """Return whether an entry is a header list; None when it has to be read to know that."""

    def objection(self, content: Content) -> str | None:
        """Return why this store cannot keep an entry, or None when it can."""

    def write(self, digest: str, blob: bytes) -> None:
        """Store an entry."""

    def merge(self, digest: str, header_list: bytes, *, dry_run: bool) -> bool:
        """Add the states of a header list to those that the store has; return whether any was new."""

    def close(self) -> None:
        """Finish the writing. The store is not used afterwards."""


def decode(digest: str, blob: bytes) -> Content:
    """Return what an entry holds; `DamagedEntryError` when it is neither code nor foreign files."""
    meta, sections = codec.unpack_checked(blob)
    if is_foreign(meta):
        return ForeignEntry.decode(digest, meta, sections)
    return Artifact.decode(digest, meta, sections)


def kind_of(content: Content) -> str:
    """Return the kind of an entry, by which the command line selects."""
    return content.kind if isinstance(content, ForeignEntry) else CUDA


def merged_list(digest: str, header_list: bytes, read: Callable[[str], bytes | None]) -> bytes | None:
    """Return the list that `read` returns with the states of `header_list`; None when none is new."""
    try:
        mine = read(digest)
    except (DamagedEntryError, UntrustedError):  # It is replaced.
        mine = None
    merged = header_list if mine is None else HeaderLists().merge(digest, mine, header_list)
    return None if merged == mine else merged
