"""Files that one of many processes creates or changes, on one node or on several, by hard links.

A server makes a link in one step, and refuses it where there is a file. That holds on NFS, Lustre and
the like, where `flock` may be missing, or hold on one node alone. An answer of the server may get lost:
then `link` fails although the link was made, and the number of links of the file tells the truth.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from preheat.cache.publish import replace, staged_name
from preheat.cache.transient import retried
from preheat.files import opened

__all__ = ["NO_LINKS", "create_by_link", "file_content", "lock_by_link"]

#: Errors of a filesystem that has no hard links.
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})
_POLL = 0.005  # seconds between two attempts to take a lock
_ABANDONED = 1 / 3  # of the time to wait: a lock that stays the same for so long is broken
# A lock is broken only if it was seen unchanged more often than this. After a pause of the server, its
# holder therefore gets time to go on as well.
_LOOKS = 10


def create_by_link(path: str, data: bytes, *, mode: int = 0o600) -> bool:
    """Create a file with its whole content, unless there is one, and return whether it was created."""
    with _private_file(path, data, mode) as private:
        return _link(private, path)


@contextmanager
def lock_by_link(path: str, *, timeout: float, mode: int = 0o600) -> Iterator[None]:
    """Hold the file `path` as a lock during the block, which makes a few calls and waits for nothing.

    The lock of a process that died is broken by one that waits. `TimeoutError` after `timeout` seconds.
    A process that is stopped inside of the block for longer than others wait may lose the lock.
    """
    token = os.urandom(16).hex().encode()
    with _private_file(path, token, mode) as private:
        _take(private, path, timeout)
    try:
        yield
    finally:
        if file_content(path) == token:  # Otherwise another process has broken the lock.
            os.unlink(path)


def file_content(path: str) -> bytes | None:
    """Return the content of a file; None when there is none."""
    try:
        return retried(_read, path)
    except FileNotFoundError:
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@contextmanager
def _private_file(path: str, data: bytes, mode: int) -> Iterator[str]:
    """Write a file beside `path` under a name of its own, which is removed after the block."""
    private = f"{os.path.dirname(path)}/{staged_name()}"
    replace(private, [data], mode=mode, durable=False)
    try:
        yield private
    finally:
        with suppress(OSError):  # A sweep removes it.
            os.unlink(private)


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
    with opened(path, os.O_RDONLY) as file:
        return os.fstat(file).st_nlink


def _take(private: str, path: str, timeout: float) -> None:
    seen = None  # the content of the lock that another process holds
    since = deadline = time.monotonic()
    deadline += timeout
    looks = 0
    while not retried(_link, private, path):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process does not release the lock", path)
        if (found := file_content(path)) != seen:
            seen, since, looks = found, now, 0
        looks += 1
        if found is not None and looks > _LOOKS and now - since > timeout * _ABANDONED:
            _break(path, found)
        time.sleep(_POLL)


def _break(path: str, content: bytes) -> None:
    """Remove the lock if it has this content. Of several processes, one moves the file away."""
    away = f"{os.path.dirname(path)}/{staged_name()}"
    with suppress(FileNotFoundError):
        os.rename(path, away)
        if file_content(away) != content:  # It was broken already, and this is the next lock.
            with suppress(FileExistsError):
                os.link(away, path)
        os.unlink(away)
