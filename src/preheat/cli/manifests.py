"""Where a manifest can go: found out before there is one to write."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

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
    if not target.parent.is_dir():
        make = f"make it: mkdir -p {shlex.quote(str(target.parent))}"
        hint = _HINT if target.parent.exists() else make
        raise InputError(f"cannot write {target}: {target.parent} is not a directory", hint=hint)
    if target.exists() and not target.is_file():
        raise InputError(f"cannot write {target}: what is there is not a file", hint=_HINT)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {target.parent}", hint=_HINT)
