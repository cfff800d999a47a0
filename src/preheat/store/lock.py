"""An advisory lock between processes of one node, released by the kernel when its owner dies."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from preheat.process import fork
from preheat.process.files import Descriptor, lock_open_file, open_fd
from preheat.process.locks import Holder, Lock
from preheat.store.filesystem import TRANSIENT, retry_transient
from preheat.store.trust import DistrustedError, NotAFileError

__all__ = ["FileLock", "hold", "release_lost", "sweep"]

_KEY = "[0-9a-f]" * 64  # the name of a lock that is removed again
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_POLL = (0.001, 0.05)  # first and longest pause between two tries, in seconds


class FileLock:
    """`flock` on a separate file, which is removed on release unless `keep` is given.

    Lock files of keys are removed, because there is one for each key. A lock that is taken again
    and again keeps its file. `owner` is the frame of the function that holds the lock, not of a
    generator: when an interrupt ends the function before it releases the lock, `release_lost` does so.
    With `trust`, the file may belong to another user.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: bool = False,
        owner: FrameType | None = None,
        trust: bool = False,
    ) -> None:
        self.path = path
        self._keep = keep
        self._trust = trust
        self._owner = None if owner is None else Holder(owner)
        self._file: Descriptor | None = None

    def acquire(self, timeout: float) -> bool:
        """Take the lock within `timeout` seconds; return False when another holder kept it that long.

        Raises `OSError` if the directory does not allow locks.
        """
        if self.attempt():
            return True
        deadline = time.monotonic() + timeout
        pause, longest = _POLL
        while True:
            release_lost()  # An interrupted function of this process may hold it.
            if self.attempt():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, longest)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def release(self) -> None:
        """Release the lock. Does nothing when it is not held."""
        file = self._file
        if file is not None and not file.closed:
            with suppress(OSError):  # A file that is left behind does no harm.
                if not self._keep:
                    lock_open_file(file, self.path)  # An interrupted attempt may not hold it.
                    os.unlink(self.path)
            with suppress(OSError):  # Unlock now, even if a forked child has a copy of the descriptor.
                fcntl.flock(file, fcntl.LOCK_UN)
        self._close()
        if self._owner is not None:
            self._owner.end()

    def detach(self) -> None:
        """Hold the lock beyond the end of the function that took it, until `release`."""
        self._owner = None

    def owner_is_gone(self) -> bool:
        """Return whether the function that holds the lock has ended."""
        return self._owner is not None and not self._owner.alive()

    def attempt(self, *, retry: bool = True) -> bool:
        """Take the lock if it is free. Unlike `acquire`, do not release locks that were lost.

        With `retry`, try again after an error that may pass in a moment.
        """
        if self._file is not None:
            return False
        # Set before the file is locked, so that `release_lost` finds the lock after an interrupt.
        _held.add(self)
        try:
            self._file = file = open_fd(self.path, _FLAGS)
            _require_file(os.fstat(file), self.path, trust=self._trust)
            lock_open_file(file, self.path)
        except (BlockingIOError, FileNotFoundError):
            missing = self._file is None  # The directory does not exist.
            self._close()
            if missing:
                raise
            return False
        except OSError as fault:
            self._close()
            if not retry or fault.errno not in TRANSIENT:
                raise
        except BaseException:
            self._close()
            raise
        else:
            return True
        return retry_transient(self.attempt, retry=False)

    def _close(self) -> None:
        file = self._file
        if file is not None:
            file.close()
        self._file = None
        _held.discard(self)


def _require_file(status: os.stat_result, path: Path, *, trust: bool) -> None:
    """Raise `OSError` for anything but a file, or a file of another user, who could hold it forever."""
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError
    if not trust and status.st_uid not in (os.geteuid(), 0):
        raise DistrustedError(f"the lock file {path} belongs to user {status.st_uid}, not to you")


class _HeldLocks(set["FileLock"]):
    """The locks that this process holds."""

    def after_fork(self) -> None:
        """Close the child's copies: with one of them open, a lock would outlive a parent that died."""
        for lock in list(self):
            lock._close()


_held = _HeldLocks()
fork.register(_held)


def release_lost() -> None:
    """Release the locks whose functions were interrupted before they could release them."""
    if _held:
        with _releasing:
            for lock in list(_held):
                if lock.owner_is_gone():
                    lock.release()


_releasing = Lock()


class hold:  # noqa: N801 - used like a function
    """Hold a lock with a permanent file during a block. The value is True if it was taken in time.

    The block runs without the lock if the lock is not `required` and cannot be taken at all. The path
    may be a function that creates the directory first. The block must not be in a generator. `trust`
    means the same as for `FileLock`.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path],
        timeout: float,
        *,
        required: bool = True,
        trust: bool = False,
    ) -> None:
        self._path = path
        self._timeout = timeout
        self._required = required
        self._trust = trust
        self._lock: FileLock | None = None

    def __enter__(self) -> bool:
        try:
            path = self._path() if callable(self._path) else self._path
            self._lock = FileLock(path, keep=True, owner=sys._getframe(1), trust=self._trust)
            return self._lock.acquire(self._timeout)
        except OSError:
            if self._required:
                raise
            return False

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()


def sweep(directory: Path, older_than: float) -> None:
    """Remove the lock files of keys that are older than that and not held: their owners were killed.

    Other files stay, including those of locks with permanent files.
    """
    for name in fnmatch.filter(os.listdir(directory), _KEY):
        path = directory / name
        with suppress(OSError):  # It was removed in the meantime, or it is not a file.
            if os.lstat(path).st_mtime < older_than:
                lock = FileLock(path, owner=sys._getframe())
                if lock.acquire(0):
                    lock.release()
