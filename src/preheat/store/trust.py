"""Directories that may hold code: made private, and refused when someone else could have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from preheat.events import Events

__all__ = ["distrust", "first_usable", "make_private"]

_OVERRIDE = "set PREHEAT_TRUST_CACHE_DIR=1 if that is intended"


def make_private(path: Path) -> None:
    """Create `path` and its missing parents for this user alone."""
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:  # another process was quicker
            continue
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def distrust(path: Path, me: int | None = None) -> str | None:
    """Why code in `path` cannot be trusted by user `me`, or None when it can.

    Trusted are directories of the user or of root that nobody else can write, not reached through
    a symbolic link that a third user planted.
    """
    mine = {os.getuid() if me is None else me, 0}
    found = os.stat(path)
    for link in _links(path):
        if (owner := os.lstat(link).st_uid) not in mine:
            return f"{link} is a symbolic link owned by user {owner}; {_OVERRIDE}"
    if found.st_uid not in mine:
        return f"it belongs to user {found.st_uid}, not to you; {_OVERRIDE}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        return f"others can write to it (mode {mode:04o}); chmod go-w it, or {_OVERRIDE}"
    return None


def _links(path: Path) -> Iterator[Path]:
    """Every symbolic link on the way to `path`, those that other links lead through as well."""
    for step in (path, *path.parents):
        if step.is_symlink():
            yield step
            yield from _links(step.parent / os.readlink(step))


def first_usable(candidates: Iterable[Path], events: Events, *, trust: bool = False) -> Path | None:
    """The first candidate that is, or can be made, a trusted writable directory.

    Each one passed over is an event with the reason.
    """
    for path in candidates:
        try:
            make_private(path)
            why = None if trust else distrust(path)
            if why is None and not os.access(path, os.W_OK | os.X_OK):
                why = "it is not writable"
        except OSError as fault:
            why = f"it cannot be created: {fault.strerror or fault}"
        if why is None:
            return path
        events.emit("refused", path=str(path), reason=why)
    return None
