"""Objects as files in a directory that machines share, such as one on NFS."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import TypeVar

from preheat.process.files import open_fd
from preheat.store.filesystem import is_silly_renamed, is_transient, retry_transient
from preheat.store.publish import is_staged, replace, sweep
from preheat.store.remote.engine import Engine, ObjectError, RemoteError
from preheat.store.remote.links import (
    NO_LINKS,
    LinkLocks,
    LockedError,
    create_by_link,
    file_content,
    private_file,
)
from preheat.store.remote.url import ROOT, Remote, digest_of
from preheat.store.trust import DistrustedError, NotAFileError, read_file, writable_by_others

__all__ = ["FileEngine"]

_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]+(/(?!\.{1,2}(/|$))[\w.-]+)*", re.ASCII)
_ENTRIES = re.compile(f"{ROOT}[0-9a-f]{{2}}")  # a folder of entries
_LOCK = ".preheat-lock-"  # and a name: held while the object is compared and replaced
# Seconds after which a lock that has stayed the same is broken. It is the same on all hosts, whatever
# the time limits of their requests are: a holder that was stopped for half of it changes nothing.
_ABANDONED = 10.0
_PAGE = 1000  # names of a folder that share a time limit
#: What is wrong with one file, while the directory can be used. A socket cannot be opened (ENXIO).
_ONE_FILE = (errno.EISDIR, errno.ELOOP, errno.EFBIG, errno.ENXIO)

T = TypeVar("T")


class _NotAFolderError(OSError):
    """A link, a file or the like is in the place of a folder of the store."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOTDIR, f"{path} is a link or a file, and not a folder", path)
        self.path = path


