"""Objects as files in a directory that machines share, such as one on NFS."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from preheat.cache.filesystem import is_silly_renamed
from preheat.cache.publish import is_staged, replace, sweep
from preheat.cache.remote.engine import RemoteError
from preheat.cache.remote.links import NO_LINKS, create_by_link, file_content, lock_by_link
from preheat.cache.remote.url import Remote
from preheat.cache.transient import is_transient, retried
from preheat.files import opened

__all__ = ["FileEngine"]

_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]+(/(?!\.{1,2}(/|$))[\w.-]+)*", re.ASCII)
_LOCK = ".preheat-lock-"  # and a name: held while the object is compared and replaced
_MODE = 0o666  # The umask decides who else may replace an object.


class FileEngine:
    """One file for each object, replaced by a rename and created by an exclusive link.

    `swap` and `discard` compare under a lock, which is an exclusive link, too. Where a file system has
    no hard links, as behind many gateways to object stores, the first `create` sets `conditional` to
    False, and conditions hold as well as they can.
    """

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        self.conditional = True
        self.name = remote.name
        self._root = remote.path
        self._timeout = timeout
        self._folders: set[str] = set()  # those that exist

    def read(self, name: str) -> bytes | None:
        with self._faults():
            return file_content(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        with self._faults():
            replace(self._made_path(name), [data], mode=_MODE)

    def delete(self, name: str) -> None:
        with self._faults(), suppress(FileNotFoundError):
            retried(os.unlink, self._path(name))

    def existing(self, names: Iterable[str]) -> set[str]:
        with self._faults():
            return {name for name in names if _exists(self._path(name))}

    def names(self, prefix: str = "") -> Iterator[str]:
        with self._faults():
            folder = self._path(prefix.rstrip("/")) if prefix else self._root
            for path in _files(folder):
                yield os.path.relpath(path, self._root)

    def create(self, name: str, data: bytes, *, seconds: float) -> bool:
        del seconds  # Nothing removes a file by itself.
        with self._faults():
            return self._create(self._made_path(name), data)

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        del seconds
        with self._faults(), self._compared(name, old) as same:
            if same:
                replace(self._path(name), [new], mode=_MODE)
            return same

    def discard(self, name: str, old: bytes) -> bool:
        with self._faults(), self._compared(name, old) as same:
            if same:
                retried(os.unlink, self._path(name))
            return same

    def close(self) -> None:
        pass  # No file stays open.

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):  # It may come from the list of another store.
            raise OSError(errno.EINVAL, f"{name!r} is not a name of an object")
        return f"{self._root}/{name}"

    def _made_path(self, name: str) -> str:
        """Return the path of an object, and create its folder, or clean it up, at the first call."""
        path = self._path(name)
        folder = os.path.dirname(path)
        if folder not in self._folders:
            # The folder of the root must exist: it is missing where a file system is not mounted.
            with suppress(FileExistsError):
                os.mkdir(self._root)
            os.makedirs(folder, exist_ok=True)
            sweep(folder, time.time(), beside=True)
            self._folders.add(folder)
        return path

    @contextmanager
    def _compared(self, name: str, old: bytes) -> Iterator[bool]:
        """Say whether an object has this content, and hold the lock of its folder during the block."""
        path = self._path(name)
        if file_content(path) != old:  # Without the lock, which needs a folder that can be written.
            yield False
            return
        with self._lock(path):
            yield file_content(path) == old

    def _create(self, path: str, data: bytes) -> bool:
        if self.conditional:
            try:
                return create_by_link(path, data, mode=_MODE)
            except OSError as fault:
                if fault.errno not in NO_LINKS:
                    raise
                self.conditional = False
        return _create_directly(path, data)

    def _lock(self, path: str) -> AbstractContextManager[None]:
        """Hold the lock of an object during a block."""
        if not self.conditional:
            return nullcontext()
        folder, name = os.path.split(path)
        return lock_by_link(f"{folder}/{_LOCK}{name}", timeout=0.8 * self._timeout, mode=_MODE)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            reason = fault.strerror or str(fault)
            message = f"{self.name}: {reason}"
            retryable = is_transient(fault) or isinstance(fault, BlockingIOError)
            raise RemoteError(message, retryable=retryable) from None


def _exists(path: str) -> bool:
    try:
        retried(os.stat, path)
    except FileNotFoundError:
        return False
    return True


def _create_directly(path: str, data: bytes) -> bool:
    """Create a file unless there is one, where there are no links. A reader may see a part of it."""
    try:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE) as file:
            os.write(file, data)
    except FileExistsError:
        return False
    return True


def _files(folder: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif not _is_hidden(entry.name):
                yield entry.path


def _is_hidden(name: str) -> bool:
    """Return whether a file is no object: it is staged, a lock, or was removed while it was open."""
    return is_staged(name) or name.startswith(_LOCK) or bool(is_silly_renamed(name))
