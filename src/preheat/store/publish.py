"""A file that is replaced in one step and for good."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from preheat.files import opened

__all__ = ["obstacle", "publish"]


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
    """Make or replace `path`; its size. A reader sees the old file or the new one, never a part."""
    staged = path.parent / f".preheat-{os.urandom(8).hex()}.staged"
    try:
        with (
            opened(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644) as descriptor,
            open(descriptor, "wb", closefd=False) as file,
        ):
            file.writelines(parts)
            file.flush()
            os.fsync(descriptor)
            size = file.tell()
        os.replace(staged, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise
    with suppress(OSError):  # not every file system can; the file is there, though
        _sync_directory(path.parent)
    return size


def _sync_directory(path: Path) -> None:
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
