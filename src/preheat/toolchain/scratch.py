"""Temporary directories for single compiles, which are removed whatever happens to the processes.

A worker holds a lock on the directory that it compiles in. The kernel releases the lock when the worker
dies, so a directory whose lock is free is left over, and any process that finds it removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress

from preheat.config import environ
from preheat.files import Descriptor, lock_open_file, opened, others_can_replace

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
        shutil.rmtree(self.path, ignore_errors=True)
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
    path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
    try:
        made = Scratch(path, _locked(path))
    except OSError:  # Another process may have swept it.
        shutil.rmtree(path, ignore_errors=True)
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
        shutil.rmtree(made.path, ignore_errors=True)


def sweep() -> None:
    """Remove the directories of workers that died during a compile."""
    for place in _places():
        with suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if entry.name.startswith(_PREFIX):
                    with suppress(OSError), _locked(entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)


def _locked(path: str) -> Descriptor:
    """Return a descriptor that holds the lock of the directory `path`, or raise `OSError`."""
    directory = opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.fstat(directory).st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    lock_open_file(directory, path)
    return directory


def _places() -> Iterator[str]:
    """Yield the locations for directories: in memory if possible, else the temporary directory.

    In such a location, no other user can rename the files of this one. `tempfile.gettempdir`
    is not used: it takes a lock that a forked child may find held for ever.
    """
    for place in dict.fromkeys(("/dev/shm", environ().get("TMPDIR", ""), "/tmp")):
        with suppress(OSError):
            status = os.stat(place)
            mine = status.st_uid in (os.geteuid(), 0)
            if os.path.isabs(place) and mine and not others_can_replace(status):
                yield place
