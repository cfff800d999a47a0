"""Exclusive creation and locking of files by hard links, on one node or among several.

A server makes a link in one step, and refuses it if the name exists. That is true on NFS, Lustre and
similar filesystems, where `flock` may be missing, or work on one node only. If an answer of the server
gets lost, `link` fails although the link was made. The link count of the file then shows the truth.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from preheat.process.files import open_fd
from preheat.store.filesystem import retry_transient
from preheat.store.publish import replace, staged_name
from preheat.store.remote.engine import LEASE_BYTES
from preheat.store.trust import read_file

__all__ = ["NO_LINKS", "LinkLocks", "LockedError", "create_by_link", "file_content", "private_file"]

#: Errors of a filesystem that has no hard links.
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})
_POLL = 0.005  # seconds between two attempts to take a lock
# A lock is broken only if it was seen unchanged more often than this. After the file server has
# stalled, the holder therefore gets time to continue.
_LOOKS = 10
_MAX_SIGHTINGS = 1024  # locks of others that are remembered


class LockedError(TimeoutError):
    """The lock of a file could not be taken, or was held for too long. Other files can be used."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(errno.ETIMEDOUT, reason, path)


def create_by_link(path: str, data: bytes, *, mode: int = 0o600) -> bool:
    """Create a file with its whole content, unless there is one, and return whether it was created."""
    with private_file(path, data, mode=mode) as private:
        return _link(private, path)


def file_content(path: str, *, trust: bool = True) -> bytes | None:
    """Return the content of a small file; None when there is none.

    Raises `OSError` for a link, a pipe or a large file, and `DistrustedError` without `trust` for a
    file that others can write.
    """
    try:
        return read_file(path, trust=trust, limit=LEASE_BYTES)[0]
    except FileNotFoundError:
        return None


@contextmanager
def private_file(path: str, data: bytes, *, mode: int = 0o600) -> Iterator[str]:
    """Write a file beside `path` under a unique name, which is removed after the block."""
    private = f"{os.path.dirname(path)}/{staged_name()}"
    replace(private, [data], mode=mode, durable=False)
    try:
        yield private
    finally:
        with suppress(OSError):  # A sweep removes it.
            os.unlink(private)


@dataclass(slots=True)
class _Sighting:
    """A lock that another process holds: its content, since when, and how often it was seen."""

    content: bytes | None
    since: float
    looks: int = 0


class LinkLocks:
    """Locks of files, each of which is an exclusive link.

    A call waits up to `timeout` seconds for a lock. The lock of a process that died is broken by one
    that waits. That is a lock that was seen with the same content for `abandoned` seconds, in one call
    or in several. This time must be longer than a holder takes for its block.
    """

    def __init__(self, *, timeout: float, abandoned: float, mode: int = 0o600) -> None:
        self._timeout = timeout
        self._abandoned = abandoned
        self._mode = mode
        self._seen: dict[str, _Sighting] = {}  # by path

    @contextmanager
    def hold(self, path: str) -> Iterator[Callable[[], None]]:
        """Hold the file `path` as a lock during the block, which waits for nothing.

        Yields a function to call right before a change. It raises `LockedError` if this process was
        stopped for so long that another one may break the lock. `LockedError` is also raised if the
        lock cannot be taken.
        """
        token = os.urandom(16).hex().encode()
        with private_file(path, token, mode=self._mode) as private:
            taken = self._take(private, path)

        def require() -> None:
            if time.monotonic() - taken > self._abandoned / 2:
                raise LockedError("this process was stopped while it held the lock", path)

        try:
            yield require
        finally:
            if file_content(path) == token:  # Otherwise another process has broken the lock.
                os.unlink(path)

    def _take(self, private: str, path: str) -> float:
        """Take the lock, and return a time before it was taken."""
        deadline = time.monotonic() + self._timeout
        while True:
            now = time.monotonic()
            if retry_transient(_link, private, path):
                self._seen.pop(path, None)
                return now
            if now > deadline:
                raise LockedError("another process does not release the lock", path)
            self._look(path, now)
            time.sleep(_POLL)

    def _look(self, path: str, now: float) -> None:
        """Notice how long another process holds the lock, and break a lock that is abandoned."""
        found = file_content(path)
        seen = self._seen.get(path)
        if seen is None or seen.content != found:
            while len(self._seen) >= _MAX_SIGHTINGS:
                self._seen.popitem()
            seen = self._seen[path] = _Sighting(found, now)
        seen.looks += 1
        if found is not None and seen.looks > _LOOKS and now - seen.since > self._abandoned:
            _break(path, found)


def _link(private: str, path: str) -> bool:
    """Make `path` another name of the file `private`, unless it exists; return whether it was made."""
    try:
        os.link(private, path)
    except OSError as fault:
        if fault.errno not in NO_LINKS and _links(private) == 2:
            return True
        if isinstance(fault, FileExistsError):
            return False
        raise
    return True


def _links(path: str) -> int:
    """Return the number of names of a file. NFS asks the server for it when a file is opened."""
    with open_fd(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        return os.fstat(file).st_nlink


def _break(path: str, content: bytes) -> None:
    """Remove the lock if it has this content. Of several processes, one moves the file away."""
    away = f"{os.path.dirname(path)}/{staged_name()}"
    with suppress(FileNotFoundError):
        os.rename(path, away)
        if file_content(away) != content:  # It was broken already, and this is the next lock.
            with suppress(FileExistsError):
                os.link(away, path)
        os.unlink(away)
