"""Atomic replacement of a file. Every file that preheat writes is published by `replace`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from preheat.process.files import open_fd
from preheat.store.filesystem import TRANSIENT, is_silly_renamed, retry_transient

__all__ = ["ORPHANED", "is_staged", "publish", "replace", "staged_name", "sweep", "unwritable_reason"]

ORPHANED = 3600.0  # seconds after which the writer of a staged file must have ended
_PREFIX = ".preheat-"
_SUFFIX = ".staged"
_NOT_A_FILE = "it exists and is not a file"


def unwritable_reason(path: Path) -> str | None:
    """Return why a file cannot be written at `path`, as far as that is known in advance, or None."""
    if not path.parent.is_dir():
        return f"{path.parent} is not a directory"
    if path.exists() and not path.is_file():
        return _NOT_A_FILE
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent} is not writable"
    return None


def publish(path: Path, parts: Iterable[bytes], *, mode: int = 0o644) -> int:
    """Create or replace `path` durably, by default readable for all users; return its size.

    Raises `OSError` for a directory or a device, which a rename would replace as well. Staged files of
    writers that were killed at least an hour ago are removed from the directory.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, _NOT_A_FILE)
    size = replace(str(path), parts, mode=mode)
    # Some file systems cannot sync a directory. The file is published anyway.
    with suppress(OSError), open_fd(path.parent, os.O_RDONLY | os.O_DIRECTORY) as directory:
        os.fsync(directory)
    with suppress(OSError):
        sweep(str(path.parent), os.stat(path).st_mtime, beside=True)
    return size


def replace(
    path: str,
    parts: Iterable[bytes],
    *,
    staged: str | None = None,
    mode: int = 0o600,
    durable: bool = True,
    retry: bool = True,
) -> int:
    """Create or replace `path` and return its size. A reader sees the old file or the new one.

    The new file is written in the directory `staged`, by default beside `path`. With `durable`, its
    content reaches the disk before its name does. With `retry`, it is written again after an error that
    may pass in a moment.
    """
    parts = list(parts)
    home = staged or os.path.dirname(path) or "."
    temporary = f"{home}/{staged_name()}"
    size = 0
    try:
        with open_fd(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            for part in parts:
                size += _write(file, part)
            if durable:  # After a power cut, the new name must not lead to an empty file.
                os.fsync(file)
        os.replace(temporary, path)
    except BaseException as fault:
        with suppress(OSError):
            os.unlink(temporary)
        if not (retry and isinstance(fault, OSError) and fault.errno in TRANSIENT):
            raise
    else:
        return size
    return retry_transient(replace, path, parts, staged=staged, mode=mode, durable=durable, retry=False)


def staged_name() -> str:
    """Return a new name for a staged file."""
    return f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}"


def is_staged(name: str) -> bool:
    """Return whether a file of this name is a staged one."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def sweep(directory: str, now: float | None = None, *, beside: bool = False) -> tuple[int, int]:
    """Remove staged files whose writer must have ended; return their number and their bytes.

    `now` is the time by the clock that stamps the files. By default, a new file shows it, because the
    stamps in a directory that nodes share may come from the clock of a server. With `beside`, the
    directory also contains other files, which are kept.
    """
    gone = freed = 0
    with os.scandir(directory) as found:
        for file in found:
            if is_silly_renamed(file.name) or (beside and not is_staged(file.name)):
                continue
            with suppress(FileNotFoundError, IsADirectoryError):
                status = file.stat(follow_symlinks=False)
                if now is None:
                    now = _time_of(directory)
                if now - status.st_mtime > ORPHANED:
                    os.unlink(file.path)
                    gone += 1
                    freed += status.st_size
    return gone, freed


def _time_of(directory: str) -> float:
    """Return the present time by the clock that stamps the files of a directory."""
    path = f"{directory}/{staged_name()}"
    try:
        with open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as file:
            return os.fstat(file).st_mtime
    finally:
        with suppress(OSError):
            os.unlink(path)


def _write(descriptor: int, part: bytes) -> int:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]
    return len(part)
