"""A file that is replaced in one step: the only way in which preheat puts a file in its place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from preheat.files import opened

__all__ = ["ORPHANED", "is_staged", "obstacle", "publish", "replace", "sweep"]

ORPHANED = 3600.0  # seconds after which a staged file has no writer any more
_PREFIX, _SUFFIX = ".preheat-", ".staged"


def obstacle(path: Path) -> str | None:
    """Why `path` cannot be published, as far as that shows before; None where nothing does."""
    if not path.parent.is_dir():
        return f"{path.parent} is not a directory"
    if path.exists() and not path.is_file():  # a rename would replace even a device
        return "what is there is not a file"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent} cannot be written to"
    return None


def publish(path: Path, parts: Iterable[bytes]) -> int:
    """Make or replace `path` for everyone and for good; its size.

    What writers that were killed an hour ago or longer left in the directory is removed.
    """
    size = replace(str(path), parts, mode=0o644)
    with suppress(OSError):  # not every file system can; the file is there, though
        _sync_directory(path.parent)
    with suppress(OSError):
        sweep(str(path.parent), time.time(), beside=True)
    return size


def replace(
    path: str,
    parts: Iterable[bytes],
    *,
    staged: str | None = None,
    mode: int = 0o600,
    durable: bool = True,
) -> int:
    """Make or replace `path`; its size. A reader sees the old file or the new one, never a part.

    The new file grows in the directory `staged`, which is that of `path` unless it is given. With
    `durable` its content is on the disk before its name is.
    """
    home = staged or os.path.dirname(path) or "."
    growing = f"{home}/{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}"
    size = 0
    try:
        with opened(growing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            for part in parts:
                size += _write(file, part)
            if durable:  # a rename that survives a power cut must not lead to an empty file
                os.fsync(file)
        os.replace(growing, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(growing)
        raise
    return size


def is_staged(name: str) -> bool:
    """Whether a file of this name is one that was still growing."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def sweep(directory: str, now: float, *, beside: bool = False) -> tuple[int, int]:
    """Remove staged files whose writer must be gone; how many, and their bytes.

    With `beside` the directory holds other files too, which stay.
    """
    gone, freed = 0, 0
    with os.scandir(directory) as found:
        for file in found:
            if beside and not is_staged(file.name):
                continue
            with suppress(FileNotFoundError, IsADirectoryError):
                status = file.stat(follow_symlinks=False)
                if now - status.st_mtime > ORPHANED:
                    os.unlink(file.path)
                    gone, freed = gone + 1, freed + status.st_size
    return gone, freed


def _write(descriptor: int, part: bytes) -> int:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]
    return len(part)


def _sync_directory(path: Path) -> None:
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
