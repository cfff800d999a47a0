"""An advisory lock between processes of one node, released by the kernel when its owner dies."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from preheat.store.trust import DistrustedError, NotAFileError

__all__ = ["FileLock", "hold", "sweep"]

_KEY = "[0-9a-f]" * 64  # the name of a lock that is removed again
_POLL = (0.001, 0.05)  # first and longest pause between two tries, in seconds


class FileLock:
    """`flock` on a file of its own, which is removed again on release unless it is to be kept.

    One lock a key would leave litter; a lock that is taken again and again is better kept.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self.path, self._keep = path, keep
        self._descriptor: int | None = None

    def acquire(self, timeout: float) -> bool:
        """Take the lock within `timeout` seconds; False when someone else kept it that long.

        Raises `OSError` where the directory does not allow locks.
        """
        deadline = time.monotonic() + timeout
        pause, longest = _POLL
        while not self._try():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, longest)
        return True

    def release(self) -> None:
        """Give the lock back. Does nothing when it is not held."""
        if self._descriptor is not None:
            with suppress(OSError):  # a file left behind is only litter
                if not self._keep and self._is_at_path(self._descriptor):
                    os.unlink(self.path)
            self._close()

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(self.path, flags, 0o600)
        try:
            _require_own_file(os.fstat(descriptor), self.path)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last owner may have unlinked the file between our open and our lock: then what we
            # hold is a lock nobody else can find.
            if not self._is_at_path(descriptor):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _is_at_path(self, descriptor: int) -> bool:
        """Whether our file is still the one others find; a cleaner of old files may have been here."""
        return os.path.samestat(os.fstat(descriptor), os.stat(self.path))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            os.close(descriptor)


def _require_own_file(found: os.stat_result, path: Path) -> None:
    """`OSError` for what is no file, or one whose lock a stranger may hold for as long as he likes."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError
    if found.st_uid not in (os.geteuid(), 0):
        raise DistrustedError(f"the lock file {path} belongs to user {found.st_uid}, not to you")


# Locks held by this process. A forked child closes its copies at once: with them open the lock would
# outlive a parent that died.
_held: set[FileLock] = set()


def _close_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def hold(path: Path, timeout: float) -> Iterator[bool]:
    """Hold a kept lock for the block; the value says whether it was taken in time."""
    lock = FileLock(path, keep=True)
    taken = lock.acquire(timeout)
    try:
        yield taken
    finally:
        lock.release()


def sweep(directory: Path, older_than: float) -> None:
    """Remove the locks of keys that killed owners left behind: made before then, and held by nobody.

    Other files stay, those of locks that are kept on purpose among them.
    """
    for name in fnmatch.filter(os.listdir(directory), _KEY):
        path = directory / name
        with suppress(OSError):  # someone else removed it, or it is no file: it is only litter
            if os.lstat(path).st_mtime < older_than:
                lock = FileLock(path)
                if lock.acquire(0):
                    lock.release()
