"""Checks of a path to which the command line writes a manifest."""

from __future__ import annotations

import shlex
from pathlib import Path

from preheat.errors import InputError
from preheat.store.publish import unwritable_reason

__all__ = ["require_file", "require_writable"]

_HINT = "name another file for the manifest with -o"


def require_file(named: Path) -> None:
    """Raise for `-`, which stands for standard output."""
    if str(named) == "-":
        message = (
            "a manifest cannot be written to standard output, because it has source files beside it"
        )
        raise InputError(message, hint=_HINT)


def require_writable(target: Path) -> None:
    """Raise unless a manifest can be created or replaced at `target`."""
    if why := unwritable_reason(target):
        make = f"create it: mkdir -p {shlex.quote(str(target.parent))}"
        raise InputError(
            f"cannot write {target}: {why}", hint=_HINT if target.parent.exists() else make
        )
