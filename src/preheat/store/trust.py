"""Directories that may hold code: made private, and refused when someone else could have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from preheat.events import Events

__all__ = ["distrust", "first_usable", "make_private", "unusable", "usable"]

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


def unusable(path: Path, *, trust: bool = False, write: bool = True) -> str | None:
    """Why `path` cannot be used as a cache or layer, or None when it can.

    With `write` it is created where it is missing, and has to be writable.
    """
    try:
        if write:
            make_private(path)
        why = None if trust else distrust(path)
    except OSError as fault:
        return f"it cannot be {'created' if write else 'read'}: {fault.strerror or fault}"
    if why is None and write and not os.access(path, os.W_OK | os.X_OK):
        return "it is not writable"
    return why


def usable(
    candidates: Iterable[Path], events: Events, *, trust: bool = False, write: bool = True
) -> Iterator[Path]:
    """Those of the candidates that can be used; each one passed over is an event with the reason."""
    for path in candidates:
        why = unusable(path, trust=trust, write=write)
        if why is None:
            yield path
        else:
            events.emit("refused", path=str(path), reason=why)


def first_usable(candidates: Iterable[Path], events: Events, *, trust: bool = False) -> Path | None:
    """The first candidate that is, or can be made, a trusted writable directory."""
    return next(usable(candidates, events, trust=trust), None)
