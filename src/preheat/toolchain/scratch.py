"""Private directories for one compile each, gone afterwards whatever happens to its processes.

A worker holds a lock on the directory it compiles in. The kernel gives the lock back when the worker
dies, so a directory whose lock is free belongs to nobody, and whoever finds it removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress

from preheat.config import environ
from preheat.files import Descriptor, opened

__all__ = ["Scratch", "make", "remove_all", "sweep"]

_PREFIX = "preheat-compile-"
_TRIES = 10  # to make a directory before another process takes it for one that was left behind
_mine: set[Scratch] = set()  # those of this process that still exist


class Scratch:
    """A directory of this process, locked until it is removed."""

    def __init__(self, path: str, lock: Descriptor) -> None:
        self.path, self.lock = path, lock
        _mine.add(self)

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        _mine.discard(self)
        self.lock.close()


def make(links: Mapping[str, str]) -> Scratch | None:
    """A new directory that holds these symbolic links, in the first place that can take them.

    Nothing but links is put there, so that it needs no bytes, which a place in memory may not have.
    None when no place will do.
    """
    for place in _places():
        for _ in range(_TRIES):
            try:
                return _make_in(place, links)
            except (FileNotFoundError, BlockingIOError):  # a sweep took it before it was locked
                continue
            except OSError:
                break
    return None


def _make_in(place: str, links: Mapping[str, str]) -> Scratch:
    path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
    try:
        made = Scratch(path, _locked(path))
    except OSError:  # another process may have taken it for one that was left behind
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
    """Remove every directory of this process, which is about to end and then gives back the locks."""
    for made in list(_mine):
        shutil.rmtree(made.path, ignore_errors=True)


def sweep() -> None:
    """Remove what workers left behind that died amid a compile."""
    for place in _places():
        with suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if entry.name.startswith(_PREFIX):
                    with suppress(OSError):
                        _remove_if_free(entry.path)


def _remove_if_free(path: str) -> None:
    with _locked(path):
        shutil.rmtree(path, ignore_errors=True)


def _locked(path: str) -> Descriptor:
    """A descriptor that holds the lock of our directory `path`; `OSError` when it cannot be had."""
    directory = opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(directory)
    if found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(found, os.stat(path)):
        raise FileNotFoundError(path)
    return directory


def _places() -> Iterator[str]:
    """Where directories are made: in memory where there is such a place, else the temporary directory.

    Not `tempfile.gettempdir`, which holds a lock that a forked child may find taken for ever.
    """
    for place in dict.fromkeys(("/dev/shm", environ().get("TMPDIR", ""), "/tmp")):
        with suppress(OSError):
            if os.path.isabs(place) and _is_safe(os.stat(place)):
                yield place


def _is_safe(found: os.stat_result) -> bool:
    """Whether nobody else can rename what we put there: it is ours or root's, and sticky if shared."""
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in (os.geteuid(), 0) and (not shared or bool(found.st_mode & stat.S_ISVTX))
