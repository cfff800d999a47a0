"""The content of files by hash, and when a time stamp is enough to believe that it is unchanged.

No stamp is ever compared with the clock of this machine: a file server has a clock of its own, and a
file may be dated tomorrow. A hash is believed without reading the file again when

- the stamp of the file is the same as when it was hashed: size, times, inode, device and mount, and
- it was hashed at least two seconds after that stamp was first seen, so that the clock of the file
  system has moved on and a later change must get another stamp.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from preheat.files import opened
from preheat.locks import no_fork

__all__ = ["Evidence", "Memo", "View"]

_SETTLED = 2.0  # seconds, more than the resolution of the time stamps of any file system in use
_MOST_BYTES = 1 << 26  # of a header; what is larger is data
_TRIES = 3  # to read a file that somebody is writing
_NO_PROOF = -1  # in the place of a mount whose stamps prove nothing
_MOUNT_ID_UNIQUE = 0x4000  # STATX_MNT_ID_UNIQUE, from Linux 6.8
_STATX_SIZE, _MOUNT_ID_AT = 256, 144  # of struct statx


class Evidence(NamedTuple):
    """One look at a file: its stamp and the SHA-256 of its content."""

    stamp: tuple[int, ...]
    digest: str


class _Row(NamedTuple):
    """What is known about a file. `settled` says that the stamp alone is believed from now on."""

    stamp: tuple[int, ...]
    digest: str
    seen: float  # when the stamp was first seen, in seconds since the machine was started
    settled: bool


def _now() -> float:
    """Seconds since the machine was started: a clock that nobody sets, the same in every process."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Memo:
    """Hashes by path. `note` is where the last process left off; stamps of an earlier boot are void."""

    def __init__(self, note: bytes | None = None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _now
        self._rows: dict[str, _Row] = {}
        self.changed = False
        if note is not None:
            self._read(note)

    def _read(self, note: bytes) -> None:
        try:
            boot, rows = json.loads(note)
            if boot != _boot():
                return
            for path, (stamp, digest, seen, settled) in rows.items():
                self._rows[str(path)] = _Row(
                    tuple(map(int, stamp)), str(digest), float(seen), settled is True
                )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self._rows.clear()
            self.changed = True

    def note(self) -> bytes:
        """What to keep for the next process."""
        rows = dict(self._rows)  # a copy: other threads may be learning more
        return json.dumps((_boot(), rows), separators=(",", ":")).encode()

    def known(self, path: str, stamp: tuple[int, ...]) -> str | None:
        """The hash of the file at `path`, where its stamp is proof enough."""
        row = self._rows.get(path)
        return row.digest if row is not None and row.settled and row.stamp == stamp else None

    def learn(self, path: str, stamp: tuple[int, ...], digest: str) -> None:
        """Remember the hash of a file that has just been read."""
        now, row = self._clock(), self._rows.get(path)
        if row is None or (row.stamp, row.digest) != (stamp, digest):
            self._rows[path] = _Row(stamp, digest, now, settled=False)
        elif now - row.seen >= _SETTLED:
            self._rows[path] = row._replace(settled=True)
        else:
            return
        self.changed = True


class View:
    """The file system as it is during one lookup or one step of a build. Mounts are asked for once."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._mounts: dict[str, int] = {}  # by directory

    def evidence(self, path: str) -> Evidence:
        """The content of a regular file; `OSError` when it cannot be read."""
        stamp = self._stamp(path, os.stat(path))
        if digest := self._memo.known(path, stamp):
            return Evidence(stamp, digest)
        for _ in range(_TRIES):
            # Without O_NONBLOCK opening a pipe would wait for its writer.
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

    def _stamp(self, path: str, found: os.stat_result) -> tuple[int, ...]:
        """What must be equal for content to be equal; the mount comes last."""
        directory = os.path.dirname(path)
        mount = self._mounts.get(directory)
        if mount is None:
            mount = self._mounts[directory] = _mount(directory or ".")
        return (*_times(found), mount)


def _times(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def _mount(path: str) -> int:
    """A number that no other mount since the machine was booted has.

    Where the kernel gives no such number, it is 0 for a mount that can be written, on which the kernel
    itself sets the times of changes. On any other mount no stamp proves anything: it may be an image
    that was built with any times.
    """
    unique = _unique_mount(path)
    if unique is not None:
        return unique
    return _NO_PROOF if os.statvfs(path).f_flag & os.ST_RDONLY else 0


def _unique_mount(path: str) -> int | None:
    statx, buffer = _statx()
    if statx is None or statx(-100, os.fsencode(path), 0, _MOUNT_ID_UNIQUE, block := buffer()):
        return None
    found = bytes(block)
    if not int.from_bytes(found[:4], "little") & _MOUNT_ID_UNIQUE:
        return None
    return int.from_bytes(found[_MOUNT_ID_AT : _MOUNT_ID_AT + 8], "little")


@functools.cache
def _statx() -> tuple[Any, Any]:
    """The C library's `statx`, None where it has none, and the type of its result."""
    with no_fork:
        import ctypes  # costs a millisecond that programs without headers need not spend

    return getattr(ctypes.CDLL(None), "statx", None), ctypes.c_char * _STATX_SIZE


_boots: list[str] = []


def _boot() -> str:
    """What tells this start of the machine from others."""
    if not _boots:
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                _boots.append(file.read().decode().strip())
        except OSError:
            _boots.append("")
    return _boots[0]
