"""Content hashes of files, and when an unchanged stamp proves unchanged content.

Stamps are never compared with the clock of this machine: a file server has its own clock, and a file
may have a time in the future. A cached hash is trusted without reading the file if

- the stamp of the file is the same as when it was hashed: size, times, inode, device and mount, and
- the file was hashed at least two seconds after that stamp was first seen, so that the clock of the
  file system has advanced and a later change gets a different stamp.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat import native
from preheat.process.files import open_fd
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import ctypes
else:
    ctypes = LazyModule("ctypes")  # It takes a millisecond, which programs without headers save.

__all__ = ["Evidence", "FileHasher", "Memo", "file_digest"]

_SETTLED = 2.0  # Seconds. The time stamps of every file system in use are finer.
_MAX_BYTES = 1 << 26  # The largest header. A larger file is data.
_BLOCK = 1 << 20  # bytes that are read at once
_TRIES = 3  # Attempts to read a file while another process writes it.
_NO_PROOF = -1  # Instead of a mount id: stamps on this mount prove nothing.
_MOUNT_ID_UNIQUE = 0x4000  # STATX_MNT_ID_UNIQUE, since Linux 6.8.
_STATX_SIZE = 256  # The size of struct statx, which begins with a mask of the fields that it has.
_MASK_AND_MOUNT = struct.Struct("=I140xQ")


class Evidence(NamedTuple):
    """The stamp of a file and the SHA-256 of its content."""

    stamp: tuple[int, ...]
    digest: str


class _Row(NamedTuple):
    """A cached hash. `settled` says that an equal stamp proves equal content."""

    stamp: tuple[int, ...]
    digest: str
    seen: float  # When the stamp was first seen, in seconds since boot.
    settled: bool


class _Expected(NamedTuple):
    """The stamps that prove the hashes of files: the mount ids by directory, the rest in order."""

    paths: list[str]
    times: list[tuple[int, ...]]
    mounts: dict[str, int]
    # The first two as the native core takes and returns them.
    native_paths: bytes
    native_times: bytes


#: Returns the stamp of a file, without its mount, from the status of the file.
_times: Callable[[os.stat_result], tuple[int, ...]] = operator.attrgetter(
    "st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"
)


_NATIVE_TIMES = struct.Struct("=qqqQQ")  # the same five numbers in the native core


def _now() -> float:
    """Return the seconds since boot. No one sets this clock, and all processes share it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Memo:
    """A cache of hashes by path.

    `note` was saved by an earlier process, and is ignored after a reboot.
    """

    def __init__(self, note: bytes | None = None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _now
        self.rows: dict[str, _Row] = {}
        self.changed = False
        # The last result of `expected`, with the list that it is for and the rows that it is from.
        self._expected: tuple[object, object, _Expected | None] = (None, None, None)
        self._learned = object()  # Replaced by a new object whenever a row changes.
        if note is not None:
            self._read(note)

    def _read(self, note: bytes) -> None:
        try:
            boot, rows = json.loads(note)
            if boot != _boot():
                return
            for path, (stamp, digest, seen, settled) in rows.items():
                self.rows[str(path)] = _Row(
                    tuple(map(int, stamp)), str(digest), float(seen), settled is True
                )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self.rows.clear()
            self.changed = True

    def note(self) -> bytes:
        """Return the bytes to store for the next process."""
        rows = dict(self.rows)  # A copy, because other threads may add rows.
        return json.dumps((_boot(), rows), separators=(",", ":")).encode()

    def known(self, path: str, stamp: tuple[int, ...]) -> str | None:
        """Return the hash of the file at `path` if its stamp proves it, else None."""
        row = self.rows.get(path)
        return row.digest if row is not None and row.settled and row.stamp == stamp else None

    def expected(self, files: Sequence[tuple[str, str, str]]) -> _Expected | None:
        """Return the stamps that prove the hashes of files; None if no stamps do.

        The result is kept for the next call with the same list, until a row changes.
        """
        known_files, known_rows, expected = self._expected
        learned = self._learned
        if known_files is not files or known_rows is not learned:
            expected = self._expect(files)
            self._expected = (files, learned, expected)
        return expected

    def _expect(self, files: Sequence[tuple[str, str, str]]) -> _Expected | None:
        paths: list[str] = []
        times: list[tuple[int, ...]] = []
        mounts: dict[str, int] = {}
        for path, directory, digest in files:
            row = self.rows.get(path)
            if row is None or not row.settled or row.digest != digest:
                return None
            if mounts.setdefault(directory, row.stamp[-1]) != row.stamp[-1]:
                return None
            paths.append(path)
            times.append(row.stamp[:-1])
        try:
            packed = b"".join(starmap(_NATIVE_TIMES.pack, times))
            joined = b"".join(os.fsencode(path) + b"\0" for path in paths)
        except (struct.error, UnicodeError):  # The note is not valid: no file has such a stamp.
            return None
        return _Expected(paths, times, mounts, joined, packed)

    def learn(self, path: str, stamp: tuple[int, ...], digest: str) -> None:
        """Store the hash of a file that has just been read."""
        now = self._clock()
        row = self.rows.get(path)
        if row is None or (row.stamp, row.digest) != (stamp, digest):
            self.rows[path] = _Row(stamp, digest, now, settled=False)
        elif now - row.seen >= _SETTLED:
            self.rows[path] = row._replace(settled=True)
        else:
            return
        self._learned = object()
        self.changed = True


class FileHasher:
    """Reads files during one lookup or one step of a build, and queries each mount only once."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._mounts: dict[str, int] = {}  # By directory.

    def evidence(self, path: str) -> Evidence:
        """Return stamp and hash of a regular file, or raise `OSError`."""
        stamp = self._stamp(path, os.stat(path))
        if digest := self._memo.known(path, stamp):
            return Evidence(stamp, digest)
        digest, after = _read(path)
        stamp = self._stamp(path, after)
        if stamp[-1] != _NO_PROOF:
            self._memo.learn(path, stamp, digest)
        return Evidence(stamp, digest)

    def proves(self, files: Sequence[tuple[str, str, str]]) -> bool:
        """Return True if the stamps of files, given as (path, directory, hash), prove their hashes.

        A lookup of a program with hundreds of headers spends its time here, so the files are compared
        by functions in C. An error means that nothing is proven.
        """
        expected = self._memo.expected(files)
        if expected is None:
            return False
        try:
            if native.core is not None:
                same = native.core.file_times(expected.native_paths) == expected.native_times
            else:
                same = list(map(_times, map(os.stat, expected.paths))) == expected.times
            return same and list(map(_mount, expected.mounts)) == list(expected.mounts.values())
        except OSError:
            return False

    def _stamp(self, path: str, status: os.stat_result) -> tuple[int, ...]:
        """Return the stamp of a file. The mount id comes last."""
        directory = os.path.dirname(path)
        if directory not in self._mounts:
            self._mounts[directory] = _mount(directory)
        return (*_times(status), self._mounts[directory])


def file_digest(path: str) -> str:
    """Return the SHA-256 of a regular file, or raise `OSError`."""
    return _read(path)[0]


def _read(path: str) -> tuple[str, os.stat_result]:
    """Return the SHA-256 of a regular file, and its status after it was read."""
    for _ in range(_TRIES):
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open_fd(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise OSError("it is not a regular file")
            if before.st_size > _MAX_BYTES:
                raise OSError(f"{before.st_size:,} bytes are too many for a header")
            content = hashlib.sha256()
            # `hashlib.file_digest` would clear a large buffer for each small file.
            while block := os.read(descriptor, min(before.st_size + 1, _BLOCK)):
                content.update(block)
            after = os.fstat(descriptor)
        if _times(before) == _times(after):
            return content.hexdigest(), after
    raise OSError("it changes while it is read")


def _mount(directory: str) -> int:
    """Return a mount id that is unique since boot.

    If the kernel has no such id, it is 0 for a writable mount, where the kernel itself sets the times
    of changes. On a read-only mount no stamp proves anything: it may be an image with arbitrary times.
    """
    directory = directory or "."
    unique = _unique_mount(directory)
    if unique is not None:
        return unique
    return _NO_PROOF if os.statvfs(directory).f_flag & os.ST_RDONLY else 0


def _unique_mount(path: str) -> int | None:
    statx, buffer = _statx()
    if statx is None or statx(-100, os.fsencode(path), 0, _MOUNT_ID_UNIQUE, block := buffer()):
        return None
    mask, mount = _MASK_AND_MOUNT.unpack_from(block)
    return mount if mask & _MOUNT_ID_UNIQUE else None


@functools.cache
def _statx() -> tuple[Any, Any]:
    """Return the C library's `statx`, or None, and the type of its result."""
    return getattr(ctypes.CDLL(None), "statx", None), ctypes.c_char * _STATX_SIZE


_boots: list[str] = []


def _boot() -> str:
    """Return the id of the current boot."""
    if not _boots:
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                _boots.append(file.read().decode().strip())
        except OSError:
            _boots.append("")
    return _boots[0]
