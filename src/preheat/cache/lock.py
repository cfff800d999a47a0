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

from preheat import fork
from preheat.cache.trust import DistrustedError, NotAFileError
from preheat.files import Descriptor, opened
from preheat.locks import Call, Lock

__all__ = ["FileLock", "hold", "release_lost", "sweep"]

_KEY = "[0-9a-f]" * 64  # the name of a lock that is removed again
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_POLL = (0.001, 0.05)  # first and longest pause between two tries, in seconds


class FileLock:
    """`flock` on a file of its own, which is removed again on release unless it is to be kept.

    One lock a key would leave litter; a lock that is taken again and again is better kept. `owner` is
    the frame of the function that holds the lock, no generator's: when an interrupt ends the function
    before it gives the lock back, `release_lost` does. With `trust` the file may be another user's.
    """

    def __init__(
        self, path: Path, *, keep: bool = False, owner: FrameType | None = None, trust: bool = False
    ) -> None:
        self.path, self._keep, self._trust = path, keep, trust
        self._owner = None if owner is None else Call(owner)
        self._file: Descriptor | None = None

    def acquire(self, timeout: float) -> bool:
        """Take the lock within `timeout` seconds; False when someone else kept it that long.

        Raises `OSError` where the directory does not allow locks.
        """
        release_lost()
        deadline = time.monotonic() + timeout
        pause, longest = _POLL
        while not self._try():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, longest)
            release_lost()
        return True

    def release(self) -> None:
        """Give the lock back. Does nothing when it is not held."""
        file = self._file
        if file is not None and not file.closed:
            with suppress(OSError):  # a file left behind is only litter
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an interrupted try may not have it
                if not self._keep and self._is_at_path(file):
                    os.unlink(self.path)
            with suppress(OSError):  # at once, even where a forked child still has a copy
                fcntl.flock(file, fcntl.LOCK_UN)
        self._close()
        if self._owner is not None:
            self._owner.end()

    def is_lost(self) -> bool:
        """Return whether the function that holds the lock has ended."""
        return self._owner is not None and not self._owner.alive()

    def _try(self) -> bool:
        if self._file is not None:
            return False
        _held.add(self)  # before it is locked: whatever ends this function, the lock can be found
        try:
            self._file = file = opened(self.path, _FLAGS)
            _require_file(os.fstat(file), self.path, trust=self._trust)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last owner may have unlinked the file between our open and our lock: then what we
            # hold is a lock nobody else can find.
            if not self._is_at_path(file):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            missing = self._file is None  # there is not even a directory for it
            self._close()
            if missing:
                raise
            return False
        except BaseException:
            self._close()
            raise
        return True

    def _is_at_path(self, file: Descriptor) -> bool:
        """Whether our file is still the one others find; a cleaner of old files may have been here."""
        return os.path.samestat(os.fstat(file), os.stat(self.path))

    def _close(self) -> None:
        file = self._file
        if file is not None:
            file.close()
        self._file = None
        _held.discard(self)


def _require_file(found: os.stat_result, path: Path, *, trust: bool) -> None:
    """`OSError` for what is no file, or one whose lock a stranger may hold for as long as he likes."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError
    if not trust and found.st_uid not in (os.geteuid(), 0):
        raise DistrustedError(f"the lock file {path} belongs to user {found.st_uid}, not to you")


class _HeldLocks(set["FileLock"]):
    """The locks that this process holds."""

    def after_fork(self) -> None:
        """Close the child's copies: with one of them open, a lock would outlive a parent that died."""
        for lock in list(self):
            lock._close()


_held = _HeldLocks()
fork.register(_held)


def release_lost() -> None:
    """Give back the locks whose functions were interrupted before they could."""
    if _held:
        with _releasing:
            for lock in list(_held):
                if lock.is_lost():
                    lock.release()


_releasing = Lock()


class hold:  # noqa: N801 - used like a function
    """Hold a kept lock for the block; the value says whether it was taken in time.

    A lock that is not `required` and cannot be had at all is done without. The path may be a function
    that prepares the place for it. The block must not belong to a generator, and `trust` means the
    same as there: see `FileLock`.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path],
        timeout: float,
        *,
        required: bool = True,
        trust: bool = False,
    ) -> None:
        self._path, self._timeout, self._required, self._trust = path, timeout, required, trust
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
    """Remove the locks of keys that killed owners left behind: made before then, and held by nobody.

    Other files stay, those of locks that are kept on purpose among them.
    """
    for name in fnmatch.filter(os.listdir(directory), _KEY):
        path = directory / name
        with suppress(OSError):  # someone else removed it, or it is no file: it is only litter
            if os.lstat(path).st_mtime < older_than:
                lock = FileLock(path, owner=sys._getframe())
                if lock.acquire(0):
                    lock.release()
