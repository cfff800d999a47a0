"""The store on disk: one file for each entry, staged, renamed, and verified on every read.

`preheat.store.layer` has the layout of the directory.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from preheat.model import codec
from preheat.model.events import Events
from preheat.process.files import open_fd
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock
from preheat.store import lock, publish
from preheat.store.filesystem import retry_transient
from preheat.store.journal import Journal
from preheat.store.layer import FORMAT, KINDS, Item, LayerStore, scan, size_of
from preheat.store.lock import FileLock, hold
from preheat.store.trust import NotAFileError, make_private, read_file

if TYPE_CHECKING:
    import shutil
else:  # It takes milliseconds to import, and few processes need it.
    shutil = LazyModule("shutil")

__all__ = ["DiskStore", "Swept"]

_STAMP_EVERY = 3600.0  # seconds after which a read refreshes the stamp of its entry
_LOW_WATER = 0.8  # eviction continues down to this fraction of the limits, so that it runs rarely
_LOCK_WAIT = 2.0  # seconds to wait for the usage file; a sweep corrects totals that drift
_SWEEP_WAIT = 2.0  # seconds that a writer over the limit waits for the process that sweeps
_USAGE = struct.Struct("<5Q")
_MAX_TOTAL = (1 << 64) - 1
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of preheat: safe to delete.\n"


class Swept(NamedTuple):
    """What a sweep removed."""

    files: int = 0
    bytes: int = 0


class Usage(NamedTuple):
    """The number of entries and their bytes, and what remained after the last sweep (`floor_…`)."""

    files: int = 0
    bytes: int = 0
    floor_files: int = 0
    floor_bytes: int = 0
    recounts: int = 0  # how often all entries were counted, so that a writer notices a recount

    def plus(self, files: int, size: int) -> Usage:
        """Return the totals with so many files and bytes added; they never become negative."""
        return self._replace(files=max(self.files + files, 0), bytes=max(self.bytes + size, 0))

    def over(self, limit: int, max_files: int) -> bool:
        """Return whether a sweep is due.

        A sweep cannot remove pinned entries. Where these exceed the limits, the next sweep is due when
        the usage has grown by a further 10 %.
        """
        return self.bytes > max(limit, self.floor_bytes * 1.1) or self.files > max(
            max_files, self.floor_files * 1.1
        )


def _pack_usage(usage: Usage) -> bytes:
    """Return the totals and their checksum as bytes; numbers beyond 64 bits are clamped."""
    front = _USAGE.pack(*map(min, usage, repeat(_MAX_TOTAL)))
    return front + xxhash.xxh3_128_digest(front)


def _unpack_usage(row: bytes) -> Usage | None:
    """Return the totals in `row`; None when they are damaged."""
    front, checksum = row[: _USAGE.size], row[_USAGE.size :]
    whole = len(front) == _USAGE.size and xxhash.xxh3_128_digest(front) == checksum
    return Usage(*_USAGE.unpack(front)) if whole else None


class DiskStore(LayerStore):
    """A cache directory that this process writes, and that is kept within limits.

    `lock_dir` is a directory local to this node; `clock` returns the time for stamps and sweeps. With
    `shared`, the directory is on a network filesystem, and other nodes write it at the same time.
    """

    writable = True

    def __init__(
        self,
        root: Path,
        events: Events,
        *,
        lock_dir: Path,
        limit: int = 8 << 30,
        max_files: int = 100_000,
        trust: bool = False,
        shared: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(root, name="disk", trust=trust)
        self._events = events
        self.shared = shared
        self.lock_dir = lock_dir
        self._limit = limit
        self._max_files = max_files
        self._clock = clock
        self._tidied = False
        self._lock_paths: dict[str, Path] = {}
        self._adding = Lock()  # Otherwise, each thread would poll for the lock of the file of totals.

    def put(self, digest: str, blob: bytes) -> None:
        """Publish the entry. A reader sees the old file or the new one, never a part of it."""
        if not self._tidied:  # Once in a process, so that files of killed processes do not pile up.
            self._tidied = True
            self._sweep_killed()
        path = self._path(digest)
        before = size_of(path)
        with self._counting(int(before is None), len(blob) - (before or 0)):
            self._publish(path, blob)

    def journal(self) -> Journal:
        """Return the counters of the processes that use this cache."""
        directory = self.root / "stats"
        return Journal(directory, lock_dir=self.lock_dir, trust=self._trust, clock=self._clock)

    def remove(self, digest: str) -> None:
        """Remove the entry and its note, if there are any. A pin stays."""
        freed = self._unlink(digest)
        if freed is not None:
            with self._counting(-1, -freed):
                pass

    def key_lock(self, digest: str, owner: FrameType) -> FileLock:
        """Return a lock that the processes of this node share, to hold while an entry is changed.

        `owner` is the frame of the function that releases it.
        """
        make_private(self.lock_dir, trust=self._trust)
        return FileLock(self.lock_dir / digest, owner=owner)

    def note(self, digest: str) -> bytes | None:
        """Return the note of this machine about an entry, or None if it is missing or damaged."""
        path = self._path(digest, "note")
        try:
            blob, _ = read_file(path, trust=self._trust)
        except OSError:
            return None
        try:
            return codec.unpack(digest, blob).sections["note"]
        except (codec.DamagedEntryError, KeyError):
            with suppress(OSError):
                os.unlink(path)
            return None

    def put_note(self, digest: str, text: bytes) -> None:
        """Store a note that only this machine can use, such as the stamps of files."""
        path = self._path(digest, "note")
        blob = codec.pack(digest, {}, {"note": text})
        with self._counting(0, len(blob) - (size_of(path) or 0)):
            self._publish(path, blob, durable=False)

    def pin(self, digest: str, *others: str) -> None:
        """Never evict this entry, nor the `others` that lead to it."""
        listed = "".join(f"{other}\n" for other in others)
        self._publish(f"{self._base}/pins/{digest}", listed.encode())

    def unpin(self, digest: str) -> None:
        """Allow eviction of the entry, and of those that were pinned with it."""
        with suppress(FileNotFoundError):
            retry_transient(os.unlink, f"{self._base}/pins/{digest}")

    def sweep(self, *, limit: int | None = None, max_files: int | None = None) -> Swept:
        """Evict the least recently read entries until the cache is within limits; return the number.

        Orphaned staged files and entries of other format versions are removed as well.
        """
        limit = self._limit if limit is None else limit
        max_files = self._max_files if max_files is None else max_files
        with self._try_hold("sweep", _SWEEP_WAIT):
            return _sum(self._sweep_leftovers(), self._count_and_evict(limit, max_files))

    def clear(self) -> Swept:
        """Remove every entry, including pinned ones."""
        total = Swept()
        for item in list(self.items()):
            freed = self._unlink(item.digest)
            if freed is not None:
                total = _sum(total, Swept(1, freed))
            self.unpin(item.digest)
        self._write_usage(Usage())
        return total

    # Writing

    def _publish(self, path: str, blob: bytes, *, durable: bool = True) -> None:
        staged = f"{self._base}/staged"
        for last in (False, True):
            for directory in (os.path.dirname(path), staged):
                if not os.path.isdir(directory):
                    self.make_directory(directory)
            try:
                publish.replace(path, [blob], staged=staged, durable=durable)
                return
            except FileNotFoundError:  # Someone has just removed the directories.
                if last:
                    raise

    def make_directory(self, directory: str) -> None:
        """Create a directory below the cache's, private to this user. It may exist."""
        try:
            retry_transient(os.mkdir, directory, 0o700)
        except FileExistsError:  # Another process was faster.
            return
        except FileNotFoundError:
            for path in (self.root, Path(self._base), Path(directory)):
                make_private(path, trust=self._trust)
            tag = f"{self.root}/CACHEDIR.TAG"
            if not size_of(tag):
                publish.replace(tag, [_TAG], durable=False)

    def _unlink(self, digest: str) -> int | None:
        """Remove an entry and its note; return the bytes freed, or None when there was no entry."""
        freed = None
        for kind in KINDS:
            path = self._path(digest, kind)
            with suppress(FileNotFoundError):
                size = retry_transient(os.lstat, path).st_size
                retry_transient(os.unlink, path)
                freed = (freed or 0) + size
        return freed

    def _refresh_stamp(self, digest: str, stamp: float) -> None:
        """Refresh the stamp of an entry when it is old. That is rare, so that a hit is not a write."""
        now = self._clock()
        if now - stamp > _STAMP_EVERY:
            with suppress(OSError):  # The stamp only affects the order of eviction.
                os.utime(self._path(digest), (now, now))

    # Limits

    @contextmanager
    def _counting(self, files: int, size: int) -> Iterator[None]:
        """Add to the running totals, run the block, and sweep if the totals exceed the limits.

        The totals are written first. A writer that is killed in between leaves them too large, which a
        later recount corrects, and never too small, which would let the cache grow. If another process
        recounted meanwhile, the entry is added again, because the recount may have missed it.
        """
        usage = None
        fault = None
        try:
            usage = self._add_usage(files, size)
        except OSError as error:
            fault = error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self._add_usage(-files, -size)
            raise
        if usage is not None and (now := self._read_usage()) and now.recounts != usage.recounts:
            with suppress(OSError):
                usage = self._add_usage(files, size)
        if fault is not None:
            self._events.fault(self.name, "keep count", fault)
        elif usage is None or usage.over(self._limit, self._max_files):
            self._enforce_limits(uncounted=usage is None)

    def _add_usage(self, files: int, size: int) -> Usage | None:
        """Add to the running totals and return them; None when there are no totals yet."""
        with self._adding, hold(self._lock_path("usage"), _LOCK_WAIT):
            usage = self._read_usage()
            if usage is not None:
                usage = usage.plus(files, size)
                self._write_usage(usage)
            return usage

    def _enforce_limits(self, *, uncounted: bool) -> None:
        """Recount the entries, and evict down to the low-water mark if they exceed the limits.

        One process at a time does this. The others wait for it, so that each of them exceeds the limits
        by at most one entry, and by one more for every two seconds that the sweep takes.
        """
        try:
            with hold(self._lock_path("sweep"), _SWEEP_WAIT) as mine:
                usage = None if uncounted else self._read_usage()
                if mine and (usage is None or usage.over(self._limit, self._max_files)):
                    self._count_and_evict(self._limit, self._max_files, low_water=_LOW_WATER)
        except OSError as fault:
            self._events.fault(self.name, "keep count", fault)

    def _count_and_evict(self, limit: int, max_files: int, *, low_water: float = 1.0) -> Swept:
        """Count the entries and, over the limits, evict down to `low_water` of them."""
        before = self._begin_count()
        items = sorted(self.items(), key=lambda item: item.last_read)
        true = left = Usage(len(items), sum(item.bytes for item in items))
        if true.over(limit, max_files):
            if low_water < 1.0:
                self._sweep_leftovers()
            left = self._evict(items, true, int(limit * low_water), int(max_files * low_water))
        self._write_count(before, left)
        evicted = Swept(true.files - left.files, true.bytes - left.bytes)
        if evicted.files:
            self._events.emit("evict", files=evicted.files, bytes=evicted.bytes)
        return evicted

    def _evict(self, items: list[Item], usage: Usage, limit: int, max_files: int) -> Usage:
        """Remove entries in this order until the rest is within the limits; return the rest."""
        for item in items:
            if not usage.over(limit, max_files):
                return usage
            if not item.pinned:
                with suppress(OSError):  # An entry that cannot be removed does not protect the others.
                    self._unlink(item.digest)
                    usage = usage.plus(-1, -item.bytes)
        if usage.over(limit, max_files):
            return Usage(usage.files, usage.bytes, usage.files, usage.bytes)
        return usage

    def _begin_count(self) -> Usage | None:
        """Return the running totals, and let writers notice that a recount has begun.

        The recount may miss an entry that was added to the totals but is not published yet. Its writer
        adds it again.
        """
        if not os.path.lexists(f"{self._base}/usage"):  # No writer adds to totals that do not exist.
            return None
        with self._try_hold("usage", _LOCK_WAIT):
            usage = self._read_usage()
            if usage is not None:
                usage = usage._replace(recounts=usage.recounts + 1)
                self._write_usage(usage)
            return usage

    def _write_count(self, before: Usage | None, counted: Usage) -> None:
        """Write the count plus what others have added since. Some of that may count twice."""
        with self._try_hold("usage", _LOCK_WAIT):
            after = self._read_usage()
            if before is not None and after is not None:
                late = max(after.files - before.files, 0), max(after.bytes - before.bytes, 0)
                counted = counted.plus(*late)
            self._write_usage(counted._replace(recounts=(after.recounts if after else 0) + 1))

    # Files of processes that are gone

    def _sweep_killed(self) -> None:
        """Remove the files of killed processes that are old enough to be sure."""
        self._sweep_staged()
        with suppress(OSError):
            make_private(self.lock_dir, trust=self._trust)
            lock.sweep(self.lock_dir, self._clock() - publish.ORPHANED)

    def _sweep_leftovers(self) -> Swept:
        return _sum(self._sweep_staged(), self._sweep_versions())

    def _sweep_staged(self) -> Swept:
        """Remove staged files and leases whose writer must have ended."""
        total = Swept()
        # A lease that is held is written every few seconds, and one that was released is removed.
        alone = (f"{self._base}/staged", f"{self._base}/leases")
        # Files of a directory that nodes share may have stamps of other clocks than this node's.
        now = None if self.shared else self._clock()
        for place, beside in (*((path, False) for path in alone), (str(self.root), True)):
            with suppress(OSError):
                total = _sum(total, Swept(*publish.sweep(place, now, beside=beside)))
        return total

    def _sweep_versions(self) -> Swept:
        """Remove directories of other format versions."""
        gone = freed = 0
        for other in scan(str(self.root)):
            is_format = other.name[:1] == "v" and other.name[1:].isdecimal()
            if is_format and other.name != FORMAT and other.is_dir(follow_symlinks=False):
                for place, _, names in os.walk(other.path):
                    gone += len(names)
                    freed += sum(size_of(f"{place}/{name}") or 0 for name in names)
                # Another process may be removing it as well.
                shutil.rmtree(other.path, ignore_errors=True)
        return Swept(gone, freed)

    # Locks and totals

    def _lock_path(self, what: str) -> Path:
        make_private(self.lock_dir, trust=self._trust)
        path = self._lock_paths.get(what)
        if path is None:
            # One file name for each cache; a collision costs a wait.
            root = os.fsencode(self.root).hex()[-120:]
            path = self._lock_paths[what] = self.lock_dir / f"{what}-{root}"
        return path

    def _try_hold(self, what: str, wait: float) -> hold:
        """Return a context that holds the lock, or continues without it after `wait` seconds."""
        return hold(lambda: self._lock_path(what), wait, required=False)

    def _read_usage(self) -> Usage | None:
        """Return the running totals; None when there are none yet, or they are damaged."""
        try:
            return _unpack_usage(read_file(f"{self._base}/usage", trust=self._trust)[0])
        except OSError:
            return None

    def _write_usage(self, usage: Usage) -> None:
        path = f"{self._base}/usage"
        row = _pack_usage(usage)
        try:
            retry_transient(_overwrite, path, row)
        except FileNotFoundError:  # There is no cache directory yet.
            return
        except OSError as fault:
            if fault.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            if fault.errno == errno.EISDIR:
                os.rmdir(path)
            self._publish(path, row, durable=False)  # Something other than a file is there.


def _overwrite(path: str, content: bytes) -> None:
    """Write a file in place, which is cheaper than replacing it. No link is followed."""
    with open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotAFileError
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))


def _sum(one: Swept, other: Swept) -> Swept:
    return Swept(one.files + other.files, one.bytes + other.bytes)
