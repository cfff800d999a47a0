"""File descriptors that are always closed, locks on them, and reading of whole files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from functools import partial

TYPE_CHECKING = False  # `typing` takes long to import, and compiler processes start with this module.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "MAX_FILE_BYTES",
    "OTHERS_WRITE",
    "Descriptor",
    "adopt_fd",
    "lock_open_file",
    "open_fd",
    "others_can_replace",
    "read_part",
    "read_whole",
]

MAX_FILE_BYTES = 1 << 30  # Larger files are not read at once.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # The bits of a mode that let other users write.


class Descriptor(int):
    """The number of an open file, closed when the object is collected.

    An interrupt such as Ctrl-C can end a function between any two of its steps. Here, opening a file
    and making its owner is one step, because a chain of `map` runs inside a single call of `next`.
    Closing it is one step as well.
    """

    _close = staticmethod(os.close)  # At exit, `os` may be None before this object is collected.

    def close(self, *_: object) -> None:
        """Close the file. Closing it twice is allowed."""
        next(self.__dict__.setdefault("_closing", map(self._close, (int(self),))), None)

    @property
    def closed(self) -> bool:
        """Return whether the file is closed, so that the number may belong to another file."""
        return "_closing" in self.__dict__

    def __enter__(self) -> Descriptor:
        return self

    __exit__ = close
    __del__ = close


def adopt_fd(make: Callable[..., int], *arguments: Any) -> Descriptor:
    """Return the descriptor that `make(*arguments)` opens, owned from the start."""
    return next(map(Descriptor, map(make, *zip(arguments))))  # `zip` makes 1-tuples for `map`.


def open_fd(
    path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None
) -> Descriptor:
    """Open `path` as `os.open` does. Child programs do not inherit the descriptor."""
    call = os.open if dir_fd is None else partial(os.open, dir_fd=dir_fd)
    flags |= os.O_CLOEXEC
    return next(map(Descriptor, map(call, (path,), (flags,), (mode,))))  # One step, as in `adopt_fd`.


def lock_open_file(file: Descriptor, path: str | os.PathLike[str]) -> None:
    """Take the `flock` of an open file or directory; `BlockingIOError` when another process has it.

    Raises `FileNotFoundError` when `path` does not lead to this file any more: its last owner may have
    removed it between the open and the lock. Then no other process can find the lock.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(file), os.stat(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def others_can_replace(directory: os.stat_result) -> bool:
    """Return whether other users can replace the entries of a directory with this status.

    They cannot if they cannot write it, or if it has the sticky bit, like `/tmp`.
    """
    return bool(directory.st_mode & OTHERS_WRITE) and not directory.st_mode & stat.S_ISVTX


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file of at most `MAX_FILE_BYTES`.

    Raises `OSError` for a larger one, and for anything else, such as an endless device.
    """
    return read_part(path, MAX_FILE_BYTES)


def read_part(
    path: str | os.PathLike[str], limit: int, *, offset: int = 0, size: int = 0, own: bool = False
) -> bytes:
    """Return `size` bytes of a regular file, by default all of it; `OSError` for more than `limit`.

    With `own`, the file must be one that only this user or root can have made: it is neither a link nor
    a second name of another file.
    """
    with _open_regular(path, os.O_NOFOLLOW if own else 0) as file:
        status = os.fstat(file)
        if own and (status.st_uid not in (os.geteuid(), 0) or status.st_nlink != 1):
            raise OSError(errno.EPERM, "it belongs to another user or has several names")
        size = min(size or status.st_size, max(status.st_size - offset, 0))
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes are too many")
        with open(file, "rb", closefd=False) as stream:
            stream.seek(offset)
            return stream.read(size)


def _open_regular(path: str | os.PathLike[str], flags: int = 0) -> Descriptor:
    """Open a regular file for reading, without waiting for the writer of a pipe."""
    file = open_fd(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    return file
