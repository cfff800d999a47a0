"""The tier on disk: one file an entry, staged and renamed, checked on every read.

<root>/CACHEDIR.TAG              tells backup programs to pass by
<root>/v1/ab/<digest>.heat       an entry (see preheat.cache.codec)
<root>/v1/ab/<digest>.note       what this machine knows about it, in the same form; lost without harm
<root>/v1/staged/                files being written; orphans are swept by age
<root>/v1/pins/<digest>          an entry that eviction passes over, and in it the digests of others
<root>/v1/usage                  running totals and their checksum, so that a put never counts the cache
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from preheat.cache import codec, lock, publish
from preheat.cache.journal import Journal
from preheat.cache.lock import hold
from preheat.cache.trust import DistrustedError, NotAFileError, foreign, make_private, read_file
from preheat.events import Events
from preheat.files import opened
from preheat.locks import no_fork

__all__ = ["DiskStore", "Item", "LayerStore", "Swept"]

_FORMAT = f"v{codec.VERSION}"
_STAMP_EVERY = 3600.0  # seconds: how stale an entry's last-read stamp may get
_LOW_WATER = 0.8  # eviction goes down to this part of the limits, so that it runs rarely
_LOCK_WAIT = 2.0  # seconds to wait for the usage file; totals may drift, a sweep corrects them
_SWEEP_WAIT = 2.0  # seconds that a writer over the limit waits for the one that sweeps
_USAGE = struct.Struct("<5Q")
_MOST = (1 << 64) - 1
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of preheat: safe to delete.\n"
_FRONT = 128
_KINDS = ("heat", "note")
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
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
    counts: int = 0  # how often all entries were counted, so that a writer sees that one came between

    def plus(self, files: int, size: int) -> _Usage:
        total, used = max(self.files + files, 0), max(self.bytes + size, 0)
        return _Usage(total, used, self.floor_files, self.floor_bytes, self.counts)

    def over(self, limit: int, max_files: int) -> bool:
        """Whether a sweep is due. What pins hold cannot be swept: then wait for a tenth more."""
        return self.bytes > max(limit, self.floor_bytes * 1.1) or self.files > max(
            max_files, self.floor_files * 1.1
        )


def _packed(usage: _Usage) -> bytes:
    """The totals and their checksum; sizes that no disk has are cut off."""
    row = (usage.files, usage.bytes, usage.floor_files, usage.floor_bytes, usage.counts)
    front = _USAGE.pack(*(min(number, _MOST) for number in row))
    return front + xxhash.xxh3_128_digest(front)


def _unpacked(row: bytes) -> _Usage | None:
    """The totals in `row`; None when it is damaged."""
    front, checksum = row[: _USAGE.size], row[_USAGE.size :]
    whole = len(front) == _USAGE.size and xxhash.xxh3_128_digest(front) == checksum
    return _Usage(*_USAGE.unpack(front)) if whole else None


class LayerStore:
    """A cache directory that is only read, such as one shipped in an image.

    Whoever opens it has made sure that `root` can be trusted. What is in it is judged when it is read:
    directories and entries have to be this user's or root's alone to write, unless `trust` is given.
    """

    def __init__(self, root: Path, events: Events, name: str = "layer", *, trust: bool = False) -> None:
        self.root, self.name = root, name
        self._events, self._trust = events, trust
        self._base = f"{root}/{_FORMAT}"
        self._own: set[str] = set()  # directories found good: strangers cannot change them any more

    def reader(self, events: Events) -> LayerStore:
        """The same directory for reading only: it refreshes no stamps and removes no damaged entry."""
        return LayerStore(self.root, events, trust=self._trust)

    def get(self, digest: str) -> bytes | None:
        """The verified entry or None; damage and faults are events."""
        path = self._path(digest)
        try:
            if digest[:2] not in self._own:
                self._check(digest[:2])
            blob, found = read_file(path, trust=self._trust)
        except FileNotFoundError:
            return None
        except DistrustedError as distrusted:
            self._events.emit("refused", path=path, reason=str(distrusted))
            return None
        except OSError as fault:
            self._events.fault(self.name, "read", fault)
            return None
        if why := codec.damage(digest, blob):
            self._events.emit("damaged", tier=self.name, key=digest, reason=why)
            self._damaged(digest)
            return None
        self._used(digest, found.st_mtime)
        return blob

    def _check(self, shard: str) -> None:
        """`OSError` unless the directory `shard` and the one above are nobody else's to write."""
        if not self._trust:
            for directory in (self._base, f"{self._base}/{shard}"):
                found = os.lstat(directory)
                if not stat.S_ISDIR(found.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
                if why := foreign(found):
                    raise DistrustedError(f"{directory}: {why}")
        self._own.add(shard)

    def items(self) -> Iterator[Item]:
        """Every entry there is, in no order."""
        pins = self.pinned()
        for shard in _scan(self._base):
            if shard.name in _NOT_SHARDS or not shard.is_dir(follow_symlinks=False):
                continue
            sizes: dict[str, int] = {}
            stamps: dict[str, float] = {}
            for file in _scan(shard.path):
                digest, _, kind = file.name.partition(".")
                if digest[:2] != shard.name or kind not in _KINDS:  # none of ours
                    continue
                with suppress(FileNotFoundError):  # another process evicted it meanwhile
                    found = file.stat(follow_symlinks=False)
                    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
                    sizes[digest] = sizes.get(digest, 0) + size
                    if kind == "heat" or digest not in stamps:  # a layer's entry leaves its note here
                        stamps[digest] = found.st_mtime
            for digest, stamp in stamps.items():
                yield Item(digest, sizes[digest], stamp, digest in pins)

    def front(self, digest: str) -> bytes | None:
        """The first bytes of an entry, unverified: enough to tell its kind. None when there is none."""
        try:
            with opened(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
                return os.read(file, _FRONT)
        except FileNotFoundError:
            return None
        except OSError:  # what cannot be read is damaged, and there
            return b""

    def pinned(self) -> set[str]:
        """The digests that are exempt from eviction: pinned entries, and those pinned with them."""
        found = set()
        for pin in _scan(f"{self._base}/pins"):
            found.add(pin.name)
            with suppress(OSError):  # one without a list still holds its own entry
                listed, _ = read_file(pin.path, trust=self._trust)
                found.update(_DIGEST.findall(listed.decode("ascii", "replace")))
        return found

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
        trust: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(root, events, name="disk", trust=trust)
        self.lock_dir, self._limit, self._max_files = lock_dir, limit, max_files
        self._clock, self._tidied = clock, False

    def put(self, digest: str, blob: bytes) -> None:
        """Publish the entry: readers see the old file or the new one, never a part."""
        if not self._tidied:  # once a process: what killed ones left must not pile up
            self._tidied = True
            self._tidy()
        path = self._path(digest)
        before = _size(path)
        with self._counted(int(before is None), len(blob) - (before or 0)):
            self._publish(path, blob)

    def journal(self) -> Journal:
        """The counters of the processes that use this cache."""
        directory = self.root / "stats"
        return Journal(directory, lock_dir=self.lock_dir, trust=self._trust, clock=self._clock)

    def remove(self, digest: str) -> None:
        """Remove the entry and its note; nothing happens when there is none. A pin stays."""
        freed = self._unlink(digest)
        if freed is not None:
            with self._counted(-1, -freed):
                pass

    def note(self, digest: str) -> bytes | None:
        """What this machine noted about an entry; None when there is no note, or a damaged one."""
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
        """Note something that only this machine can know, such as the stamps of files."""
        path, blob = self._path(digest, "note"), codec.pack(digest, {}, {"note": text})
        with self._counted(0, len(blob) - (_size(path) or 0)):
            self._publish(path, blob, durable=False)

    def pin(self, digest: str, *others: str) -> None:
        """Exempt this entry, and the `others` by which it is found, from eviction."""
        listed = "".join(f"{other}\n" for other in others)
        self._publish(f"{self._base}/pins/{digest}", listed.encode())

    def unpin(self, digest: str) -> None:
        """Make the entry, and those that were pinned with it, subject to eviction again."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self._base}/pins/{digest}")

    def sweep(self, *, limit: int | None = None, max_files: int | None = None) -> Swept:
        """Bring the cache within limits, least recently read first, and clear away orphans.

        Entries of other format versions go as well. Returns what was removed.
        """
        limit = self._limit if limit is None else limit
        max_files = self._max_files if max_files is None else max_files
        with self._turn("sweep", _SWEEP_WAIT):
            return _sum(self._clear_away(), self._fit(limit, max_files))

    def clear(self) -> Swept:
        """Remove every entry, pinned ones too."""
        total = Swept()
        for item in list(self.items()):
            freed = self._unlink(item.digest)
            if freed is not None:
                total = _sum(total, Swept(1, freed))
            self.unpin(item.digest)
        self._write_usage(_Usage())
        return total

    # Writing

    def _publish(self, path: str, blob: bytes, *, durable: bool = True) -> None:
        home, staged = os.path.dirname(path), f"{self._base}/staged"
        for last in (False, True):
            for directory in (home, staged):
                if not os.path.isdir(directory):
                    self._make(directory)
            try:
                publish.replace(path, [blob], staged=staged, durable=durable)
                return
            except FileNotFoundError:  # someone removed the directories just now
                if last:
                    raise

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:  # another process was quicker
            return
        except FileNotFoundError:
            make_private(Path(directory), trust=self._trust)
            self._tag()

    def _tag(self) -> None:
        path = f"{self.root}/CACHEDIR.TAG"
        if not _size(path):
            publish.replace(path, [_TAG], durable=False)

    def _unlink(self, digest: str) -> int | None:
        """Remove entry and note; the bytes freed, or None when there was no entry."""
        freed = None
        for kind in _KINDS:
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

    @contextmanager
    def _counted(self, files: int, size: int) -> Iterator[None]:
        """Add to the running totals, do the block, and sweep when they have passed the limits.

        The totals come first: a writer that is killed in between leaves them too large, which a count
        puts right, and never too small, which would let the cache grow. A count that came between may
        have missed the entry: then it is added once more.
        """
        usage, fault = None, None
        try:
            usage = self._add(files, size)
        except OSError as error:
            fault = error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self._add(-files, -size)
            raise
        if usage is not None and (now := self._read_usage()) and now.counts != usage.counts:
            with suppress(OSError):
                usage = self._add(files, size)
        if fault is not None:
            self._events.fault(self.name, "keep count", fault)
        elif usage is None or usage.over(self._limit, self._max_files):
            self._enforce(uncounted=usage is None)

    def _add(self, files: int, size: int) -> _Usage | None:
        """The running totals with this added; None when nobody has counted."""
        with hold(self._lock("usage"), _LOCK_WAIT):
            usage = self._read_usage()
            if usage is not None:
                usage = usage.plus(files, size)
                self._write_usage(usage)
            return usage

    def _enforce(self, *, uncounted: bool) -> None:
        """Replace the totals by a true count, and evict down to the low water if that is over.

        One process does so at a time. The others wait for it, so that together they pass the limits by
        no more than an entry each, and another for every two seconds that it takes.
        """
        try:
            with hold(self._lock("sweep"), _SWEEP_WAIT) as mine:
                usage = None if uncounted else self._read_usage()
                if mine and (usage is None or usage.over(self._limit, self._max_files)):
                    self._fit(self._limit, self._max_files, low_water=_LOW_WATER)
        except OSError as fault:
            self._events.fault(self.name, "keep count", fault)

    def _fit(self, limit: int, max_files: int, *, low_water: float = 1.0) -> Swept:
        """Count what there is; over the limits, evict down to this part of them. What was evicted."""
        before = self._read_usage()
        items = sorted(self.items(), key=lambda item: item.last_read)
        true = left = _Usage(len(items), sum(item.bytes for item in items))
        if true.over(limit, max_files):
            if low_water < 1.0:
                self._clear_away()
            left = self._evict(items, true, int(limit * low_water), int(max_files * low_water))
        self._settle(before, left)
        evicted = Swept(true.files - left.files, true.bytes - left.bytes)
        if evicted.files:
            self._events.emit("evict", files=evicted.files, bytes=evicted.bytes)
        return evicted

    def _evict(self, items: list[Item], usage: _Usage, limit: int, max_files: int) -> _Usage:
        """Remove entries in this order until what is left is within the limits; what is left."""
        for item in items:
            if not usage.over(limit, max_files):
                return usage
            if not item.pinned:
                with suppress(OSError):  # what cannot be removed does not save the others
                    self._unlink(item.digest)
                    usage = usage.plus(-1, -item.bytes)
        if usage.over(limit, max_files):
            return _Usage(usage.files, usage.bytes, usage.files, usage.bytes)
        return usage

    def _settle(self, before: _Usage | None, counted: _Usage) -> None:
        """Write down what was counted plus what others added meanwhile, though some may count twice."""
        with self._turn("usage", _LOCK_WAIT):
            after = self._read_usage()
            if before is not None and after is not None:
                late = max(after.files - before.files, 0), max(after.bytes - before.bytes, 0)
                counted = counted.plus(*late)
            self._write_usage(replace(counted, counts=(after.counts if after else 0) + 1))

    # What others left behind

    def _tidy(self) -> None:
        """Remove what killed processes left, where it is old enough to be sure."""
        self._sweep_staged()
        with suppress(OSError):
            make_private(self.lock_dir, trust=self._trust)
            lock.sweep(self.lock_dir, self._clock() - publish.ORPHANED)

    def _clear_away(self) -> Swept:
        return _sum(self._sweep_staged(), self._sweep_versions())

    def _sweep_staged(self) -> Swept:
        """Remove staged files whose writer must be gone."""
        total = Swept()
        for place, beside in ((f"{self._base}/staged", False), (str(self.root), True)):
            with suppress(OSError):
                total = _sum(total, Swept(*publish.sweep(place, self._clock(), beside=beside)))
        return total

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

    # Locks and totals

    def _lock(self, what: str) -> Path:
        make_private(self.lock_dir, trust=self._trust)
        root = os.fsencode(self.root).hex()[-120:]  # a file name per cache; a clash costs a wait
        return self.lock_dir / f"{what}-{root}"

    def _turn(self, what: str, wait: float) -> hold:
        """Hold the lock if it can be had in time, and go on without if not."""
        return hold(lambda: self._lock(what), wait, required=False)

    def _read_usage(self) -> _Usage | None:
        """The running totals, or None when nobody has counted yet, or they are damaged."""
        try:
            return _unpacked(read_file(f"{self._base}/usage", trust=self._trust)[0])
        except OSError:
            return None

    def _write_usage(self, usage: _Usage) -> None:
        path, row = f"{self._base}/usage", _packed(usage)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = opened(path, flags)
        except FileNotFoundError:  # there is no cache to keep count of
            return
        except OSError as fault:
            if fault.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            if fault.errno == errno.EISDIR:
                os.rmdir(path)
            self._publish(path, row, durable=False)  # no file: put one in its place
            return
        with file:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise NotAFileError
            os.pwrite(file, row, 0)
            os.ftruncate(file, len(row))


def _sum(one: Swept, other: Swept) -> Swept:
    return Swept(one.files + other.files, one.bytes + other.bytes)


def _size(path: str) -> int | None:
    """Bytes of a file; None when it is not there."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _scan(path: str) -> list[os.DirEntry[str]]:
    """The entries of a directory; none when it is not there, or not for us to read."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
