"""Manifests on the command line: where one can go, and that one lists something."""

from __future__ import annotations

import shlex
from pathlib import Path

from preheat.errors import InputError
from preheat.store.publish import obstacle
from preheat.warm.manifest import Manifest

__all__ = ["read_listing", "require_file", "require_writable"]

_HINT = "name another place for the manifest with -o"


def read_listing(path: Path) -> Manifest:
    """The manifest at `path`; `InputError` when it lists nothing, which no bake or check can mean."""
    manifest = Manifest.read(path)
    if not (manifest.programs or manifest.unreadable or manifest.graphs):
        hint = "record what a program needs: preheat record -- python app.py"
        raise InputError(f"{path} lists no program", hint=hint)
    return manifest


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