class FileEngine(Engine):
    """One file for each object, replaced by a rename and created by an exclusive link.

    `swap` and `discard` compare under a lock, which is an exclusive link, too. Where a file system has
    no hard links, as behind many gateways to object stores, the first `create` sets `conditional` to
    False, and conditions hold as well as they can.

    In a store that is `private`, objects have no signatures, and the owners and modes of files decide
    what is trusted. Only this user can write what it creates, and it reads nothing that another user
    but root can write. The caller has checked the path to the root. Otherwise the umask decides who may
    replace objects.

    The root may be a link. A link in the place of a folder below it is not followed, because it may
    lead out of the store.
    """

    closes_after_fork = True
    group_size = 100  # A network file system takes milliseconds for each name.

    def __init__(
        self, remote: Remote, *, timeout: float, private: bool = False, mode: int | None = None
    ) -> None:
        """`mode` is for new files, by default 0600 in a private store. Folders have 0700 then."""
        super().__init__(remote.name, timeout=timeout)
        self.conditional = True
        self._private = private
        self._mode = mode or (0o600 if private else 0o666)
        self._trusted: set[str] = set()  # folders that other users cannot write
        self._root = remote.path
        self._locks = LinkLocks(timeout=0.8 * self._timeout, abandoned=_ABANDONED, mode=self._mode)
        self._folders: set[str] = set()  # those that exist

    def _get(self, name: str, limit: int) -> bytes | None:
        with self._faults(reads=True):
            try:
                self._require_folders(os.path.dirname(name))
                return read_file(self._path(name), trust=not self._private, limit=limit)[0]
            except FileNotFoundError:
                return None

    def _put(self, name: str, data: bytes) -> None:
        def write(path: str) -> None:
            replace(path, [data], mode=self._mode)

        with self._faults():
            self._in_folder(name, write)

    def _remove(self, name: str) -> None:
        with self._faults(), suppress(FileNotFoundError):
            path = self._path(name)
            self._require_folders(os.path.dirname(name))
            retry_transient(os.unlink, path)

    def _existing(self, names: list[str]) -> set[str]:
        with self._faults(reads=True):
            return {name for name in names if _exists(self._path(name))}

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        with self._faults():
            yield from self._list_folder(prefix.rstrip("/"))

    def _create(self, name: str, data: bytes, seconds: float) -> bool:
        del seconds  # A filesystem does not expire files.
        with self._faults():
            return self._in_folder(name, lambda path: self._create_file(path, data))

    def _swap(self, name: str, old: bytes, new: bytes, seconds: float) -> bool:
        del seconds
        with self._faults():
            path = self._path(name)
            if self._content(name) != old:  # without the lock, which needs a writable folder
                return False
            # The file is written before the lock is taken, so that the lock is held for a short time.
            with private_file(path, new, mode=self._mode) as staged, self._lock(path) as require_lock:
                if self._content(name) != old:
                    return False
                require_lock()
                _rename(staged, path, new)
        return True

    def _discard(self, name: str, old: bytes) -> bool:
        with self._faults():
            path = self._path(name)
            if self._content(name) != old:
                return False
            with self._lock(path) as require_lock:
                if self._content(name) != old:
                    return False
                require_lock()
                with suppress(FileNotFoundError):  # The answer to an earlier attempt was lost.
                    retry_transient(os.unlink, path)
        return True

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):  # It may come from the list of another store.
            raise OSError(errno.EINVAL, f"{name!r} is not a name of an object")
        return f"{self._root}/{name}"

    def _in_folder(self, name: str, act: Callable[[str], T]) -> T:
        """Return what `act` returns for the path of an object, and create its folder if it is missing.

        A folder that was created earlier may have been removed since. It is then created again.
        """
        path = self._path(name)
        folder = os.path.dirname(name)
        if folder in self._folders:
            try:
                self._require_folders(folder)
                return act(path)
            except FileNotFoundError:
                self._folders.discard(folder)
                self._trusted.discard(folder)
        self._make_folders(folder)
        with suppress(OSError):
            sweep(os.path.dirname(path), beside=True)
        self._folders.add(folder)
        return act(path)

    @property
    def _folder_mode(self) -> int:
        return 0o777 if self._mode & 0o077 else 0o700

    def _make_folders(self, folder: str) -> None:
        """Create a folder below the root and those above it, and check them.

        `os.makedirs` applies its mode to the last folder only.
        """
        # The parent of the root is not created. If it is missing, the filesystem is probably not
        # mounted.
        if not os.path.isdir(self._root):
            with suppress(FileExistsError):
                os.mkdir(self._root, self._folder_mode)
        for path in self._steps(folder):
            if not os.path.lexists(path):
                with suppress(FileExistsError):  # Another process was faster.
                    os.mkdir(path, self._folder_mode)
            self._require_folder(path)  # before anything is created in it
        self._require_folders(folder)

    def _steps(self, folder: str) -> Iterator[str]:
        """Yield the paths of the folders from the root to `folder`, without the root."""
        path = self._root
        for part in filter(None, folder.split("/")):
            path = f"{path}/{part}"
            yield path

    def _require_folders(self, folder: str) -> None:
        """Raise `OSError` unless a folder and those above it, up to the root, can be used.

        Whoever may write to a shared store can put a link in the place of a folder at any time, so the
        folders are checked at every call. Only this user and root can change a private store's folders.
        """
        if folder in self._trusted:
            return
        if self._private:
            self._require_private_root()
        for path in self._steps(folder):
            self._require_folder(path)
        if self._private:
            self._trusted.add(folder)

    def _require_private_root(self) -> None:
        """Raise `RemoteError` if another user can write to the root, or has made a link in its place.

        It may not have existed when the caller checked the path to it.
        """
        link = retry_transient(os.lstat, self._root)
        status = retry_transient(os.stat, self._root)
        why = writable_by_others(status)
        if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
            why = f"it is a symbolic link owned by user {link.st_uid}"
        if why is not None:
            raise RemoteError(f"{self.name}: {why}")

    def _require_folder(self, path: str) -> None:
        """Raise `OSError` for a link, and for a folder of a private store that others can write."""
        status = retry_transient(os.lstat, path)
        if not stat.S_ISDIR(status.st_mode):
            raise _NotAFolderError(path)
        if self._private and (why := writable_by_others(status)):
            raise DistrustedError(f"{path}: {why}")

    def _content(self, name: str) -> bytes | None:
        """Return the content of a small object; None when there is none, or no folder for it."""
        path = self._path(name)
        try:
            self._require_folders(os.path.dirname(name))
        except FileNotFoundError:
            return None
        return file_content(path, trust=not self._private)

    def _create_file(self, path: str, data: bytes) -> bool:
        if self.conditional:
            try:
                return create_by_link(path, data, mode=self._mode)
            except OSError as fault:
                if fault.errno not in NO_LINKS:
                    raise
                self.conditional = False
        return _create_directly(path, data, self._mode)

    def _lock(self, path: str) -> AbstractContextManager[Callable[[], None]]:
        """Hold the lock of an object during a block; see `LinkLocks.hold`."""
        if not self.conditional:
            return nullcontext(lambda: None)
        folder, name = os.path.split(path)
        return self._locks.hold(f"{folder}/{_LOCK}{name}")

    @contextmanager
    def _faults(self, *, reads: bool = False) -> Iterator[None]:
        try:
            yield
        except RemoteError:
            raise
        except OSError as fault:
            reason = fault.strerror or str(fault)
            message = f"{self.name}: {reason}"
            if self._concerns_one_file(fault, reads=reads):
                raise ObjectError(message) from None
            retryable = is_transient(fault) or isinstance(fault, BlockingIOError)
            raise RemoteError(message, retryable=retryable) from None

    def _concerns_one_file(self, fault: OSError, *, reads: bool) -> bool:
        """Return whether a fault concerns some objects only, and the others can be used."""
        if isinstance(fault, _NotAFolderError):  # Entries are in many folders, leases in one.
            return _ENTRIES.fullmatch(fault.path.removeprefix(f"{self._root}/")) is not None
        if isinstance(fault, DistrustedError | NotAFileError | LockedError):
            return True
        if fault.errno in _ONE_FILE:
            return True
        # Another user may keep a file private in a directory that all read.
        return reads and fault.errno == errno.EACCES and _can_be_searched(self._root)

    def _list_folder(self, folder: str) -> Iterator[list[str]]:
        """Yield pages with the names of all objects in a folder, and those below it.

        A directory counts as an object, so that a check can report it, if it is in the place of an
        entry, or if it is not a folder of preheat and cannot be listed, such as `lost+found`.
        """
        try:
            found = os.scandir(self._path(folder) if folder else self._root)
        except FileNotFoundError:
            return
        except PermissionError:
            if not folder or f"{folder}/".startswith(ROOT):  # Then the list would lack entries.
                raise
            yield [folder]
            return
        below: list[str] = []
        with found:
            while entries := list(islice(found, _PAGE)):
                page = []
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False) and _is_folder(name):
                        below.append(name)
                    elif not _is_hidden(entry.name):
                        page.append(name)
                yield page
        for name in below:
            yield from self._list_folder(name)


def _is_folder(name: str) -> bool:
    """Return whether a directory of this name can have objects, and is not in the place of one."""
    return digest_of(name) is None and _NAME.fullmatch(name) is not None


def _exists(path: str) -> bool:
    try:
        retry_transient(os.stat, path)
    except FileNotFoundError:
        return False
    return True


def _can_be_searched(directory: str) -> bool:
    try:
        os.stat(f"{directory}/.")
    except OSError:
        return False
    return True


def _create_directly(path: str, data: bytes, mode: int) -> bool:
    """Create a file unless there is one, where there are no links. A reader may see a part of it."""
    try:
        with open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            os.write(file, data)
    except FileExistsError:
        return False
    return True


def _rename(staged: str, path: str, data: bytes) -> None:
    """Give a file with the content `data` another name."""
    try:
        retry_transient(os.replace, staged, path)
    except FileNotFoundError:  # The answer to an earlier attempt may have been lost.
        if file_content(path) != data:
            raise


def _is_hidden(name: str) -> bool:
    """Return whether a file is no object: it is staged, a lock, or was removed while it was open."""
    return is_staged(name) or name.startswith(_LOCK) or bool(is_silly_renamed(name))
