"""Temporary directories for single compiles, which are removed whatever happens to the processes.

A worker holds a lock on the directory that it compiles in. The kernel releases the lock when the worker
dies, so a directory whose lock is free is left over, and any process that finds it removes it.
"""

from __future__ import annotations

import os

from preheat.process.files import Descriptor, lock_open_file, open_fd, others_can_replace
from preheat.process.locks import no_fork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Scratch", "make", "remove_all", "sweep"]

_PREFIX = "preheat-compile-"
_TRIES = 10  # Attempts to lock a new directory before another process removes it as left over.
_mine: set[Scratch] = set()  # The directories of this process that still exist.


class Scratch:
    """A directory of this process, locked until it is removed."""

    def __init__(self, path: str, lock: Descriptor) -> None:
        self.path = path
        self.lock = lock
        _mine.add(self)

    def remove(self) -> None:
        """Remove the directory and its contents."""
        _remove(self.path)
        _mine.discard(self)
        self.lock.close()


def make(links: Mapping[str, str]) -> Scratch | None:
    """Create a directory with these symbolic links in the first location that works, or return None.

    The directory contains only links, which take no space: a file system in memory may be full.
    """
    for place in _places():
        for _ in range(_TRIES):
            try:
                return _make_in(place, links)
            except (FileNotFoundError, BlockingIOError):
                continue  # Another process swept it before it was locked.
            except OSError:
                break
    return None


def _make_in(place: str, links: Mapping[str, str]) -> Scratch:
    path = f"{place}/{_PREFIX}{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    try:
        made = Scratch(path, _lock(path))
    except OSError:  # Another process may have swept it.
        _remove(path)
        raise
    try:
        for name, target in links.items():
            os.symlink(target, name, dir_fd=made.lock)
    except OSError:
        made.remove()
        raise
    return made


def remove_all() -> None:
    """Remove every directory of this process, which is about to exit and to release the locks."""
    for made in list(_mine):
        _remove(made.path)


def sweep() -> None:
    """Remove the directories of workers that died during a compile."""
    for place in _places():
        for path, _ in _entries(place):
            if os.path.basename(path).startswith(_PREFIX):
                try:
                    with _lock(path):
                        _remove(path)
                except OSError:
                    pass


def _entries(directory: str) -> list[tuple[str, bool]]:
    """Return the paths in a directory that can be read, and whether they are directories."""
    try:
        with os.scandir(directory) as entries:
            return [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []


def _remove(directory: str) -> None:
    """Remove a directory of this user with all that is in it and can be removed.

    `shutil.rmtree` does the same, but a worker starts faster without the modules that it imports.
    """
    for path, is_directory in _entries(directory):
        if is_directory:
            _remove(path)
        else:
            _attempt(os.unlink, path)
    _attempt(os.rmdir, directory)


def _attempt(remove: Callable[[str], None], path: str) -> bool:
    try:
        remove(path)
    except OSError:
        return False
    return True


def _lock(path: str) -> Descriptor:
    """Return a descriptor that holds the lock of the directory `path`, or raise `OSError`."""
    directory = open_fd(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.fstat(directory).st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    lock_open_file(directory, path)
    return directory


def _places() -> Iterator[str]:
    """Yield the locations for directories: in memory if possible, else the temporary directory.

    In such a location, no other user can rename the files of this one. `tempfile.gettempdir`
    is not used: it takes a lock that may stay locked in a forked child.
    """
    if _is_safe("/dev/shm"):
        yield "/dev/shm"
    with no_fork:
        from preheat.model.config import environ  # A worker seldom gets here.

    for place in dict.fromkeys((environ().get("TMPDIR", ""), "/tmp")):
        if place != "/dev/shm" and _is_safe(place):
            yield place


def _is_safe(place: str) -> bool:
    """Return whether `place` is an absolute path where no other user can replace entries."""
    try:
        status = os.stat(place)
    except OSError:
        return False
    mine = status.st_uid in (os.geteuid(), 0)
    return os.path.isabs(place) and mine and not others_can_replace(status)
