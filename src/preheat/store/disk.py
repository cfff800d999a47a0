"""The tier on disk: one file an entry, staged and renamed, checked on every read.

<root>/CACHEDIR.TAG              tells backup programs to pass by
<root>/v1/ab/<digest>.heat       an entry (see preheat.container)
<root>/v1/ab/<digest>.note       what this machine knows about it; lost without harm
<root>/v1/staged/                files being written; orphans are swept by age
<root>/v1/pins/<digest>          entries that eviction passes over
<root>/v1/usage                  running totals, so that a put never counts the cache
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from preheat import container
from preheat.events import Events
from preheat.files import Descriptor, opened
from preheat.locks import no_fork
from preheat.store.lock import hold
from preheat.store.trust import make_private

__all__ = ["DiskStore", "Item", "LayerStore", "Swept"]

_FORMAT = f"v{container.VERSION}"
_STAMP_EVERY = 3600.0  # seconds: how stale an entry's last-read stamp may get
_ORPHANED = 3600.0  # seconds after which a staged file has no writer any more
_LOW_WATER = 0.8  # eviction goes down to this part of the limits, so that it runs rarely
_LOCK_WAIT = 2.0  # seconds to wait for the usage file; totals may drift, a sweep corrects them
_USAGE = struct.Struct("<4Q")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of preheat: safe to delete.\n"
_NOT_SHARDS = {"staged", "pins", "usage"}


@dataclass(frozen=True, slots=True)
class Item:
    """One entry as the directory shows it."""

    digest: str
    bytes: int  # with its note
    last_read: float  # our own stamp in the file's mtime, exact to an hour
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Usage:
    """Totals, and what the last sweep could not bring them below."""

    files: int = 0
    bytes: int = 0
    floor_files: int = 0
    floor_bytes: int = 0

    def plus(self, files: int, size: int) -> _Usage:
        return replace(self, files=max(self.files + files, 0), bytes=max(self.bytes + size, 0))

    def over(self, limit: int, max_files: int) -> bool:
        """Whether a sweep is due. What pins hold cannot be swept: then wait for a tenth more."""
        return self.bytes > max(limit, self.floor_bytes * 1.1) or self.files > max(
            max_files, self.floor_files * 1.1
        )


class LayerStore:
    """A cache directory that is only read, such as one shipped in an image."""

    def __init__(self, root: Path, events: Events, name: str = "layer") -> None:
        self.root, self.name = root, name
        self._events = events
        self._base = f"{root}/{_FORMAT}"

    def get(self, digest: str) -> bytes | None:
        """The verified entry or None; damage and faults are events."""
        try:
            file = opened(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as fault:
            self._events.fault(self.name, "read", fault)
            return None
        try:
            with file:
                found = os.fstat(file)
                blob = os.read(file, found.st_size + 1)
        except OSError as fault:
            self._events.fault(self.name, "read", fault)
            return None
        if why := container.damage(digest, blob):
            self._events.emit("damaged", tier=self.name, key=digest, reason=why)
            self._damaged(digest)
            return None
        self._used(digest, found.st_mtime)
        return blob

    def items(self) -> Iterator[Item]:
        """Every entry there is, in no order."""
        pins = {pin.name for pin in _scan(f"{self._base}/pins")}
        for shard in _scan(self._base):
            if shard.name in _NOT_SHARDS:
                continue
            sizes: dict[str, int] = {}
            stamps: dict[str, float] = {}
            for file in _scan(shard.path):
                with suppress(FileNotFoundError):  # another process evicted it meanwhile
                    found = file.stat(follow_symlinks=False)
                    digest, _, kind = file.name.partition(".")
                    sizes[digest] = sizes.get(digest, 0) + found.st_size
                    if kind == "heat" or digest not in stamps:  # a layer's entry leaves its note here
                        stamps[digest] = found.st_mtime
            for digest, stamp in stamps.items():
                yield Item(digest, sizes[digest], stamp, digest in pins)

    def _path(self, digest: str, kind: str = "heat") -> str:
        return f"{self._base}/{digest[:2]}/{digest}.{kind}"

    def _damaged(self, digest: str) -> None:
        """A layer is never written, not even to mend it."""

    def _used(self, digest: str, stamp: float) -> None:
        """A layer is never written, so it keeps no stamps."""


class DiskStore(LayerStore):
    """A cache directory of our own, kept within limits.

    `lock_dir` is a directory local to this node; `clock` tells the time for stamps and sweeps.
    """

    def __init__(
        self,
        root: Path,
        events: Events,
        *,
        lock_dir: Path,
        limit: int = 8 << 30,
        max_files: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(root, events, name="disk")
        self.lock_dir, self._limit, self._max_files = lock_dir, limit, max_files
        self._clock, self._tidied = clock, False

    def put(self, digest: str, blob: bytes) -> None:
        """Publish the entry: readers see the old file or the new one, never a part."""
        if not self._tidied:  # once a process: what killed writers left must not pile up
            self._tidied = True
            self._sweep_staged()
        path = self._path(digest)
        before = _size(path)
        self._publish(path, blob)
        self._account(int(before is None), len(blob) - (before or 0))

    def remove(self, digest: str) -> None:
        """Remove the entry and its note; nothing happens when there is none. A pin stays."""
        freed = self._unlink(digest)
        if freed is not None:
            self._account(-1, -freed)

    def note(self, digest: str) -> bytes | None:
        """What this machine noted about an entry; unverified and possibly missing."""
        try:
            return Path(self._path(digest, "note")).read_bytes()
        except OSError:
            return None

    def put_note(self, digest: str, text: bytes) -> None:
        """Note something that only this machine can know, such as the stamps of files."""
        path = self._path(digest, "note")
        before = _size(path)
        self._publish(path, text, durable=False)
        self._account(0, len(text) - (before or 0))

    def pin(self, digest: str) -> None:
        """Keep this entry whatever the limits say."""
        self._publish(f"{self._base}/pins/{digest}", b"")

    def unpin(self, digest: str) -> None:
        """Let eviction have the entry again."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self._base}/pins/{digest}")

    def sweep(self, *, limit: int | None = None, max_files: int | None = None) -> Swept:
        """Bring the cache within limits, least recently read first, and clear away orphans.

        Entries of other format versions go as well. Returns what was removed.
        """
        limit = self._limit if limit is None else limit
        max_files = self._max_files if max_files is None else max_files
        staged, versions = self._sweep_staged(), self._sweep_versions()
        items = sorted(self.items(), key=lambda item: item.last_read)
        files, total = len(items), sum(item.bytes for item in items)
        evicted = Swept()
        for item in items:
            if total <= limit and files <= max_files:
                break
            if item.pinned:
                continue
            freed = self._unlink(item.digest)
            evicted = Swept(evicted.files + 1, evicted.bytes + (freed or 0))
            files, total = files - 1, total - item.bytes
        stuck = total > limit or files > max_files
        self._write_usage(_Usage(files, total, files * stuck, total * stuck))
        if evicted.files:
            self._events.emit("evict", files=evicted.files, bytes=evicted.bytes)
        return Swept(
            evicted.files + staged.files + versions.files,
            evicted.bytes + staged.bytes + versions.bytes,
        )

    def clear(self) -> Swept:
        """Remove every entry, pinned ones too."""
        total = Swept()
        for item in list(self.items()):
            freed = self._unlink(item.digest)
            if freed is not None:
                total = Swept(total.files + 1, total.bytes + freed)
            self.unpin(item.digest)
        self._write_usage(_Usage())
        return total

    # Writing

    def _publish(self, path: str, blob: bytes, *, durable: bool = True) -> None:
        staged = f"{self._base}/staged/{os.getpid()}-{os.urandom(8).hex()}"
        try:
            with self._create(staged, path) as file:
                view = memoryview(blob)
                while view:
                    view = view[os.write(file, view) :]
                if durable:  # a rename that survives a power cut must not lead to an empty file
                    os.fsync(file)
            os.replace(staged, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(staged)
            raise

    def _create(self, staged: str, path: str) -> Descriptor:
        """Open the staged file, making the directories it and `path` need where they are missing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        home = os.path.dirname(path)
        try:
            if os.path.isdir(home):
                return opened(staged, flags)
        except FileNotFoundError:
            pass
        make_private(Path(home))
        make_private(Path(staged).parent)
        self._tag()
        return opened(staged, flags)

    def _tag(self) -> None:
        path, flags = self.root / "CACHEDIR.TAG", os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with suppress(FileExistsError), opened(path, flags) as tag:
            os.write(tag, _TAG)

    def _unlink(self, digest: str) -> int | None:
        """Remove entry and note; the bytes freed, or None when there was no entry."""
        freed = None
        for kind in ("heat", "note"):
            path = self._path(digest, kind)
            with suppress(FileNotFoundError):
                size = os.lstat(path).st_size
                os.unlink(path)
                freed = (freed or 0) + size
        return freed

    def _damaged(self, digest: str) -> None:
        try:
            self.remove(digest)
        except OSError as fault:
            self._events.fault(self.name, "remove a damaged entry", fault)

    def _used(self, digest: str, stamp: float) -> None:
        """Refresh the entry's stamp when it is old: rarely, so that a hit is not a write."""
        now = self._clock()
        if now - stamp > _STAMP_EVERY:
            with suppress(OSError):  # the order of eviction is not worth an event
                os.utime(self._path(digest), (now, now))

    # Limits

    def _account(self, files: int, size: int) -> None:
        """Add to the running totals and sweep when they pass the limits; a fault here is an event."""
        try:
            with hold(self._lock("usage"), _LOCK_WAIT):
                usage = self._read_usage()
                if usage is not None:
                    usage = usage.plus(files, size)
                    self._write_usage(usage)
            if usage is None or usage.over(self._limit, self._max_files):
                with hold(self._lock("sweep"), 0) as mine:
                    if mine:  # else another process is at it
                        self._recount()
        except OSError as fault:
            self._events.fault(self.name, "keep count", fault)

    def _recount(self) -> None:
        """Replace the totals by a true count, and sweep to the low water if that is over."""
        items = list(self.items())
        usage = _Usage(len(items), sum(item.bytes for item in items))
        if usage.over(self._limit, self._max_files):
            low_files = int(self._max_files * _LOW_WATER)
            self.sweep(limit=int(self._limit * _LOW_WATER), max_files=low_files)
        else:
            self._write_usage(usage)

    def _sweep_staged(self) -> Swept:
        """Remove staged files whose writer must be gone."""
        gone, freed = 0, 0
        for file in _scan(f"{self._base}/staged"):
            with suppress(FileNotFoundError):
                found = file.stat(follow_symlinks=False)
                if self._clock() - found.st_mtime > _ORPHANED:
                    os.unlink(file.path)
                    gone, freed = gone + 1, freed + found.st_size
        return Swept(gone, freed)

    def _sweep_versions(self) -> Swept:
        """Remove directories of other format versions."""
        gone, freed = 0, 0
        for other in _scan(str(self.root)):
            is_format = other.name[:1] == "v" and other.name[1:].isdecimal()
            if is_format and other.name != _FORMAT and other.is_dir(follow_symlinks=False):
                for place, _, names in os.walk(other.path):
                    gone += len(names)
                    freed += sum(_size(f"{place}/{name}") or 0 for name in names)
                with no_fork:
                    import shutil  # milliseconds that few processes need

                shutil.rmtree(other.path, ignore_errors=True)  # another process may be at it too
        return Swept(gone, freed)

    def _lock(self, what: str) -> Path:
        make_private(self.lock_dir)
        root = os.fsencode(self.root).hex()[-120:]  # a file name per cache; a clash costs a wait
        return self.lock_dir / f"{what}-{root}"

    def _read_usage(self) -> _Usage | None:
        """The running totals, or None when nobody has counted yet."""
        try:
            return _Usage(*_USAGE.unpack(Path(f"{self._base}/usage").read_bytes()))
        except (OSError, struct.error):
            return None

    def _write_usage(self, usage: _Usage) -> None:
        row = _USAGE.pack(usage.files, usage.bytes, usage.floor_files, usage.floor_bytes)
        try:
            file = opened(f"{self._base}/usage", os.O_WRONLY | os.O_CREAT)
        except FileNotFoundError:  # there is no cache to keep count of
            return
        with file:
            os.pwrite(file, row, 0)


def _size(path: str) -> int | None:
    """Bytes of a file; None when it is not there."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _scan(path: str) -> list[os.DirEntry[str]]:
    """The entries of a directory; none when it is not there."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
