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
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from preheat.files import opened
from preheat.locks import no_fork

__all__ = ["Evidence", "FileHasher", "Memo"]

_SETTLED = 2.0  # Seconds. The time stamps of every file system in use are finer.
_MOST_BYTES = 1 << 26  # The largest header. A larger file is data.
_TRIES = 3  # Attempts to read a file while another process writes it.
_NO_PROOF = -1  # Instead of a mount id: stamps on this mount prove nothing.
_MOUNT_ID_UNIQUE = 0x4000  # STATX_MNT_ID_UNIQUE, since Linux 6.8.
_STATX_SIZE = 256  # The size of struct statx.
_MOUNT_ID_AT = 144  # The offset of the mount id in it.


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


def _now() -> float:
    """Return the seconds since boot. No one sets this clock, and all processes share it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Memo:
    """A cache of hashes by path. `note` is that of an earlier process; another boot makes it void."""

    def __init__(self, note: bytes | None = None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _now
        self.rows: dict[str, _Row] = {}
        self.changed = False
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
        for _ in range(_TRIES):
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            with opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
                before = os.fstat(descriptor)
                if not stat.S_ISREG(before.st_mode):
                    raise OSError("it is not a regular file")
                if before.st_size > _MOST_BYTES:
                    raise OSError(f"{before.st_size:,} bytes are too many for a header")
                with open(descriptor, "rb", closefd=False) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                after = os.fstat(descriptor)
            if _times(before) == _times(after):
                break
        else:
            raise OSError("it changes while it is read")
        stamp = self._stamp(path, after)
        if stamp[-1] != _NO_PROOF:
            self._memo.learn(path, stamp, digest)
        return Evidence(stamp, digest)

    def proves(self, files: Iterable[tuple[str, str, str]]) -> bool:
        """Return True if the stamps of files, given as (path, directory, hash), prove their hashes.

        A lookup of a program with hundreds of headers spends its time in this loop, so the steps of
        `evidence` are written out in it. An error means that nothing is proven.
        """
        mounts = self._mounts
        known = self._memo.rows.get
        status_of = os.stat
        try:
            for path, directory, wanted in files:
                row = known(path)
                if row is None:
                    return False
                stamp, digest, _, settled = row
                if not settled or digest != wanted:
                    return False
                if directory not in mounts:
                    mounts[directory] = _mount(directory)
                status = status_of(path)
                if stamp != (
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_ino,
                    status.st_dev,
                    mounts[directory],
                ):
                    return False
        except OSError:
            return False
        return True

    def _stamp(self, path: str, status: os.stat_result) -> tuple[int, ...]:
        """Return the stamp of a file. The mount id comes last."""
        directory = os.path.dirname(path)
        if directory not in self._mounts:
            self._mounts[directory] = _mount(directory)
        return (*_times(status), self._mounts[directory])


def _times(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


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
    answer = bytes(block)
    if not int.from_bytes(answer[:4], "little") & _MOUNT_ID_UNIQUE:
        return None
    return int.from_bytes(answer[_MOUNT_ID_AT : _MOUNT_ID_AT + 8], "little")


@functools.cache
def _statx() -> tuple[Any, Any]:
    """Return the C library's `statx`, or None, and the type of its result."""
    with no_fork:
        import ctypes  # Importing takes a millisecond, which programs without headers need not spend.

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
