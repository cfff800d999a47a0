"""Private directories for one compile each, gone afterwards whatever happens to its processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress

from preheat.locks import no_fork

__all__ = ["make", "remove", "sweep"]

_PREFIX = "preheat-scratch-"
_PLACES = ("/dev/shm", None)  # in memory where there is such a place, else the temporary directory
_ORPHANED = 24 * 3600.0  # seconds after which nobody can be compiling in one any more


def make() -> str | None:
    """A new directory; None when there is no place for one at all."""
    for parent in _PLACES:
        with suppress(OSError), no_fork:  # tempfile takes a lock for the first name
            return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    return None


def remove(directory: str | None) -> None:
    """Remove a directory that `make` gave, if it gave one."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def sweep() -> None:
    """Remove what processes killed together with their workers left behind."""
    for parent in _PLACES:
        with no_fork:  # tempfile takes a lock the first time
            place = parent or tempfile.gettempdir()
        with suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if entry.name.startswith(_PREFIX) and _orphaned(entry):
                    remove(entry.path)


def _orphaned(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > _ORPHANED
