"""Where the command line can write a manifest."""

from __future__ import annotations

import shlex
from pathlib import Path

from preheat.cache.publish import obstacle
from preheat.errors import InputError

__all__ = ["require_file", "require_writable"]

_HINT = "name another place for the manifest with -o"


def require_file(named: Path) -> None:
    """Refuse standard output, by the name that it has on a command line."""
    if str(named) == "-":
        told = "a manifest has sources beside it, and cannot go to standard output"
        raise InputError(told, hint=_HINT)


def require_writable(target: Path) -> None:
    """Raise unless a manifest can be made at `target`, or is a file that can be replaced."""
    if why := obstacle(target):
        make = f"make it: mkdir -p {shlex.quote(str(target.parent))}"
        raise InputError(
            f"cannot write {target}: {why}", hint=_HINT if target.parent.exists() else make
        )
