"""File descriptors that are always closed, and reading of whole files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Descriptor", "opened", "owned", "read_whole"]


class Descriptor(int):
    """The number of an open file, closed when the object is collected.

    An interrupt such as Ctrl-C can end a function between any two of its steps. Opening a file and
    making the object that owns it is one step, and so is closing it: a chain of `map` runs inside a
    single call of `next`.
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


def owned(make: Callable[..., int], *arguments: Any) -> Descriptor:
    """Return the descriptor that `make(*arguments)` returns, with an owner from the beginning."""
    return next(map(Descriptor, map(make, *zip(arguments))))  # `zip` makes 1-tuples for `map`.


def opened(
    path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None
) -> Descriptor:
    """Open `path` as `os.open` does. Child programs do not inherit the descriptor."""
    call = os.open if dir_fd is None else partial(os.open, dir_fd=dir_fd)
    return owned(call, path, flags | os.O_CLOEXEC, mode)


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; `OSError` for anything else, such as an endless device."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as file:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        with open(file, "rb", closefd=False) as stream:
            return stream.read()
