"""Objects as files in a directory that machines share, such as one on NFS."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from preheat.cache.publish import is_staged, replace, staged_name, sweep
from preheat.cache.remote.engine import RemoteError
from preheat.cache.remote.url import Remote
from preheat.files import opened

__all__ = ["FileEngine"]

_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]+(/(?!\.{1,2}(/|$))[\w.-]+)*", re.ASCII)
_LOCK = ".preheat-lock"  # held while an object is compared and replaced
_MODE = 0o666  # The umask decides who else may replace an object.
_PASSING = {errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}


class FileEngine:
    """One file for each object, replaced by a rename and created by an exclusive link.

    `swap` and `discard` compare under `flock`. It holds between processes of one machine, and between
    machines where the file system supports it, as NFS 4 does.
    """

    conditional = True

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        self.name = remote.name
        self._root = remote.path
        self._timeout = timeout
        self._folders: set[str] = set()  # those that exist

    def read(self, name: str) -> bytes | None:
        with self._faults():
            return _content(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        with self._faults():
            replace(self._made_path(name), [data], mode=_MODE)

    def delete(self, name: str) -> None:
        with self._faults(), suppress(FileNotFoundError):
            os.unlink(self._path(name))

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
            return _link_new(self._made_path(name), data)

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        del seconds
        with self._faults(), self._compared(name, old) as same:
            if same:
                replace(self._path(name), [new], mode=_MODE)
            return same

    def discard(self, name: str, old: bytes) -> bool:
        with self._faults(), self._compared(name, old) as same:
            if same:
                os.unlink(self._path(name))
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
        if _content(path) != old:  # Without the lock, which needs a folder that can be written.
            yield False
            return
        with opened(f"{os.path.dirname(path)}/{_LOCK}", os.O_RDWR | os.O_CREAT, _MODE) as lock:
            self._lock(lock)
            yield _content(path) == old

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            reason = fault.strerror or str(fault)
            message = f"{self.name}: {reason}"
            raise RemoteError(message, retryable=fault.errno in _PASSING) from None


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _link_new(path: str, data: bytes) -> bool:
    """Create a file with its whole content at once, unless there is one."""
    whole = f"{os.path.dirname(path)}/{staged_name()}"
    replace(whole, [data], mode=_MODE)
    try:
        os.link(whole, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(whole)
    return True


def _files(folder: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif not is_staged(entry.name) and entry.name != _LOCK:
                yield entry.path
