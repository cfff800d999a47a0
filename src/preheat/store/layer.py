"""A cache directory that is only read, and the layout of every cache directory.

<root>/CACHEDIR.TAG              tells backup programs to skip the directory
<root>/v1/ab/<digest>.heat       an entry (see preheat.model.codec)
<root>/v1/ab/<digest>.note       what this machine knows about the entry; it can be lost
<root>/v1/staged/                files that are being written; orphans are removed by age
<root>/v1/pins/<digest>          an entry that is never evicted, and in it the digests of others
<root>/v1/leases/                on a network filesystem, who compiles what; see preheat.store.remote
<root>/v1/usage                  running totals and their checksum, so that a put never counts the cache
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from preheat.model import codec
from preheat.process.files import open_fd
from preheat.store.filesystem import is_silly_renamed, retry_transient
from preheat.store.trust import DistrustedError, read_file, writable_by_others

__all__ = ["FORMAT", "KINDS", "Item", "LayerStore", "scan", "size_of"]

FORMAT = f"v{codec.VERSION}"
KINDS = ("heat", "note")  # suffixes of the files of an entry
_FIRST_BYTES = 128  # bytes at the beginning of an entry that show its kind
_DIGEST = r"\b[0-9a-f]{64}\b"
_NOT_SHARDS = {"staged", "pins", "usage", "leases"}


class Item(NamedTuple):
    """One entry as a directory listing shows it."""

    digest: str
    bytes: int  # of the entry and its note
    last_read: float  # stored as the mtime of the file, exact to an hour
    pinned: bool = False


class LayerStore:
    """A cache directory that is only read, such as one shipped in an image.

    The caller has checked that `root` can be trusted. Its content is checked when it is read: only this
    user or root may be able to write its directories and entries, unless `trust` is given.
    """

    writable = False

    def __init__(self, root: Path, name: str = "layer", *, trust: bool = False) -> None:
        self.root = root
        self.name = name
        self.shared = False  # whether other nodes write the directory at the same time
        self._trust = trust
        self._base = f"{root}/{FORMAT}"
        # Directories that were checked: other users cannot change them any more.
        self._checked_shards: set[str] = set()

    def reader(self) -> LayerStore:
        """Return a store that only reads this directory: it refreshes no stamp."""
        return LayerStore(self.root, trust=self._trust)

    def get(self, digest: str, *, again: bool = True) -> bytes | None:
        """Return the verified entry, or None.

        Raises `DistrustedError` for an entry that other users can write. With `again`, a missing file
        is looked up twice if the filesystem may have cached the first answer.
        """
        shard = digest[:2]
        path = f"{self._base}/{shard}/{digest}.heat"
        try:
            if shard not in self._checked_shards:
                retry_transient(self._check, shard)
            blob, status = read_file(path, trust=self._trust)
        except FileNotFoundError:
            again = again and self.shared and _forget_absence(os.path.dirname(path))
            return self.get(digest, again=False) if again else None
        except DistrustedError as distrusted:
            distrusted.filename = path
            raise
        if why := codec.damage(digest, blob):
            raise codec.DamagedEntryError(why)
        self._refresh_stamp(digest, status.st_mtime)
        return blob

    def put(self, digest: str, blob: bytes) -> None:
        """Raise `OSError`: a layer is never written."""
        del blob
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path(digest))

    def remove(self, digest: str) -> None:
        """Raise `OSError`: a layer is never written, not even to remove a damaged entry."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path(digest))

    def exists(self, digests: Iterable[str]) -> set[str]:
        """Return the `digests` that have a file, which may be damaged or refused."""
        return {digest for digest in digests if os.path.lexists(self._path(digest))}

    def names(self) -> Iterator[str]:
        """Yield the digest of every entry. Notes, which belong to this machine, are left out."""
        return (item.digest for item in self.items() if self.exists([item.digest]))

    def _check(self, shard: str) -> None:
        """Raise `OSError` if other users can write the directory `shard` or its parent."""
        if not self._trust:
            parent = () if self._checked_shards else (self._base,)
            for directory in (*parent, f"{self._base}/{shard}"):
                status = os.lstat(directory)
                if not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
                if why := writable_by_others(status):
                    raise DistrustedError(f"{directory}: {why}")
        self._checked_shards.add(shard)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def items(self) -> Iterator[Item]:
        """Yield every entry, in no particular order."""
        pins = self.pinned()
        for shard in scan(self._base):
            if shard.name in _NOT_SHARDS or not shard.is_dir(follow_symlinks=False):
                continue
            sizes: dict[str, int] = {}
            stamps: dict[str, float] = {}
            for file in scan(shard.path):
                digest, _, kind = file.name.partition(".")
                if digest[:2] != shard.name or kind not in KINDS:  # The file is not part of the cache.
                    continue
                if (status := _status(file)) is None:  # Another process evicted it in the meantime.
                    continue
                size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                sizes[digest] = sizes.get(digest, 0) + size
                # An entry of a layer may have only its note in this directory.
                if kind == "heat" or digest not in stamps:
                    stamps[digest] = status.st_mtime
            for digest, stamp in stamps.items():
                yield Item(digest, sizes[digest], stamp, digest in pins)

    def first_bytes(self, digest: str) -> bytes | None:
        """Return the first bytes of an entry, which show its kind and are not verified, or None."""
        try:
            return retry_transient(_first_bytes, self._path(digest))
        except FileNotFoundError:
            return None
        except OSError:  # The entry exists, but it cannot be read.
            return b""

    def pinned(self) -> set[str]:
        """Return the digests that are never evicted: pinned entries, and those pinned with them."""
        digests = set()
        for pin in scan(f"{self._base}/pins"):
            digests.add(pin.name)
            with suppress(OSError):  # A pin without a list still pins its own entry.
                listed, _ = read_file(pin.path, trust=self._trust)
                digests.update(re.findall(_DIGEST, listed.decode("ascii", "replace")))
        return digests

    def _path(self, digest: str, kind: str = "heat") -> str:
        return f"{self._base}/{digest[:2]}/{digest}.{kind}"

    def _refresh_stamp(self, digest: str, stamp: float) -> None:
        """Do nothing: a layer is never written, so it has no stamps of reads."""


def _first_bytes(path: str) -> bytes:
    with open_fd(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        return os.read(file, _FIRST_BYTES)


def size_of(path: str) -> int | None:
    """Return the size of a file in bytes; None when there is no such file."""
    try:
        return retry_transient(os.lstat, path).st_size
    except OSError:
        return None


def scan(path: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; none when it does not exist or cannot be read."""
    try:
        return retry_transient(_scan, path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _forget_absence(directory: str) -> bool:
    """Let this node ask the server of a network filesystem again for a name that was missing.

    A node caches missing names for up to a minute, or until it changes their directory. Without this
    call, it would compile what another node has just stored. Returns False if that is not possible.
    """
    try:
        os.utime(directory)
    except OSError:  # The directory does not exist, or a second look would fail as well.
        return False
    return True


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file that was listed; None when any node has removed it since."""
    try:
        return retry_transient(file.stat, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as fault:
        if fault.errno != errno.ESTALE:
            raise
        return None


def _scan(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return [entry for entry in entries if not is_silly_renamed(entry.name)]
